"""A transported metric on the ordinary family: the nearby construction that does not close.

With the HiPPO family C^T Phi_t and a channel metric M(t, tau) [d, d], the minimiser of int ||f - C^T Phi||^2_M dmu solves

    K[C] = b,      K[C] = int Phi Phi^T C M dmu,      b = int Phi f^T M dmu,

and K is not of the form G C M' unless M does not depend on tau. The system of size N d is solved directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shippo_ssm.projection._numerics import Array, as_time
from shippo_ssm.projection.measures import Measure
from shippo_ssm.projection.signals import as_signal


@dataclass(frozen=True)
class MetricOnly:
    """Projection on the ordinary family C^T Phi_t in the channel metric M(t, tau)."""

    measure: Measure
    metric: Callable[[float, float], Array]
    """(t, tau) -> [d, d], symmetric positive definite, for numbers t and tau."""
    width: int
    """Number of channels d."""

    def _metrics(self, t: float, tau: Array) -> Array:
        """M(t, tau) [M, d, d] for times tau [M]."""
        return np.stack([self.metric(t, float(time)) for time in tau])

    def operator(self, t: float) -> Array:
        """K as a tensor [N, d, N, d]: K[C]_ni = sum_mj K_nimj C_mj = (int Phi Phi^T C M dmu)_ni."""
        t = as_time("t", t)

        def integrand(tau: Array, w: Array) -> Array:
            psi, phi = self.measure._psi(t, tau), self.measure._phi(t, tau)
            return np.einsum("kn,km,kji->nimj", w[:, None] * psi, phi, self._metrics(t, tau), optimize=True)

        return self.measure._integrate(integrand, t)

    def moments(self, f: Any, t: float) -> Array:
        """b = int Phi f^T M dmu [N, d]."""
        t = as_time("t", t)
        signal = as_signal(f, width=self.width)

        def integrand(tau: Array, w: Array) -> Array:
            return (w[:, None] * self.measure._psi(t, tau)).T @ np.einsum("ki,kij->kj", signal(tau), self._metrics(t, tau))

        return self.measure._integrate(integrand, t)

    def project(self, f: Any, t: float) -> Array:
        """The minimiser C_M(t) [N, d]: K[C_M] = b."""
        size = self.measure.N * self.width
        flat = np.linalg.solve(self.operator(t).reshape(size, size), self.moments(f, t).ravel())
        return flat.reshape(self.measure.N, self.width)

    def factor_gap(self, t: float) -> float:
        """min over M' of ||K - G(t) (x) M'||_F / ||K||_F: 0 when K[C] = G C M' for some matrix M'."""
        operator = self.operator(t)
        gram = self.measure.gram(t)
        # Least squares for M': the best coefficient of G in each channel block.
        best = np.einsum("nm,nimj->ij", gram, operator) / np.sum(gram * gram)
        gap = operator - np.einsum("nm,ij->nimj", gram, best)
        return float(np.linalg.norm(gap) / np.linalg.norm(operator))
