"""The registry of checks and their results.

A check is a function without arguments that measures one statement of the paper and returns `at_most(..)` or `at_least(..)`:
a number, its bound, and what was measured. The decorator `check` adds the statement and registers it in `CHECKS`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A measured number and its bound."""

    measured: str
    residual: float
    bound: float
    sense: Literal["<=", ">="]
    """ "<=": holds when the residual is at most the bound; ">=": a distance that must stay away from zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult(Finding):
    """One statement, measured."""

    name: str
    statement: str
    """The statement, by the paper's own title."""
    place: str

    @property
    def holds(self) -> bool:
        """Whether the residual is finite and respects the bound."""
        if not math.isfinite(self.residual):
            return False
        return self.residual <= self.bound if self.sense == "<=" else self.residual >= self.bound

    @property
    def relation(self) -> str:
        return "\u2264" if self.sense == "<=" else "\u2265"

    @property
    def section(self) -> str:
        """The section of the paper, such as "Appendix B"."""
        match = re.match(r"(sec|app)\. (\w+)", self.place)
        return "Other" if match is None else {"sec": "Section", "app": "Appendix"}[match[1]] + " " + match[2]

    @property
    def topic(self) -> str:
        return TOPICS.get(self.section, "")

    @property
    def record(self) -> dict[str, Any]:
        """The row for JSON; a residual that is not finite is `None`."""
        residual = self.residual if math.isfinite(self.residual) else None
        return dataclasses.asdict(self) | {"residual": residual, "holds": self.holds}


Check = Callable[[], CheckResult]

CHECKS: dict[str, Check] = {}
"""Name -> check, in the order of the paper."""
TOPICS = {
    "Section 2": "approximation problem, normal equation, Sylvester dynamics",
    "Section 3": "exact scan, collapse of right actions, the cell",
    "Appendix A": "proofs for section 2; metric-only extensions",
    "Appendix B": "transport, its metric, the moving frame",
    "Appendix C": "scan closure, closed-form factors, errors of the cell",
}


def by_section(rows: Iterable[CheckResult]) -> dict[str, list[CheckResult]]:
    """Section of the paper -> its rows."""
    sections: dict[str, list[CheckResult]] = {}
    for row in rows:
        sections.setdefault(row.section, []).append(row)
    return sections


def at_most(residual: SupportsFloat, bound: float, measured: str) -> Finding:
    """The statement holds when `residual` <= `bound`."""
    return Finding(measured=measured, residual=float(residual), bound=bound, sense="<=")


def at_least(residual: SupportsFloat, bound: float, measured: str) -> Finding:
    """The statement holds when `residual` >= `bound`: it says that something is not zero."""
    return Finding(measured=measured, residual=float(residual), bound=bound, sense=">=")


def check(place: str, statement: str) -> Callable[[Callable[[], Finding]], Check]:
    """Register a check of `statement`, which is at `place` in the paper."""

    def register(function: Callable[[], Finding]) -> Check:
        @functools.wraps(function)
        def run() -> CheckResult:
            return CheckResult(name=function.__name__, statement=statement, place=place, **dataclasses.asdict(function()))

        CHECKS[function.__name__] = run
        return run

    return register
