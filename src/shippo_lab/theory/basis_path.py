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
    """The basis S(t) Phi_t of an orthonormal measure, for an invertible path S(t) = `change`(t) with S' = `change_rate`."""

    orthonormal = False
    stationary = False
    measure: Measure
    change: Callable[[float], Array]
    change_rate: Callable[[float], Array]

    def __init__(self, measure: Measure, change: Callable[[float], Array], change_rate: Callable[[float], Array]) -> None:
        super().__init__(measure.N)
        # A measure is a frozen dataclass: bypass its `__setattr__`.
        vars(self).update(measure=measure, closes=measure.closes, change=change, change_rate=change_rate)

    def __repr__(self) -> str:
        return f"BasisPath({self.measure!r})"

    def _transposed(self, times: Any) -> Array:
        """S(times)^T [.., N, N]."""
        array = np.asarray(times, dtype=float)
        stack = np.stack([self.change(time) for time in array.ravel()]).reshape(*array.shape, self.N, self.N)
        return np.swapaxes(stack, -1, -2)

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

    def left(self, t: float) -> Array:
        """Generator of the coefficients C: G^{-1} A G - G^{-1} G' [N, N]."""
        gram = self.gram(t)
        return np.linalg.solve(gram, self.A(t) @ gram) - np.linalg.solve(gram, self.gram_rate(t))

    def source(self, t: float) -> Array:
        """Source vector of the coefficients C: G^{-1} B [N]."""
        return np.linalg.solve(self.gram(t), self.B(t))

    def flow(self, stop: Any, start: Any) -> Array:
        """S(stop)^{-T} E(stop, start) S(start)^T [.., N, N]: coefficients of the same function, C' = S^{-T} C."""
        return np.linalg.solve(self._transposed(stop), self.measure.flow(stop, start) @ self._transposed(start))

    def impulse(self, stop: Any, tau: Any) -> Array:
        return np.linalg.solve(self._transposed(stop), self.measure.impulse(stop, tau)[..., None])[..., 0]

    def resolution(self, start: Array, stop: Array) -> float:
        return self.measure.resolution(start, stop)
