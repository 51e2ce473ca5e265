"""The theory in the report: every statement of the paper that `shippo_ssm.theory` measures, with its residual and bound.

Rows come from a file that `shippo verify --out` wrote, or from running the checks now.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shippo_ssm.lab.experiment import blame
from shippo_ssm.lab.report.html import table, text, verdict
from shippo_ssm.lab.store import read_json


def rows(checks: Path | None) -> list[dict[str, Any]]:
    """One mapping per statement: `statement`, `place`, `measured`, `residual`, `bound`, `sense`, `holds`."""
    if checks is not None:
        return read_json(checks)["rows"]
    from shippo_ssm.theory import CHECKS, run_check

    return [run_check(name, check).record for name, check in CHECKS.items()]


def section(checks: Path | None) -> str:
    """A sentence with the count, and one table per part of the paper, folded away unless something in it does not hold."""
    with blame(checks):
        return _section(rows(checks))


def _section(found: list[dict[str, Any]]) -> str:
    lead = (
        "<p>Each proposition, lemma, theorem and example of the paper is a function that computes both of its sides and "
        "measures how far they are apart, or how far apart they must be. "
        f"<strong>{_count(found)}</strong> Open a part to see its residuals.</p>"
    )
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        parts.setdefault(_part(row["place"]), []).append(row)
    return lead + "".join(_fold(name, members) for name, members in parts.items())


def _part(place: str) -> str:
    """The part of the paper that a place such as "app. B.3, Example" belongs to."""
    match = re.match(r"(sec|app)\. (\w+)", place)
    return "Other" if match is None else {"sec": "Section", "app": "Appendix"}[match[1]] + " " + match[2]


def _count(found: list[dict[str, Any]]) -> str:
    failed = sum(not row["holds"] for row in found)
    return f"All {len(found)} hold." if not failed else f"{failed} of {len(found)} do not hold."


def _fold(name: str, found: list[dict[str, Any]]) -> str:
    body = []
    for row in found:
        residual = "none" if row["residual"] is None else f"{row['residual']:.1e}"
        statement = f"{text(row['statement'])}<br><small>{text(row['place'])}</small>"
        bound = f'<span class="bound">{"≤" if row["sense"] == "<=" else "≥"}&nbsp;{row["bound"]:.0e}</span>'
        body.append([statement, text(row["measured"]), residual, bound, verdict(row["holds"], "")])
    grid = table(f"{name}: statements and their residuals", ["Statement", "Measured", "Residual", "Bound", ""], body)
    shown = "" if all(row["holds"] for row in found) else " open"
    return f"<details{shown}><summary><strong>{name}</strong> {_count(found)}</summary>{grid}</details>"
