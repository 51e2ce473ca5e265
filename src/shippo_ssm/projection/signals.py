"""Signals: the inputs of a projection memory, as objects from times [M] to values [M, d]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shippo_ssm.projection._numerics import Array, as_times


@dataclass(frozen=True)
class Samples:
    """A sampled signal: straight lines between samples, constant before the first and after the last.

    Args:
        times: [K], strictly increasing.
        values: [K, d], or [K] for one channel.
    """

    times: Array
    values: Array

    def __post_init__(self) -> None:
        times, values = as_times("Samples", self.times), np.asarray(self.values, dtype=float)
        values = values[:, None] if values.ndim == 1 else values
        if values.ndim != 2 or len(times) != len(values):
            raise ValueError(f"Samples: `values` is {values.shape} for times {times.shape}; expected [K, d], one row per time")
        object.__setattr__(self, "times", times)
        object.__setattr__(self, "values", values)

    @property
    def breaks(self) -> Array:
        """Where the signal has kinks."""
        return self.times

    def __call__(self, times: Array) -> Array:
        """Values [M, d] at times [M]."""
        if len(self.times) == 1:
            return np.repeat(self.values, len(times), axis=0)
        right = np.clip(np.searchsorted(self.times, times), 1, len(self.times) - 1)
        start, stop = self.times[right - 1], self.times[right]
        share = np.clip((times - start) / (stop - start), 0.0, 1.0)[:, None]
        return (1 - share) * self.values[right - 1] + share * self.values[right]


@dataclass(frozen=True)
class Function:
    """A callable time -> [d] (or a number, for one channel), called once per time, of `width` channels; `None` is any."""

    call: Callable[[float], Any]
    width: int | None = None
    # A callable is treated as smooth.
    breaks = np.empty(0)

    def __call__(self, times: Array) -> Array:
        """Values [M, d] at times [M]."""
        rows = np.array([np.atleast_1d(np.asarray(self.call(float(time)), dtype=float)) for time in times])
        if rows.ndim != 2:
            raise ValueError(f"signal: `f` has values of shape {rows.shape[1:]}; expected a vector [d] for one time")
        _check_width(rows.shape[1], self.width)
        return rows


Signal = Samples | Function


def _check_width(got: int, expected: int | None) -> None:
    if expected not in (None, got):
        raise ValueError(f"signal: `f` has {got} channels; expected {expected} as the transport moves; give both one width")


def as_signal(f: Any, times: Any = None, width: int | None = None) -> Signal:
    """A signal of `width` channels from `Samples`, an array [K, d] with its `times` [K], or a callable time -> [d]."""
    if not callable(f):
        if times is None:
            raise ValueError("signal: `f` is an array without times; pass times=[K] or a callable f")
        f = Samples(times, f)
    if not isinstance(f, Samples):
        return f if isinstance(f, Function) else Function(f, width)
    _check_width(f.values.shape[1], width)
    return f
