"""How well a measure closes: d_t psi = A_L psi, B_L = psi(t, t) and G = I."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shippo_ssm.projection import Measure
from shippo_ssm.projection._numerics import Array, as_time

# Six-point central difference, order 6: weights of f(+h), f(+2h), f(+3h), antisymmetric.
_STENCIL = ((1, 3 / 4), (2, -3 / 20), (3, 1 / 60))


class Closure(NamedTuple):
    """Relative maxima at one time."""

    derivative: float
    """max |d_t psi - A_L psi| / max |d_t psi| inside the support, d_t psi by finite differences."""
    source: float
    """max |B_L - psi(t, t)| / max |psi(t, t)|."""
    gram: float
    """max |G - I|."""


def psi_rate(measure: Measure, t: float, tau: Array) -> Array:
    """d_t psi(t, tau) [.., N] by central differences of the formula of psi."""
    if measure.stationary:
        # psi depends on t - tau alone: difference at a t of the size of the window, or of order one.
        shift = max(getattr(measure, "theta", 1.0) - t, 0.0)
        t, tau = t + shift, tau + shift
    h = 1e-3 * min(t, measure._memory()) / measure.N
    terms = (c * (measure._psi(t + k * h, tau) - measure._psi(t - k * h, tau)) for k, c in _STENCIL)
    return sum(terms, start=np.zeros(1)) / h


def closure(measure: Measure, t: float) -> Closure:
    """How well d_t psi = A_L psi, B_L = psi(t, t) and G = I hold at time t."""
    t = as_time("t", t)
    low = max(measure._start(t), 0.0)
    tau = low + (t - low) * np.linspace(0.02, 0.98, 97)
    rate = psi_rate(measure, t, tau)
    gap = rate - measure._psi(t, tau) @ measure.A(t).T
    end = measure._psi(t, np.asarray(t))
    return Closure(
        derivative=float(np.abs(gap).max() / max(np.abs(rate).max(), 1e-300)),
        source=float(np.abs(measure.B(t) - end).max() / np.abs(end).max()),
        gram=float(np.abs(measure.gram(t) - np.eye(measure.N)).max()),
    )
