"""Measures: what part of the past is remembered, and in which basis.

A measure gives a weight w_t(tau) and N functions Phi_t(tau), orthonormal under it, and the pair (A_L, B_L) of
psi(t, tau) = w_t(tau) Phi_t(tau):

    d_t psi(t, tau) = A_L(t) psi(t, tau)   for tau < t,      B_L(t) = psi(t, t).

Then C(t) = int psi(t, tau) f(tau)^T dtau [N, d] follows C' = A_L C + B_L f^T. LegS and LagT close exactly. LegT and Fourier
forget at the far end of a window, where f(t - theta) must be estimated from C; the tests measure its defect. History before
time 0 is zero. `t` is a number, `tau` an array [..]; functions are [.., N].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shippo_ssm._expect import expect_real, expect_size
from shippo_ssm.projection._numerics import Array, as_past, as_time, expm_ages, gauss, integrate


def _polynomials(num: int, start: Array, factor: Callable[[int], Array]) -> Array:
    """p_n for n < num: [.., num], with p_0 = start and (n + 1) p_{n+1} = factor(n) p_n - n p_{n-1}."""
    values = np.empty((num, *np.shape(start)))
    values[0] = start
    if num > 1:
        values[1] = factor(0) * start
    for n in range(1, num - 1):
        values[n + 1] = (factor(n) * values[n] - n * values[n - 1]) / (n + 1)
    return np.moveaxis(values, 0, -1)


def _legendre(num: int, x: Array) -> Array:
    """sqrt(2n + 1) P_n(x) for n < num: [.., num], orthonormal on [-1, 1] with weight 1/2."""
    return _polynomials(num, np.ones(x.shape), lambda n: (2 * n + 1) * x) * np.sqrt(2 * np.arange(num) + 1.0)


def _laguerre(num: int, age: Array, start: Array) -> Array:
    """start * L_n(age) for n < num: [.., num]; a decaying `start` keeps large ages finite."""
    return _polynomials(num, start, lambda n: 2 * n + 1 - age)


@lru_cache(maxsize=16)
def _legs_operator(num: int) -> Array:
    root = np.sqrt(2 * np.arange(num) + 1.0)
    return np.tril(np.outer(root, root), -1) + np.diag(np.arange(num) + 1.0)


@dataclass(frozen=True)
class Measure(ABC):
    """A weight and N >= 1 orthonormal functions with linear dynamics; see the head of this file."""

    N: int

    def __post_init__(self) -> None:
        expect_size(type(self).__name__, "N", self.N, "a positive integer, the number of functions")

    closes = True
    """Whether d_t psi = A_L psi holds exactly."""
    stationary = True
    """Whether A_L and B_L do not depend on t; if they do, A_L is lower triangular."""

    @abstractmethod
    def _start(self, t: float) -> float:
        """Beginning of the support of the weight; may be negative or -inf."""

    @abstractmethod
    def _phi(self, t: Any, tau: Array) -> Array:
        """Phi_t(tau) [.., N] by its formula, wherever tau is."""

    @abstractmethod
    def _psi(self, t: Any, tau: Array) -> Array:
        """psi(t, tau) [.., N] by its formula, wherever tau is; `t` broadcasts against `tau`."""

    @abstractmethod
    def weight(self, t: float, tau: Any) -> Array:
        """w_t(tau) [..]; 0 where nothing is remembered."""

    @abstractmethod
    def A(self, t: float) -> Array:
        """A_L(t) [N, N]."""

    @abstractmethod
    def resolution(self, start: Array, stop: Array) -> float:
        """About how many half waves psi(stop, .) makes on the widest of the steps [start, stop], no longer than the memory."""

    def basis(self, t: float, tau: Any) -> Array:
        """Phi_t(tau) [.., N] for tau in [0, t]; 0 where the weight is 0."""
        t = as_time("t", t)
        past = as_past(tau, t)
        inside = past >= self._start(t) - 1e-12 * max(1.0, t)
        return np.where(inside[..., None], self._phi(t, past), 0.0)

    def psi(self, t: float, tau: Any) -> Array:
        """psi(t, tau) = w_t(tau) Phi_t(tau) [.., N]."""
        return self.weight(t, tau)[..., None] * self.basis(t, tau)

    def B(self, t: float) -> Array:
        """B_L(t) [N]: the boundary value psi(t, t)."""
        t = as_time("t", t)
        return self._psi(t, np.asarray(t))

    def gram(self, t: float) -> Array:
        """G(t) = int Phi_t Phi_t^T dmu_t [N, N] over the whole support, by quadrature."""
        t = as_time("t", t)
        return self._integrate(
            lambda tau, w: self._phi(t, tau).T @ (w[:, None] * self._psi(t, tau)), t, since=-math.inf, rtol=1e-14
        )

    def _integrate(self, integrand: Any, t: float, *, since: float = 0.0, breaks: Any = (), rtol: float = 1e-12) -> Array:
        """Sum of integrand(nodes, weights) over the support at time t, from `since` on."""
        low = max(self._start(t), t - self._memory(), since)
        return integrate(integrand, low, t, breaks=np.asarray(breaks), panels=4 + self.N // 4, rtol=rtol)

    def flow(self, stop: Any, start: Any) -> Array:
        """E(stop, start) [.., N, N], the exact transition of C' = A_L C."""
        return expm_ages(self.A(1.0), np.subtract(stop, start))

    def impulse(self, stop: Any, tau: Any) -> Array:
        """E(stop, tau) B_L(tau) [.., N], the response at `stop` to a unit source at tau; psi(stop, tau) if it closes."""
        if self.closes:
            return self._psi(*np.broadcast_arrays(np.asarray(stop, dtype=float), np.asarray(tau, dtype=float)))
        return expm_ages(self.A(1.0), np.subtract(stop, tau), self.B(1.0))

    def _memory(self) -> float:
        """An age beyond which the weighted basis is negligible."""
        return math.inf

    def parts(self, spans: Array) -> Array:
        """Fractions 0 .. 1 that cut steps of the lengths `spans` [..] into parts no longer than the memory: [.., m + 1].

        Whatever is written in the first part of a longer step is forgotten at its end.
        """
        longest = self._memory()
        if not (spans > longest).any():
            return np.broadcast_to([0.0, 1.0], (*spans.shape, 2))
        # A window that does not close forgets by and by.
        kept = np.minimum(spans, longest if self.closes else 64 * longest)
        rest = np.linspace(1, 0, math.ceil(kept.max() / longest) + 1)
        cuts = 1 - (kept / np.maximum(spans, 1e-300))[..., None] * rest
        return np.concatenate([np.zeros_like(cuts[..., :1]), cuts], axis=-1)


@dataclass(frozen=True)
class LegS(Measure):
    """Scaled Legendre: the whole past [0, t], uniformly weighted. Closes exactly.

    w_t = 1/t, Phi_n = sqrt(2n + 1) P_n(2 tau / t - 1), A_L(t) = -A / t, B_L(t) = B / t with
    A_nk = sqrt((2n + 1)(2k + 1)) for n > k, n + 1 for n = k, 0 for n < k, and B_n = sqrt(2n + 1).
    """

    stationary = False

    def _start(self, t: float) -> float:
        return 0.0

    def _phi(self, t: Any, tau: Array) -> Array:
        return _legendre(self.N, 2 * tau / t - 1)

    def _psi(self, t: Any, tau: Array) -> Array:
        return self._phi(t, tau) / np.asarray(t)[..., None]

    def weight(self, t: float, tau: Any) -> Array:
        t = as_time("t", t)
        return np.full(as_past(tau, t).shape, 1 / t)

    def A(self, t: float) -> Array:
        return -_legs_operator(self.N) / as_time("t", t)

    def B(self, t: float) -> Array:
        """psi(t, t) = sqrt(2n + 1) / t [N]; the closed form halves the time of a bilinear step."""
        return np.sqrt(2 * np.arange(self.N) + 1.0) / as_time("t", t)

    def flow(self, stop: Any, start: Any) -> Array:
        """E = x int_0^1 p(x u) p(u)^T du with x = start / stop and p the orthonormal Legendre functions of [0, 1].

        N Gauss nodes integrate it exactly, while exp(-log(stop / start) A) is badly scaled for large N.
        """
        u, weights = gauss(self.N)
        ratio = np.asarray(np.divide(start, stop))[..., None]
        moved = _legendre(self.N, 2 * ratio * u - 1)
        fixed = _legendre(self.N, 2 * u - 1) * weights[:, None]
        return ratio[..., None] * (np.swapaxes(moved, -1, -2) @ fixed)

    def resolution(self, start: Array, stop: Array) -> float:
        return self.N * math.sqrt(float(np.max(1 - start / stop)))


@dataclass(frozen=True)
class LagT(Measure):
    """Laguerre: an exponentially fading past (-inf, t]. Closes exactly.

    w_t = exp(-(t - tau)), Phi_n = L_n(t - tau), A_L = -(lower triangle of ones with its diagonal), B_L = ones.
    """

    def _start(self, t: float) -> float:
        return -math.inf

    def _memory(self) -> float:
        return 60.0 + 5.0 * self.N

    def _phi(self, t: Any, tau: Array) -> Array:
        return _laguerre(self.N, t - tau, np.ones(np.shape(t - tau)))

    def _psi(self, t: Any, tau: Array) -> Array:
        half = np.exp(-(t - tau) / 2)
        return _laguerre(self.N, t - tau, half) * half[..., None]

    def weight(self, t: float, tau: Any) -> Array:
        t = as_time("t", t)
        return np.exp(as_past(tau, t) - t)

    def A(self, t: float) -> Array:
        as_time("t", t)
        return -np.tril(np.ones((self.N, self.N)))

    def flow(self, stop: Any, start: Any) -> Array:
        """E_nk = e_{n-k} with e_m = exp(-s) (L_m(s) - L_{m-1}(s)) at s = stop - start: the addition theorem of L_n."""
        age = np.asarray(np.subtract(stop, start), dtype=float)
        column = np.diff(self._psi(age, np.zeros_like(age)), axis=-1, prepend=0.0)
        shift = np.arange(self.N)[:, None] - np.arange(self.N)
        return np.where(shift >= 0, column[..., np.maximum(shift, 0)], 0.0)

    def resolution(self, start: Array, stop: Array) -> float:
        return math.sqrt(self.N * min(self._memory(), float(np.max(stop - start))))


@dataclass(frozen=True)
class _Window(Measure):
    """A window: w_t = 1 / theta on [t - theta, t]."""

    theta: float

    closes = False

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_real(type(self).__name__, "theta", self.theta, "a finite window length > 0", 0, open_end=True)

    def _start(self, t: float) -> float:
        return t - self.theta

    def _memory(self) -> float:
        return self.theta

    def _psi(self, t: Any, tau: Array) -> Array:
        return self._phi(t, tau) / self.theta

    def weight(self, t: float, tau: Any) -> Array:
        t = as_time("t", t)
        inside = as_past(tau, t) >= self._start(t) - 1e-12 * max(1.0, t)
        return np.where(inside, 1 / self.theta, 0.0)


@dataclass(frozen=True)
class LegT(_Window):
    """Translated Legendre: the window [t - theta, t] of length `theta`. Closes only approximately.

    Phi_n = sqrt(2n + 1) P_n(1 - 2 (t - tau) / theta). Inside the window d_t psi = D psi exactly; at its far end f(t - theta)
    is replaced by its reconstruction Phi_t(t - theta)^T C, so A_L = D - psi(t, t - theta) Phi_t(t - theta)^T:
    A_nk = -sqrt((2n + 1)(2k + 1)) / theta for n >= k, times (-1)^(n-k) for n < k. The defect
    psi(t, t - theta) (f - f_N)(t - theta)^T is zero on polynomials of degree < N and spectrally small on smooth signals.
    """

    def _phi(self, t: Any, tau: Array) -> Array:
        return _legendre(self.N, 1 - 2 * (t - tau) / self.theta)

    def A(self, t: float) -> Array:
        as_time("t", t)
        n = np.arange(self.N)
        root = np.sqrt(2 * n + 1.0)
        sign = np.where(n[:, None] >= n, 1.0, (-1.0) ** (n[:, None] - n))
        return -np.outer(root, root) * sign / self.theta

    def resolution(self, start: Array, stop: Array) -> float:
        return self.N * math.sqrt(min(1.0, float(np.max(stop - start)) / self.theta))


@dataclass(frozen=True)
class Fourier(_Window):
    """Fourier series of the window [t - theta, t] of length `theta`. Closes only approximately.

    Phi = 1, sqrt(2) cos(w_k s), sqrt(2) sin(w_k s), ... with s = t - tau and w_k = 2 pi k / theta, k = 1, 2, ... for odd N.
    An even N has no constant and k = 1/2, 3/2, ... Inside the window d_t psi = D psi. A Fourier series at the ends of its
    window tends to the mean of f(t) and f(t - theta), so f(t - theta) is estimated as 2 Phi_t(t)^T C - f(t)^T, and

        A_L = D - 2 psi(t, t) Phi_t(t)^T,      B_L = 2 psi(t, t).

    The source counts twice. The defect falls like 1 / N on smooth signals.
    """

    def _phi(self, t: Any, tau: Array) -> Array:
        age = np.asarray(t - tau)
        phase = np.repeat(self._speeds, 2) * age[..., None]
        waves = np.sqrt(2.0) * np.where(np.arange(phase.shape[-1]) % 2 == 0, np.cos(phase), np.sin(phase))
        return np.concatenate([np.ones((*age.shape, self.N % 2)), waves], axis=-1)

    @property
    def _speeds(self) -> Array:
        """w_k of the pairs."""
        return 2 * np.pi / self.theta * (np.arange(self.N // 2) + (1.0 if self.N % 2 else 0.5))

    def A(self, t: float) -> Array:
        end = self._phi(as_time("t", t), np.asarray(t))
        operator = -2 * np.outer(end, end) / self.theta
        for cosine, speed in zip(range(self.N % 2, self.N, 2), self._speeds):
            operator[cosine, cosine + 1] -= speed
            operator[cosine + 1, cosine] += speed
        return operator

    def B(self, t: float) -> Array:
        """B_L = 2 psi(t, t) [N]; see the class."""
        return 2 * super().B(t)

    def resolution(self, start: Array, stop: Array) -> float:
        # Waves take more nodes than polynomials.
        return 2 + 2 * self.N * min(1.0, float(np.max(stop - start)) / self.theta)
