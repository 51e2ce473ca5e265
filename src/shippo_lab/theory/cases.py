"""Shared by the checks: one signal, generator paths of every kind, and numerical tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shippo_lab.theory.basis_path import BasisPath
from shippo_ssm.projection import LegS, Transport

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


def varying(t: float) -> Array:
    """A_R(t) [3, 3]: values at different times do not commute."""
    return np.cos(1.3 * t) * MIXED + np.sin(2 * t) * TURN


def skew(t: float) -> Array:
    """A skew A_R(t) [3, 3] whose values at different times do not commute."""
    other = np.array([[0.0, 0.6, 0.0], [-0.6, 0.0, 0.8], [0.0, -0.8, 0.0]])
    return TURN * np.cos(t) + other * t


def transports() -> dict[str, Transport]:
    """A transport of each kind: constant, pieces, callable."""
    pieces = np.stack([MIXED, TURN, MIXED.T - 0.5 * TURN])
    return {
        "constant": Transport(MIXED, WIDTH),
        "pieces": Transport(pieces, WIDTH, times=[0.0, 0.6, 1.2]),
        "callable": Transport(varying, WIDTH),
    }


def moving() -> Transport:
    """The time-varying transport."""
    return Transport(varying, WIDTH)


def skewed_basis(num: int = 5) -> BasisPath:
    """A moving basis with G(t) != I and G'(t) != 0."""
    rng = np.random.default_rng(5)
    first, second = rng.normal(size=(2, num, num)) / (2 * num)
    return BasisPath(
        LegS(num),
        lambda t: np.eye(num) + np.sin(t) * first + np.cos(2 * t) * second,
        lambda t: np.cos(t) * first - 2 * np.sin(2 * t) * second,
    )


def derivative(function: Callable[[float], Any], t: float, h: float = 0.02) -> Array:
    """d/dt by the central difference of order 8."""
    weights = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
    terms = (w * (np.asarray(function(t + k * h)) - np.asarray(function(t - k * h))) for k, w in enumerate(weights, start=1))
    return sum(terms, start=np.zeros(())) / h


def gap(one: Any, other: Any) -> float:
    """||one - other|| / ||other||, in the Frobenius norm."""
    one, other = np.asarray(one), np.asarray(other)
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-300))


def gaps(*pairs: tuple[Any, Any]) -> float:
    """The largest gap of some pairs."""
    return max(gap(one, other) for one, other in pairs)


def slope(sizes: Array, errors: Array) -> float:
    """The slope of log error over log size, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def nodes(t: float, order: int = 60) -> tuple[Array, Array]:
    """Gauss nodes and weights on [0, t]."""
    x, w = np.polynomial.legendre.leggauss(order)
    return t * (x + 1) / 2, t * w / 2
