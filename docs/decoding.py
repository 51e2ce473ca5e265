"""The table of the page "Decoding", from `results/decode.json`, which `python -m benchmarks.decode` writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shippo_ssm.lab.pages import renew

PAGE = Path("docs", "decoding.md")
RESULT = Path("results", "decode.json")


def measured(root: Path) -> str:
    """The lines of the committed run with their goals, and tokens per second."""
    if str(root) not in sys.path:
        sys.path.append(str(root))
    from benchmarks.decode import table

    run = json.loads((root / RESULT).read_text())
    rates = [f"| {name(key)} | {rate:,.0f} |" for key, rate in run["tokens_per_second"].items()]
    prefill = f"| a prompt of 512 tokens, in one scan | {run['prefill_tokens_per_second']:,.0f} |"
    return "\n".join([table(run), "", "| batch and context | tokens per second |", "|---|---|", *rates, prefill, ""])


def name(key: str) -> str:
    """ "transformer 16 4096" in words."""
    who, batch, *context = key.split()
    words = {"ours": "SHiPPO", "transformer": "Transformer", "bfloat16": "SHiPPO, bfloat16", "int8": "SHiPPO, int8"}
    return f"{words[who]}, batch {batch}" + "".join(f", context {int(length):,}" for length in context)


def parts(root: Path) -> dict[str, str]:
    """The generated parts of the page, by name."""
    return {"decode": measured(root)}


def write(root: Path) -> None:
    """Renew the tables of the page."""
    renew(root / PAGE, parts(root))
