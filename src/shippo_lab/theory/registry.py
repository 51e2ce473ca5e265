"""The registry of checks and their results.

A check is a function without arguments that measures one statement of the paper; its docstring says what it measures.
The decorator `check` adds the statement and the bound, and registers it in `CHECKS`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

import numpy as np

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
    def relation(self) -> str:
        return "\u2264" if self.sense == "<=" else "\u2265"

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

    def register(function: Callable[[], SupportsFloat | Pairs]) -> Check:
        key = name or function.__name__
        words = measured or function.__doc__ or ""
        sense, bound = ("<=", at_most) if math.isnan(at_least) else (">=", at_least)

        def run() -> CheckResult:
            found = function()
            residual = float(np.max([gap(*pair) for pair in found]) if isinstance(found, Iterator) else found)
            return CheckResult(words, residual, bound, sense, key, statement, place)

        run.__name__ = key
        CHECKS[key] = run
        return run

    return register
