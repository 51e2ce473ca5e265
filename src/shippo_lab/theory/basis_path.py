"""A moving basis that is not orthonormal: Phi'_t = S(t) Phi_t with Gram matrix G(t) = S(t) S(t)^T.

The moments b = int Phi' f^T P dmu [N, d] follow b' = A b + B f^T + b A_R, and C = G^{-1} b has an extra term:

    C' = G^{-1} b' - G^{-1} G' C = G^{-1} (A G - G') C + G^{-1} B f^T + C A_R.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shippo_ssm.projection._numerics import Array, as_time
from shippo_ssm.projection.measures import Measure


class BasisPath(Measure):
    """The basis S(t) Phi_t of an orthonormal measure, for an invertible path S.

    Args:
        measure: the orthonormal measure.
        change: [N, N], or a callable t -> [N, N].
        change_rate: callable t -> S'(t) [N, N]; by default central differences of `change`.

    Example:
        >>> from shippo_ssm.projection import LegS
        >>> double = BasisPath(LegS(2), 2 * np.eye(2))
        >>> double.gram(1.0).round(6).tolist()
        [[4.0, 0.0], [0.0, 4.0]]
    """

    def __init__(self, measure: Measure, change: Any, change_rate: Callable[[float], Any] | None = None) -> None:
        super().__init__(measure.N)
        # A measure is a frozen dataclass: bypass its `__setattr__`.
        vars(self).update(measure=measure, closes=measure.closes, _change=change, _change_rate=change_rate)
        if np.linalg.cond(self.change(1.0)) > 1e12:
            raise ValueError("BasisPath: `change` is singular at t = 1; expected an invertible matrix at every time")

    orthonormal = False
    stationary = False
    measure: Measure
    _change: Any
    _change_rate: Callable[[float], Any] | None

    def __repr__(self) -> str:
        return f"BasisPath({self.measure!r})"

    def change(self, t: float) -> Array:
        """S(t) [N, N]."""
        matrix = np.asarray(self._change(float(t)) if callable(self._change) else self._change, dtype=float)
        if matrix.shape != (self.N, self.N):
            raise ValueError(f"BasisPath: `change` has shape {matrix.shape}; expected [{self.N}, {self.N}] at each time")
        return matrix

    def change_rate(self, t: float) -> Array:
        """S'(t) [N, N]."""
        if self._change_rate is not None:
            return np.asarray(self._change_rate(float(t)), dtype=float)
        if not callable(self._change):
            return np.zeros((self.N, self.N))
        h = 1e-3 * t
        one, two = (self.change(t + k * h) - self.change(t - k * h) for k in (1, 2))
        return (8 * one - two) / (12 * h)

    def _stack(self, times: Any) -> Array:
        array = np.asarray(times, dtype=float)
        return np.stack([self.change(time) for time in array.ravel()]).reshape(*array.shape, self.N, self.N)

    def _start(self, t: float) -> float:
        return self.measure._start(t)

    def _memory(self) -> float:
        return self.measure._memory()

    def _phi(self, t: Any, tau: Array) -> Array:
        return self.measure._phi(t, tau) @ self.change(t).T

    def _psi(self, t: Any, tau: Array) -> Array:
        return self.measure._psi(t, tau) @ self.change(t).T

    def weight(self, t: float, tau: Any) -> Array:
        return self.measure.weight(t, tau)

    def A(self, t: float) -> Array:
        """A_L of psi' = w S Phi: (S' + S A) S^{-1} [N, N]."""
        t = as_time("t", t)
        moved = self.change_rate(t) + self.change(t) @ self.measure.A(t)
        return np.linalg.solve(self.change(t).T, moved.T).T

    def B(self, t: float) -> Array:
        """S B [N]."""
        return self.change(t) @ self.measure.B(t)

    def gram_rate(self, t: float) -> Array:
        """G'(t) = S' S^T + S S'^T [N, N]."""
        half = self.change_rate(t) @ self.change(t).T
        return half + half.T

    def extra(self, t: float) -> Array:
        """-G^{-1} G' [N, N]: the extra term."""
        return -np.linalg.solve(self.gram(t), self.gram_rate(t))

    def left(self, t: float) -> Array:
        """Generator of the coefficients C: G^{-1} A G - G^{-1} G' [N, N]."""
        gram = self.gram(t)
        return np.linalg.solve(gram, self.A(t) @ gram) + self.extra(t)

    def source(self, t: float) -> Array:
        """Source vector of the coefficients C: G^{-1} B [N]."""
        return np.linalg.solve(self.gram(t), self.B(t))

    def flow(self, stop: Any, start: Any) -> Array:
        """S(stop)^{-T} E(stop, start) S(start)^T [.., N, N]: coefficients of the same function, C' = S^{-T} C."""
        inner = self.measure.flow(stop, start) @ np.swapaxes(self._stack(start), -1, -2)
        return np.linalg.solve(np.swapaxes(self._stack(stop), -1, -2), inner)

    def impulse(self, stop: Any, tau: Any) -> Array:
        inner = self.measure.impulse(stop, tau)
        return np.linalg.solve(np.swapaxes(self._stack(stop), -1, -2), inner[..., None])[..., 0]

    def resolution(self, start: Array, stop: Array) -> float:
        return self.measure.resolution(start, stop)
