"""Transport of the channel frame: d_t P(t, tau) = P(t, tau) A_R(t), P(tau, tau) = I.

The time axis is cut into segments [s_j, s_{j+1}] on which P is known in closed form or by an adaptive ODE solution, and

    P(t, tau) = P(s_{j+1}, tau) P(s_{j+2}, s_{j+1}) ... P(t, s_i)      for tau in segment j, t in segment i.

The segments of a callable path are short compared to the size of A_R, so that every factor is well conditioned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

from shippo_ssm._expect import expect_size
from shippo_ssm.projection._numerics import Array, as_real, as_times, expm, expm_ages

_RTOL = 1e-12
_ATOL = 1e-13
# Bound on ||A_R|| times the length of a segment: the condition of a local frame stays below about exp(2 * 2).
_SEGMENT_SIZE = 2.0
_LONGEST_SEGMENT = 4.0


class Transport:
    """P(t, tau) of a right generator path: d_t P = P A_R, P(tau, tau) = I; adaptive to about 1e-10, closed form when constant.

    Args:
        generator: [d, d]; or [K, d, d] together with `times`; or a callable t -> [d, d].
        width: number of channels d.
        times: [K], the starts of the pieces; the first piece reaches back to time 0, the last one has no end.
    """

    def __init__(self, generator: Any, width: int, *, times: Any = None) -> None:
        expect_size("Transport", "width", width, "a positive number of channels")
        self.width = int(width)
        self._call: Callable[[float], Any] | None = generator if callable(generator) else None
        # A callable has one piece, its value at time 0, which is checked and not used.
        alone = times is None or callable(generator)
        self._knots = as_times("Transport", [0.0] if alone else times)
        if self._knots[0] < 0:
            raise ValueError(f"Transport: `times` begins at {self._knots[0]}; expected times >= 0")
        pieces = generator(0.0) if callable(generator) else generator
        self._pieces = self._checked(pieces)[None] if alone else self._checked(pieces, len(self._knots))
        if not np.all(np.isfinite(self._pieces)):
            raise ValueError("Transport: `generator` has an entry that is not finite; expected numbers")
        # Where segments begin and end. The first piece reaches back to time 0 and the last has no end; `_reach` adds those of a
        # callable, with the solutions (W, Y) on each.
        self._edges = np.array([0.0]) if self._call else np.concatenate([[0.0], self._knots[1:], [math.inf]])
        self._solutions: list[tuple[Callable[[Array], Array], ...]] = []

    def _checked(self, matrices: Any, *count: int) -> Array:
        shape = (*count, self.width, self.width)
        array = as_real("Transport", "generator", matrices, "real matrices [d, d]; write complex entries as 2 x 2 blocks")
        if array.shape != shape:
            raise ValueError(
                f"Transport: `generator` has shape {array.shape}; expected {shape}; pieces [K, d, d] need times=[K]"
            )
        return array

    @property
    def is_constant(self) -> bool:
        """Whether A_R is one matrix."""
        return self._call is None and len(self._pieces) == 1

    @property
    def breaks(self) -> Array:
        """Times where A_R jumps."""
        return self._knots[self._knots > 0]

    def generator(self, t: float) -> Array:
        """A_R(t) [d, d]."""
        if self._call is not None:
            return self._checked(self._call(float(t)))
        return self._pieces[max(0, int(np.searchsorted(self._knots, t, side="right")) - 1)]

    def _reach(self, t: float) -> None:
        """Extend the segments of a callable up to time t."""
        while self._edges[-1] < t:
            start, length = float(self._edges[-1]), _LONGEST_SEGMENT
            while length > 1e-9:
                probes = start + length * np.array([0.05, 0.25, 0.5, 0.75, 1.0])
                size = max(float(np.linalg.norm(self.generator(time), 2)) for time in probes)
                if size * length <= _SEGMENT_SIZE:
                    break
                length /= 2
            self._solutions.append(self._solve(start, start + length))
            self._edges = np.append(self._edges, start + length)

    def _solve(self, start: float, stop: float) -> tuple[Callable[[Array], Array], ...]:
        """W' = W A_R and Y' = -A_R Y, which is W^{-1}, from I at `start`: as functions of times [M], each [d d, M]."""
        square, begin = (self.width, self.width), np.eye(self.width).ravel()
        rates = (
            lambda time, flat: (flat.reshape(square) @ self.generator(time)).ravel(),
            lambda time, flat: (-self.generator(time) @ flat.reshape(square)).ravel(),
        )
        both = [
            solve_ivp(rate, (start, stop), begin, method="DOP853", rtol=_RTOL, atol=_ATOL, dense_output=True) for rate in rates
        ]
        if not all(found.success for found in both):
            raise ValueError(f"Transport: `generator` could not be integrated on [{start}, {stop}]; expected finite values")
        return tuple(found.sol for found in both)

    def _solution(self, segment: Array, times: Array, part: int) -> Array:
        """W (`part` 0) or Y (1) of segments j [M] at times [M]: [M, d, d]."""
        result = np.empty((len(times), self.width, self.width))
        for index in np.unique(segment):
            rows = segment == index
            # Many pairs share one end, and the interpolant is expensive.
            distinct, which = np.unique(times[rows], return_inverse=True)
            result[rows] = np.moveaxis(self._solutions[index][part](distinct).reshape(*result.shape[1:], -1), -1, 0)[which]
        return result

    def _step(self, segment: Array, later: Array, earlier: Array, inverse: bool) -> Array:
        """P(later, earlier), or its inverse, for pairs [M] inside segments j [M]: [M, d, d]."""
        if self._call is not None:
            first, last = (later, earlier) if inverse else (earlier, later)
            return self._solution(segment, first, 1) @ self._solution(segment, last, 0)
        pieces, ages = -self._pieces if inverse else self._pieces, later - earlier
        return expm_ages(pieces[0], ages) if len(pieces) == 1 else expm(ages[:, None, None] * pieces[segment])

    def _frame(self, t: Any, tau: Any, inverse: bool) -> Array:
        """P(t, tau), or its inverse: the factors of whole segments between, inverted and in reverse order."""
        later, earlier = np.broadcast_arrays(as_real("Transport", "t", t, "times"), as_real("Transport", "tau", tau, "times"))
        slack = 1e-12 * max(1.0, float(np.abs(later).max(initial=0.0)))
        if not np.all((earlier >= -slack) & (earlier <= later + slack) & np.isfinite(later)):
            raise ValueError("Transport: `tau` is outside [0, t]; expected an earlier time; `inverse` moves back")
        shape, later, earlier = later.shape, later.ravel(), np.clip(earlier.ravel(), 0.0, None)
        # A callable path needs a first segment even for time 0.
        self._reach(max(float(later.max(initial=0.0)), 1e-9))
        edges = self._edges
        last = len(edges) - 2
        start = np.clip(np.searchsorted(edges, earlier, side="right") - 1, 0, last)
        # An end on an edge belongs to the segment before it.
        stop = np.maximum(np.clip(np.searchsorted(edges, later, side="left") - 1, 0, last), start)
        crossing = start < stop
        result = self._step(start, np.where(crossing, edges[start + 1], later), earlier, inverse)
        # Pairs that cross edges: walk back from each distinct end through the whole segments between, once for all starts.
        for time in np.unique(later[crossing]):
            rows = np.flatnonzero(crossing & (later == time))
            end = stop[rows[:1]]
            rest = self._step(end, np.array([time]), edges[end], inverse)[0]
            between = np.arange(start[rows].min(), end[0])
            whole = self._step(between, edges[between + 1], edges[between], inverse)
            for index in range(len(between) - 1, -1, -1):
                here = rows[start[rows] == between[index]]
                result[here] = rest @ result[here] if inverse else result[here] @ rest
                rest = rest @ whole[index] if inverse else whole[index] @ rest
        return result.reshape(*shape, self.width, self.width)

    def P(self, t: Any, tau: Any) -> Array:
        """P(t, tau) [.., d, d] for 0 <= tau <= t; arrays broadcast."""
        return self._frame(t, tau, inverse=False)

    def V(self, t: Any) -> Array:
        """The moving frame V(t) = P(t, 0) [.., d, d]; P(t, tau) = V(tau)^{-1} V(t)."""
        return self.P(t, np.zeros_like(np.asarray(t, dtype=float)))

    def inverse(self, t: Any, tau: Any) -> Array:
        """P(t, tau)^{-1} [.., d, d] from its own equation d_t P^{-1} = -A_R(t) P^{-1}."""
        return self._frame(t, tau, inverse=True)

    def metric(self, t: Any, tau: Any) -> Array:
        """M_P(t, tau) = P(t, tau) P(t, tau)^T [.., d, d]: the metric at t of channel vectors written at tau."""
        frame = self.P(t, tau)
        return frame @ np.swapaxes(frame, -1, -2)

    def carry(self, values: Array, tau: Any, t: Any) -> Array:
        """f(tau)^T P(t, tau) [.., d]: channel vectors [.., d] written at tau, in the frame of t."""
        return np.einsum("...i,...ij->...j", values, self.P(t, tau))
