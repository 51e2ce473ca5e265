"""Shared by the checks: one signal, generator paths of every kind, and numerical tools."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shippo_ssm.projection import Transport

Array = np.ndarray

WIDTH = 3
"""Channels of the shared signal."""
TIME = 1.7
"""The time at which states are compared."""

TURN = np.array([[0.0, -1.1, 0.3], [1.1, 0.0, -0.4], [-0.3, 0.4, 0.0]])
"""A skew generator."""
MIXED = np.array([[0.2, -0.7, 0.0], [0.9, -0.3, 0.5], [0.0, 0.4, 0.1]])
"""A generator that is neither skew, nor symmetric, nor traceless, nor normal."""


def signal(t: float) -> Array:
    """f(t) [3]: smooth, not in the span of any basis used here."""
    return np.array([np.sin(2.3 * t), np.exp(-t) * np.cos(3 * t), 1 / (1 + t)])


def moving() -> Transport:
    """A transport whose generators at different times do not commute."""
    return Transport(lambda t: np.cos(1.3 * t) * MIXED + np.sin(2 * t) * TURN, WIDTH)


def smooth_transports() -> tuple[Transport, ...]:
    """A transport with a constant generator, and one that varies."""
    return Transport(MIXED, WIDTH), moving()


def transports() -> tuple[Transport, ...]:
    """A transport of each kind: constant, varying, pieces."""
    pieces = np.stack([MIXED, TURN, MIXED.T - 0.5 * TURN])
    return *smooth_transports(), Transport(pieces, WIDTH, times=[0.0, 0.6, 1.2])


def differences(function: Callable[[float], Any], t: float, h: float, weights: tuple[float, ...]) -> Array:
    """d/dt by a central difference with these weights of f(t + h), f(t + 2 h), .. and minus these of f(t - h), .."""
    terms = (w * (np.asarray(function(t + k * h)) - np.asarray(function(t - k * h))) for k, w in enumerate(weights, start=1))
    return sum(terms, start=np.zeros(())) / h


def derivative(function: Callable[[float], Any], t: float) -> Array:
    """d/dt by the central difference of order 8."""
    return differences(function, t, 0.02, (4 / 5, -1 / 5, 4 / 105, -1 / 280))


def slope(sizes: Array, errors: Array) -> float:
    """The slope of log error over log size, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def nodes(t: float, order: int = 60) -> tuple[Array, Array]:
    """Gauss nodes and weights on [0, t]."""
    x, w = np.polynomial.legendre.leggauss(order)
    return t * (x + 1) / 2, t * w / 2
