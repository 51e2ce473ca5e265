"""Transport of the channel frame: d_t P(t, tau) = P(t, tau) A_R(t), P(tau, tau) = I.

The time axis is cut into segments [s_j, s_{j+1}] on which P is known in closed form or by an adaptive ODE solution, and

    P(t, tau) = P(s_{j+1}, tau) P(s_{j+2}, s_{j+1}) ... P(t, s_i)      for tau in segment j, t in segment i.

The segments of a callable path are short compared to the size of A_R, so that every factor is well conditioned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

from shippo_ssm._expect import expect_size
from shippo_ssm.projection._numerics import Array, as_real, expm, expm_ages

_RTOL = 1e-12
_ATOL = 1e-13
# Bound on ||A_R|| times the length of a segment: the condition of a local frame stays below about exp(2 * 2).
_SEGMENT_SIZE = 2.0
_LONGEST_SEGMENT = 4.0
REAL = "real matrices [d, d]; write complex entries as 2 x 2 blocks"
_Dense = Callable[[Array], Array]


class _Pieces:
    """Segments of a constant or piecewise-constant path, in closed form."""

    def __init__(self, knots: Array, generators: Array) -> None:
        # The first piece reaches back to time 0, and the last one has no end.
        self.knots = np.concatenate([[0.0], knots[1:], [math.inf]])
        self._generators = generators

    def reach(self, t: float) -> None:
        """Pieces are known for all times."""

    def step(self, segment: Array, later: Array, earlier: Array, inverse: bool) -> Array:
        """P(later, earlier), or its inverse, for pairs [M] inside segments j [M]: [M, d, d]."""
        generators, ages = -self._generators if inverse else self._generators, later - earlier
        return expm_ages(generators[0], ages) if len(generators) == 1 else expm(ages[:, None, None] * generators[segment])


class _Flow:
    """Segments of a callable path, by an adaptive method of order 8: W' = W A_R and Y' = -A_R Y = (W^{-1})', from I at s_j."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._solutions: list[tuple[_Dense, _Dense]] = []
        self.knots = np.array([0.0])

    def reach(self, t: float) -> None:
        """Extends the segments up to time t."""
        horizon = self._transport.horizon
        if t > horizon:
            raise ValueError(f"Transport: `t` is {t}; expected at most {horizon}, the horizon of the generator")
        while self.knots[-1] < t:
            start = float(self.knots[-1])
            stop = min(start + self._length(start), horizon)
            self._solutions.append(self._solve(start, stop))
            self.knots = np.append(self.knots, stop)

    def _length(self, start: float) -> float:
        length = min(_LONGEST_SEGMENT, self._transport.horizon - start)
        while length > 1e-9:
            probes = start + length * np.array([0.05, 0.25, 0.5, 0.75, 1.0])
            size = max(float(np.linalg.norm(self._transport.generator(time), 2)) for time in probes)
            if size * length <= _SEGMENT_SIZE:
                break
            length /= 2
        return length

    def _solve(self, start: float, stop: float) -> tuple[_Dense, _Dense]:
        generator, width = self._transport.generator, self._transport.width

        def forward(time: float, flat: Array) -> Array:
            return (flat.reshape(width, width) @ generator(time)).ravel()

        def backward(time: float, flat: Array) -> Array:
            return (-generator(time) @ flat.reshape(width, width)).ravel()

        frame, inverse = (
            solve_ivp(rate, (start, stop), np.eye(width).ravel(), method="DOP853", rtol=_RTOL, atol=_ATOL, dense_output=True)
            for rate in (forward, backward)
        )
        if not (frame.success and inverse.success):
            raise ValueError(f"Transport: `generator` could not be integrated on [{start}, {stop}]; expected finite values")
        return frame.sol, inverse.sol

    def _evaluate(self, segment: Array, times: Array, part: int) -> Array:
        width = self._transport.width
        result = np.empty((len(times), width, width))
        for index in np.unique(segment):
            rows = segment == index
            # Many pairs share one end, and the interpolant is expensive.
            distinct, which = np.unique(times[rows], return_inverse=True)
            result[rows] = np.moveaxis(self._solutions[index][part](distinct).reshape(width, width, -1), -1, 0)[which]
        return result

    def step(self, segment: Array, later: Array, earlier: Array, inverse: bool) -> Array:
        """P(later, earlier) = Y_j(earlier) W_j(later), or its inverse, for pairs [M] inside segments j [M]: [M, d, d]."""
        first, last = (later, earlier) if inverse else (earlier, later)
        return self._evaluate(segment, first, 1) @ self._evaluate(segment, last, 0)


class Transport:
    """P(t, tau) of a right generator path: d_t P = P A_R, P(tau, tau) = I; adaptive to about 1e-10, closed form when constant.

    Args:
        generator: [d, d]; or [K, d, d] together with `times`; or a callable t -> [d, d].
        width: number of channels d.
        times: [K], the starts of the pieces; the first piece reaches back to time 0, the last one has no end.
        horizon: the time up to which a callable is defined (default everywhere); it is never called beyond it.
    """

    def __init__(self, generator: Any, width: int, *, times: Any = None, horizon: float = math.inf) -> None:
        expect_size("Transport", "width", width, "a positive number of channels")
        if not isinstance(horizon, int | float) or not horizon > 0:
            raise ValueError(f"Transport: `horizon` is {horizon!r}; expected a time > 0")
        self.width, self.horizon = int(width), float(horizon)
        self._call: Callable[[float], Any] | None = generator if callable(generator) else None
        matrices = self.generator(0.0) if callable(generator) else as_real("Transport", "generator", generator, REAL)
        if not np.all(np.isfinite(matrices)):
            raise ValueError("Transport: `generator` has an entry that is not finite; expected numbers")
        if times is None or callable(generator):
            self._knots, self._pieces = np.array([0.0]), self._checked(matrices)[None]
            return
        knots = as_real("Transport", "times", times, "the times [K] where pieces begin")
        if knots.ndim != 1 or matrices.shape != (len(knots), width, width):
            came = f"shape {matrices.shape} for times {knots.shape}"
            raise ValueError(f"Transport: `generator` has {came}; expected [K, {width}, {width}] for times [K]")
        if len(knots) == 0 or not np.all(np.isfinite(knots)) or np.any(np.diff(knots) <= 0) or knots[0] < 0:
            raise ValueError(f"Transport: `times` is {knots.tolist()}; expected finite times >= 0, strictly increasing")
        self._knots, self._pieces = knots, matrices

    def _checked(self, matrix: Any) -> Array:
        array = as_real("Transport", "generator", matrix, REAL)
        if array.shape != (self.width, self.width):
            expected = f"a matrix [{self.width}, {self.width}]; for pieces [K, d, d] pass times=[K] too"
            raise ValueError(f"Transport: `generator` has shape {array.shape}; expected {expected}")
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

    @cached_property
    def _segments(self) -> _Pieces | _Flow:
        return _Pieces(self._knots, self._pieces) if self._call is None else _Flow(self)

    def _pairs(self, t: Any, tau: Any) -> tuple[Array, Array, tuple[int, ...]]:
        later, earlier = np.broadcast_arrays(as_real("Transport", "t", t, "times"), as_real("Transport", "tau", tau, "times"))
        slack = 1e-12 * max(1.0, float(np.abs(later).max(initial=0.0)))
        if not np.all((earlier >= -slack) & (earlier <= later + slack) & np.isfinite(later)):
            raise ValueError("Transport: `tau` is outside [0, t]; expected an earlier time; `inverse` moves back")
        return later.ravel(), np.clip(earlier.ravel(), 0.0, None), later.shape

    def _frame(self, t: Any, tau: Any, inverse: bool) -> Array:
        """P(t, tau), or its inverse: the factors of whole segments between, inverted and in reverse order."""
        later, earlier, shape = self._pairs(t, tau)
        segments = self._segments
        # A callable path needs a first segment even for time 0.
        segments.reach(max(float(later.max(initial=0.0)), min(1e-9, self.horizon)))
        last = len(segments.knots) - 2
        start = np.clip(np.searchsorted(segments.knots, earlier, side="right") - 1, 0, last)
        # An end on a knot belongs to the segment before it.
        stop = np.maximum(np.clip(np.searchsorted(segments.knots, later, side="left") - 1, 0, last), start)
        crossing = start < stop
        result = segments.step(start, np.where(crossing, segments.knots[start + 1], later), earlier, inverse)
        # Pairs that cross knots: walk back from each distinct end through the whole segments between, once for all starts.
        for time in np.unique(later[crossing]):
            rows = np.flatnonzero(crossing & (later == time))
            end = stop[rows[:1]]
            rest = segments.step(end, np.array([time]), segments.knots[end], inverse)[0]
            between = np.arange(start[rows].min(), end[0])
            whole = segments.step(between, segments.knots[between + 1], segments.knots[between], inverse)
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
