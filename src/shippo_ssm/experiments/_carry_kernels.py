"""Machine code for `carry.py`: products of 16 x 16 matrices that never leave the first-level cache.

One work item is a sequence. Forward, positions from the last to the first, with the frame S_t = exp(M_{t+1}) ..
exp(M_T) [d, d]:

    moved_t = value_t S_t,        S_{t-1} = exp(M_t) S_t = S_t + M_t (S_t + M_t (S_t + ..) / 2)

by Horner's rule on the frame itself, one product per degree. Backward, positions from the first to the last,
everything transposed so that each product is a plain row-major one: with C = (dLoss / dS_{t-1})^T and, at degree two,
Q = S_t + M_t S_t / 2,

    dM_t^T = Q C + S_t (C M_t) / 2,        (dLoss / dS_t)^T = dmoved_t^T value_t + C + C M_t + C M_t M_t / 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shippo_ssm._simd import simd

__all__ = ["build_backward", "build_forward"]

LANES = 8
ROWS = 4


def _product(width: int, inner: int, row: int, column: int, scale: float) -> Any:
    """Four rows of C = base + scale A B: A [4, inner] with strides (row, column), B [inner, width]; C overlaps neither A nor B."""

    @simd("float32", LANES)
    def product(emit, a, ia, b, ib, base, ibase, c, ic):
        blocks = range(0, width, LANES)
        total: dict[tuple[int, int], Any] = {}
        for k in range(inner):
            right = [emit.load(b, emit.at(ib, k * width + j), padded=True) for j in blocks]
            for i in range(ROWS):
                left = emit.splat(a, emit.at(ia, i * row + k * column))
                for j, vector in zip(blocks, right):
                    total[i, j] = emit.fma(left, vector, total[i, j]) if k else emit.mul(left, vector)
        for (i, j), vector in total.items():
            below = emit.load(base, emit.at(ibase, i * width + j), padded=True)
            emit.store(c, emit.at(ic, i * width + j), emit.fma(vector, emit.constant(scale), below), padded=True)

    return product


def build_forward(width: int, rank: int, degree: int) -> Any:
    """moved [n, T, rank, width] and all frames [n, T, width, width] from values and generators; rank a multiple of four."""
    size, rows = width * width, ROWS
    horner = tuple(_product(width, width, width, 1, 1.0 / k) for k in range(degree, 0, -1))
    carry = _product(width, width, width, 1, 1.0)
    last, middle = horner[-1], horner[:-1]
    depth = len(middle)
    # Numba unrolls neither tuples of intrinsics nor Python loops over them: at most two inner products are spelled out.
    first, second = (middle[0], middle[-1]) if middle else (last, last)

    def forward(value, generator, moved, frame, length, start, stop):
        zero = np.zeros(width * max(width, rank), np.float32)
        scratch, other = np.empty(size, np.float32), np.empty(size, np.float32)
        for item in range(start, stop):
            base = item * length
            top = (base + length - 1) * size
            for e in range(size):
                frame[top + e] = 1.0 if e % (width + 1) == 0 else 0.0
            for t in range(length - 1, -1, -1):
                s, m, v = (base + t) * size, (base + t) * size, (base + t) * rank * width
                for i in range(0, rank * width, rows * width):
                    carry(value, v + i, frame, s, zero, 0, moved, v + i)
                if t == 0:
                    break
                if depth == 0:
                    for i in range(0, size, rows * width):
                        last(generator, m + i, frame, s, frame, s + i, frame, s - size + i)
                elif depth == 1:
                    for i in range(0, size, rows * width):
                        first(generator, m + i, frame, s, frame, s + i, scratch, i)
                    for i in range(0, size, rows * width):
                        last(generator, m + i, scratch, 0, frame, s + i, frame, s - size + i)
                else:
                    for i in range(0, size, rows * width):
                        first(generator, m + i, frame, s, frame, s + i, other, i)
                    for i in range(0, size, rows * width):
                        second(generator, m + i, other, 0, frame, s + i, scratch, i)
                    for i in range(0, size, rows * width):
                        last(generator, m + i, scratch, 0, frame, s + i, frame, s - size + i)

    return forward


def build_backward(width: int, rank: int) -> Any:
    """Gradients of `build_forward` at degree two: dvalue [n, T, rank, width] and dgenerator [n, T, width, width], transposed."""
    size, rows = width * width, ROWS
    plain = _product(width, width, width, 1, 1.0)
    half = _product(width, width, width, 1, 0.5)
    outer = _product(width, rank, 1, width, 1.0)

    def backward(value, generator, frame, dmoved, dvalue, dgenerator, length, start, stop):
        zero, turned = np.zeros(size, np.float32), np.empty(size, np.float32)
        adjoint, once = np.zeros(size, np.float32), np.empty(size, np.float32)
        twice, inner = np.empty(size, np.float32), np.empty(size, np.float32)
        for item in range(start, stop):
            base = item * length
            adjoint[:] = 0
            for t in range(length):
                s, v = (base + t) * size, (base + t) * rank * width
                # dvalue = dmoved S^T: transposing the frame once is cheaper than dot products across lanes.
                for i in range(width):
                    for j in range(width):
                        turned[j * width + i] = frame[s + i * width + j]
                for i in range(0, rank * width, rows * width):
                    plain(dmoved, v + i, turned, 0, zero, 0, dvalue, v + i)
                if t == 0:
                    for e in range(size):
                        dgenerator[s + e] = 0.0
                    for i in range(0, width, rows):
                        outer(dmoved, v + i, value, v, zero, 0, adjoint, i * width)
                    continue
                for i in range(0, size, rows * width):
                    half(generator, s + i, frame, s, frame, s + i, inner, i)
                for i in range(0, size, rows * width):
                    plain(adjoint, i, generator, s, zero, 0, once, i)
                for i in range(0, size, rows * width):
                    half(once, i, generator, s, once, i, twice, i)
                for i in range(0, size, rows * width):
                    plain(inner, i, adjoint, 0, zero, 0, dgenerator, s + i)
                for i in range(0, size, rows * width):
                    half(frame, s + i, once, 0, dgenerator, s + i, dgenerator, s + i)
                for e in range(size):
                    twice[e] += adjoint[e]
                for i in range(0, width, rows):
                    outer(dmoved, v + i, value, v, twice, i * width, adjoint, i * width)

    return backward
