"""A transported metric on the ordinary family: the nearby construction that does not close.

With the HiPPO family C^T Phi_t and a channel metric M(t, tau) [d, d], the minimiser of int ||f - C^T Phi||^2_M dmu solves

    K[C] = b,      K[C] = int Phi Phi^T C M dmu,      b = int Phi f^T M dmu,

and K is not of the form G C M' unless M does not depend on tau. The system of size N d is solved directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shippo_ssm._expect import expect_size
from shippo_ssm.projection._numerics import Array, as_time
from shippo_ssm.projection.measures import Measure
from shippo_ssm.projection.signals import as_signal


class MetricOnly:
    """Projection on the ordinary family C^T Phi_t in the channel metric M(t, tau).

    Args:
        measure: what is remembered, and in which basis.
        metric: callable (t, tau) -> [d, d], symmetric positive definite, for numbers t and tau.
        width: number of channels d.

    Example:
        >>> from shippo_ssm.projection import LegS
        >>> tilted = MetricOnly(LegS(4), lambda t, tau: np.diag([1.0, 1.0 + tau]), 2)
        >>> tilted.project(lambda t: np.array([t, t * t]), 1.0).shape
        (4, 2)
    """

    def __init__(self, measure: Measure, metric: Callable[[float, float], Any], width: int) -> None:
        expect_size("MetricOnly", "width", width, "a positive number of channels")
        self.measure = measure
        self.width = int(width)
        self._metric = metric

    def metric(self, t: float, tau: float) -> Array:
        """M(t, tau) [d, d], checked."""
        return self._metrics(t, np.array([tau]))[0]

    def _metrics(self, t: float, tau: Array) -> Array:
        """M(t, tau) [M, d, d] for times tau [M], checked."""
        rows = [np.asarray(self._metric(t, float(time)), dtype=float) for time in tau]
        for row in rows:
            if row.shape != (self.width, self.width):
                raise ValueError(
                    f"MetricOnly: `metric` has shape {row.shape}; expected [{self.width}, {self.width}] at each time"
                )
        matrices = np.stack(rows)
        skewness = np.abs(matrices - np.swapaxes(matrices, -1, -2)).max() / np.abs(matrices).max()
        if skewness > 1e-10 or np.linalg.eigvalsh(matrices).min() <= 0:
            raise ValueError(f"MetricOnly: `metric` is wrong at t = {t}; expected symmetric positive definite matrices")
        return matrices

    def operator(self, t: float) -> Array:
        """K as a tensor [N, d, N, d]: K[C]_ni = sum_mj K_nimj C_mj = (int Phi Phi^T C M dmu)_ni."""
        t = as_time("t", t)
        measure = self.measure
        return measure._integrate(
            lambda tau, w: np.einsum(
                "kn,km,kji->nimj", w[:, None] * measure._psi(t, tau), measure._phi(t, tau), self._metrics(t, tau), optimize=True
            ),
            t,
        )

    def moments(self, f: Any, t: float) -> Array:
        """b = int Phi f^T M dmu [N, d]."""
        t = as_time("t", t)
        signal = as_signal(f, width=self.width)
        return self.measure._integrate(
            lambda tau, w: (
                (w[:, None] * self.measure._psi(t, tau)).T @ np.einsum("ki,kij->kj", signal(tau), self._metrics(t, tau))
            ),
            t,
        )

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
