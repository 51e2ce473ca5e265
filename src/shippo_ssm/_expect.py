"""Checks of single numbers that several modules share; each names the argument, what came, and what was expected."""

from __future__ import annotations

import math
import numbers
from typing import Any


def expect_size(op: str, name: str, size: Any, what: str = "a positive integer", least: int = 1) -> None:
    """Raise where `size` is not an integer of at least `least`; truth values are none."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < least:
        raise ValueError(f"{op}: `{name}` is {size!r}; expected {what}")


def expect_real(op: str, name: str, number: Any, what: str, least: float = -math.inf, *, open_end: bool = False) -> None:
    """Raise where `number` is not a finite real number of at least `least`, or above it with `open_end`."""
    real = isinstance(number, numbers.Real) and not isinstance(number, bool) and math.isfinite(number)
    if not real or number < least or (open_end and number == least):
        raise ValueError(f"{op}: `{name}` is {number!r}; expected {what}")
