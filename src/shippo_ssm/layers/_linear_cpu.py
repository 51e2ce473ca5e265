"""Machine code of linear layers on few tokens: weights of any storage dtype are read once, in the order of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.engine import Emitter, Variable, register_lanes, simd, transposed


class Matrix(NamedTuple):
    """A weight [rows, columns] of a product: addresses, 0 for what is not there."""

    weight: int
    bias: int
    """[rows]."""
    scale: int
    """[rows], what the rows of an int8 weight are to be multiplied by."""
    rows: int


class Product(NamedTuple):
    """Operands of `build_product`: x [tokens, columns] and out [tokens, rows], the rows of all matrices one after another."""

    x: int
    out: int
    tokens: int
    columns: int
    rows: int
    first: Matrix
    second: Matrix
    third: Matrix
    fourth: Matrix


# Rows of a weight that one item takes, no fewer than a matrix has; what is left at its end is taken with rows before it.
# As many tokens stand in the lanes.
ROWS = 8


def build_product(storage: str, weights: str, dtype: str) -> Callable[..., None]:
    """kernel(operands, start, stop): out = x weight^T + bias, for the blocks start .. stop - 1 of ROWS rows.

    A weight is read once, in the order of memory, which is what its time is made of. One token is a dot product along each row.
    Several stand in the lanes: the block is widened into a scratch first, and its numbers are splat from there.
    """
    element = np.dtype(dtype)
    # Sums that are under way at once: as many as hide the latency of an addition.
    lanes = 4 * register_lanes(dtype)

    @simd(dtype, register_lanes(dtype))
    def widen_x(emit: Emitter, operands: Any, wide: Any) -> None:
        x = emit.pointer(operands.x, storage)
        for k in emit.blocks(operands.columns):
            emit.store(wide, k, emit.load(x, k))

    @simd(dtype, 1)
    def spread_x(emit: Emitter, operands: Any, token: Any, wide: Any, target: Any) -> None:
        # A token goes into one lane of the vectors of all columns.
        x, start = emit.pointer(operands.x, storage), emit.builder.mul(token, operands.columns)
        for k in emit.each(operands.columns):
            emit.store(wide, emit.at(target, emit.times(k, ROWS)), emit.load(x, emit.at(start, k), padded=True), padded=True)

    @simd(dtype, lanes)
    def dot_rows(emit: Emitter, operands: Any, matrix: Any, row: Any, wide: Any, sums: Any) -> None:
        weight, columns, build = emit.pointer(matrix.weight, weights), operands.columns, emit.builder
        narrow = Emitter(build, dtype, register_lanes(dtype))
        totals = []
        for i in range(ROWS):
            start, total = build.mul(emit.at(row, i), columns), emit.variable()
            for k in emit.blocks(columns):
                total.set(emit.fma(emit.load(weight, emit.at(start, k)), emit.load(wide, k), total.get()))
            totals.append(emit.fold(total.get(), narrow.lanes))
        narrow.store_sums(sums, 0, totals)

    @simd(dtype, register_lanes(dtype))
    def widen_rows(emit: Emitter, operands: Any, matrix: Any, row: Any, block: Any) -> None:
        weight, start = emit.pointer(matrix.weight, weights), emit.builder.mul(row, operands.columns)
        for k in emit.blocks(emit.times(operands.columns, ROWS)):
            emit.store(block, k, emit.load(weight, emit.at(start, k)))

    @simd(dtype, ROWS)
    def multiply(emit: Emitter, operands: Any, matrix: Any, row: Any, block: Any, wide: Any, first: Any, sums: Any) -> None:
        totals = [emit.variable() for _ in range(ROWS)]
        weight, later = emit.pointer(matrix.weight, weights), emit.builder.mul(emit.at(row, ROWS), operands.columns)
        for k in emit.each(operands.columns):
            # The rows of the next block come while this one is multiplied.
            emit.prefetch(weight, emit.at(later, emit.times(k, ROWS)), 1)
            tokens = emit.load(wide, emit.at(first, emit.times(k, ROWS)), padded=True)
            for i, total in enumerate(totals):
                place = emit.at(emit.times(operands.columns, i), k)
                total.set(emit.fma(emit.splat(block, place), tokens, total.get()))
        for token, vector in enumerate(transposed(emit, [total.get() for total in totals])):
            emit.store(sums, token * ROWS, vector, padded=True)

    @simd(dtype, ROWS)
    def finish(emit: Emitter, operands: Any, matrix: Any, row: Any, sums: Any, place: Any, target: Any) -> None:
        vector = emit.load(sums, place, padded=True)
        if weights == "int8":
            vector = emit.mul(vector, emit.load(emit.pointer(matrix.scale, dtype), row, padded=True))
        slot = Variable(emit, vector)
        with emit.builder.if_then(emit.builder.icmp_signed("!=", matrix.bias, emit.at(0))):
            slot.set(emit.add(vector, emit.load(emit.pointer(matrix.bias, storage), row, padded=True)))
        emit.store(emit.pointer(operands.out, storage), target, slot.get(), padded=True)

    def kernel(operands, start, stop):
        tokens, columns = operands.tokens, operands.columns
        wide = np.zeros(columns if tokens == 1 else -(-tokens // ROWS) * ROWS * columns, element)
        block, sums = np.empty(0 if tokens == 1 else ROWS * columns, element), np.zeros(ROWS * ROWS, element)
        if tokens == 1:
            widen_x(operands, wide)
        else:
            for token in range(tokens):
                spread_x(operands, token, wide, token // ROWS * ROWS * columns + token % ROWS)
        for item in range(start, stop):
            left, base = item, 0
            matrix = operands.first
            for other in (operands.second, operands.third, operands.fourth):
                if left * ROWS >= matrix.rows:
                    left, base, matrix = left - (matrix.rows + ROWS - 1) // ROWS, base + matrix.rows, other
            row = min(left * ROWS, matrix.rows - ROWS)
            if tokens == 1:
                dot_rows(operands, matrix, row, wide, sums)
                finish(operands, matrix, row, sums, 0, base + row)
            else:
                widen_rows(operands, matrix, row, block)
                for first in range(0, tokens, ROWS):
                    multiply(operands, matrix, row, block, wide, first * columns, sums)
                    for token in range(first, min(first + ROWS, tokens)):
                        finish(operands, matrix, row, sums, (token - first) * ROWS, token * operands.rows + base + row)

    return kernel
