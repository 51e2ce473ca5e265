"""Checks of single numbers that several modules share; each names the argument, what came, and what was expected."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any


def expect_size(op: str, name: str, size: Any, what: str = "a positive integer", least: int = 1) -> None:
    """Raise where `size` is not an integer of at least `least`; truth values are none."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < least:
        raise ValueError(f"{op}: `{name}` is {size!r}; expected {what}")


def expect_fields(
    op: str, record: Any, sizes: Sequence[str], optional: Sequence[str], words: Mapping[str, Sequence[Any]]
) -> None:
    """Raise where a field of `record` is no size (or `None`, if `optional`), or none of the `words` that it may be."""
    for name in sizes:
        expect_size(op, name, getattr(record, name))
    for name in optional:
        if getattr(record, name) is not None:
            expect_size(op, name, getattr(record, name), "a positive integer, or None")
    for name, choices in words.items():
        if getattr(record, name) not in choices:
            raise ValueError(f"{op}: `{name}` is {getattr(record, name)!r}; expected {' or '.join(map(repr, choices))}")


def expect_real(op: str, name: str, number: Any, what: str, least: float = -math.inf, *, open_end: bool = False) -> None:
    """Raise where `number` is not a finite real number of at least `least`, or above it with `open_end`."""
    real = isinstance(number, numbers.Real) and not isinstance(number, bool) and math.isfinite(number)
    if not real or number < least or (open_end and number == least):
        raise ValueError(f"{op}: `{name}` is {number!r}; expected {what}")
