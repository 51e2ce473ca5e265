"""The CPU kernel of `StreamingMemory`: C <- E C R + sum_i g_i v_i^T for each sample, with v_i the signal at Gauss node i."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Array = np.ndarray
# sin(x) / x and (1 - cos x) / x^2 as polynomials of x^2, highest power first; exact to rounding for x^2 < 1/4.
SERIES = tuple(((-1.0) ** k / math.factorial(2 * k + 1), (-1.0) ** k / math.factorial(2 * k + 2)) for k in range(7, -1, -1))


class StreamOperands(NamedTuple):
    """Flat float64 arrays (`index` is int64). `state` and `last` are read and written, `states` may be `None`."""

    state: Array  # [B, d, N], transposed: the N axis is the SIMD axis
    last: Array  # [B, d], the previous sample; NaN where there is none
    sample: Array  # [B, T, d], NaN where a sensor is missing
    # [B, T, 3] rotation vectors, or factors [B, T, q + 1, w, w] from each node, and from the start (last), to the end
    turn: Array
    operator: Array  # [K, N + q, N]: rows of E^T, then g
    node: Array  # [q + 1], in [0, 1]; the last one is 0, the start of the step
    scratch: Array  # [B, w w + d (N + q)]
    states: Array | None  # [B, T, d, N]
    index: Array  # [B, T], which operator
    length: int
    order: int
    channels: int
    num_nodes: int


def streaming_update(turning: str, width: int) -> Callable[..., None]:
    """`turning` is "none", "vector" or "factors", what `turn` holds; `width` is w, the channels that turn together."""

    def update(o, start, stop):
        T, N, d, q = o.length, o.order, o.channels, o.num_nodes
        rows = N + q
        for row in range(start, stop):
            state, last, factor = row * d * N, row * d, row * (width * width + d * rows)
            inputs = factor + width * width
            for t in range(T):
                at = row * T + t
                sample, operator = at * d, o.index[at] * rows * N
                for i in range(q + 1):
                    if turning == "factors":
                        for entry in range(width * width):
                            o.scratch[factor + entry] = o.turn[(at * (q + 1) + i) * width * width + entry]
                    elif turning == "vector":
                        # exp(part [v]x) = I + along [v]x + across [v]x^2, by series below half a radian.
                        x, y, z, part = o.turn[3 * at], o.turn[3 * at + 1], o.turn[3 * at + 2], 1.0 - o.node[i]
                        square = x * x + y * y + z * z
                        s = part * part * square
                        if s < 0.25:
                            along, across = 0.0, 0.0
                            for sine, cosine in SERIES:
                                along, across = along * s + sine, across * s + cosine
                            along, across = along * part, across * part * part
                        else:
                            angle = math.sqrt(square)
                            half = math.sin(0.5 * part * angle)
                            along, across = math.sin(part * angle) / angle, 2 * half * half / square
                        o.scratch[factor] = 1 + across * (x * x - square)
                        o.scratch[factor + 1] = across * x * y - along * z
                        o.scratch[factor + 2] = across * x * z + along * y
                        o.scratch[factor + 3] = across * x * y + along * z
                        o.scratch[factor + 4] = 1 + across * (y * y - square)
                        o.scratch[factor + 5] = across * y * z - along * x
                        o.scratch[factor + 6] = across * x * z - along * y
                        o.scratch[factor + 7] = across * y * z + along * x
                        o.scratch[factor + 8] = 1 + across * (z * z - square)
                    else:
                        o.scratch[factor] = 1.0
                    for sensor in range(0, d, width):
                        if i == q:
                            for j in range(width):
                                to = inputs + (sensor + j) * rows
                                for n in range(N):
                                    moved = 0.0
                                    for c in range(width):
                                        moved += o.scratch[factor + c * width + j] * o.state[state + (sensor + c) * N + n]
                                    o.scratch[to + n] = moved
                            continue
                        # A sum with a NaN in it is NaN.
                        now, before = 0.0, 0.0
                        for c in range(sensor, sensor + width):
                            now += o.sample[sample + c]
                            before += o.last[last + c]
                        for j in range(width):
                            value = 0.0
                            if now == now:
                                for c in range(width):
                                    held = o.sample[sample + sensor + c]
                                    if before == before:
                                        held = o.node[i] * held + (1 - o.node[i]) * o.last[last + sensor + c]
                                    value += held * o.scratch[factor + c * width + j]
                            o.scratch[inputs + (sensor + j) * rows + N + i] = value
                for j in range(d):
                    to, x = state + j * N, inputs + j * rows
                    # Eight sums at a time, in two or four SIMD registers.
                    for n in range(0, N - 7, 8):
                        s0, s1, s2, s3, s4, s5, s6, s7 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                        for m in range(rows):
                            value, k = o.scratch[x + m], operator + m * N + n
                            s0 += o.operator[k] * value
                            s1 += o.operator[k + 1] * value
                            s2 += o.operator[k + 2] * value
                            s3 += o.operator[k + 3] * value
                            s4 += o.operator[k + 4] * value
                            s5 += o.operator[k + 5] * value
                            s6 += o.operator[k + 6] * value
                            s7 += o.operator[k + 7] * value
                        o.state[to + n], o.state[to + n + 1], o.state[to + n + 2], o.state[to + n + 3] = s0, s1, s2, s3
                        o.state[to + n + 4], o.state[to + n + 5], o.state[to + n + 6], o.state[to + n + 7] = s4, s5, s6, s7
                    for n in range(N - N % 8, N):
                        total = 0.0
                        for m in range(rows):
                            total += o.operator[operator + m * N + n] * o.scratch[x + m]
                        o.state[to + n] = total
                    o.last[last + j] = o.sample[sample + j]
                if o.states.size > 0:
                    for entry in range(d * N):
                        o.states[at * d * N + entry] = o.state[state + entry]

    return update
