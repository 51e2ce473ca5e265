"""Small numerical tools of this room: batched exponentials, composite Gauss rules, argument checks.

Everything here is float64 NumPy. `expm` takes [.., d, d]; `gauss_panels` turns panel edges [K + 1] into nodes and
weights [K, q]; `as_times` and `as_time` are the one place where times are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray

# Taylor degree 14 on ||X||_1 <= 1/2 leaves a remainder below 3e-17.
_TAYLOR_DEGREE = 14
_TAYLOR_RADIUS = 0.5
# Nodes handled at once by the quadratures: bounds the working memory, whatever the number of samples.
NODES_PER_CHUNK = 4096


def expm(generator: Array) -> Array:
    """exp(X) for a stack of small matrices [.., d, d], by scaling and squaring of a Taylor polynomial.

    `scipy.linalg.expm` walks over a stack one matrix at a time; here every product is one batched matmul.
    """
    width = generator.shape[-1]
    eye = np.eye(width)
    if generator.size == 0:
        return np.zeros_like(generator)
    norm = float(np.abs(generator).sum(axis=-2).max())
    squarings = max(0, math.ceil(math.log2(norm / _TAYLOR_RADIUS))) if norm > _TAYLOR_RADIUS else 0
    scaled = generator / 2.0**squarings
    # Horner: I + X (I + X/2 (I + X/3 (...))).
    result = eye + scaled / _TAYLOR_DEGREE
    for degree in range(_TAYLOR_DEGREE - 1, 0, -1):
        result = eye + (scaled @ result) / degree
    for _ in range(squarings):
        result = result @ result
    return result


def expm_ages(generator: Array, ages: Array) -> Array:
    """exp(age X) for one matrix X [d, d] and many ages [..]; equal ages are computed once.

    Ages that differ by rounding alone (steps of a `linspace`) count as equal.
    """
    flat = np.asarray(ages, dtype=float).ravel()
    quantum = 1e-13 * max(1e-300, float(np.abs(flat).max(initial=0.0)))
    _, first, inverse = np.unique(np.round(flat / quantum), return_index=True, return_inverse=True)
    distinct = expm(flat[first][:, None, None] * generator)
    return distinct[inverse].reshape(*np.shape(ages), *generator.shape)


@lru_cache(maxsize=64)
def gauss(order: int) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    return (nodes + 1) / 2, weights / 2


def gauss_panels(edges: Array, order: int) -> tuple[Array, Array]:
    """Nodes and weights [K, order] of the composite Gauss rule on the panels between `edges` [K + 1]."""
    nodes, weights = gauss(order)
    lengths = np.diff(edges)[:, None]
    return edges[:-1, None] + lengths * nodes, lengths * weights


def panel_chunks(edges: Array, order: int) -> Iterator[tuple[Array, Array]]:
    """The composite rule in flat pieces of at most about `NODES_PER_CHUNK` nodes."""
    stride = max(1, NODES_PER_CHUNK // order)
    for start in range(0, len(edges) - 1, stride):
        nodes, weights = gauss_panels(edges[start : start + stride + 1], order)
        yield nodes.ravel(), weights.ravel()


def integrate(
    integrand: Callable[[Array, Array], Array], low: float, high: float, *, breaks: Array, panels: int, rtol: float
) -> Array:
    """Sum of integrand(nodes, weights) over a composite Gauss rule, panels halved until two answers agree to rtol.

    Args:
        integrand: maps nodes [M] and weights [M] to the weighted sum over them, an array of fixed shape.
        breaks: points inside (low, high) where the integrand has a kink; panel edges are put there.
        panels: number of panels to start from.
    """
    inner = breaks[(breaks > low) & (breaks < high)]
    edges = np.unique(np.concatenate([np.linspace(low, high, panels + 1), inner]))
    order = 10 if len(edges) < 1000 else 4
    previous = None
    for _ in range(9):
        total = sum((integrand(nodes, weights) for nodes, weights in panel_chunks(edges, order)), start=np.zeros(()))
        if previous is not None and np.linalg.norm(total - previous) <= rtol * max(np.linalg.norm(total), 1e-300):
            return total
        previous = total
        edges = np.sort(np.concatenate([edges, (edges[:-1] + edges[1:]) / 2]))
    assert previous is not None
    return previous


def as_real(op: str, name: str, value: Any, expected: str) -> Array:
    """What NumPy makes of `value` in float64, or ValueError: text, complex numbers and ragged lists are none."""
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise ValueError(array.dtype)
        return array.astype(float, copy=False)
    except (TypeError, ValueError):
        raise ValueError(f"{op}: `{name}` is {value!r:.60}; expected {expected}") from None


def as_time(name: str, value: Any) -> float:
    """A single finite time > 0, or ValueError."""
    number = as_real("projection", name, value, "one number; pass a float")
    if number.size != 1:
        raise ValueError(f"projection: `{name}` is {value!r:.60}; expected one number; pass a float")
    time = float(number.reshape(()))
    if not (math.isfinite(time) and time > 0):
        raise ValueError(f"projection: `{name}` is {time}; expected a time > 0; the history lives on [0, {name}]")
    return time


def as_times(name: str, values: Any) -> Array:
    """A strictly increasing vector [K] of finite times > 0, or ValueError."""
    times = as_real("projection", name, values, "a vector of at least one time")
    if times.ndim != 1 or times.size == 0:
        raise ValueError(f"projection: `{name}` has shape {times.shape}; expected a vector of at least one time")
    as_time(f"{name}[0]", times[0])
    if not np.all(np.isfinite(times)) or np.any(np.diff(times) <= 0):
        raise ValueError(f"projection: `{name}` is not in order; expected finite times, strictly increasing; sort it")
    return times


def as_past(tau: Any, t: float) -> Array:
    """Times tau within [0, t], or ValueError; a rounding error past either end is clipped."""
    past = as_real("projection", "tau", tau, f"times in [0, {t}]")
    slack = 1e-12 * max(1.0, t)
    if not np.all((past >= -slack) & (past <= t + slack)):
        raise ValueError(f"projection: `tau` has values in [{past.min()}, {past.max()}]; expected [0, {t}]; clip it first")
    return np.clip(past, 0.0, t)
