"""Projection memories: the state solves an approximation problem in a moving channel frame.

A memory holds C(t) [N, d], the coefficients that minimise

    J_t(C) = int || f(tau) - P(t, tau)^{-T} C^T Phi_t(tau) ||^2_{M_P(t, tau)} dmu_t(tau),      M_P = P P^T.

`project` integrates over the whole history: C = int Phi f^T P dmu, since the basis is orthonormal. `evolve` computes the same C
online, from the Sylvester dynamics C' = A_L C + B_L f^T + C A_R. Without a transport P = I, which is HiPPO.

Left and right actions commute as maps of C, so one step of `evolve` from t_0 to t_1 is exactly

    C(t_1) = E C(t_0) P(t_1, t_0) + int E(t_1, tau) B_L(tau) f(tau)^T P(t_1, tau) dtau,

with E the left flow of the measure and P the right flow of the transport. "exact" integrates the source by Gauss points; "zoh"
does the same with f and A_R held over the step; "bilinear" replaces both exponentials by their Cayley form.

The time axis is cut into chunks of K strides of S steps, grid [K, S + 1]. Flows, right factors and sources of a chunk are
batched products; the states follow by one small product per stride. S is 1 if every state is needed; if the measure closes
exactly, a source inside a long stride has the closed form psi(t_1, tau) at its end, and S is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import numpy as np
from scipy.linalg import get_lapack_funcs

from shippo_ssm.projection._numerics import Array, as_past, as_real, as_time, as_times, gauss_panels
from shippo_ssm.projection.measures import Measure
from shippo_ssm.projection.signals import Samples, Signal, as_signal
from shippo_ssm.projection.transport import Transport

Keep = Literal["all", "last"]
Method = Literal["exact", "bilinear", "zoh"]
Sampled = Callable[[Array], Array]

ORDERS: dict[Method, int] = {"exact": 6, "bilinear": 2, "zoh": 1}
"""Order in the step size at which `evolve` of a smooth callable signal converges to `project`, per discretisation."""

# Maximum steps per chunk, maximum entries in one of its arrays, and steps per stride when states are skipped.
_CHUNK = 512
_CHUNK_NUMBERS = 2**22
_STRIDE = 64


def _grids(times: Array, stride: int, num: int) -> Iterator[Array]:
    """Cut times [T] into grids [K, S + 1] of K strides, single steps last; a step of N = `num` functions needs N^2 numbers."""
    chunk = max(1, min(_CHUNK, _CHUNK_NUMBERS // num**2))
    last, position = len(times) - 1, 0
    while position < last:
        size = stride if last - position >= stride else 1
        count = min(max(1, chunk // size), (last - position) // size)
        yield times[position + size * np.arange(count)[:, None] + np.arange(size + 1)]
        position += size * count


def _sources(measure: Measure, transport: Transport | None, signal: Sampled, grid: Array, extra: int) -> Array:
    """int E(t_1, tau) B_L(tau) f(tau)^T P(t_1, tau) dtau over each stride of grid [K, S + 1]: [K, N, d].

    Three Gauss points per step give order 6; a step that is coarse for the basis takes more, plus `extra`.
    """
    spans = np.diff(grid, axis=1)
    cuts = measure.parts(spans)
    if len(grid) > 1 and cuts.shape[-1] > 2:
        # Rows with a step longer than the memory have many nodes.
        return np.concatenate([_sources(measure, transport, signal, row[None], extra) for row in grid])
    edges = np.concatenate([(grid[:, :-1, None] + spans[..., None] * cuts[..., :-1]).reshape(len(grid), -1), grid[:, -1:]], 1)
    order = max(3, 1 + math.ceil(measure.resolution(grid[:, :-1], grid[:, 1:]))) + extra
    nodes, weights = gauss_panels(edges, order)
    stop = np.broadcast_to(grid[:, -1:], nodes.shape)
    values = signal(nodes.ravel()).reshape(*nodes.shape, -1)
    if transport is not None:
        values = transport.carry(values, nodes, stop)
    return np.swapaxes(measure.impulse(stop, nodes), -1, -2) @ (weights[..., None] * values)


def _exponential(
    measure: Measure, transport: Transport | None, signal: Sampled, grid: Array, state: Array, extra: int
) -> Iterator[Array]:
    """C_1 = E C_0 P + the source of each stride of grid [K, S + 1], one after another."""
    source = _sources(measure, transport, signal, grid, extra)
    flow = measure.flow(grid[:, -1], grid[:, 0])
    right = None if transport is None else transport.P(grid[:, -1], grid[:, 0])
    for index in range(len(grid)):
        state = flow[index] @ (state if right is None else state @ right[index]) + source[index]
        yield state


def _held(transport: Transport | None, signal: Signal, starts: Array) -> tuple[Transport | None, Sampled]:
    """A_R and the signal, held at their values at the start of each step."""
    values = signal(starts)
    if transport is not None and not transport.is_constant:
        transport = Transport(np.stack([transport.generator(time) for time in starts]), transport.width, times=starts)
    return transport, lambda times: values[np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)]


def _bilinear(measure: Measure, transport: Transport | None, signal: Signal, grid: Array, state: Array) -> Iterator[Array]:
    """C_1 = (I - X)^{-1} [(I + X) C_0 R + h B g^T] with X = h A_L / 2, Y = h A_R / 2.

    R = (I + Y)(I - Y)^{-1} and g^T = f^T (I - Y)^{-1}; all of A_L, B_L, A_R and f are taken at the middle of the step.
    """
    step, middle = grid[:, 1] - grid[:, 0], grid.mean(axis=1)
    values = signal(middle)
    right = None
    if transport is not None:
        eye = np.eye(transport.width)
        half = np.stack([transport.generator(time) for time in middle]) * (step / 2)[:, None, None]
        resolvent = np.linalg.inv(eye - half)
        right = (eye + half) @ resolvent
        values = np.einsum("ki,kij->kj", values, resolvent)
    solvers: dict[float, Array] = {}
    (substitute,) = get_lapack_funcs(("trtrs",), (state,))
    for index, (h, time) in enumerate(zip(step, middle)):
        # (I + X) = 2 I - (I - X): one solve serves both terms.
        moved = state if right is None else state @ right[index]
        load = 2 * moved + np.outer(h * measure.B(time), values[index])
        implicit = np.eye(measure.N) - h / 2 * measure.A(time)
        if measure.stationary:
            # Steps of a uniform grid differ by rounding: compare twelve digits.
            key = float(f"{h:.11e}")
            if key not in solvers:
                solvers[key] = np.linalg.inv(implicit)
            solved = solvers[key] @ load
        else:
            solved, _ = substitute(implicit, load, lower=1)
        state = solved - moved
        yield state


class ProjectionMemory:
    """Online compression of a d-channel signal into C(t) [N, d], in a channel frame that may move.

    Args:
        measure: what is remembered, and in which basis.
        transport: the motion of the channel frame; `None` is HiPPO.

    Example:
        >>> import numpy as np
        >>> from shippo_ssm.projection import LegS
        >>> memory = ProjectionMemory(LegS(12))
        >>> state = memory.evolve(lambda t: np.array([np.sin(t)]), np.linspace(0.1, 2, 200), keep="last")
        >>> bool(abs(memory.reconstruct(state, 2.0, np.array([1.0]))[0, 0] - np.sin(1.0)) < 1e-6)
        True
    """

    def __init__(self, measure: Measure, transport: Transport | None = None) -> None:
        if not isinstance(measure, Measure):
            raise ValueError(f"ProjectionMemory: `measure` is a {type(measure).__name__}; expected a measure such as LegS(32)")
        if not isinstance(transport, Transport | None):
            raise ValueError(
                f"ProjectionMemory: `transport` is a {type(transport).__name__}; expected a Transport; wrap the generator"
            )
        self.measure, self.transport = measure, transport
        self._width = None if transport is None else transport.width

    def _breaks(self, signal: Signal) -> Array:
        return signal.breaks if self.transport is None else np.concatenate([signal.breaks, self.transport.breaks])

    def project(self, f: Any, t: float, *, times: Any = None, rtol: float = 1e-12) -> Array:
        """The minimiser C(t) = int Phi_t f^T P(t, .) dmu_t [N, d] of J_t, by adaptive quadrature to the relative error `rtol`.

        `f` is a callable time -> [d], `Samples`, or an array [K, d] with its `times` [K].
        """
        t, signal = as_time("t", t), as_signal(f, times, self._width)

        def integrand(tau: Array, w: Array) -> Array:
            values = signal(tau) if self.transport is None else self.transport.carry(signal(tau), tau, t)
            return self.measure._psi(t, tau).T @ (w[:, None] * values)

        return self.measure._integrate(integrand, t, breaks=self._breaks(signal), rtol=rtol)

    def reconstruct(self, C: Array, t: float, tau: Any) -> Array:
        """P(t, tau)^{-T} C^T Phi_t(tau) [len(tau), d] for tau in [0, t]; 0 where the measure remembers nothing."""
        t = as_time("t", t)
        past = as_past(np.atleast_1d(tau), t)
        values = self.measure.basis(t, past) @ self._state(C)
        # Rows g^T = (C^T Phi)^T P^{-1}.
        return values if self.transport is None else np.einsum("mi,mij->mj", values, self.transport.inverse(t, past))

    def objective(self, f: Any, C: Array, t: float, *, times: Any = None, rtol: float = 1e-10) -> float:
        """J_t(C): the squared error in the transported metric M_P = P P^T, over the whole support of the measure."""
        t, C = as_time("t", t), self._state(C)
        signal, measure = as_signal(f, times, self._width), self.measure

        def integrand(tau: Array, w: Array) -> Array:
            phi, psi = measure._phi(t, tau), measure._psi(t, tau)
            gap = signal(tau) - self.reconstruct(C, t, tau)
            if self.transport is None:
                squares = np.einsum("mi,mi->m", gap, gap)
            else:
                squares = np.einsum("mi,mij,mj->m", gap, self.transport.metric(t, tau), gap)
            # The Gram matrix of the support after time 0 is integrated along.
            return np.concatenate([[np.sum(w * measure.weight(t, tau) * squares)], (phi.T @ (w[:, None] * psi)).ravel()])

        value, *active = measure._integrate(integrand, t, breaks=self._breaks(signal), rtol=rtol)
        if measure._start(t) < 0:
            # Before time 0 the signal is 0 and the error is the reconstruction itself.
            before = measure.gram(t) - np.reshape(active, (measure.N, measure.N))
            value += np.einsum("nd,nm,md->", C, before, C)
        return float(value)

    def error(self, f: Any, C: Array, t: float, *, times: Any = None, rtol: float = 1e-10) -> float:
        """sqrt(J_t(C)): the distance of f from its reconstruction, in the transported metric."""
        return math.sqrt(max(0.0, self.objective(f, C, t, times=times, rtol=rtol)))

    def _state(self, C: Any) -> Array:
        state = as_real("ProjectionMemory", "C", C, "a coefficient matrix")
        if state.ndim != 2 or state.shape[0] != self.measure.N or self._width not in (None, state.shape[1]):
            expected = f"[{self.measure.N}, {self._width or 'd'}]"
            raise ValueError(f"ProjectionMemory: `C` has shape {state.shape}; expected a coefficient matrix {expected}")
        return state

    def evolve(self, f: Any, times: Any, *, method: Method = "exact", keep: Keep = "all", initial_state: Any = None) -> Array:
        """C at each time, by the Sylvester dynamics C' = A_L C + B_L f^T + C A_R from C(times[0]) on.

        Args:
            f: callable time -> [d], `Samples`, or an array [T, d] of values at `times`; samples are joined by straight lines.
            times: [T], > 0 and strictly increasing.
            method: "exact", exact flows and Gauss points for the source; "bilinear", the Cayley form of both generators at the
                middle of the step; "zoh", f and A_R held from the start of the step. `ORDERS` has the order of their errors.
            keep: "all" returns every state; "last" the last one, with working memory independent of T.
            initial_state: C(times[0]) [N, d]; default the projection, with samples constant before the first one.

        Returns:
            [T, N, d], or [N, d] with keep="last".
        """
        for name, came, known in (("method", method, get_args(Method)), ("keep", keep, get_args(Keep))):
            if came not in known:
                raise ValueError(f"ProjectionMemory: `{name}` is {came!r}; expected one of {known}")
        times = as_times("projection", times)
        as_time("times[0]", times[0])
        signal = as_signal(f, None if callable(f) else times, self._width)
        state = self.project(signal, times[0]) if initial_state is None else self._state(initial_state)
        every, index = keep == "all", 0
        history = np.empty((len(times) if every else 1, *state.shape))
        history[0] = state
        stride = 1 if every or method == "bilinear" or not self.measure.closes else _STRIDE
        for grid in _grids(times, stride, self.measure.N):
            for found in self._advance(signal, grid, history[index], method):
                index = index + 1 if every else 0
                history[index] = found
        return history if every else history[0]

    def _advance(self, signal: Signal, grid: Array, state: Array, method: Method) -> Iterator[Array]:
        """The states at the ends of the strides of grid [K, S + 1], from `state` at its start."""
        if method == "bilinear":
            return _bilinear(self.measure, self.transport, signal, grid, state)
        if method == "zoh":
            return _exponential(self.measure, *_held(self.transport, signal, grid[:, :-1].ravel()), grid, state, extra=2)
        # Straight lines between samples are integrated to rounding.
        extra = 3 if isinstance(signal, Samples) else 0
        return _exponential(self.measure, self.transport, signal, grid, state, extra)
