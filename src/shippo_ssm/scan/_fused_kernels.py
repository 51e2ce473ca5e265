"""The scan and its adjoint as machine code: time outside, groups inside, the state order N along the vector lanes.

Everything is flat. Token `u` of the kernel is one (position, group) pair, the row t G + g of every operand; a batch is B
sequences of T positions one after another, so a dense batch and packed sequences are the same thing, told apart by
`bounds`. A work item is one sequence and one block of neighbouring groups.

Forward: for each position, for each group of the block, with the state H [P][N] in a scratch that stays in cache,

    M = exp(step drift) * (H right),    H <- M + write value^T,    y = read^T H,

and the state before every chunk of positions goes to `checkpoints` when those are asked for. With `seen`, y is
read^T M + (read . write) seen: it then does not depend on `value`, not even in its last bit.

H right is computed in tiles of a few columns, so that the sums of a tile stay in registers (`tile_columns`). Up to that width
it is one tile, and the new state takes the place of the old one.

Backward: chunks from the last to the first. The states of a chunk are computed again from its checkpoint into a
scratch, and dread = H dy with them; then, positions backwards, with the adjoint S = dLoss/dH in the same layout,

    S <- S + read dy^T;   dwrite = S value;   dvalue = S^T write;   M = exp(step drift) * S;
    dright = H_old^T M;   S <- M right^T;   q = sum_p H_old S;   dstep = sum_n q drift;   ddrift = q step.

With `seen`, dwrite and dvalue take the S from before read dy^T was added, and c = dy . seen gives the rest:

    dread = (H - write value^T) dy + c write;   dwrite = S value + c read;   dseen = (read . write) dy.

Chunks of rotations in wide groups are run back in a moving frame instead, where there is no right action and these traces are
those of `has_right=False` (`_frame_kernels.py`).

The gradient with respect to step drift is q = <H_old, S> rather than <H - write value^T, S_new>: the same number
without a cancellation, hence exactly zero where the memory was wiped.

Summary: what a segment does to any state that enters it, H -> left H right + update, without a pass over its states. From the
last position to the first, with D the decay and W the product of the right actions behind the position,

    update <- update + (D * write) (value^T W);    W <- right W;    D <- exp(step drift) * D,

which costs N P + P^3 multiplications per position where the recurrence itself costs N P^2, and ends for a group whose D is all
zero: nothing older is left there, and `right`, then the product so far, is multiplied by zero.

The mirrored form is the adjoint's,
S_{t-1} = L_t (S_t + read_t dy_t^T) R_t^T: from the first position to the last, with dy for value and read for write,

    W <- right^T W;    D <- exp(step drift) * D;    update <- update + (D * read) (dy^T W).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.engine import Emitter, Pointer, register_lanes, simd, simd_lanes, tile_columns, transposed
from shippo_ssm.scan._frame_kernels import entrance, frame_opener, load_rows, meeting, sum_rows, way_out
from shippo_ssm.scan.algebra import Recurrence

__all__ = [
    "SIDE",
    "Backward",
    "Case",
    "Forward",
    "Items",
    "Summary",
    "build_backward",
    "build_forward",
    "build_summary",
    "padded_order",
]


# Tokens of a block between a prefetch and its use: few enough that what is fetched still lies in the first cache.
PREFETCH = 16
# Positions after which a summary looks anew whether a group has forgotten everything.
LOOK = 64
# Rows and columns of the blocks in which a matrix is transposed.
SIDE = 8
# A `Recurrence` as traces see it: every field is a `Pointer`.
Pointers = Any


class Case(NamedTuple):
    """What machine code is made for: sizes and kinds of operands."""

    dtype: str
    order: int
    width: int
    rank: int
    has_right: bool
    has_seen: bool
    varying: bool
    """Whether the drift varies in time."""
    chunk: int
    """Positions between two kept states."""
    row: int
    """`padded_order`."""
    streamed: bool = False
    """Whether gradients go past the caches."""
    framed: bool = False
    """Whether chunks of rotations are run in the moving frame (`_frame_kernels.py`)."""


class Items(NamedTuple):
    """Work items, each one sequence and one block of groups."""

    bounds: Any
    """[sequences + 1] first position of each sequence."""
    first_chunk: Any
    """[sequences] first chunk of each sequence."""
    groups: int
    block: int
    """Groups of one item."""


class Forward(NamedTuple):
    """Operands of the forward kernel; `checkpoints` [chunks, G, P, row] is empty where no state is kept."""

    items: Items
    recurrence: Recurrence
    initial_state: Any
    y: Any
    final_state: Any
    checkpoints: Any


class Backward(NamedTuple):
    """Operands of the backward kernel; the gradient of a constant drift is one partial [G, N] per sequence."""

    items: Items
    recurrence: Recurrence
    checkpoints: Any
    dy: Any
    dfinal: Any
    gradient: Recurrence
    dinitial: Any


class Summary(NamedTuple):
    """Operands of the summary kernel; of the record it reads value, write, step, drift and right."""

    items: Items
    recurrence: Recurrence
    left: Any
    right: Any
    update: Any


class Behind(NamedTuple):
    """Scratch of the summary: update [group, P, row], D [group, row], W [group, P, wide], value^T W [group, r, wide]."""

    update: Any
    decay: Any
    frame: Any
    framed: Any


class Chunk(NamedTuple):
    """Scratch: states [position, group, P, row], decays [position, group, row] and, of operands in bfloat16, numbers that are
    splat one by one, [position, group, P P + r P + P] (right, value, dy), of one chunk or one position."""

    states: Any
    decays: Any
    numbers: Any


class Adjoint(NamedTuple):
    """Scratch of the backward pass: dLoss/dH [group, P, row], M = decay dLoss/dH of one group as [P, row] and again as [N, P],
    and ddrift [group, row] of a chunk."""

    state: Any
    moved: Any
    slopes: Any


class Place(NamedTuple):
    """Where one position of one group stands: token of the operands, row of value, seen and dy (the token, but in a frame),
    drift row, old state, decay, numbers, adjoint, slope."""

    u: Any
    v: Any
    d: Any
    old: Any
    a: Any
    z: Any
    s: Any
    k: Any


def padded_order(dtype: str, order: int) -> int:
    """N rounded up to whole vectors: the row length of states in scratch and checkpoints."""
    lanes = simd_lanes(dtype, order)
    return -(-order // lanes) * lanes


def build_forward(case: Case) -> Any:
    """The forward kernel: y, the final states and, unless `checkpoints` is empty, the state before every chunk."""
    advance, prepare, many = _advance(case, answers=True, replays=False), _prepare(case, replays=False), num_numbers(case)
    order, width, row, chunk, varying = case.order, case.width, case.row, case.chunk, case.varying
    tiled = width > tile_columns(case.dtype, simd_lanes(case.dtype, order))
    size, copy = width * row, _copy(case)
    element = np.dtype(case.dtype).type

    def forward(operands, start, stop):
        (bounds, first_chunk, groups, block), recurrence, initial, y, final, checkpoints = operands
        num_blocks = (groups + block - 1) // block
        # A product of several tiles writes a new state beside the old one; a single tile puts it in its place.
        other = block * size if tiled else 0
        states = np.empty(block * size + other, element)
        decays = np.empty(block * row, element)
        scratch = Chunk(states, decays, np.empty(block * many, element))
        for item in range(start, stop):
            sequence, first = item // num_blocks, item % num_blocks * block
            count = min(block, groups - first)
            skip = groups - count
            begin, end = bounds[sequence], bounds[sequence + 1]
            corner = (sequence * groups + first) * order * width
            states[:] = 0
            if initial.size:
                for g in range(count):
                    for n in range(order):
                        for p in range(width):
                            states[g * size + p * row + n] = initial[corner + (g * order + n) * width + p]
            old, new = 0, other
            for low in range(begin, end, chunk):
                if checkpoints.size:
                    kept = ((first_chunk[sequence] + (low - begin) // chunk) * groups + first) * size
                    copy(states, old, checkpoints, kept, count * size)
                for t in range(low, min(low + chunk, end)):
                    u = t * groups + first
                    for g in range(count):
                        d = u + g if varying else first + g
                        prepare(scratch, g * row, g * many, recurrence, y, recurrence, u + g, d, groups)
                    for g in range(count):
                        ahead = PREFETCH if g + PREFETCH < count else PREFETCH + skip
                        h, k = old + g * size, new + g * size
                        advance(scratch, h, k, g * row, g * many, recurrence, u + g, u + g, ahead, y, y, y)
                    old, new = new, old
            for g in range(count):
                for n in range(order):
                    for p in range(width):
                        final[corner + (g * order + n) * width + p] = states[old + g * size + p * row + n]

    return forward


def build_backward(case: Case) -> Any:
    """The backward kernel: gradients of every operand; a constant drift's is left as one partial per sequence."""
    advance, retreat = _advance(case, answers=False, replays=True), _retreat(case)
    prepare, many = _prepare(case, replays=True), num_numbers(case)
    plain = case._replace(has_right=False)
    glide, glide_back = _advance(plain, answers=True, replays=True), _retreat(plain)
    open_frame, enter_frame = frame_opener(case), entrance(case)
    (turn_adjoint, meet, keep), (leave, turn_back) = meeting(case), way_out(case)
    order, width, row, chunk, varying, framed = case.order, case.width, case.row, case.chunk, case.varying, case.framed
    size, copy = width * row, _copy(case)
    element = np.dtype(case.dtype).type

    def backward(operands, start, stop):
        (bounds, first_chunk, groups, block), recurrence, checkpoints, dy, dfinal, gradient, dinitial = operands
        num_blocks = (groups + block - 1) // block
        states = np.empty((chunk + 1) * block * size, element)
        decays = np.empty(chunk * block * row, element)
        adjoint = np.empty(block * size, element)
        slopes = np.empty(block * row, element)
        scratch = Chunk(states, decays, np.empty(chunk * block * many, element))
        adjoints = Adjoint(adjoint, np.empty(2 * size, element), slopes)
        frame, turning = open_frame(block), np.zeros(block, np.bool_)
        _, write, read, step, drift, right, _ = recurrence
        inside = Recurrence(frame.value, write, read, step, drift, right, frame.seen)
        dvalue, dwrite, dread, dstep, ddrift, dright, dseen = gradient
        dinside = Recurrence(frame.dvalue, dwrite, dread, dstep, ddrift, dright, frame.dseen)
        for item in range(start, stop):
            sequence, first = item // num_blocks, item % num_blocks * block
            count = min(block, groups - first)
            skip = groups - count
            begin, end = bounds[sequence], bounds[sequence + 1]
            corner = (sequence * groups + first) * order * width
            turning[:] = framed
            adjoint[:] = 0
            if dfinal.size:
                for g in range(count):
                    for n in range(order):
                        for p in range(width):
                            adjoint[g * size + p * row + n] = dfinal[corner + (g * order + n) * width + p]
            for k in range((end - begin + chunk - 1) // chunk - 1, -1, -1):
                low, high = begin + k * chunk, min(begin + k * chunk + chunk, end)
                kept = ((first_chunk[sequence] + k) * groups + first) * size
                copy(checkpoints, kept, states, 0, count * size)
                if framed:
                    enter_frame(frame, turning, recurrence, dy, low * groups + first, high - low, groups, count, block)
                for t in range(low, high):
                    u, s = t * groups + first, (t - low) * block
                    for g in range(count):
                        d = u + g if varying else first + g
                        prepare(scratch, (s + g) * row, (s + g) * many, recurrence, dy, gradient, u + g, d, groups)
                    for g in range(count):
                        ahead = PREFETCH if g + PREFETCH < count else PREFETCH + skip
                        old, new, a, z = (s + g) * size, (s + g + block) * size, (s + g) * row, (s + g) * many
                        if framed and turning[g]:
                            glide(scratch, old, new, a, z, inside, u + g, s + g, ahead, frame.y, frame.dy, dread)
                        else:
                            advance(scratch, old, new, a, z, recurrence, u + g, u + g, ahead, dy, dy, dread)
                for g in range(count):
                    if framed and turning[g]:
                        s = (high - low) * block + g
                        turn_adjoint(frame, s, adjoint, g * size)
                        meet(frame, g, states, s * size, adjoint, g * size)
                # A chunk's share of the drift gradient is summed apart, so that long sequences lose no digits.
                slopes[:] = 0
                for t in range(high - 1, low - 1, -1):
                    for g in range(count):
                        u = t * groups + first + g
                        s = (t - low) * block + g
                        d = u if varying else first + g
                        v = s if framed and turning[g] else u
                        place = Place(u=u, v=v, d=d, old=s * size, a=s * row, z=s * many, s=g * size, k=g * row)
                        if framed and turning[g]:
                            glide_back(place, scratch, adjoints, inside, frame.dy, dinside)
                            leave(frame, s, s + block, g, dvalue, dseen, u)
                            keep(frame, decays, s * row)
                            if frame.kept[0] < 1:
                                meet(frame, g, states, s * size, adjoint, g * size)
                            turn_back(frame, s, s + block, g, dright, u)
                        else:
                            retreat(place, scratch, adjoints, recurrence, dy, gradient)
                if not varying:
                    for g in range(count):
                        for n in range(order):
                            ddrift[(sequence * groups + first + g) * order + n] += slopes[g * row + n]
            if dinitial.size:
                for g in range(count):
                    for n in range(order):
                        for p in range(width):
                            dinitial[corner + (g * order + n) * width + p] = adjoint[g * size + p * row + n]

    return backward


def build_summary(case: Case, mirrored: bool) -> Any:
    """The summary kernel: the `Affine` of every sequence and group, or of its adjoint where `mirrored`."""
    # Positions that a trace unrolls, with D, W and the update in registers; fewer where the code would grow long.
    many = 8 if case.width <= 4 else 4 if case.width <= 8 else 1
    turn_many, gather_many = _turn(case, mirrored, many), _gather(case, mirrored, many)
    turn, gather = _turn(case, mirrored, 1), _gather(case, mirrored, 1)
    order, width, rank, row, varying, has_right = case.order, case.width, case.rank, case.row, case.varying, case.has_right
    size, wide = width * row, padded_order("float64", width)
    element = np.dtype(case.dtype).type

    def summary(operands, start, stop):
        (bounds, _, groups, block), recurrence, left, right, update = operands
        num_blocks = (groups + block - 1) // block
        stride = groups if mirrored else -groups
        states, decays = np.empty(block * size, element), np.empty(block * row, element)
        frames, framed = np.empty(block * width * wide, np.float64), np.empty(block * many * rank * wide, element)
        behind = Behind(states, decays, frames, framed)
        alive = np.empty(block, np.bool_)
        for item in range(start, stop):
            sequence, first = item // num_blocks, item % num_blocks * block
            count = min(block, groups - first)
            begin, end = bounds[sequence], bounds[sequence + 1]
            states[:] = 0
            decays[:] = 1
            frames[:] = 0
            for g in range(count):
                for p in range(width):
                    frames[(g * width + p) * wide + p] = 1
            done = 0
            while done < end - begin:
                if done % LOOK == 0:
                    left_over = False
                    for g in range(count):
                        alive[g] = np.any(decays[g * row : g * row + order] != 0)
                        left_over = left_over or alive[g]
                    if not left_over:
                        break
                u = (begin + done if mirrored else end - 1 - done) * groups + first
                whole = end - begin - done >= many
                for g in range(count):
                    if not alive[g]:
                        continue
                    w, x = g * width * wide, g * many * rank * wide
                    d = u + g if varying else first + g
                    if whole:
                        if has_right:
                            turn_many(behind, w, x, recurrence, u + g, stride)
                        gather_many(behind, g * size, g * row, x, recurrence, u + g, d, stride)
                    else:
                        if has_right:
                            turn(behind, w, x, recurrence, u + g, stride)
                        gather(behind, g * size, g * row, x, recurrence, u + g, d, stride)
                done += many if whole else 1
            for g in range(count):
                corner = sequence * groups + first + g
                for n in range(order):
                    left[corner * order + n] = decays[g * row + n]
                    for p in range(width):
                        update[(corner * order + n) * width + p] = states[g * size + p * row + n]
                if has_right:
                    for p in range(width):
                        for q in range(width):
                            right[(corner * width + p) * width + q] = frames[(g * width + p) * wide + q]

    return summary


def num_numbers(case: Case) -> int:
    """Numbers of one position and group that are splat one by one: right, value and dy."""
    return case.width * (case.width + case.rank + 1)


def _copy(case: Case) -> Any:
    """Numbers of one array to another: the copy of a slice takes Numba four seconds to compile where it is the first."""

    @simd(case.dtype, simd_lanes(case.dtype, case.order))
    def copy(emit: Emitter, source: Pointer, i: Any, target: Pointer, j: Any, length: Any) -> None:
        for n in emit.blocks(length):
            emit.store(target, emit.at(j, n), emit.load(source, emit.at(i, n)))

    return copy


def _prepare(case: Case, *, replays: bool) -> Any:
    """exp(step drift) of one position and group, in a loop of its own: its long dependency chains then overlap.

    So does what has to be widened before it can be splat: what was stored just before is slow to load again. Short rows of the
    next position are asked for: where a block has not all groups, the processor's own prefetching gets lost in the gaps.
    """
    _, order, width, rank, has_right = case[:5]

    @simd(case.dtype, simd_lanes(case.dtype, order))
    def prepare(
        emit: Emitter,
        scratch: Chunk,
        a: Any,
        z: Any,
        recurrence: Pointers,
        dy: Pointer,
        out: Pointers,
        u: Any,
        d: Any,
        groups: Any,
    ) -> None:
        later = emit.at(u, groups)
        for array, length in ((recurrence.value, rank * width), (recurrence.step, 1)):
            emit.prefetch(array, emit.times(later, length), length)
        # In the place of dy a forward pass has y.
        emit.prefetch(dy, emit.times(later, width), width, writes=not replays)
        for array, length in ((out.value, replays * rank * width), (out.step, int(replays))):
            emit.prefetch(array, emit.times(later, length), length, writes=True)
        rate = emit.mul(emit.splat(recurrence.step, u), emit.constant(math.log2(math.e)))
        for n in emit.blocks(order):
            exponent = emit.mul(rate, emit.load(recurrence.drift, emit.at(emit.times(d, order), n)))
            emit.store(scratch.decays, emit.at(a, n), emit.exp2(exponent), padded=True)
        lengths = (has_right * width * width, rank * width, replays * width)
        for array, length, place in zip(
            (recurrence.right, recurrence.value, dy), lengths, (0, width**2, width * (width + rank))
        ):
            if array.storage:
                emit.copy(array, emit.times(u, length), scratch.numbers, emit.at(z, place), length)

    return prepare


def _numbers(emit: Emitter, scratch: Chunk, z: Any, array: Pointer, index: Any, place: int) -> tuple[Pointer, Any]:
    """Where the numbers that begin at array[index] can be splat: in place, or where `_prepare` has widened them."""
    return (scratch.numbers, emit.at(z, place)) if array.storage else (array, index)


def _advance(case: Case, *, answers: bool, replays: bool) -> Any:
    """One position of one group: the state at `old` gives the state at `new`; y if it `answers`, dread if it `replays`.

    Rows of value, seen, y and dy are those of `v`, which is the token `u` outside of a frame.
    """
    _, order, width, rank, has_right, has_seen, _, _, row, streamed, _ = case
    lanes = simd_lanes(case.dtype, order)
    columns = tile_columns(case.dtype, lanes)

    @simd(case.dtype, lanes, shared=replays and case.framed)
    def advance(
        emit: Emitter,
        scratch: Chunk,
        old: Any,
        new: Any,
        a: Any,
        z: Any,
        recurrence: Pointers,
        u: Any,
        v: Any,
        ahead: Any,
        y: Pointer,
        dy: Pointer,
        dread: Pointer,
    ) -> None:
        value, write, read, _, _, right, seen = recurrence
        states, decays, _ = scratch
        # Long rows; they end with every block of groups, and the processor's own prefetching does not jump over the gap.
        for array, length in ((write, rank * order), (read, order), (right, has_right * width**2)):
            emit.prefetch(array, emit.times(emit.at(u, ahead), length), length)
        sources = emit.times(v, rank * width)
        value, first = _numbers(emit, scratch, z, value, sources, width**2)
        right, matrix = _numbers(emit, scratch, z, right, emit.times(u, width * width), 0)
        cotangents, own = [], []
        if replays:
            dy, at_dy = _numbers(emit, scratch, z, dy, emit.times(v, width), width * (width + rank))
            (cotangents,) = _splats(emit, dy, at_dy, 1, width)
            if has_seen:
                own = [emit.dot(line, cotangents) for line in _splats(emit, seen, sources, rank, width)]

        def store_dread(n: Any, rows: list[Any], wheres: list[Any]) -> None:
            total = emit.dot(rows, cotangents)
            for c, where in zip(own, wheres):
                total = emit.fma(c, where, total)
            emit.store(dread, emit.at(emit.times(u, order), n), total, streamed=streamed)

        def load_wheres(n: Any) -> list[Any]:
            return [emit.load(write, emit.at(emit.times(u, rank * order), n, r * order)) for r in range(rank)]

        for q, count in emit.strips(width, columns):
            values = [_splats(emit, value, emit.at(first, q, r * width), 1, count)[0] for r in range(rank)]
            outputs = [emit.variable() for _ in range(count * answers)]
            overlaps = [emit.variable() for _ in range(rank * (has_seen and answers))]
            for n in emit.blocks(order):
                left = emit.load(decays, emit.at(a, n), padded=True)
                if has_right and width > columns:
                    state = _tile(emit, width, count, states, emit.at(old, n), row, right, emit.at(matrix, q), 1)
                elif has_right:
                    state = _product(emit, load_rows(emit, states, emit.at(old, n), width, row), right, matrix, 1)
                else:
                    state = load_rows(emit, states, emit.at(old, n, emit.times(q, row)), count, row)
                state = moved = [emit.mul(left, x) for x in state]
                wheres = load_wheres(n)
                for where, line in zip(wheres, values):
                    state = [emit.fma(where, x, h) for x, h in zip(line, state)]
                for p, h in enumerate(state):
                    emit.store(states, emit.at(new, n, emit.times(emit.at(q, p), row)), h, padded=True)
                shown = moved if has_seen else state
                if answers:
                    readout = emit.load(read, emit.at(emit.times(u, order), n))
                    for output, h in zip(outputs, shown):
                        output.set(emit.fma(readout, h, output.get()))
                    for overlap, where in zip(overlaps, wheres):
                        overlap.set(emit.fma(readout, where, overlap.get()))
                if replays and count == width:
                    store_dread(n, shown, wheres)
            for r, overlap in enumerate(overlaps):
                for p, output in enumerate(outputs):
                    shown = emit.splat(seen, emit.at(sources, q, r * width + p))
                    output.set(emit.fma(overlap.get(), shown, output.get()))
            if answers:
                emit.store_sums(y, emit.at(emit.times(v, width), q), [output.get() for output in outputs])
        if replays and width > columns:
            for n in emit.blocks(order):
                rows, wheres = load_rows(emit, states, emit.at(new, n), width, row), load_wheres(n)
                if has_seen:
                    # What was moved here, without the source of its own.
                    for where, line in zip(wheres, _splats(emit, value, first, rank, width)):
                        rows = [emit.sub(h, emit.mul(where, x)) for x, h in zip(line, rows)]
                store_dread(n, rows, wheres)

    return advance


def _retreat(case: Case) -> Any:
    """One position of one group, backwards: the adjoint at `s` of the new state becomes that of the old one."""
    dtype, order, width, rank, has_right, has_seen, varying, _, row, streamed, _ = case
    # The sums of this step fill the registers already: a vector may take no more than one.
    lanes = min(simd_lanes(dtype, order), register_lanes(dtype))
    columns = tile_columns(dtype, lanes)
    # A product of more than one tile reads its rows from scratch.
    tiled = has_right and width > columns
    across = tiled and width % SIDE == 0 and order % SIDE == 0

    @simd(dtype, lanes, shared=case.framed)
    def retreat(
        emit: Emitter, place: Place, scratch: Chunk, adjoints: Adjoint, recurrence: Pointers, dy: Pointer, out: Pointers
    ) -> None:
        u, v, d, old, a, z, s, k = place
        value, write, read, step, drift, right, seen = recurrence
        (states, decays, _), (adjoint, moved, slopes) = scratch, adjoints
        sources = emit.times(v, rank * width)
        values = _splats(emit, *_numbers(emit, scratch, z, value, sources, width**2), rank, width)
        dy, at_dy = _numbers(emit, scratch, z, dy, emit.times(v, width), width * (width + rank))
        (cotangents,) = _splats(emit, dy, at_dy, 1, width)
        rate = emit.splat(step, u)
        dmatrix = emit.times(u, width * width)
        right, matrix = _numbers(emit, scratch, z, right, dmatrix, 0)
        dvalues = [[emit.variable() for _ in range(width)] for _ in range(rank)]
        dsteps = emit.variable()
        own, overlaps = [], []
        if has_seen:
            own = [emit.dot(line, cotangents) for line in _splats(emit, seen, sources, rank, width)]
            overlaps = [emit.variable() for _ in range(rank)]

        def store_slope(n: Any, lower: list[Any]) -> None:
            slope = emit.dot(load_rows(emit, states, emit.at(old, n), width, row), lower)
            dsteps.set(emit.fma(slope, emit.load(drift, emit.at(emit.times(d, order), n)), dsteps.get()))
            if varying:
                emit.store(out.drift, emit.at(emit.times(u, order), n), emit.mul(slope, rate))
            else:
                total = emit.load(slopes, emit.at(k, n), padded=True)
                emit.store(slopes, emit.at(k, n), emit.fma(slope, rate, total), padded=True)

        for n in emit.blocks(order):
            readout = emit.load(read, emit.at(emit.times(u, order), n))
            later = load_rows(emit, adjoint, emit.at(s, n), width, row)
            upper = [emit.fma(readout, c, x) for c, x in zip(cotangents, later)]
            source_adjoint = later if has_seen else upper
            for r in range(rank):
                source = emit.at(emit.times(u, rank * order), n, r * order)
                where = emit.load(write, source)
                dwhere = emit.dot(source_adjoint, values[r])
                if has_seen:
                    dwhere = emit.fma(own[r], readout, dwhere)
                    overlaps[r].set(emit.fma(readout, where, overlaps[r].get()))
                emit.store(out.write, source, dwhere, streamed=streamed)
                for total, x in zip(dvalues[r], source_adjoint):
                    total.set(emit.fma(where, x, total.get()))
            left = emit.load(decays, emit.at(a, n), padded=True)
            lower = [emit.mul(left, x) for x in upper]
            if has_right:
                for p in range(width):
                    emit.store(moved, emit.at(n, p * row), lower[p], padded=True)
            if has_right and not tiled:
                lower = _product(emit, lower, right, matrix, width)
            if not tiled:
                for p in range(width):
                    emit.store(adjoint, emit.at(s, n, p * row), lower[p], padded=True)
                store_slope(n, lower)
        emit.store_sums(out.value, sources, [total.get() for line in dvalues for total in line])
        for r, overlap in enumerate(overlaps):
            parts = [emit.mul(overlap.get(), c) for c in cotangents]
            emit.store_sums(out.seen, emit.at(sources, r * width), parts)
        if tiled:
            for p, count in emit.strips(width, columns):
                for n in emit.blocks(order):
                    lower = _tile(emit, width, count, moved, n, row, right, emit.at(matrix, emit.times(p, width)), width)
                    for i, x in enumerate(lower):
                        emit.store(adjoint, emit.at(s, n, emit.times(emit.at(p, i), row)), x, padded=True)
            for n in emit.blocks(order):
                store_slope(n, load_rows(emit, adjoint, emit.at(s, n), width, row))
        emit.store_sums(out.step, u, [dsteps.get()])
        if across:
            _store_dright_across(emit, states, old, moved, out.right, dmatrix)
        elif has_right:
            _store_dright(emit, states, old, moved, out.right, dmatrix)

    def _store_dright(emit: Emitter, states: Pointer, old: Any, moved: Pointer, dright: Pointer, start: Any) -> None:
        # H_old^T M in tiles of two by four: eight sums, six operands, within sixteen registers.
        for top in range(0, width, 2):
            for left in range(0, width, 4):
                high, wide = min(2, width - top), min(4, width - left)
                tile = [[emit.variable() for _ in range(wide)] for _ in range(high)]
                for n in emit.blocks(order):
                    columns = load_rows(emit, moved, emit.at(n, left * row), wide, row)
                    for line, h in zip(tile, load_rows(emit, states, emit.at(old, n, top * row), high, row)):
                        for total, m in zip(line, columns):
                            total.set(emit.fma(h, m, total.get()))
                for p, line in enumerate(tile, start=top):
                    sums = [total.get() for total in line]
                    emit.store_sums(dright, emit.at(start, p * width + left), sums, streamed=streamed and width % 4 == 0)

    def _store_dright_across(emit: Emitter, states: Pointer, old: Any, moved: Pointer, dright: Pointer, start: Any) -> None:
        # The same with lanes along the columns of M, which is turned into [N, P] behind itself: no sum over lanes is left.
        eight = Emitter(emit.builder, dtype, SIDE)
        turned = emit.at(width * row)
        for p in range(0, width, SIDE):
            for n in eight.blocks(order):
                columns = transposed(eight, load_rows(eight, moved, emit.at(n, p * row), SIDE, row))
                for i, column in enumerate(columns):
                    eight.store(moved, emit.at(turned, emit.times(emit.at(n, i), width), p), column, padded=True)
        line = Emitter(emit.builder, dtype, simd_lanes(dtype, width))
        for p, count in emit.strips(width, tile_columns(dtype, line.lanes)):
            for q in line.blocks(width):
                tile = [line.variable() for _ in range(count)]
                for n in emit.each(order // 4):
                    for i in range(4):
                        m = emit.at(emit.times(n, 4), i)
                        row_of_m = line.load(moved, emit.at(turned, emit.times(m, width), q), padded=True)
                        for j, total in enumerate(tile):
                            h = line.splat(states, emit.at(old, m, emit.times(emit.at(p, j), row)))
                            total.set(line.fma(h, row_of_m, total.get()))
                for j, total in enumerate(tile):
                    line.store(dright, emit.at(start, emit.times(emit.at(p, j), width), q), total.get(), streamed=streamed)

    return retreat


def _turn(case: Case, mirrored: bool, many: int) -> Any:
    """`many` positions of one group: value^T W of each, and their right actions taken into W; lanes along the columns of W.

    W is a long product that every position hands its rounding to, so it is kept in double precision.
    """
    width, rank = case.width, case.rank
    wide = padded_order("float64", width)

    @simd("float64", simd_lanes("float64", width))
    def turn(emit: Emitter, behind: Behind, w: Any, x: Any, recurrence: Pointers, u: Any, stride: Any) -> None:
        outside = Emitter(emit.builder, case.dtype, emit.lanes)
        single = case.dtype != "float64"

        def wide_splats(array: Pointer, start: Any, rows: int) -> list[list[Any]]:
            # A row is loaded and widened as one vector: single entries would be gathered into vectors by LLVM, which is slow.
            line = Emitter(emit.builder, case.dtype, width)
            vectors = [line.load(array, emit.at(start, i * width), padded=True) for i in range(rows)]
            if single:
                vectors = [emit.builder.fpext(vector, Emitter(emit.builder, "float64", width).vector) for vector in vectors]
            return [[emit.lane(vector, j) for j in range(width)] for vector in vectors]

        for q in emit.blocks(wide):
            rows = load_rows(emit, behind.frame, emit.at(w, q), width, wide)
            for c in range(many):
                token = emit.at(u, emit.times(stride, c))
                matrix = wide_splats(recurrence.right, emit.times(token, width * width), width)
                moved = [emit.dot(line, rows) for line in (zip(*matrix) if mirrored else matrix)]
                values = wide_splats(recurrence.value, emit.times(token, rank * width), rank)
                for r in range(rank):
                    line = emit.dot(values[r], moved if mirrored else rows)
                    line = emit.builder.fptrunc(line, outside.vector) if single else line
                    outside.store(behind.framed, emit.at(x, q, (c * rank + r) * wide), line, padded=True)
                rows = moved
            for p in range(width):
                emit.store(behind.frame, emit.at(w, q, p * wide), rows[p], padded=True)

    return turn


def _gather(case: Case, mirrored: bool, many: int) -> Any:
    """`many` positions of one group: (D * write) (value^T W) of each into the update, and their decays into D."""
    _, order, width, rank, has_right, _, varying, _, row, _, _ = case
    wide = padded_order("float64", width)

    @simd(case.dtype, simd_lanes(case.dtype, order))
    def gather(emit: Emitter, behind: Behind, s: Any, k: Any, x: Any, record: Pointers, u: Any, d: Any, stride: Any) -> None:
        value, write, _, step, drift, right, _ = record
        tokens = [emit.at(u, emit.times(stride, c)) for c in range(many)]
        for token in tokens:
            ahead = emit.at(token, emit.times(stride, many))
            for array, length in ((value, rank * width), (write, rank * order), (right, has_right * width**2)):
                emit.prefetch(array, emit.times(ahead, length), length)
        for n in emit.blocks(order):
            decay = emit.load(behind.decay, emit.at(k, n), padded=True)
            # Lanes that have forgotten everything by now take nothing more: most of them, in a long segment.
            with emit.when_any(decay):
                update = load_rows(emit, behind.update, emit.at(s, n), width, row)
                drifts = None if varying else emit.load(drift, emit.at(emit.times(d, order), n))
                for c, token in enumerate(tokens):
                    if varying:
                        drifts = emit.load(drift, emit.at(emit.times(token, order), n))
                    rate = emit.mul(emit.splat(step, token), emit.constant(math.log2(math.e)))
                    further = emit.flush(emit.mul(emit.exp2(emit.mul(rate, drifts)), decay))
                    for r in range(rank):
                        where = emit.load(write, emit.at(emit.times(token, rank * order), n, r * order))
                        where = emit.mul(where, further if mirrored else decay)
                        source = emit.at(x, (c * rank + r) * wide) if has_right else emit.times(token, rank * width)
                        offset = 0 if has_right else r * width
                        (line,) = _splats(emit, behind.framed if has_right else value, emit.at(source, offset), 1, width)
                        update = [emit.fma(where, v, h) for v, h in zip(line, update)]
                    decay = further
                for p in range(width):
                    emit.store(behind.update, emit.at(s, n, p * row), update[p], padded=True)
                emit.store(behind.decay, emit.at(k, n), decay, padded=True)

    return gather


def _product(emit: Emitter, rows: list[Any], matrix: Pointer, start: Any, stride: int) -> list[Any]:
    """rows [P] times the P x P matrix at `start`, whose columns begin every `stride` numbers.

    One row after another, so that a matrix entry is loaded right where it is used.
    """
    width = len(rows)
    down = width // stride
    result: list[Any] = [None] * width
    for p, x in enumerate(rows):
        for q in range(width):
            entry = emit.splat(matrix, emit.at(start, p * down + q * stride))
            result[q] = emit.mul(x, entry) if p == 0 else emit.fma(x, entry, result[q])
    return result


def _tile(
    emit: Emitter, width: int, count: int, array: Pointer, first: Any, row: int, matrix: Pointer, start: Any, stride: int
) -> list[Any]:
    """The same for `count` of the columns, the first at `start`, of rows that stand in `array`, one every `row` numbers."""
    down = width // stride

    def row_of(p: Any) -> Any:
        return emit.load(array, emit.at(first, emit.times(p, row)), padded=True)

    def entry_of(p: Any, q: int) -> Any:
        return emit.splat(matrix, emit.at(start, emit.times(p, down), q * stride))

    return sum_rows(emit, width, count, row_of, entry_of)


def _splats(emit: Emitter, array: Pointer, start: Any, rows: int, columns: int) -> list[list[Any]]:
    return [[emit.splat(array, emit.at(start, i * columns + j)) for j in range(columns)] for i in range(rows)]
