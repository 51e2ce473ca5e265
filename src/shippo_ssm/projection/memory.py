"""Projection memories: the state solves an approximation problem in a moving channel frame.

A memory holds C(t) [N, d], the coefficients that minimise

    J_t(C) = int || f(tau) - P(t, tau)^{-T} C^T Phi_t(tau) ||^2_{M_P(t, tau)} dmu_t(tau),      M_P = P P^T.

`project` integrates over the whole history: C = int Phi f^T P dmu, since the basis is orthonormal. `evolve` computes the same C
online, from the Sylvester dynamics C' = A_L C + B_L f^T + C A_R. Without a transport P = I, which is HiPPO.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np

from shippo_ssm.projection._numerics import Array, as_past, as_real, as_time, as_times
from shippo_ssm.projection.measures import Measure
from shippo_ssm.projection.signals import Signal, as_signal
from shippo_ssm.projection.stepping import Method, states
from shippo_ssm.projection.transport import Transport

Keep = Literal["all", "last"]


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

    @property
    def _width(self) -> int | None:
        return None if self.transport is None else self.transport.width

    def _signal(self, f: Any, times: Any = None) -> Signal:
        return as_signal(f, times, self._width)

    def _breaks(self, signal: Signal) -> Array:
        return signal.breaks if self.transport is None else np.concatenate([signal.breaks, self.transport.breaks])

    def project(self, f: Any, t: float, *, times: Any = None, rtol: float = 1e-12) -> Array:
        """The minimiser C(t) = int Phi_t f^T P(t, .) dmu_t [N, d] of J_t, by adaptive quadrature to the relative error `rtol`.

        `f` is a callable time -> [d], `Samples`, or an array [K, d] with its `times` [K].
        """
        t, signal = as_time("t", t), self._signal(f, times)

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
        signal, measure = self._signal(f, times), self.measure

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
        times = as_times("times", times)
        signal = self._signal(f, None if callable(f) else times)
        state = self.project(signal, times[0]) if initial_state is None else self._state(initial_state)
        following = states(self.measure, self.transport, signal, times, method, state, skip=keep == "last")
        if keep == "last":
            return deque(chain([state], following), maxlen=1)[0]
        history = np.empty((len(times), *state.shape))
        for index, found in enumerate(chain([state], following)):
            history[index] = found
        return history
