"""A few tokens of a layer as machine code: what stands between its projections, one row of the batch after another.

`build_branch` is the short convolution and its SiLU, from the in-projection to the branch x. `build_cell` is everything from
the controller's projections to the out-projection: steps and gates, right actions, the two-point cell, the read-out and its
norm, skip and gate. Operands are addresses, so that a call costs no more than its arithmetic; half-precision tensors are
widened and rounded on the way. Groups stand in the lanes where the controller is computed, the state order N where the state
moves. A state may be written over the one that is read; with a stride the state after every position is kept.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np

from shippo_ssm.actions._exponential_cpu import right_lanes
from shippo_ssm.actions.kernels import sigmoid, softplus
from shippo_ssm.engine import LANES, Emitter, Pointer, register_lanes, simd

# Operands of `build_branch`: addresses, and sizes in numbers. `projected` is [B, T, row], the in-projection, of which the first
# channels are convolved; windows are [B, K - 1, channels]. `stride` leads from the window after a position to that after the
# next, 0 where only the last is kept.
Branch = namedtuple("Branch", "projected window weight bias x next_window channels row length stride")
# Operands of `build_cell`. x [B, T, r D], the gate and the four projections of the controller have rows of their own lengths,
# states are those of a `CellState`, `dt` is [B, T]. Group g uses write and read of set g // (groups / sets). `every` leads from
# the row of the state after a position to that after the next, 0 where only the last is kept.
Cell = namedtuple(
    "Cell",
    "x gate write read scalars coords right scalar_bias right_bias drift_log skip norm memory last_write last_value "
    "next_memory next_write next_value out dt x_row gate_row write_row read_row scalar_row coords_row groups sets length every",
)
# The state that a position reads: addresses of its tensors, and its row in them.
Before = namedtuple("Before", "memory write value row")


def build_branch(storage: str, dtype: str, taps: int, has_bias: bool) -> Callable[..., None]:
    """kernel(operands, start, stop): x = silu(conv(projected)) and the next windows, for rows start .. stop - 1."""
    lanes, before, element = register_lanes(dtype), taps - 1, np.dtype(dtype)

    @simd(dtype, lanes)
    def start(emit: Emitter, operands: Any, total: Any) -> None:
        for d in emit.blocks(operands.channels):
            vector = emit.load(emit.pointer(operands.bias, storage), d) if has_bias else emit.constant(0.0)
            emit.store(total, d, vector)

    @simd(dtype, lanes)
    def add_tap(emit: Emitter, operands: Any, memory: Any, place: Any, tap: Any, total: Any) -> None:
        source, weight = (emit.pointer(address, storage) for address in (memory, operands.weight))
        first = emit.builder.mul(tap, operands.channels)
        for d in emit.blocks(operands.channels):
            product = emit.mul(emit.load(source, emit.at(place, d)), emit.load(weight, emit.at(first, d)))
            emit.store(total, d, emit.add(emit.load(total, d), product))

    @simd(dtype, lanes)
    def finish(emit: Emitter, operands: Any, total: Any, place: Any) -> None:
        x = emit.pointer(operands.x, storage)
        for d in emit.blocks(operands.channels):
            vector = emit.load(total, d)
            emit.store(x, emit.at(place, d), emit.mul(vector, sigmoid(emit, vector)))

    @simd(dtype, lanes)
    def copy(emit: Emitter, operands: Any, memory: Any, source: Any, target: Any) -> None:
        old, new = emit.pointer(memory, storage), emit.pointer(operands.next_window, storage)
        for d in emit.blocks(operands.channels):
            emit.store(new, emit.at(target, d), emit.load(old, emit.at(source, d)))

    def kernel(operands, first, last):
        channels, length, row = operands.channels, operands.length, operands.row
        total = np.zeros(channels, element)
        for b in range(first, last):
            for t in range(length):
                start(operands, total)
                for tap in range(taps):
                    s = t - before + tap
                    if s < 0:
                        add_tap(operands, operands.window, (b * before + s + before) * channels, tap, total)
                    else:
                        add_tap(operands, operands.projected, (b * length + s) * row, tap, total)
                finish(operands, total, (b * length + t) * channels)
            for t in range(0 if operands.stride else length - 1, length):
                # Oldest first: a window that is written over itself is read before.
                for place in range(before):
                    s, target = t - before + 1 + place, t * operands.stride + (b * before + place) * channels
                    if s < 0:
                        copy(operands, operands.window, (b * before + s + before) * channels, target)
                    else:
                        copy(operands, operands.projected, (b * length + s) * row, target)

    return kernel


# What the machine code of a cell is made for: `storage` is the dtype of x, gate, projections and output, `dtype` that of the
# state and of the arithmetic; K = num_coordinates is 0 where R is given or missing.
CellCase = namedtuple("CellCase", "storage dtype order width rank num_coordinates inline has_right norm_eps")


def build_cell(case: CellCase) -> Callable[..., None]:
    """kernel(operands, start, stop): rows start .. stop - 1 of the batch."""
    from numba import njit

    storage, dtype, order, width, rank, count_coords, inline, has_right, norm_eps = case
    inlined, has_norm, eps = inline is not None, norm_eps is not None, norm_eps or 0.0
    element, lanes, size, row = np.dtype(dtype), register_lanes(dtype), width * width, order * width
    if inline is not None:
        lane_map = right_lanes(dtype, width, inline)
        fill, scratch, w_coords, w_step = lane_map.fill, lane_map.size, lane_map.coords, lane_map.step
        w_element = np.dtype(lane_map.arithmetic)
    else:
        fill, scratch, w_coords, w_step, w_element = njit(inline="always")(lambda w: 0), LANES, 0, 0, element

    @simd(dtype, lanes)
    def emit_scalars(emit: Emitter, operands: Any, token: Any, scalars: Any) -> None:
        # Step, beta, gamma, write gate and read gate of every group.
        raw, bias = emit.pointer(operands.scalars, storage), emit.pointer(operands.scalar_bias, dtype)
        start, time = emit.builder.mul(token, operands.scalar_row), emit.splat(emit.pointer(operands.dt, dtype), token)
        for g in emit.blocks(operands.groups):
            places = [emit.at(emit.times(operands.groups, k), g) for k in range(5)]
            values = [emit.add(emit.load(raw, emit.at(start, place)), emit.load(bias, place)) for place in places[:4]]
            step, mix = emit.mul(softplus(emit, values[0])[0], time), sigmoid(emit, values[1])
            gamma = emit.mul(mix, step)
            gates = [sigmoid(emit, value) for value in values[2:]]
            for place, vector in zip(places, (step, emit.sub(step, gamma), gamma, *gates)):
                emit.store(scalars, place, vector)

    @simd(dtype, LANES)
    def read_tile(emit: Emitter, operands: Any, token: Any, g: Any, coords: Any) -> None:
        # The coordinates of LANES groups from g on, with their biases, into the lanes.
        raw, bias = emit.pointer(operands.coords, storage), emit.pointer(operands.right_bias, dtype)
        first = emit.times(g, count_coords)
        start = emit.at(emit.builder.mul(token, operands.coords_row), first)
        for _ in emit.blocks(LANES):
            columns, shifts = (emit.load_columns(array, at, count_coords) for array, at in ((raw, start), (bias, first)))
            for k, (column, shift) in enumerate(zip(columns, shifts)):
                emit.store(coords, k * LANES, emit.add(column, shift), padded=True)

    @simd(dtype, 1)
    def read_one(emit: Emitter, operands: Any, token: Any, index: Any, coords: Any, place: Any) -> None:
        raw, bias = emit.pointer(operands.coords, storage), emit.pointer(operands.right_bias, dtype)
        number = emit.load(raw, emit.at(emit.builder.mul(token, operands.coords_row), index), padded=True)
        emit.store(coords, place, emit.add(number, emit.load(bias, index, padded=True)), padded=True)

    @simd(dtype, lanes)
    def read_right(emit: Emitter, operands: Any, index: Any, right: Any) -> None:
        given = emit.pointer(operands.right, dtype)
        for e in emit.blocks(size):
            emit.store(right, e, emit.load(given, emit.at(emit.times(index, size), e)))

    @simd(dtype, lanes)
    def move(
        emit: Emitter, operands: Any, token: Any, g: Any, s: Any, before: Any, after: Any, scalars: Any, right: Any, y: Any
    ) -> None:
        # Group g of one position, with the write and read of set s; `before` is the state that is read, as addresses and a row,
        # `after` the row that is written.
        matrix = [emit.splat(right, e) for e in range(size)] if has_right else None
        step, beta, gamma, write_gate = (emit.splat(scalars, emit.at(emit.times(operands.groups, k), g)) for k in range(4))
        rate = emit.mul(step, emit.constant(-1.0 / math.log(2.0)))

        def state(address: Any, index: Any, numbers: int) -> tuple[Pointer, Any]:
            return emit.pointer(address, dtype), emit.times(emit.at(emit.builder.mul(index, operands.groups), g), numbers)

        def carried(values: list[Any]) -> list[Any]:
            if matrix is None:
                return values
            return [emit.dot(values, matrix[q::width]) for q in range(width)]

        x = emit.pointer(operands.x, storage)
        x_start = emit.at(emit.builder.mul(token, operands.x_row), emit.times(g, width))
        last_value, old = state(before.value, before.row, rank * width)
        next_value, new = state(operands.next_value, after, rank * width)
        sources, entering = [], []
        for k in range(rank):
            last = [emit.mul(beta, emit.splat(last_value, emit.at(old, k * width + p))) for p in range(width)]
            entering.append(carried(last))
            place = emit.at(x_start, emit.times(operands.groups, k * width))
            value = [emit.mul(write_gate, emit.splat(x, emit.at(place, p))) for p in range(width)]
            sources.append([emit.mul(gamma, number) for number in value])
            for p, number in enumerate(value):
                emit.store_first(next_value, emit.at(new, k * width + p), number)
        memory, old = state(before.memory, before.row, row)
        next_memory, new = state(operands.next_memory, after, row)
        last_write = emit.pointer(before.write, dtype)
        old_write = emit.times(emit.at(emit.builder.mul(before.row, operands.sets), s), rank * order)
        write, read = emit.pointer(operands.write, storage), emit.pointer(operands.read, storage)
        write_start = emit.at(emit.builder.mul(token, operands.write_row), emit.times(s, rank * order))
        read_start = emit.at(emit.builder.mul(token, operands.read_row), emit.times(s, order))
        drift = emit.pointer(operands.drift_log, dtype)
        totals = [emit.variable() for _ in range(width)]
        for n in emit.blocks(order):
            log = emit.load(drift, emit.at(emit.times(g, order), n))
            decay = emit.exp2(emit.mul(rate, emit.exp2(emit.mul(log, emit.constant(1.0 / math.log(2.0))))))
            columns = carried(emit.load_columns(memory, emit.at(old, emit.times(n, width)), width))
            for k in range(rank):
                w = emit.load(last_write, emit.at(old_write, k * order, n))
                columns = [emit.fma(w, number, column) for number, column in zip(entering[k], columns)]
            columns = [emit.mul(decay, column) for column in columns]
            for k in range(rank):
                w = emit.load(write, emit.at(write_start, k * order, n))
                columns = [emit.fma(w, number, column) for number, column in zip(sources[k], columns)]
            emit.store_columns(next_memory, emit.at(new, emit.times(n, width)), columns)
            c = emit.load(read, emit.at(read_start, n))
            for total, column in zip(totals, columns):
                total.set(emit.fma(c, column, total.get()))
        emit.store_sums(y, emit.times(g, width), [total.get() for total in totals])

    @simd(dtype, lanes)
    def keep_write(emit: Emitter, operands: Any, token: Any, after: Any) -> None:
        # After all groups: the state may be written over the one that they read.
        write, next_write = emit.pointer(operands.write, storage), emit.pointer(operands.next_write, dtype)
        start, length = emit.builder.mul(token, operands.write_row), emit.times(operands.sets, rank * order)
        for n in emit.blocks(length):
            emit.store(next_write, emit.at(emit.builder.mul(after, length), n), emit.load(write, emit.at(start, n)))

    @simd(dtype, lanes)
    def finish(emit: Emitter, operands: Any, token: Any, y: Any, scale: Any) -> None:
        x, gate, out = (emit.pointer(address, storage) for address in (operands.x, operands.gate, operands.out))
        skip, norm, factor = emit.pointer(operands.skip, dtype), emit.pointer(operands.norm, dtype), emit.splat(scale, 0)
        x_start, gate_start = emit.builder.mul(token, operands.x_row), emit.builder.mul(token, operands.gate_row)
        channels = emit.times(operands.groups, width)
        for d in emit.blocks(channels):
            vector = emit.load(y, d)
            if has_norm:
                vector = emit.mul(emit.mul(vector, factor), emit.load(norm, d))
            vector = emit.fma(emit.load(skip, d), emit.load(x, emit.at(x_start, d)), vector)
            z = emit.load(gate, emit.at(gate_start, d))
            vector = emit.mul(vector, emit.mul(z, sigmoid(emit, z)))
            emit.store(out, emit.at(emit.builder.mul(token, channels), d), vector)

    def kernel(operands, first, last):
        groups = operands.groups
        channels, shared = groups * width, groups // operands.sets
        w = np.zeros(scratch, w_element)
        scalars, coords = np.zeros(5 * groups, element), np.zeros(count_coords * LANES + 1, element)
        right, y, scale = np.zeros(size, element), np.zeros(channels, element), np.ones(1, element)
        for b in range(first, last):
            before = Before(operands.memory, operands.last_write, operands.last_value, b)
            for t in range(operands.length):
                token, after = b * operands.length + t, b + t * operands.every
                emit_scalars(operands, token, scalars)
                for tile in range(0, groups, LANES):
                    here, matrix = min(LANES, groups - tile), 0
                    if inlined:
                        if here == LANES:
                            read_tile(operands, token, tile, coords)
                        else:
                            for lane in range(here):
                                for k in range(count_coords):
                                    read_one(operands, token, (tile + lane) * count_coords + k, coords, k * LANES + lane)
                        for k in range(count_coords * LANES):
                            w[w_coords + k] = coords[k]
                        for lane in range(here):
                            w[w_step + lane] = scalars[tile + lane]
                        matrix = fill(w)
                    for lane in range(here):
                        if inlined:
                            for e in range(size):
                                right[e] = w[matrix + e * LANES + lane]
                        elif has_right:
                            read_right(operands, token * groups + tile + lane, right)
                        move(operands, token, tile + lane, (tile + lane) // shared, before, after, scalars, right, y)
                keep_write(operands, token, after)
                total = 0.0
                for g in range(groups):
                    for p in range(g * width, (g + 1) * width):
                        y[p] *= scalars[4 * groups + g]
                        total += y[p] * y[p]
                if has_norm:
                    scale[0] = 1.0 / math.sqrt(total / channels + eps)
                finish(operands, token, y, scale)
                before = Before(operands.next_memory, operands.next_write, operands.next_value, after)

    return kernel
