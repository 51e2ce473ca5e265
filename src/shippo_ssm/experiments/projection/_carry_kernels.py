"""Machine code for `carry.py`: products of d x d matrices that stay in the first-level cache.

One work item is a sequence. Forward, positions from the last to the first, with M_t = sum_k coef_{t,k} G_k and the frame
S_t = exp(M_{t+1}) .. exp(M_T) [d, d]:

    moved_t = (f_t^T E) S_t [r, d],        S_{t-1} = exp(M_t) S_t = S_t + M_t (S_t + M_t (S_t + ..) / 2)

by Horner's rule on the frame itself, one product per degree; positions before the last `near` have one degree less. M_t
and the values f_t^T E are built where they are used and never written to memory. Backward, positions from the first to the
last, everything transposed so that each product is a plain row-major one: at degree two, with the adjoint
C = (dLoss / dS_{t-1})^T, Q = C + C M_t / 2 and dmoved_t = write_t^T dstate,

    dM_t^T = S_t Q + (M_t S_t / 2) C,     (dLoss / dS_t)^T = C + Q M_t + dmoved_t^T value_t,     dvalue_t = dmoved_t S_t^T;

at degree one Q = C and dM_t^T = S_t C.

dG_k^T = sum_t coef_{t,k} dM_t^T and dE = sum_t f_t dvalue_t are products over `BLOCK` positions at a time: what they are
added to is then read and written once for all of them. Frames are the only large thing kept between the passes; they
are asked for ahead of their use, or waiting for memory would cost a third of the forward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.engine import simd

__all__ = ["build_backward", "build_forward"]

# Rows of a product in the kernels: ranks are multiples of it, and so is the memory for gradients of generators.
ROWS = 4
# A product has ROWS * width / LANES accumulators, enough at width 16 to hide the latency of a fused multiply-add.
LANES = 8
# Vectors of a generator handled together.
CHUNK = 8
# Positions whose gradients are added together.
BLOCK = 16
# Positions by which memory is asked for ahead of its use.
AHEAD = 4

Vectors = dict[tuple[int, int], Any]
"""Vectors (i, j .. j + LANES) of a matrix, by (i, j)."""


class Forward(NamedTuple):
    """Operands of the forward kernel; the integers are those of `Backward`."""

    signal: Any
    maps: Any
    coef: Any
    generators: Any
    moved: Any
    frame: Any
    length: int
    near: int
    apart: int


class Backward(NamedTuple):
    """Operands of the backward kernel."""

    signal: Any
    maps: Any
    write: Any
    coef: Any
    generators: Any
    frame: Any
    dstate: Any
    dmaps: Any
    dgenerators: Any
    length: int
    near: int
    """Last positions with the full degree."""
    apart: int
    """n width, the distance between rows of `moved`."""


def _matrix(emit: Any, array: Any, start: Any, lead: int) -> Any:
    """Vectors (i, j .. j + LANES) of a matrix whose rows are `lead` apart."""
    return lambda i, j: emit.load(array, emit.at(start, i * lead + j), padded=True)


def _entries(emit: Any, array: Any, start: Any, row: int) -> Any:
    """Entries (i, k) of a matrix whose rows are `row` apart, each in every lane."""
    return lambda i, k: emit.splat(array, emit.at(start, i * row + k))


def _add_product(emit: Any, left: Any, right: Any, inner: int, width: int, rows: int = ROWS, below: Any = ()) -> Vectors:
    """below[i, j] + sum_k left(i, k) right(k, j); what is not there below is zero."""
    total: Vectors = dict(below)
    for k in range(inner):
        vectors = {j: right(k, j) for j in range(0, width, LANES)}
        for i in range(rows):
            entry = left(i, k)
            for j, vector in vectors.items():
                total[i, j] = emit.fma(entry, vector, total[i, j]) if (i, j) in total else emit.mul(entry, vector)
    return total


def _keep(emit: Any, total: Vectors, array: Any, start: Any, lead: int) -> None:
    """Store vectors (i, j .. j + LANES) in a matrix whose rows are `lead` apart."""
    for (i, j), vector in total.items():
        emit.store(array, emit.at(start, i * lead + j), vector, padded=True)


def _fetch(length: int) -> Any:
    """Ask for the cache lines of array[i : i + length]."""

    @simd("float32", LANES)
    def fetch(emit, array, i):
        emit.prefetch(array, i, length)

    return fetch


def _product(width: int, inner: int, rows: int = ROWS, scale: float = 1.0) -> Any:
    """Rows of C = scale A B, A [rows, inner], B [inner, width]; C is neither A nor B."""

    @simd("float32", LANES)
    def product(emit, a, ia, b, ib, c, ic):
        total = _add_product(emit, _entries(emit, a, ia, inner), _matrix(emit, b, ib, width), inner, width, rows)
        for (i, j), vector in total.items():
            scaled = vector if scale == 1 else emit.mul(vector, emit.constant(scale))
            emit.store(c, emit.at(ic, i * width + j), scaled, padded=True)

    return product


def _turn(width: int, rows: int) -> Any:
    """Rows of moved = value S, stored `apart` from each other."""

    @simd("float32", LANES)
    def turn(emit, value, iv, frame, iframe, moved, im, apart, ahead):
        for i in range(rows):
            emit.prefetch(moved, emit.at(ahead, emit.times(apart, i)), 1)
        right = _matrix(emit, frame, iframe, width)
        total = _add_product(emit, _entries(emit, value, iv, width), right, width, width, rows)
        for (i, j), vector in total.items():
            emit.store(moved, emit.at(im, emit.times(apart, i), j), vector, padded=True)

    return turn


def _turn_back(width: int, rank: int) -> Any:
    """Four columns q of dvalue = dmoved S^T."""

    @simd("float32", LANES)
    def turn_back(emit, dmoved, frame, iq, dvalue, iv):
        blocks = range(0, width, LANES)
        rows = [[emit.load(frame, emit.at(iq, q * width + p), padded=True) for p in blocks] for q in range(4)]
        for j in range(rank):
            left = [emit.load(dmoved, j * width + p, padded=True) for p in blocks]
            emit.store_sums(dvalue, emit.at(iv, j * width), [emit.dot(left, row) for row in rows])

    return turn_back


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


def _horner(width: int, scale: float) -> Any:
    """`ROWS` rows of C = base + scale A B; C is neither A nor B."""

    @simd("float32", LANES)
    def horner(emit, base, ibase, a, ia, b, ib, c, ic):
        below = _matrix(emit, base, ibase, width)
        total = _add_product(emit, _entries(emit, a, ia, width), _matrix(emit, b, ib, width), width, width)
        for (i, j), vector in total.items():
            emit.store(c, emit.at(ic, i * width + j), emit.fma(vector, emit.constant(scale), below(i, j)), padded=True)

    return horner


def _pair(width: int) -> Any:
    """`ROWS` rows of C = A B + D E; C is none of them."""

    @simd("float32", LANES)
    def pair(emit, a, ia, b, ib, d, i_d, e, ie, c, ic):
        one = _add_product(emit, _entries(emit, a, ia, width), _matrix(emit, b, ib, width), width, width)
        total = _add_product(emit, _entries(emit, d, i_d, width), _matrix(emit, e, ie, width), width, width, below=one)
        _keep(emit, total, c, ic, width)

    return pair


def _advance(width: int, rank: int) -> Any:
    """`ROWS` rows i .. of C += Q M + dmoved^T value."""

    @simd("float32", LANES)
    def advance(emit, q, step, dmoved, value, i, c):
        start = emit.times(i, width)
        below = _matrix(emit, c, start, width)
        old = {(a, j): below(a, j) for a in range(ROWS) for j in range(0, width, LANES)}
        moved = _add_product(emit, _entries(emit, q, start, width), _matrix(emit, step, 0, width), width, width, below=old)

        def turned(a: int, k: int) -> Any:
            return emit.splat(dmoved, emit.at(i, k * width + a))

        _keep(emit, _add_product(emit, turned, _matrix(emit, value, 0, width), rank, width, below=moved), c, start, width)

    return advance


def _spread(size: int, count: int) -> Any:
    """out_k += sum_t weight_{t,k} part_t over a block: `ROWS` of the `count` rows k, 2 LANES of the `size` columns."""

    @simd("float32", LANES)
    def spread(emit, weights, k, parts, i, out, io):
        below = _matrix(emit, out, io, size)
        old = {(a, j): below(a, j) for a in range(ROWS) for j in (0, LANES)}

        def weight(a: int, t: int) -> Any:
            return emit.splat(weights, emit.at(k, t * count + a))

        total = _add_product(emit, weight, _matrix(emit, parts, i, size), BLOCK, 2 * LANES, below=old)
        _keep(emit, total, out, io, size)

    return spread


def build_forward(width: int, rank: int, front: bool, count: int, dense: int, degree: int, keep: bool) -> Any:
    """moved [T, rank, n, width]; with `keep` also the frames [n, T, width, width].

    Without `front` the signal itself is carried, and rank is one. Of the `count` generators those from `dense` on have a
    single entry at most. At degree zero the frames are not made but given.
    """
    size, rows, chunk, stride = width * width, min(rank, ROWS), CHUNK * LANES, ROWS * width
    turn, combine, fetch = _turn(width, rows), _combine(size, dense), _fetch(size)
    apply = _product(rank * width, width, rows=1)
    # Horner's rule from the inside: 1 / degree, .., 1 / 2, 1. Degrees one to three are in use.
    inmost, inner, outer = (_horner(width, scale) for scale in (1 / 3, 1 / 2, 1.0))

    def forward(operands, start, stop):
        signal, maps, coef, generators, moved, frame, length, near, apart = operands
        step, value = np.empty(size, np.float32), np.empty(rank * width, np.float32)
        deep, deeper = np.empty(size, np.float32), np.empty(size, np.float32)
        frames = frame if keep else np.empty(2 * size, np.float32)
        places = np.zeros(count, np.int64)
        for k in range(dense, count):
            for e in range(size):
                if generators[k * size + e] != 0:
                    places[k] = e
        for item in range(start, stop):
            base = item * length
            for t in range(length - 1, -1, -1):
                s = (base + t) * size if keep else t % 2 * size
                if keep:
                    fetch(frame, s - AHEAD * size)
                if degree and t == length - 1:
                    for e in range(size):
                        frames[s + e] = 1.0 if e % (width + 1) == 0 else 0.0
                if front:
                    apply(signal, (base + t) * width, maps, 0, value, 0)
                for j in range(0, rank, rows):
                    place = (t * rank + j) * apart + item * width
                    if front:
                        turn(value, j * width, frames, s, moved, place, apart, place - AHEAD * rank * apart)
                    else:
                        turn(signal, (base + t) * width, frames, s, moved, place, apart, place - AHEAD * rank * apart)
                if degree == 0:
                    continue
                if t == 0:
                    break
                before = s - size if keep else (t - 1) % 2 * size
                for i in range(0, size, chunk):
                    combine(coef, (base + t) * count, generators, i, step, i)
                for k in range(dense, count):
                    step[places[k]] += coef[(base + t) * count + k] * generators[k * size + places[k]]
                own = degree if t >= length - near else degree - 1
                if own == 3:
                    for i in range(0, size, stride):
                        inmost(frames, s + i, step, i, frames, s, deeper, i)
                    for i in range(0, size, stride):
                        inner(frames, s + i, step, i, deeper, 0, deep, i)
                elif own == 2:
                    for i in range(0, size, stride):
                        inner(frames, s + i, step, i, frames, s, deep, i)
                for i in range(0, size, stride):
                    if own == 1:
                        outer(frames, s + i, step, i, frames, s, frames, before + i)
                    else:
                        outer(frames, s + i, step, i, deep, 0, frames, before + i)

    return forward


def build_backward(width: int, rank: int, order: int, count: int, learned: bool) -> Any:
    """Gradients of the forward pass: dE [n, width, rank width] and, where `learned`, dG [n, padded, width, width] transposed.

    `padded` is `count` rounded up to a multiple of `ROWS`. The write vectors are [T, rank, order], dstate [n, order, width].
    """
    size, chunk, stride, wide = width * width, CHUNK * LANES, ROWS * width, rank * width
    padded = -(-count // ROWS) * ROWS
    apply, unwrite, turn_back = _product(wide, width, rows=1), _product(width, order), _turn_back(width, rank)
    combine, fetch, half, inner = _combine(size, count), _fetch(size), _product(width, width, scale=0.5), _horner(width, 0.5)
    product, pair, advance = _product(width, width), _pair(width), _advance(width, rank)
    spread_front, spread = _spread(wide, width), _spread(size, padded)

    def backward(operands, start, stop):
        signal, maps, write, coef, generators, frame, dstate, dmaps, dgenerators, length, near, _ = operands
        step, adjoint = np.empty(size, np.float32), np.empty(size, np.float32)
        shifted, moving = np.empty(size, np.float32), np.empty(size, np.float32)
        value, dmoved = np.empty(wide, np.float32), np.empty(wide, np.float32)
        # A block of positions: what is added up, and its weights.
        dvalues, signals = np.zeros(BLOCK * wide, np.float32), np.empty(BLOCK * width, np.float32)
        dsteps, weights = np.zeros(BLOCK * size, np.float32), np.empty(BLOCK * padded, np.float32)
        for item in range(start, stop):
            base = item * length
            dmaps[item * width * wide : (item + 1) * width * wide] = 0
            if learned:
                dgenerators[item * padded * size : (item + 1) * padded * size] = 0
            adjoint[:], shifted[:], step[:] = 0, 0, 0
            for t in range(length):
                s, slot = (base + t) * size, t % BLOCK
                if slot == 0:
                    # Positions that do not exist have no weight, and neither has the first right action: it acts on nothing.
                    signals[:], weights[:] = 0, 0
                fetch(frame, s + AHEAD * size)
                if learned and t > 0:
                    for i in range(0, size, chunk):
                        combine(coef, (base + t) * count, generators, i, step, i)
                for j in range(0, rank, ROWS):
                    unwrite(write, (t * rank + j) * order, dstate, item * order * width, dmoved, j * width)
                for q in range(0, width, 4):
                    turn_back(dmoved, frame, s + q * width, dvalues, slot * wide + q)
                for c in range(width):
                    signals[slot * width + c] = signal[(base + t) * width + c]
                if learned:
                    if 0 < t < length - near:
                        shifted[:] = adjoint
                        for i in range(0, size, stride):
                            product(frame, s + i, adjoint, 0, dsteps, slot * size + i)
                    elif t > 0:
                        for i in range(0, size, stride):
                            inner(adjoint, i, adjoint, i, step, 0, shifted, i)
                        for i in range(0, size, stride):
                            half(step, i, frame, s, moving, i)
                        for i in range(0, size, stride):
                            pair(frame, s + i, shifted, 0, moving, i, adjoint, 0, dsteps, slot * size + i)
                    if t > 0:
                        for k in range(count):
                            weights[slot * padded + k] = coef[(base + t) * count + k]
                    apply(signal, (base + t) * width, maps, 0, value, 0)
                    for i in range(0, width, ROWS):
                        advance(shifted, step, dmoved, value, i, adjoint)
                if slot == BLOCK - 1 or t == length - 1:
                    for c in range(0, width, ROWS):
                        for i in range(0, wide, 2 * LANES):
                            spread_front(signals, c, dvalues, i, dmaps, (item * width + c) * wide + i)
                    if learned:
                        for i in range(0, size, 2 * LANES):
                            for k in range(0, padded, ROWS):
                                spread(weights, k, dsteps, i, dgenerators, (item * padded + k) * size + i)

    return backward
