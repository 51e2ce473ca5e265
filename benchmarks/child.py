"""One section in a process of its own: `python -m benchmarks.child OPTIONS OUT`, both given by `run.spawn`.

Data path: OPTIONS is JSON with the section's name, its thread count and its keyword arguments; the process binds itself to
that many cores before it imports anything that starts threads, measures, and writes the section's dictionary to OUT.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

# Where each section stands: module and function.
SECTIONS = {
    "scan": ("scan", "measure"),
    "sweeps": ("sweeps", "measure"),
    "widths": ("sweeps", "measure_widths"),
    "halves": ("halves", "measure"),
    "cases": ("against", "cases"),
    "expm": ("expm", "measure"),
    "compilation": ("compilation", "measure"),
    "memory": ("memory", "measure"),
    "training": ("models", "training"),
    "decoding": ("models", "decoding"),
    "projection": ("projection", "compression"),
}


def bind(threads: int) -> None:
    """Keep this process, and every library it will load, on `threads` cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import torch

    torch.set_num_threads(threads)


def measure(section: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one section by name.

    Args:
        section: a name in `SECTIONS`.
        arguments: its keyword arguments; a shape is a dictionary of sizes.
    """
    from benchmarks.problem import Shape

    if "shape" in arguments:
        arguments = arguments | {"shape": Shape(**arguments["shape"])}
    module, function = SECTIONS[section]
    return getattr(importlib.import_module(f"benchmarks.{module}"), function)(**arguments)


def main(options: dict[str, Any], out: Path) -> None:
    """Bind, measure, write."""
    if options["section"] not in SECTIONS:
        raise ValueError(f"section is {options['section']!r}; expected one of {', '.join(SECTIONS)}")
    bind(options["threads"])
    out.write_text(json.dumps(measure(options["section"], options["arguments"])))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
