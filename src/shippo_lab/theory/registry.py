"""The registry of checks and their results, and `verify`, which runs them, prints them and writes them as JSON.

A check is a function without arguments that measures one statement of the paper; its docstring says what it measures. The
decorator `check` adds the statement and the bound, and registers it in `CHECKS`.
"""

import dataclasses
import difflib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsFloat

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from shippo_ssm import __version__

Pairs = Iterator[tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One statement, measured."""

    measured: str
    residual: float
    bound: float
    sense: Literal["<=", ">="]
    """ "<=": holds when the residual is at most the bound; ">=": a distance that must stay away from zero."""
    name: str
    statement: str
    """The statement, by the paper's own title."""
    place: str

    @property
    def holds(self) -> bool:
        """Whether the residual is finite and respects the bound."""
        within = self.residual <= self.bound if self.sense == "<=" else self.residual >= self.bound
        return within and math.isfinite(self.residual)

    @property
    def limit(self) -> str:
        """Sense and bound, such as "≤ 1e-08"."""
        return f"{'≤' if self.sense == '<=' else '≥'} {self.bound:.0e}"

    @property
    def section(self) -> str:
        """The section of the paper, such as "Appendix B"."""
        match = re.match(r"(sec|app)\. (\w+)", self.place)
        return "Other" if match is None else {"sec": "Section", "app": "Appendix"}[match[1]] + " " + match[2]

    @property
    def record(self) -> dict[str, Any]:
        """The row for JSON; a residual that is not finite is `None`."""
        residual = self.residual if math.isfinite(self.residual) else None
        return dataclasses.asdict(self) | {"residual": residual, "holds": self.holds}


Check = Callable[[], CheckResult]

CHECKS: dict[str, Check] = {}
"""Name -> check, in the order of the paper."""


def by_section(rows: Iterable[CheckResult]) -> dict[str, list[CheckResult]]:
    """Section of the paper -> its rows."""
    sections: dict[str, list[CheckResult]] = {}
    for row in rows:
        sections.setdefault(row.section, []).append(row)
    return sections


def gap(one: Any, other: Any) -> float:
    """||one - other|| / ||other||, in the Frobenius norm."""
    one, other = np.asarray(one), np.asarray(other)
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-300))


def check(
    place: str, statement: str, *, at_most: float = math.nan, at_least: float = math.nan, name: str = "", measured: str = ""
) -> Callable[[Callable[[], SupportsFloat | Pairs]], Check]:
    """Register a check of `statement`, which is at `place` in the paper.

    The function returns the residual, or yields pairs (one side, other side) of equations: the residual is then their largest
    `gap`. A statement that two things are equal has a bound `at_most`; one that they differ, `at_least`.
    """

    sense, bound = ("<=", at_most) if math.isnan(at_least) else (">=", at_least)

    def register(function: Callable[[], SupportsFloat | Pairs]) -> Check:
        key, words = name or function.__name__, measured or function.__doc__ or ""

        def run() -> CheckResult:
            found = function()
            residual = float(np.max([gap(*pair) for pair in found]) if isinstance(found, Iterator) else found)
            return CheckResult(words, residual, bound, sense, key, statement, place)

        run.__name__ = key
        CHECKS[key] = run
        return run

    return register


TOPICS = {
    "Section 2": "approximation problem, normal equation, Sylvester dynamics",
    "Section 3": "exact scan, collapse of right actions, the cell",
    "Appendix A": "proofs for section 2; metric-only extensions",
    "Appendix B": "transport, its metric, the moving frame",
    "Appendix C": "scan closure, closed-form factors, errors of the cell",
}


def run_check(name: str, check: Check) -> CheckResult:
    """The row of one check; an exception becomes a row that does not hold."""
    try:
        return check()
    except Exception as error:
        return CheckResult(f"raised {type(error).__name__}: {error}", math.nan, 0.0, "<=", name, name.replace("_", " "), "")


def _all_rows(rows: Sequence[CheckResult], wide: bool) -> Table:
    text = [Column(heading, ratio=5) for heading in ("statement", *["what is measured"] * wide)]
    numbers = (Column(heading, justify="right", no_wrap=True) for heading in ("residual", "bound", "holds"))
    table = Table(*text, *numbers)
    for row in rows:
        place = f" [dim]({escape(row.place)})[/]" if row.place else ""
        numbers = f"{row.residual:.1e}", row.limit, "[green]yes[/]" if row.holds else "[bold red]NO[/]"
        table.add_row(f"{escape(row.statement)}{place}", *([escape(row.measured)] if wide else []), *numbers)
    return table


def _by_section(rows: Sequence[CheckResult]) -> Table:
    counts = (Column(heading, justify="right") for heading in ("statements", "hold"))
    table = Table("section of the paper", "about", *counts)
    for name, members in by_section(rows).items():
        count = sum(row.holds for row in members)
        style = "green" if count == len(members) else "bold red"
        table.add_row(name, TOPICS.get(name, ""), str(len(members)), f"[{style}]{count}[/]")
    return table


def _select(only: str | Sequence[str]) -> list[str]:
    """Names of the checks that contain one of the given parts, in the order of the paper."""
    parts = [only] if isinstance(only, str) else only
    for part in parts:
        if not any(part in name for name in CHECKS):
            close = ", ".join(difflib.get_close_matches(part, CHECKS, 3, 0.4) or list(CHECKS)[:3])
            expected = f"expected a part of the name of a check (the keys of shippo_lab.theory.CHECKS), such as {close}"
            raise ValueError(f"verify: `only` is {part!r}; {expected}")
    return [name for name in CHECKS if not parts or any(part in name for part in parts)]


def verify(
    *, out: Path | None = None, only: str | Sequence[str] | None = (), every: bool = False,
    console: Console | None = None, wide: bool = True,
) -> int:  # fmt: skip
    """Run the checks and print a summary by section, or the rows themselves; 0 when every statement holds, 1 otherwise.

    Args:
        out: a JSON file to write, or an existing folder that gets `verify.json`.
        only: names of checks (keys of `CHECKS`), or parts of names; all of them by default.
        every: print every row; without it, and without `only`, a summary by section and the rows that do not hold.
        wide: print what is measured as well; without, rows fit into 80 columns.
    """
    console, start = console or Console(), time.perf_counter()
    rows = [run_check(name, CHECKS[name]) for name in _select(only or ())]
    seconds = time.perf_counter() - start
    failed = [row for row in rows if not row.holds]
    summarise = not (every or only)
    if summarise:
        console.print(_by_section(rows))
    if shown := failed if summarise else rows:
        console.print(_all_rows(shown, wide), width=max(console.width, 100) if wide else None)
    outcome = f"{len(failed)} do not hold" if failed else "all hold"
    console.print(f"{len(rows)} statements in {seconds:.1f} s: {outcome}" + ("; --all prints every one" if summarise else ""))
    if out is not None:
        path, records = out / "verify.json" if out.is_dir() else out, [row.record for row in rows]
        content = {"version": __version__, "seconds": round(seconds, 2), "holds": not failed, "rows": records}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {path}", markup=False, soft_wrap=True)
    return 1 if failed else 0
