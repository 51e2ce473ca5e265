"""Fixed online memories C' = A C + B f^T (stationary) or t C' = A C + B f^T (scaled), and their exact steps.

A memory is a generator A, [N, N] or the N entries of a complex diagonal, and an input vector B [N]. With the input held
constant over one step, C_k = left_k C_{k-1} + gain_k f_k^T holds exactly: left = exp(h A) and gain = int_0^h exp(s A) B ds for
a step of length h of a stationary memory, and, for a scaled one from time s to t, left = exp(log(t / s) A) and
gain = (I - left) (-A)^{-1} B, with left = 0 from time 0 on, since nothing was before. All of it is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import expm

from shippo_ssm._expect import expect_size

NAMES = ("legs", "legt", "s4d")


@dataclass(frozen=True, slots=True)
class OnlineMemory:
    """A fixed online memory."""

    A: np.ndarray
    """Generator: [N, N], or the diagonal [N] (complex)."""
    B: np.ndarray
    """Input vector [N]."""
    scaled: bool = False
    """Whether time divides: t C' = A C + B f^T."""
    flow: Callable[[np.ndarray], np.ndarray] | None = None
    """For a scaled memory, left as a function of the ratios s / t; the matrix exponential by default."""

    @property
    def diagonal(self) -> bool:
        """Whether A is a diagonal."""
        return self.A.ndim == 1

    @property
    def order(self) -> int:
        """N."""
        return self.B.shape[0]

    def steps(self, times: Any, step: Any = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """left [K, N, N] (or [K, N] for a diagonal) and gain [K, N] of the steps that end at `times` [K].

        Args:
            times: ends of the steps, from a start at 0; they matter for a scaled memory only.
            step: lengths of the steps, one for all or [K]; a step of length 0 changes nothing.
        """
        times, step = np.broadcast_arrays(np.asarray(times, dtype=np.float64), np.asarray(step, dtype=np.float64))
        if self.scaled:
            ratios = np.divide(times - step, times, out=np.ones_like(times), where=step > 0).clip(0)
            ratios, index = np.unique(ratios, return_inverse=True)
            left = np.array(self._scaled_left(ratios))
            left[ratios == 0] = 0
            left = left[index]
            resting = -self.B / self.A if self.diagonal else -np.linalg.solve(self.A, self.B)
            return left, resting - (left * resting if self.diagonal else left @ resting)
        # One exponential for each length that occurs.
        lengths, index = np.unique(step, return_inverse=True)
        lengths = lengths[:, None]
        if self.diagonal:
            small = np.broadcast_to(lengths, (len(lengths), self.order)).astype(self.A.dtype)
            mean = np.divide(np.expm1(lengths * self.A), self.A, out=small, where=self.A != 0)
            left, gain = np.exp(lengths * self.A), mean * self.B
        else:
            # exp of [[A, B], [0, 0]] holds both, and needs no inverse of A.
            block = np.zeros((self.order + 1,) * 2)
            block[:-1, :-1], block[:-1, -1] = self.A, self.B
            both = np.stack([expm(length * block) for length in lengths[:, 0]])
            left, gain = both[:, :-1, :-1], both[:, :-1, -1]
        return left[index], gain[index]

    def _scaled_left(self, ratios: np.ndarray) -> np.ndarray:
        if self.flow is not None:
            return self.flow(ratios)
        ages = -np.log(np.maximum(ratios, 1e-300))
        if self.diagonal:
            return np.exp(ages[:, None] * self.A)
        return np.stack([expm(age * self.A) if ratio else np.zeros_like(self.A) for age, ratio in zip(ages, ratios)])


def online_memory(measure: Any, d_state: int = 32, theta: float = 64.0) -> OnlineMemory:
    """The memory that a name or an object stands for.

    Args:
        measure: "legs" (the whole past, scaled), "legt" (a window of `theta` tokens), "s4d" (complex diagonal
            a_n = -1/2 + i pi n), an `OnlineMemory`, or any object with A and B: arrays [N, N] or [N] and [N], or functions of
            time that are constant or fall as 1/t, as the measures of `shippo_ssm.projection` have them.
        d_state: N, for a name.
        theta: window of "legt", in units of time.
    """
    if isinstance(measure, OnlineMemory):
        return measure
    if isinstance(measure, str):
        if measure not in NAMES:
            names = ", ".join(map(repr, NAMES))
            raise ValueError(f"lift: `measure` is {measure!r}; expected one of {names}, or an object with A and B")
        expect_size("lift", "d_state", d_state)
        if measure == "s4d":
            return _s4d(d_state)
        # Loads on first use: few layers need the measures.
        from shippo_ssm.projection import LegS, LegT

        measure = LegS(d_state) if measure == "legs" else LegT(d_state, theta)
    if not hasattr(measure, "A") or not hasattr(measure, "B"):
        raise ValueError(f"lift: `measure` is a {type(measure).__name__} without A and B; expected a name or a measure")
    if not callable(measure.A):
        A, B = np.asarray(measure.A), np.asarray(measure.B)
        if A.shape not in ((len(B),), (len(B), len(B))):
            raise ValueError(
                f"lift: `measure` has A of shape {A.shape} and B of shape {B.shape}; expected [N, N] or [N], and [N]"
            )
        return OnlineMemory(A, B)
    now, later = np.asarray(measure.A(1.0)), np.asarray(measure.A(2.0))
    B = np.asarray(measure.B(1.0))
    if np.allclose(now, later, rtol=1e-12, atol=0):
        return OnlineMemory(now, B)
    if np.allclose(now, 2 * later, rtol=1e-12, atol=0):
        flow = getattr(measure, "flow", None)
        return OnlineMemory(now, B, True, None if flow is None else lambda ratios: np.array(flow(np.ones_like(ratios), ratios)))
    raise ValueError("lift: `measure` has an A(t) that is neither constant nor 1/t; expected one of the two")


def _s4d(order: int) -> OnlineMemory:
    return OnlineMemory(-0.5 + 1j * np.pi * np.arange(order), np.ones(order, dtype=np.complex128))
