"""Numerical tools in float64 NumPy: batched exponentials, composite Gauss rules, argument checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray

# Taylor degree 14 on ||X||_1 <= 1/2 leaves a remainder below 3e-17.
_TAYLOR_DEGREE = 14
_TAYLOR_RADIUS = 0.5
# Quadrature nodes per batch: bounds the working memory.
NODES_PER_CHUNK = 4096


def expm(generator: Array) -> Array:
    """exp(X) for a stack of small matrices [.., d, d], by scaling and squaring of a Taylor polynomial."""
    width = generator.shape[-1]
    eye = np.eye(width)
    if generator.size == 0:
        return np.zeros_like(generator)
    # By matrix: squaring a small one as often as a large one beside it would cost digits.
    norm = np.abs(generator).sum(axis=-2).max(axis=-1)
    squarings = np.ceil(np.log2(np.maximum(norm / _TAYLOR_RADIUS, 1.0))).astype(int)
    scaled = generator / np.exp2(squarings)[..., None, None]
    # Horner: I + X (I + X/2 (I + X/3 (...))).
    result = eye + scaled / _TAYLOR_DEGREE
    for degree in range(_TAYLOR_DEGREE - 1, 0, -1):
        result = eye + (scaled @ result) / degree
    for done in range(squarings.max()):
        again = squarings > done
        result[again] = result[again] @ result[again]
    return result


def expm_ages(generator: Array, ages: Array, vector: Array | None = None) -> Array:
    """exp(age X) [.., d, d], or exp(age X) v [.., d], for one matrix X [d, d] and many ages [..].

    Ages that are equal up to rounding are computed once. Many distinct ages share Taylor expansions around the middle of bins
    on which the remainder is below rounding: a row of powers of (age - middle) times a table of X^k exp(middle X) / k!.
    """
    flat = np.asarray(ages, dtype=float).ravel()
    quantum = 1e-13 * max(1e-300, float(np.abs(flat).max(initial=0.0)))
    _, first, inverse = np.unique(np.round(flat / quantum), return_index=True, return_inverse=True)
    distinct = flat[first]
    norm = float(np.abs(generator).sum(axis=-2).max(initial=1e-300))
    bins = np.round(distinct * (norm / (2 * _TAYLOR_RADIUS)))
    # Ages are sorted, so a bin is a slice.
    middles, begins = np.unique(bins, return_index=True)
    if len(distinct) < 4 * len(middles):
        found = expm(distinct[:, None, None] * generator)
        found = found if vector is None else found @ vector
    else:
        middles = middles * (2 * _TAYLOR_RADIUS / norm)
        ends = expm(middles[:, None, None] * generator)
        table = [ends if vector is None else (ends @ vector)[:, None]]
        for k in range(1, _TAYLOR_DEGREE + 1):
            table.append(table[-1] @ ((generator if vector is None else generator.T) / k))
        found = np.empty((len(distinct), table[0][0].size))
        for index, (begin, end) in enumerate(pairwise([*begins, len(distinct)])):
            powers = (distinct[begin:end, None] - middles[index]) ** np.arange(_TAYLOR_DEGREE + 1)
            np.dot(powers, np.stack([term[index].ravel() for term in table]), out=found[begin:end])
        found = found.reshape(-1, *(generator.shape if vector is None else vector.shape))
    if (inverse[1:] != inverse[:-1] + 1).any():
        found = found[inverse]
    return found.reshape(*np.shape(ages), *found.shape[1:])


@lru_cache(maxsize=64)
def gauss(order: int) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    return (nodes + 1) / 2, weights / 2


def gauss_panels(edges: Array, order: int) -> tuple[Array, Array]:
    """Nodes and weights [.., K order] of the composite Gauss rule on the K panels between `edges` [.., K + 1]."""
    nodes, weights = gauss(order)
    lengths = np.diff(edges)[..., None]
    parts = edges[..., :-1, None] + lengths * nodes, lengths * weights
    return parts[0].reshape(*edges.shape[:-1], -1), parts[1].reshape(*edges.shape[:-1], -1)


def integrate(
    integrand: Callable[[Array, Array], Array], low: float, high: float, *, breaks: Array, panels: int, rtol: float
) -> Array:
    """Integral by a composite Gauss rule, panels halved until two answers agree to `rtol`.

    Args:
        integrand: maps nodes [M] and weights [M] to the weighted sum over them, an array of fixed shape.
        breaks: kinks of the integrand, which become panel edges.
        panels: initial number of panels.
    """
    inner = breaks[(breaks > low) & (breaks < high)]
    edges = np.unique(np.concatenate([np.linspace(low, high, panels + 1), inner]))
    order = 10 if len(edges) < 1000 else 4
    previous = None
    for _ in range(9):
        stride = NODES_PER_CHUNK // order
        parts = (gauss_panels(edges[i : i + stride + 1], order) for i in range(0, len(edges) - 1, stride))
        total = sum((integrand(nodes, weights) for nodes, weights in parts), start=np.zeros(()))
        if previous is not None and np.linalg.norm(total - previous) <= rtol * max(np.linalg.norm(total), 1e-300):
            return total
        previous = total
        edges = np.sort(np.concatenate([edges, (edges[:-1] + edges[1:]) / 2]))
    assert previous is not None
    return previous


def as_real(op: str, name: str, value: Any, expected: str) -> Array:
    """`value` as a float64 array; ValueError for text, complex numbers and ragged lists."""
    try:
        array = np.asarray(value)
        return array.astype(float, casting="same_kind", copy=False)
    except (TypeError, ValueError):
        raise ValueError(f"{op}: `{name}` is {value!r:.60}; expected {expected}") from None


def as_time(name: str, value: Any) -> float:
    """A single finite time > 0, or ValueError."""
    time = as_real("projection", name, value, "one number")
    if time.size != 1 or not 0 < time.item() < math.inf:
        raise ValueError(f"projection: `{name}` is {value!r:.60}; expected a time > 0; the history lives on [0, {name}]")
    return time.item()


def as_times(op: str, values: Any) -> Array:
    """A strictly increasing vector [K >= 1] of finite times, or ValueError."""
    times = as_real(op, "times", values, "a vector of times")
    if times.ndim != 1 or times.size == 0 or not np.isfinite(times).all() or np.any(np.diff(times) <= 0):
        raise ValueError(f"{op}: `times` is {values!r:.60}; expected at least one finite time, strictly increasing; sort them")
    return times


def as_past(tau: Any, t: float) -> Array:
    """Times tau within [0, t], or ValueError; a rounding error past either end is clipped."""
    past = as_real("projection", "tau", tau, f"times in [0, {t}]")
    slack = 1e-12 * max(1.0, t)
    if not np.all((past >= -slack) & (past <= t + slack)):
        raise ValueError(f"projection: `tau` has values in [{past.min()}, {past.max()}]; expected [0, {t}]; clip it first")
    return np.clip(past, 0.0, t)
