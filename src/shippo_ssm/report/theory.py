"""The theory in the report: every statement of the paper that `shippo_ssm.theory` measures, with its residual and bound.

Rows come from a file that `shippo verify --out` wrote, or from running the checks now.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from shippo_ssm.experiments.store import read_json
from shippo_ssm.report.html import table, text, verdict


def rows(checks: Path | None) -> list[dict[str, Any]]:
    """One mapping per statement: `statement`, `place`, `measured`, `residual`, `bound`, `sense`, `holds`."""
    if checks is not None:
        return read_json(checks)["rows"]
    from shippo_ssm.theory import CHECKS, run_check

    found = [run_check(name, check) for name, check in CHECKS.items()]
    return [dataclasses.asdict(row) | {"holds": row.holds} for row in found]


def section(checks: Path | None) -> str:
    """A sentence with the count, and the table."""
    found = rows(checks)
    failed = sum(not row["holds"] for row in found)
    count = f"All {len(found)} hold." if not failed else f"{failed} of {len(found)} do not hold."
    lead = (
        "<p>Each proposition, lemma, theorem and example of the paper is a function that computes both of its sides and "
        f"measures how far they are apart, or how far apart they must be. <strong>{count}</strong></p>"
    )
    body = []
    for row in found:
        residual = "none" if row["residual"] is None else f"{row['residual']:.1e}"
        relation = "≤" if row["sense"] == "<=" else "≥"
        name = f"{text(row['statement'])}<br><small>{text(row['place'])}</small>"
        bound = f"{relation}&nbsp;{row['bound']:.0e}"
        body.append([name, text(row["measured"]), residual, f'<span class="bound">{bound}</span>', verdict(row["holds"], "")])
    return lead + table("Statements of the paper and their residuals", ["Statement", "Measured", "Residual", "Bound", ""], body)
