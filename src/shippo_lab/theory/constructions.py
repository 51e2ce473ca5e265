"""Constructions that only the proofs need: how well a measure closes, a moving basis, and a transported metric."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shippo_lab.theory.cases import differences
from shippo_ssm.projection import Measure
from shippo_ssm.projection._numerics import Array, as_time
from shippo_ssm.projection.signals import as_signal


class Closure(NamedTuple):
    """How far d_t psi = A_L psi (inside the support), B_L = psi(t, t) and G = I fail: largest errors over largest values."""

    derivative: float
    source: float
    gram: float


def psi_rate(measure: Measure, t: float, tau: Array) -> Array:
    """d_t psi(t, tau) [.., N] by central differences, order 6, of the formula of psi."""
    if measure.stationary:
        # psi depends on t - tau alone: difference at a t of the size of the window, or of order one.
        shift = max(getattr(measure, "theta", 1.0) - t, 0.0)
        t, tau = t + shift, tau + shift
    h = 1e-3 * min(t, measure._memory()) / measure.N
    return differences(lambda s: measure._psi(s, tau), t, h, (3 / 4, -3 / 20, 1 / 60))


def closure(measure: Measure, t: float) -> Closure:
    """The `Closure` of a measure at time t, d_t psi by finite differences."""
    low = max(measure._start(t), 0.0)
    tau = low + (t - low) * np.linspace(0.02, 0.98, 97)
    rate = psi_rate(measure, t, tau)
    gap = rate - measure._psi(t, tau) @ measure.A(t).T
    end = measure._psi(t, np.asarray(t))
    source, gram = np.abs(measure.B(t) - end).max() / np.abs(end).max(), np.abs(measure.gram(t) - np.eye(measure.N)).max()
    return Closure(np.abs(gap).max() / max(np.abs(rate).max(), 1e-300), source, gram)


@dataclass(frozen=True)
class BasisPath(Measure):
    """A moving basis Phi' = S(t) Phi_t that is not orthonormal, for an invertible path S = `change` with S' = `change_rate`.

    The moments b = int Phi' f^T P dmu [N, d], which `ProjectionMemory.project` gives, follow b' = A b + B f^T + b A_R. With the
    Gram matrix G(t) = S S^T the coefficients C = G^{-1} b follow C' = G^{-1} (A G - G') C + G^{-1} B f^T + C A_R.
    """

    measure: Measure
    change: Callable[[float], Array]
    change_rate: Callable[[float], Array]
    stationary = False

    def _start(self, t: float) -> float:
        return self.measure._start(t)

    def _phi(self, t: Any, tau: Array) -> Array:
        return self.measure._phi(t, tau) @ self.change(t).T

    def _psi(self, t: Any, tau: Array) -> Array:
        return self.measure._psi(t, tau) @ self.change(t).T

    def weight(self, t: float, tau: Any) -> Array:
        return self.measure.weight(t, tau)

    def A(self, t: float) -> Array:
        """A_L of psi' = w S Phi: (S' + S A) S^{-1} [N, N]."""
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

    def resolution(self, start: Array, stop: Array) -> float:
        return self.measure.resolution(start, stop)


@dataclass(frozen=True)
class MetricOnly:
    """Projection on the ordinary family C^T Phi_t in a channel metric M(t, tau): the construction that does not close.

    The minimiser of int ||f - C^T Phi||^2_M dmu solves K[C] = b, K[C] = int Phi Phi^T C M dmu, b = int Phi f^T M dmu, and
    K is not of the form G C M' unless M does not depend on tau. The system of size N d is solved directly.
    """

    measure: Measure
    metric: Callable[[float, float], Array]
    """(t, tau) -> [d, d], symmetric positive definite, for numbers t and tau."""
    width: int

    def _metrics(self, t: float, tau: Array) -> Array:
        return np.stack([self.metric(t, float(time)) for time in tau])

    def operator(self, t: float) -> Array:
        """K as a tensor [N, d, N, d]: K[C]_ni = sum_mj K_nimj C_mj = (int Phi Phi^T C M dmu)_ni."""

        def integrand(tau: Array, w: Array) -> Array:
            psi, phi = self.measure._psi(t, tau), self.measure._phi(t, tau)
            return np.einsum("kn,km,kji->nimj", w[:, None] * psi, phi, self._metrics(t, tau), optimize=True)

        return self.measure._integrate(integrand, as_time("t", t))

    def moments(self, f: Any, t: float) -> Array:
        """b = int Phi f^T M dmu [N, d]."""
        signal = as_signal(f, width=self.width)

        def integrand(tau: Array, w: Array) -> Array:
            return (w[:, None] * self.measure._psi(t, tau)).T @ np.einsum("ki,kij->kj", signal(tau), self._metrics(t, tau))

        return self.measure._integrate(integrand, as_time("t", t))

    def project(self, f: Any, t: float) -> Array:
        """The minimiser C_M(t) [N, d]: K[C_M] = b."""
        size = self.measure.N * self.width
        return np.linalg.solve(self.operator(t).reshape(size, size), self.moments(f, t).ravel()).reshape(-1, self.width)

    def factor_gap(self, t: float) -> float:
        """min over M' of ||K - G(t) (x) M'||_F / ||K||_F: 0 when K[C] = G C M' for some matrix M'."""
        operator, gram = self.operator(t), self.measure.gram(t)
        # Least squares for M': the best coefficient of G in each channel block.
        best = np.einsum("nm,nimj->ij", gram, operator) / np.sum(gram * gram)
        gap = operator - np.einsum("nm,ij->nimj", gram, best)
        return float(np.linalg.norm(gap) / np.linalg.norm(operator))
