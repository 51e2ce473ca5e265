"""The result of a check, a row of the table that `shippo verify` prints, and the registry of checks.

A check is a function without arguments that measures one statement of the paper. It returns what `at_most` or
`at_least` gives it: a number, the bound it must respect, and in words what was measured. The decorator `check` adds the
statement and puts the function into `CHECKS` under its own name."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

Sense = Literal["<=", ">="]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A measured number and the bound it must respect."""

    measured: str
    """What the number is."""
    residual: float
    bound: float
    sense: Sense
    """ "<=": the statement holds when the residual is at most the bound; ">=": a distance that must stay away from zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult(Finding):
    """One statement, measured."""

    name: str
    """Name of the check: a key of `CHECKS`."""
    statement: str
    """The statement, by the paper's own title."""
    place: str
    """Where it stands in the paper."""

    @property
    def holds(self) -> bool:
        """Whether the residual respects the bound; a number that is not finite never does."""
        if not math.isfinite(self.residual):
            return False
        return self.residual <= self.bound if self.sense == "<=" else self.residual >= self.bound

    @property
    def record(self) -> dict[str, Any]:
        """The row for JSON, which has no NaN: a check that raised has no number."""
        residual = self.residual if math.isfinite(self.residual) else None
        return dataclasses.asdict(self) | {"residual": residual, "holds": self.holds}


Check = Callable[[], CheckResult]

CHECKS: dict[str, Check] = {}
"""Name -> check, in the order of the paper."""


def at_most(residual: SupportsFloat, bound: float, measured: str) -> Finding:
    """The statement holds when `residual` <= `bound`."""
    return Finding(measured=measured, residual=float(residual), bound=bound, sense="<=")


def at_least(residual: SupportsFloat, bound: float, measured: str) -> Finding:
    """The statement holds when `residual` >= `bound`: it says that something is not zero."""
    return Finding(measured=measured, residual=float(residual), bound=bound, sense=">=")


def check(place: str, statement: str) -> Callable[[Callable[[], Finding]], Check]:
    """Registers a check of `statement`, which stands at `place` in the paper."""

    def register(function: Callable[[], Finding]) -> Check:
        @functools.wraps(function)
        def run() -> CheckResult:
            found = function()
            return CheckResult(name=function.__name__, statement=statement, place=place, **dataclasses.asdict(found))

        CHECKS[function.__name__] = run
        return run

    return register
