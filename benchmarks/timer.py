"""Times of several callables, taken in turn so that whatever disturbs the machine disturbs all of them.

Data path: a dictionary of nullary callables, warmed by the caller, is called round by round; each gets a `Timing` with the
median and the 20 % and 80 % quantiles of its seconds. A slow one drops out of later rounds once its time is used up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Threads of the call before keep spinning for about a millisecond; the next call waits until they sleep.
_SETTLE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one callable over the rounds it took part in."""

    median: float
    p20: float
    p80: float
    repeats: int

    def as_dict(self) -> dict[str, float]:
        """The figures by name."""
        return {"median": self.median, "p20": self.p20, "p80": self.p80, "repeats": self.repeats}


def summarize(seconds: list[float]) -> Timing:
    """Median and quantiles of measured seconds.

    Example:
        >>> summarize([3.0, 1.0, 2.0]).median
        2.0
    """
    if not seconds:
        raise ValueError("summarize: `seconds` is empty; expected at least one measurement")
    low, middle, high = np.quantile(seconds, [0.2, 0.5, 0.8])
    return Timing(median=float(middle), p20=float(low), p80=float(high), repeats=len(seconds))


def interleave(calls: Mapping[str, Callable[[], Any]], *, rounds: int, budget: float) -> dict[str, Timing]:
    """Time warmed callables in turn.

    Args:
        calls: what to time, by name.
        rounds: how often each is called at most.
        budget: seconds for each callable; one that would exceed them by another call is left out of later rounds.

    Returns:
        A `Timing` for every name, from at least one call.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken = seconds[name]
            if taken and sum(taken) + min(taken) > budget:
                continue
            time.sleep(_SETTLE)
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    return {name: summarize(taken) for name, taken in seconds.items()}


def first_call(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call and its seconds: compilation included, which is why it is reported apart."""
    begin = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin
