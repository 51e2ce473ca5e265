"""The tables of the page "How we read the paper": predictors, and models by the operations since the binding, from
`results/mqar.json`; the first steps of models, from `results/mqar-early.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shippo_ssm.experiments.mqar.ceilings import PREDICTORS
from shippo_ssm.lab.pages import renew

PAGE, RESULT, EARLY = Path("docs", "reading.md"), Path("results", "mqar.json"), Path("results", "mqar-early.json")

# Operations since the binding that a column of their own is given to.
COUNTS = (0, 1, 2, 3)


def table(head: str, lines: dict[str, dict[str, Any]], lengths: list[int], name: str) -> list[str]:
    """A line per entry with coordinate / exact accuracy of the predictor `name` at every length."""
    rows = [f"| {head} | {' | '.join(f'{length:,} events' for length in lengths)} |", f"|{'---|' * (len(lengths) + 1)}"]
    for label, numbers in lines.items():
        cells = (f"{numbers[f'{name}_coordinate_{n}']:.3f} / {numbers[f'{name}_exact_{n}']:.3f}" for n in lengths)
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return rows


def predictors(root: Path) -> str:
    """What every predictor scores, and the first of them by the number of active keys."""
    rows = json.loads((root / RESULT).read_text(encoding="utf-8"))["rows"]
    row = next(row for row in rows if row["name"] == "untouched")
    lengths, found = row["config"]["eval_lengths"], {name: mean[0] for name, mean in row["metrics"].items()}
    known = []
    for name, (words, _) in PREDICTORS.items():
        lines = table("known, the rest guessed", {words: found}, lengths, name)
        known += lines if not known else lines[2:]
    keys = table("active keys", row["notes"]["active_keys"], lengths, "untouched")
    return "\n".join([*known, "", "Untouched coordinates, by the number of active keys:", "", *keys, ""])


def models(result: Path) -> str:
    """Accuracies of each model of a result, beside the predictor on the same examples."""
    rows = [row for row in json.loads(result.read_text(encoding="utf-8"))["rows"] if row["config"]["steps"]]
    lengths, lines = rows[0]["config"]["eval_lengths"], []
    for row in rows:
        found = {name: sum(seeds) / len(seeds) for name, seeds in row["metrics"].items()}
        found |= {f"model_{name}": found[name] for name in found if name.startswith(("coordinate", "exact"))}
        label = f"{row['label']}, {row['config']['steps']:,} steps"
        lines += table("model", {label: found}, lengths, "model")[2 if lines else 0 :]
    return "\n".join([*lines, *table("model", {"untouched coordinates": found}, lengths, "untouched")[2:], ""])


def by_operations(result: Path) -> str:
    """Exact accuracy of each model of a result at the training length, by the number of operations since the binding."""
    rows = [row for row in json.loads(result.read_text(encoding="utf-8"))["rows"] if row["name"] != "untouched"]
    head = [f"{count} operation{'s' * (count != 1)}" for count in COUNTS]
    lines = [f"| model | {' | '.join(head)} |", f"|{'---|' * (len(COUNTS) + 1)}"]
    shown = [(row["label"], row, "exact") for row in rows] + [("untouched coordinates", rows[-1], "untouched_exact")]
    for label, row, metric in shown:
        profile = dict(zip(row["notes"]["operation_bins"], row["curves"][f"{metric}_{row['config']['length']}_by_operations"]))
        lines.append(f"| {label} | {' | '.join(f'{sum(profile[count]) / len(profile[count]):.3f}' for count in COUNTS)} |")
    return "\n".join([*lines, ""])


def parts(root: Path) -> dict[str, str]:
    """The generated parts of the page, by name."""
    return {"ceilings": predictors(root), "operations": by_operations(root / RESULT), "early": models(root / EARLY)}


def write(root: Path) -> None:
    """Renew the tables of the page."""
    renew(root / PAGE, parts(root))
