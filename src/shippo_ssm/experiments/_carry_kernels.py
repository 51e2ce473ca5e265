"""Machine code for `carry.py`: products of d x d matrices that stay in the first-level cache.

One work item is a sequence. Forward, positions from the last to the first, with M_t = sum_k coef_{t,k} G_k and the frame
S_t = exp(M_{t+1}) .. exp(M_T) [d, d]:

    moved_t = value_t S_t,        S_{t-1} = exp(M_t) S_t = S_t + M_t (S_t + M_t (S_t + ..) / 2)

by Horner's rule on the frame itself, one product per degree. M_t is built where it is used and never written to memory.
Backward, positions from the first to the last, everything transposed so that each product is a plain row-major one: with
C = (dLoss / dS_{t-1})^T and, at degree two, Q = S_t + M_t S_t / 2,

    dM_t^T = Q C + S_t (C M_t) / 2,        (dLoss / dS_t)^T = dmoved_t^T value_t + C + C M_t + C M_t M_t / 2,

and dM_t^T is spread over the generators of its sequence at once, dG_k^T += coef_{t,k} dM_t^T.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shippo_ssm._simd import simd

__all__ = ["build_backward", "build_forward"]

LANES = 8
# Accumulators of a product: ROWS * width / LANES registers.
ROWS = 4
# Vectors of a generator handled together.
CHUNK = 8


def _product(width: int, inner: int, row: int, column: int, scale: float, rows: int = ROWS) -> Any:
    """Rows of C = base + scale A B: A [rows, inner] with strides (row, column), B [inner, width]; C is neither A nor B."""

    @simd("float32", LANES)
    def product(emit, a, ia, b, ib, base, ibase, c, ic):
        blocks = range(0, width, LANES)
        total: dict[tuple[int, int], Any] = {}
        for k in range(inner):
            right = [emit.load(b, emit.at(ib, k * width + j), padded=True) for j in blocks]
            for i in range(rows):
                left = emit.splat(a, emit.at(ia, i * row + k * column))
                for j, vector in zip(blocks, right):
                    total[i, j] = emit.fma(left, vector, total[i, j]) if k else emit.mul(left, vector)
        for (i, j), vector in total.items():
            below = emit.load(base, emit.at(ibase, i * width + j), padded=True)
            emit.store(c, emit.at(ic, i * width + j), emit.fma(vector, emit.constant(scale), below), padded=True)

    return product


def _dots(width: int, rank: int) -> Any:
    """Four columns q of C = A S^T: C[j, q] = sum_p A[j, p] S[q, p] with A [rank, width]."""

    @simd("float32", LANES)
    def dots(emit, a, ia, s, iq, c, ic):
        blocks = range(0, width, LANES)
        rows = [[emit.load(s, emit.at(iq, q * width + p), padded=True) for p in blocks] for q in range(4)]
        for j in range(rank):
            left = [emit.load(a, emit.at(ia, j * width + p), padded=True) for p in blocks]
            emit.store_sums(c, emit.at(ic, j * width), [emit.dot(left, row) for row in rows])

    return dots


def _combine(size: int, count: int) -> Any:
    """One chunk of M = sum_k coef_k G_k."""

    @simd("float32", LANES)
    def combine(emit, coef, ic, generators, ig, out, io):
        total: list[Any] = []
        for k in range(count):
            weight = emit.splat(coef, emit.at(ic, k))
            parts = [emit.load(generators, emit.at(ig, k * size + v * LANES), padded=True) for v in range(CHUNK)]
            total = [emit.fma(weight, p, t) for p, t in zip(parts, total)] if k else [emit.mul(weight, p) for p in parts]
        for v, vector in enumerate(total):
            emit.store(out, emit.at(io, v * LANES), vector, padded=True)

    return combine


def _spread(size: int, count: int) -> Any:
    """One chunk of dG_k += coef_k dM."""

    @simd("float32", LANES)
    def spread(emit, coef, ic, dm, im, dg, ig):
        parts = [emit.load(dm, emit.at(im, v * LANES), padded=True) for v in range(CHUNK)]
        for k in range(count):
            weight = emit.splat(coef, emit.at(ic, k))
            for v, part in enumerate(parts):
                place = emit.at(ig, k * size + v * LANES)
                emit.store(dg, place, emit.fma(weight, part, emit.load(dg, place, padded=True)), padded=True)

    return spread


def build_forward(width: int, rank: int, count: int, degree: int, keep: bool) -> Any:
    """moved [n, T, rank, width]; with `keep` also the frames [n, T, width, width]. rank is one or a multiple of four."""
    size, rows, chunk = width * width, min(rank, ROWS), CHUNK * LANES
    stride = ROWS * width
    carry = _product(width, width, width, 1, 1.0, rows)
    combine = _combine(size, count)
    # Horner's rule from the inside: 1 / degree, .., 1 / 2, 1. Degrees two and three are in use.
    inmost = _product(width, width, width, 1, 1 / 3)
    inner = _product(width, width, width, 1, 1 / 2)
    outer = _product(width, width, width, 1, 1.0)

    def forward(value, coef, generators, moved, frame, length, start, stop):
        zero, step = np.zeros(rows * width, np.float32), np.empty(size, np.float32)
        deep, deeper = np.empty(size, np.float32), np.empty(size, np.float32)
        frames = frame if keep else np.empty(2 * size, np.float32)
        for item in range(start, stop):
            base = item * length
            for t in range(length - 1, -1, -1):
                s = (base + t) * size if keep else t % 2 * size
                if t == length - 1:
                    for e in range(size):
                        frames[s + e] = 1.0 if e % (width + 1) == 0 else 0.0
                v = (base + t) * rank * width
                for i in range(v, v + rank * width, rows * width):
                    carry(value, i, frames, s, zero, 0, moved, i)
                if t == 0:
                    break
                before = s - size if keep else (t - 1) % 2 * size
                for i in range(0, size, chunk):
                    combine(coef, (base + t) * count, generators, i, step, i)
                if degree == 3:
                    for i in range(0, size, stride):
                        inmost(step, i, frames, s, frames, s + i, deeper, i)
                    for i in range(0, size, stride):
                        inner(step, i, deeper, 0, frames, s + i, deep, i)
                else:
                    for i in range(0, size, stride):
                        inner(step, i, frames, s, frames, s + i, deep, i)
                for i in range(0, size, stride):
                    outer(step, i, deep, 0, frames, s + i, frames, before + i)

    return forward


def build_backward(width: int, rank: int, count: int) -> Any:
    """Gradients of the forward pass at degree two: dvalue [n, T, rank, width], and dG [n, count, width, width] transposed."""
    size, chunk, stride = width * width, CHUNK * LANES, ROWS * width
    plain = _product(width, width, width, 1, 1.0)
    half = _product(width, width, width, 1, 0.5)
    outer = _product(width, rank, 1, width, 1.0)
    combine, spread, dots = _combine(size, count), _spread(size, count), _dots(width, rank)

    def backward(value, coef, generators, frame, dmoved, dvalue, dgenerators, length, start, stop):
        zero, step = np.zeros(size, np.float32), np.empty(size, np.float32)
        adjoint, once = np.zeros(size, np.float32), np.empty(size, np.float32)
        twice, inner, dstep = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
        for item in range(start, stop):
            base, own = item * length, item * count * size
            dgenerators[own : own + count * size] = 0
            for t in range(length):
                s, v, c = (base + t) * size, (base + t) * rank * width, (base + t) * count
                for q in range(0, width, 4):
                    dots(dmoved, v, frame, s + q * width, dvalue, v + q)
                if t == 0:
                    # The first right action acts on nothing.
                    for i in range(0, width, ROWS):
                        outer(dmoved, v + i, value, v, zero, 0, adjoint, i * width)
                    continue
                for i in range(0, size, chunk):
                    combine(coef, c, generators, i, step, i)
                for i in range(0, size, stride):
                    half(step, i, frame, s, frame, s + i, inner, i)
                for i in range(0, size, stride):
                    plain(adjoint, i, step, 0, zero, 0, once, i)
                for i in range(0, size, stride):
                    plain(inner, i, adjoint, 0, zero, 0, dstep, i)
                for i in range(0, size, stride):
                    half(once, i, step, 0, once, i, twice, i)
                for i in range(0, size, stride):
                    half(frame, s + i, once, 0, dstep, i, dstep, i)
                for i in range(0, size, chunk):
                    spread(coef, c, dstep, i, dgenerators, own + i)
                for e in range(size):
                    twice[e] += adjoint[e]
                for i in range(0, width, ROWS):
                    outer(dmoved, v + i, value, v, twice, i * width, adjoint, i * width)

    return backward
