"""Discretisations of the Sylvester dynamics C' = A_L C + B_L f^T + C A_R.

Left and right actions commute as maps of C, so one step from t_0 to t_1 is exactly

    C(t_1) = E C(t_0) P(t_1, t_0) + int E(t_1, tau) B_L(tau) f(tau)^T P(t_1, tau) dtau,

with E the left flow of the measure and P the right flow of the transport. "exact" integrates the source by Gauss points; "zoh"
does the same with f and A_R held over the step; "bilinear" replaces both exponentials by their Cayley form.

The time axis is cut into chunks of K strides of S steps, grid [K, S + 1]. Flows, right factors and sources of a chunk are
batched products; the states follow by one small product per stride. S is 1 if every state is needed; if the measure closes
exactly, a source inside a long stride has the closed form psi(t_1, tau) at its end, and S is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
from scipy.linalg import get_lapack_funcs

from shippo_ssm.projection._numerics import Array, gauss_panels
from shippo_ssm.projection.measures import Measure
from shippo_ssm.projection.signals import Samples, Signal
from shippo_ssm.projection.transport import Transport

Method = Literal["exact", "bilinear", "zoh"]
Sampled = Callable[[Array], Array]

ORDERS: dict[Method, int] = {"exact": 6, "bilinear": 2, "zoh": 1}
"""Order in the step size at which `evolve` of a smooth callable signal converges to `project`, per discretisation."""

# Maximum steps per chunk, maximum entries in one of its arrays, and steps per stride when states are skipped.
_CHUNK = 512
_CHUNK_NUMBERS = 2**22
_STRIDE = 64


def _grids(times: Array, stride: int, num: int) -> Iterator[Array]:
    """Cut times [T] into grids [K, S + 1] of K strides, single steps last; a step of N = `num` functions needs N^2 numbers."""
    chunk = max(1, min(_CHUNK, _CHUNK_NUMBERS // num**2))
    last, position = len(times) - 1, 0
    while position < last:
        size = stride if last - position >= stride else 1
        count = min(max(1, chunk // size), (last - position) // size)
        yield times[position + size * np.arange(count)[:, None] + np.arange(size + 1)]
        position += size * count


def _sources(measure: Measure, transport: Transport | None, signal: Sampled, grid: Array, extra: int) -> Array:
    """int E(t_1, tau) B_L(tau) f(tau)^T P(t_1, tau) dtau over each stride of grid [K, S + 1]: [K, N, d].

    Three Gauss points per step give order 6; a step that is coarse for the basis takes more, plus `extra`.
    """
    spans = np.diff(grid, axis=1)
    cuts = measure.parts(spans)
    if len(grid) > 1 and cuts.shape[-1] > 2:
        # Rows with a step longer than the memory have many nodes.
        return np.concatenate([_sources(measure, transport, signal, row[None], extra) for row in grid])
    edges = np.concatenate([(grid[:, :-1, None] + spans[..., None] * cuts[..., :-1]).reshape(len(grid), -1), grid[:, -1:]], 1)
    order = max(3, 1 + math.ceil(measure.resolution(grid[:, :-1], grid[:, 1:]))) + extra
    nodes, weights = gauss_panels(edges, order)
    stop = np.broadcast_to(grid[:, -1:], nodes.shape)
    values = signal(nodes.ravel()).reshape(*nodes.shape, -1)
    if transport is not None:
        values = transport.carry(values, nodes, stop)
    return np.swapaxes(measure.impulse(stop, nodes), -1, -2) @ (weights[..., None] * values)


def _exponential(
    measure: Measure, transport: Transport | None, signal: Sampled, grid: Array, state: Array, extra: int
) -> Iterator[Array]:
    source = _sources(measure, transport, signal, grid, extra)
    flow = measure.flow(grid[:, -1], grid[:, 0])
    right = None if transport is None else transport.P(grid[:, -1], grid[:, 0])
    for index in range(len(grid)):
        state = flow[index] @ (state if right is None else state @ right[index]) + source[index]
        yield state


def _held(transport: Transport | None, signal: Signal, starts: Array) -> tuple[Transport | None, Sampled]:
    """A_R and the signal, held at their values at the start of each step."""
    values = signal(starts)
    if transport is not None and not transport.is_constant:
        transport = Transport(np.stack([transport.generator(time) for time in starts]), transport.width, times=starts)
    return transport, lambda times: values[np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)]


def _bilinear(measure: Measure, transport: Transport | None, signal: Signal, grid: Array, state: Array) -> Iterator[Array]:
    """C_1 = (I - X)^{-1} [(I + X) C_0 R + h B g^T] with X = h A_L / 2, Y = h A_R / 2.

    R = (I + Y)(I - Y)^{-1} and g^T = f^T (I - Y)^{-1}; all of A_L, B_L, A_R and f are taken at the middle of the step.
    """
    step, middle = grid[:, 1] - grid[:, 0], grid.mean(axis=1)
    values = signal(middle)
    right = None
    if transport is not None:
        eye = np.eye(transport.width)
        half = np.stack([transport.generator(time) for time in middle]) * (step / 2)[:, None, None]
        resolvent = np.linalg.inv(eye - half)
        right = (eye + half) @ resolvent
        values = np.einsum("ki,kij->kj", values, resolvent)
    solvers: dict[float, Array] = {}
    (substitute,) = get_lapack_funcs(("trtrs",), (state,))
    for index, (h, time) in enumerate(zip(step, middle)):
        # (I + X) = 2 I - (I - X): one solve serves both terms.
        moved = state if right is None else state @ right[index]
        load = 2 * moved + np.outer(h * measure.B(time), values[index])
        implicit = np.eye(measure.N) - h / 2 * measure.A(time)
        if measure.stationary:
            # Steps of a uniform grid differ by rounding: compare twelve digits.
            key = float(f"{h:.11e}")
            if key not in solvers:
                solvers[key] = np.linalg.inv(implicit)
            solved = solvers[key] @ load
        else:
            solved, _ = substitute(implicit, load, lower=1)
        state = solved - moved
        yield state


def states(
    measure: Measure, transport: Transport | None, signal: Signal, times: Array, method: Method, state: Array, *, skip: bool
) -> Iterator[Array]:
    """States C(t) [N, d] after times[0], ending with times[-1]; with `skip`, intermediate ones may be left out."""
    stride = _STRIDE if skip and method != "bilinear" and measure.closes else 1
    for grid in _grids(times, stride, measure.N):
        if method == "bilinear":
            following = _bilinear(measure, transport, signal, grid, state)
        elif method == "zoh":
            following = _exponential(measure, *_held(transport, signal, grid[:, :-1].ravel()), grid, state, extra=2)
        else:
            # Straight lines between samples are integrated to rounding.
            extra = 3 if isinstance(signal, Samples) else 0
            following = _exponential(measure, transport, signal, grid, state, extra)
        for state in following:
            yield state
