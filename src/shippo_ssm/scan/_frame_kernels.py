"""The moving frame inside a chunk (paper: Gauge equivalence), as traces for the kernels of `_fused_kernels.py`.

With V_t = R_1 .. R_t since the chunk began, H_t = K_t V_t turns the recurrence into the one without a right action,

    K_t = L_t K_{t-1} + write_t (value_t V_t^{-1})^T,    y_t = (read_t^T K_t) V_t,

which leaves P x P products per position where H R and its gradients take N P^2 each. Rotations alone are run this way: there
V^{-1} = V^T without a solve, and a frame is as well conditioned as a state. Whether the right actions of a chunk are
rotations is found out before anything is moved (`_settle`): every |R_t|^2 is P, and the last V is orthogonal. The first
allows no |det R_t| above one, and the second no product of them below one, so that each R_t is a rotation.

Carried into the frame (`_enter`) are value, seen and, in the backward pass, dy; carried out of it (`_leave`) are y, or dvalue
and dseen. The gradient of a right action is V_{t-1}^T B_t V_t with B_t = (L_t K_{t-1})^T S_t, S the adjoint in the frame. B needs
no sum over N: what a position reads out of the memory and writes into it is all by which B changes there (`_turn_back`),

    B_t = B_{t+1} + y_t dy_t^T - seen_t dseen_t^T - value_t dvalue_t^T,      all of them in the frame,

from B = K^T S behind the last position of the chunk (`_meet`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.engine import Emitter, Pointer, register_lanes, simd, simd_lanes, tile_columns

__all__ = ["Frame", "enter", "leave", "meet", "regauge", "settle", "slack_limit", "turn_back"]

# Widths whose rows are whole vectors.
FRAMED = (4, 8, 16)


class Frame(NamedTuple):
    """Scratch of one chunk: V before every position and behind the last [position, group, P, P]; value, seen and dy, then y,
    dvalue and dseen in the frame [position, group, r P]; B [group, P, P] and a product; how far from rotations, [group]."""

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


def slack_limit(dtype: str) -> float:
    """The largest slack of a group whose right actions count as rotations: 64 roundings."""
    return float((64 * np.finfo(dtype).eps) ** 2)


def enter(case: Any, replays: bool) -> Any:
    """V_t of one position and group from the one before, and what is carried into its frame."""
    width, rank = case.width, case.rank

    @simd(case.dtype, width)
    def enter(emit: Emitter, frame: Frame, s: Any, later: Any, g: Any, recurrence: Any, u: Any, dy: Pointer) -> None:
        before, here = emit.times(s, width * width), emit.times(later, width * width)
        moved = emit.times(u, width * width)
        _multiply(emit, frame.turns, before, recurrence.right, moved, frame.turns, here, width)
        rows = [emit.load(recurrence.right, emit.at(moved, k * width), padded=True) for k in range(width)]
        off = emit.sub(emit.total(emit.dot(rows, rows)), emit.constant(width))
        emit.store_first(frame.slack, g, emit.fma(off, off, emit.splat(frame.slack, g)))
        rows = [emit.load(frame.turns, emit.at(here, i * width), padded=True) for i in range(width)]
        carried = [(recurrence.value, frame.value, rank)]
        carried += [(recurrence.seen, frame.seen, rank)] * case.has_seen + [(dy, frame.dy, 1)] * replays
        for outside, inside, count in carried:
            for r in range(count):
                line = emit.load(outside, emit.at(emit.times(u, count * width), r * width), padded=True)
                at = emit.at(emit.times(s, count * width), r * width)
                emit.store_sums(inside, at, [emit.mul(row, line) for row in rows])

    return enter


def settle(case: Any) -> Any:
    """|V^T V - I|^2 of the last V of a group, into its slack."""
    width = case.width

    @simd(case.dtype, width)
    def settle(emit: Emitter, frame: Frame, s: Any, g: Any) -> None:
        last = emit.times(s, width * width)
        _multiply(emit, frame.turns, last, frame.turns, last, frame.product, 0, width, transposed=True)
        off = [emit.sub(emit.load(frame.product, j * width, padded=True), emit.unit(j)) for j in range(width)]
        emit.store_first(frame.slack, g, emit.add(emit.total(emit.dot(off, off)), emit.splat(frame.slack, g)))

    return settle


def leave(case: Any, count: int) -> Any:
    """`count` rows of one position and group out of the frame: inside V_t."""
    width = case.width

    @simd(case.dtype, width)
    def leave(emit: Emitter, frame: Frame, inside: Pointer, s: Any, later: Any, outside: Pointer, u: Any) -> None:
        here = emit.times(later, width * width)
        rows = [emit.load(frame.turns, emit.at(here, i * width), padded=True) for i in range(width)]
        for r in range(count):
            at = emit.at(emit.times(s, count * width), r * width)
            line = emit.dot([emit.splat(inside, emit.at(at, i)) for i in range(width)], rows)
            emit.store(outside, emit.at(emit.times(u, count * width), r * width), line, padded=True)

    return leave


def turn_back(case: Any) -> Any:
    """B_t of one position and group from B_{t+1}, and dright_t = V_{t-1}^T B_t V_t."""
    width, rank, streamed = case.width, case.rank, case.streamed

    @simd(case.dtype, width)
    def turn_back(emit: Emitter, frame: Frame, s: Any, later: Any, g: Any, dright: Pointer, u: Any) -> None:
        area = width * width
        b, sources = emit.times(g, area), emit.times(s, rank * width)
        pairs = [(frame.value, frame.dvalue, emit.at(sources, r * width)) for r in range(rank)]
        pairs += [(frame.seen, frame.dseen, emit.at(sources, r * width)) for r in range(rank * case.has_seen)]
        answer = emit.times(s, width)
        dy = emit.load(frame.dy, answer, padded=True)
        gradients = [emit.load(gradient, at, padded=True) for _, gradient, at in pairs]
        for i in range(width):
            row = emit.load(frame.meeting, emit.at(b, i * width), padded=True)
            row = emit.fma(emit.splat(frame.y, emit.at(answer, i)), dy, row)
            for (source, _, at), gradient in zip(pairs, gradients):
                row = emit.sub(row, emit.mul(emit.splat(source, emit.at(at, i)), gradient))
            emit.store(frame.meeting, emit.at(b, i * width), row, padded=True)
        here, before = emit.times(later, area), emit.times(s, area)
        _multiply(emit, frame.meeting, b, frame.turns, here, frame.product, 0, width)
        out = emit.times(u, area)
        _multiply(
            emit, frame.turns, before, frame.product, 0, dright, out, width, transposed=True, streamed=streamed and width > 4
        )

    return turn_back


def regauge(case: Any, *, back: bool) -> Any:
    """A state at the end of a chunk out of the frame, K V, or its adjoint into it, S V^T."""
    width, row = case.width, case.row

    @simd(case.dtype, min(simd_lanes(case.dtype, case.order), register_lanes(case.dtype)))
    def regauge(emit: Emitter, states: Pointer, q: Any, frame: Frame, s: Any) -> None:
        matrix = emit.times(s, width * width)
        for n in emit.blocks(case.order):
            rows = [emit.load(states, emit.at(q, n, p * row), padded=True) for p in range(width)]
            for p in range(width):
                entries = [emit.at(matrix, p * width + k if back else k * width + p) for k in range(width)]
                moved = emit.dot([emit.splat(frame.turns, entry) for entry in entries], rows)
                emit.store(states, emit.at(q, n, p * row), moved, padded=True)

    return regauge


def meet(case: Any) -> Any:
    """B = K^T S of one group, from its state and adjoint behind the last position of a chunk."""
    width, row = case.width, case.row
    lanes = min(simd_lanes(case.dtype, case.order), register_lanes(case.dtype))

    @simd(case.dtype, lanes)
    def meet(emit: Emitter, states: Pointer, old: Any, adjoint: Pointer, q: Any, frame: Frame, g: Any) -> None:
        for i in emit.each(width):
            for j, count in emit.strips(width, tile_columns(case.dtype, lanes)):
                sums = [emit.variable() for _ in range(count)]
                for n in emit.blocks(case.order):
                    state = emit.load(states, emit.at(old, n, emit.times(i, row)), padded=True)
                    for c, total in enumerate(sums):
                        column = emit.load(adjoint, emit.at(q, n, emit.times(emit.at(j, c), row)), padded=True)
                        total.set(emit.fma(state, column, total.get()))
                at = emit.at(emit.times(g, width * width), emit.times(i, width), j)
                emit.store_sums(frame.meeting, at, [total.get() for total in sums])

    return meet


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
    for i, count in emit.strips(width, tile_columns(emit.dtype, emit.lanes)):
        sums: list[Any] = [None] * count
        for k in range(width):
            row = emit.load(right, emit.at(b, k * width), padded=True)
            for j in range(count):
                place = emit.at(i, j)
                entry = emit.at(a, k * width, place) if transposed else emit.at(a, emit.times(place, width), k)
                factor = emit.splat(left, entry)
                sums[j] = emit.mul(factor, row) if k == 0 else emit.fma(factor, row, sums[j])
        for j, row in enumerate(sums):
            emit.store(out, emit.at(c, emit.times(emit.at(i, j), width)), row, padded=True, streamed=streamed)
