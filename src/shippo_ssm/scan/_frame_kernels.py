"""The moving frame inside a chunk of the backward pass (paper: Gauge equivalence), for the kernel of `_fused_kernels.py`.

With V_t = R_1 .. R_t since the chunk began, H_t = K_t V_t turns the recurrence into the one without a right action,

    K_t = L_t K_{t-1} + write_t (value_t V_t^{-1})^T,    y_t = (read_t^T K_t) V_t,

which leaves P x P products per position where H R and its gradients take N P^2 each. Rotations alone are run this way: there
V^{-1} = V^T without a solve, and a frame is as well conditioned as a state. Whether the right actions of a chunk are rotations
is found out before anything is moved (`entrance`): every |R_t|^2 is P, and the last V is orthogonal. The first allows no
|det R_t| above one, and the second no product of them below one, so that each R_t is a rotation. A norm sees a small stretch in
second order only, so what is carried into the frame is also carried back, and must be what it was.

Value, seen and dy are carried into the frame, dvalue and dseen out of it (`way_out`). The gradient of a right action is
V_{t-1}^T B_t V_t with B_t = (L_t K_{t-1})^T S_t, S the adjoint in the frame. B needs no sum over N: it changes at a position by
what is read out of the memory there and by what is written into it,

    B_t = B_{t+1} + y_t dy_t^T - seen_t dseen_t^T - value_t dvalue_t^T,      all of them in the frame,

from B = K^T S behind the last position of the chunk (`meeting`). Where a position forgets nearly everything, B would become
small by a difference of large numbers; it is summed over N anew, so that the gradient at a wiped memory is zero and not noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.engine import Emitter, Pointer, register_lanes, simd, simd_lanes, tile_columns

__all__ = ["FRAMED", "entrance", "frame_opener", "meeting", "way_out"]

# Widths at which it pays, as measured; not at P = 4, and not in the forward pass, where one N P^2 is saved for one P^3.
FRAMED = (8, 16)
# Roundings by which right actions may differ from rotations.
_SLACK = 64
# The mean decay below which a position forgets nearly everything.
_FORGETS = 1 / 16
# Rows that are written out inside a product.
_STRIP = 4


class Frame(NamedTuple):
    """Scratch of one chunk: V before every position and behind the last [position, group, P, P]; value, seen, dy, y, dvalue and
    dseen in the frame [position, group, r P]; B [group, P, P]; a product [P, P]; how far from rotations a group is, [group];
    squares of what is carried into the frame, and of what is lost on the way back, [group]; what a position keeps [1]."""

    turns: Any
    value: Any
    seen: Any
    dy: Any
    y: Any
    dvalue: Any
    dseen: Any
    meeting: Any
    product: Any
    slack: Any
    carried: Any
    lost: Any
    kept: Any


def frame_opener(case: Any) -> Any:
    """open_frame(block): the scratch for chunks of `block` groups, V = I before the first position; empty where not framed."""
    from numba import njit

    chunk, width, rank, framed = case.chunk, case.width, case.rank, case.framed
    area, sources, element = width * width, width * rank, np.dtype(case.dtype).type

    @njit(inline="always")
    def open_frame(block):
        groups = block if framed else 0
        tokens = groups * chunk
        turns = np.zeros((tokens + groups) * area, element)
        for i in range(groups * width):
            turns[i // width * area + i % width * (width + 1)] = 1
        return Frame(
            turns,
            np.empty(tokens * sources, element),
            np.empty(tokens * sources, element),
            np.empty(tokens * width, element),
            np.empty(tokens * width, element),
            np.empty(tokens * sources, element),
            np.empty(tokens * sources, element),
            np.empty(groups * area, element),
            np.empty(area, element),
            np.empty(block, element),
            np.empty(block, element),
            np.empty(block, element),
            np.empty(1, element),
        )

    return open_frame


def entrance(case: Any) -> Any:
    """enter_frame(frame, turning, recurrence, dy, u, length, groups, count, block): carry a chunk into the frame.

    Its first token is `u`. A group that was `turning` and has a right action that is no rotation is not from here on.
    """
    from numba import njit

    width, rank = case.width, case.rank
    area, limit = width * width, float((_SLACK * np.finfo(case.dtype).eps) ** 2)

    @simd(case.dtype, width, shared=True)
    def enter(emit: Emitter, frame: Frame, s: Any, later: Any, g: Any, recurrence: Any, u: Any, dy: Pointer) -> None:
        moves, here = emit.times(u, area), emit.times(later, area)
        _multiply(emit, frame.turns, emit.times(s, area), recurrence.right, moves, frame.turns, here, width)
        rows = load_rows(emit, recurrence.right, moves, width)
        off = emit.sub(emit.total(emit.dot(rows, rows)), emit.constant(width))
        emit.store_first(frame.slack, g, emit.fma(off, off, emit.splat(frame.slack, g)))
        rows = load_rows(emit, frame.turns, here, width)
        carried = [(recurrence.value, frame.value, rank), (dy, frame.dy, 1)]
        carried += [(recurrence.seen, frame.seen, rank)] * case.has_seen
        for outside, inside, count in carried:
            for r, line in enumerate(load_rows(emit, outside, emit.times(u, count * width), count, width)):
                at = emit.at(emit.times(s, count * width), r * width)
                emit.store_sums(inside, at, [emit.mul(row, line) for row in rows])
                off = emit.sub(emit.dot([emit.splat(inside, emit.at(at, i)) for i in range(width)], rows), line)
                for sums, vector in ((frame.carried, line), (frame.lost, off)):
                    squares = emit.total(emit.mul(vector, vector))
                    emit.store_first(sums, g, emit.add(squares, emit.splat(sums, g)))

    @simd(case.dtype, width, shared=True)
    def settle(emit: Emitter, frame: Frame, last: Any, g: Any) -> None:
        turn, total = emit.times(last, area), emit.variable()
        for i in emit.each(width):
            column = [emit.splat(frame.turns, emit.at(turn, i, k * width)) for k in range(width)]
            # V is I before the first position.
            one = emit.load(frame.turns, emit.at(emit.times(g, area), emit.times(i, width)), padded=True)
            off = emit.sub(emit.dot(column, load_rows(emit, frame.turns, turn, width)), one)
            total.set(emit.fma(off, off, total.get()))
        emit.store_first(frame.slack, g, emit.add(emit.total(total.get()), emit.splat(frame.slack, g)))

    @njit(inline="always")
    def enter_frame(frame, turning, recurrence, dy, u, length, groups, count, block):
        frame.slack[:] = 0
        frame.carried[:] = 0
        frame.lost[:] = 0
        for t in range(length):
            for g in range(count):
                if turning[g]:
                    s = t * block + g
                    enter(frame, s, s + block, g, recurrence, u + t * groups + g, dy)
        for g in range(count):
            if turning[g]:
                settle(frame, length * block + g, g)
                turning[g] = frame.slack[g] <= limit and frame.lost[g] <= limit * frame.carried[g]

    return enter_frame


def meeting(case: Any) -> tuple[Any, Any, Any]:
    """Three traces for one group.

    turn_adjoint(frame, s, adjoint, q)            the adjoint behind a chunk into the frame, S V^T
    meet(frame, g, states, old, adjoint, q)       B = K^T S
    keep(frame, decays, a)                        what a position keeps: its mean decay, over the one at which it forgets
    """
    dtype, order, width, row = case.dtype, case.order, case.width, case.row
    lanes = min(simd_lanes(dtype, order), register_lanes(dtype))

    @simd(dtype, lanes, shared=True)
    def turn_adjoint(emit: Emitter, frame: Frame, s: Any, adjoint: Pointer, q: Any) -> None:
        matrix = emit.times(s, width * width)
        for n in emit.blocks(order):
            rows = load_rows(emit, adjoint, emit.at(q, n), width, row)
            for p in emit.each(width):
                line = emit.at(matrix, emit.times(p, width))
                moved = emit.dot([emit.splat(frame.turns, emit.at(line, k)) for k in range(width)], rows)
                emit.store(adjoint, emit.at(q, n, emit.times(p, row)), moved, padded=True)

    @simd(dtype, lanes, shared=True)
    def meet(emit: Emitter, frame: Frame, g: Any, states: Pointer, old: Any, adjoint: Pointer, q: Any) -> None:
        for i in emit.each(width):
            for j, count in emit.strips(width, tile_columns(dtype, lanes)):
                sums = [emit.variable() for _ in range(count)]
                for n in emit.blocks(order):
                    state = emit.load(states, emit.at(old, n, emit.times(i, row)), padded=True)
                    columns = load_rows(emit, adjoint, emit.at(q, n, emit.times(j, row)), count, row)
                    for total, column in zip(sums, columns):
                        total.set(emit.fma(state, column, total.get()))
                at = emit.at(emit.times(g, width * width), emit.times(i, width), j)
                emit.store_sums(frame.meeting, at, [total.get() for total in sums])

    @simd(dtype, lanes, shared=True)
    def keep(emit: Emitter, frame: Frame, decays: Pointer, a: Any) -> None:
        total = emit.variable()
        for n in emit.blocks(order):
            total.set(emit.add(emit.load(decays, emit.at(a, n)), total.get()))
        emit.store_sums(frame.kept, 0, [emit.mul(total.get(), emit.constant(1 / (order * _FORGETS)))])

    return turn_adjoint, meet, keep


def way_out(case: Any) -> tuple[Any, Any]:
    """Two traces for one position and group.

    leave(frame, s, later, g, dvalue, dseen, u)   the gradients of its sources out of the frame, and B
    turn_back(frame, s, later, g, dright, u)      the gradient of its right action
    """
    dtype, width, rank, has_seen = case.dtype, case.width, case.rank, case.has_seen
    area = width * width

    @simd(dtype, width, shared=True)
    def leave(emit: Emitter, frame: Frame, s: Any, later: Any, g: Any, dvalue: Pointer, dseen: Pointer, u: Any) -> None:
        answer, sources, outside = emit.times(s, width), emit.times(s, rank * width), emit.times(u, rank * width)
        turns = load_rows(emit, frame.turns, emit.times(later, area), width)
        pairs = [(frame.value, frame.dvalue, dvalue)] + [(frame.seen, frame.dseen, dseen)] * has_seen
        for _, inside, out in pairs:
            for r in range(rank):
                line = emit.dot([emit.splat(inside, emit.at(sources, r * width + i)) for i in range(width)], turns)
                emit.store(out, emit.at(outside, r * width), line, padded=True)
        dy, b = emit.load(frame.dy, answer, padded=True), emit.times(g, area)
        gradients = [(source, load_rows(emit, inside, sources, rank, width)) for source, inside, _ in pairs]
        for i, row in enumerate(load_rows(emit, frame.meeting, b, width)):
            row = emit.fma(emit.splat(frame.y, emit.at(answer, i)), dy, row)
            for source, lines in gradients:
                for r, line in enumerate(lines):
                    row = emit.sub(row, emit.mul(emit.splat(source, emit.at(sources, r * width + i)), line))
            emit.store(frame.meeting, emit.at(b, i * width), row, padded=True)

    @simd(dtype, width, shared=True)
    def turn_back(emit: Emitter, frame: Frame, s: Any, later: Any, g: Any, dright: Pointer, u: Any) -> None:
        before, here, b, moves = (emit.times(index, area) for index in (s, later, g, u))
        _multiply(emit, frame.meeting, b, frame.turns, here, frame.product, 0, width)
        _multiply(emit, frame.turns, before, frame.product, 0, dright, moves, width, transposed=True, streamed=case.streamed)

    return leave, turn_back


def load_rows(emit: Emitter, array: Pointer, start: Any, count: int, row: int | None = None) -> list[Any]:
    """`count` vectors, one every `row` numbers from `start` on; one behind another by default."""
    return [emit.load(array, emit.at(start, i * (row or emit.lanes)), padded=True) for i in range(count)]


def _multiply(
    emit: Emitter,
    left: Pointer,
    a: Any,
    right: Pointer,
    b: Any,
    out: Pointer,
    c: Any,
    width: int,
    *,
    transposed: bool = False,
    streamed: bool = False,
) -> None:
    """out = left right, or left^T right: P x P matrices that begin at a, b and c, a row of `right` to a vector."""

    def row_of(k: Any) -> Any:
        return emit.load(right, emit.at(b, emit.times(k, width)), padded=True)

    for i, count in emit.strips(width, tile_columns(emit.dtype, emit.lanes)):

        def entry_of(k: Any, j: int, i: Any = i) -> Any:
            place = emit.at(i, j)
            return emit.splat(
                left, emit.at(a, *((emit.times(k, width), place) if transposed else (emit.times(place, width), k)))
            )

        for j, row in enumerate(sum_rows(emit, width, count, row_of, entry_of)):
            emit.store(out, emit.at(c, emit.times(emit.at(i, j), width)), row, padded=True, streamed=streamed)


def sum_rows(
    emit: Emitter, width: int, count: int, row_of: Callable[[Any], Any], entry_of: Callable[[Any, int], Any]
) -> list[Any]:
    """sum_k entry_of(k, j) row_of(k), k < P, for j < `count`: a run-time loop, since what is written out has to be compiled."""
    sums = [emit.variable() for _ in range(count)]
    for start, several in emit.strips(width, _STRIP):
        for k in (emit.at(start, i) for i in range(several)):
            row = row_of(k)
            for j, total in enumerate(sums):
                total.set(emit.fma(entry_of(k, j), row, total.get()))
    return [total.get() for total in sums]
