"""The scan and its adjoint as machine code: time outside, groups inside, the state order N along the vector lanes.

All arrays are flat. A *token* is one (position, group) pair, row t G + g of every operand but write and read, whose *vector*
is row t Q + g // (G / Q). A batch is B sequences of T positions one after another, so dense batches and packed sequences differ
only in `bounds`. A work item is one sequence and one block of neighbouring groups.

Forward: for each position, for each group of the block, with the state H [P][N] in scratch memory,

    M = exp(step drift) * (H right),    H <- M + write value^T,    y = read^T H.

The state before every chunk of positions goes to `checkpoints` if a backward pass follows. With `seen`, y is
read^T M + (read . write) seen and does not depend on `value`, not even in its last bit. H right is computed in tiles of a few
columns whose sums stay in registers (`tile_columns`); a single tile updates the state in place.

Backward: chunks from the last to the first. The states of a chunk and dread = H dy are recomputed from its checkpoint; then,
positions backwards, with the adjoint S = dLoss/dH in the same layout,

    S <- S + read dy^T;   dwrite = S value;   dvalue = S^T write;   M = exp(step drift) * S;
    dright = H_old^T M;   S <- M right^T;   q = sum_p H_old S;   dstep = sum_n q drift;   ddrift = q step.

With `seen`, dwrite and dvalue take the S from before read dy^T was added, and c = dy . seen gives the rest:

    dread = (H - write value^T) dy + c write;   dwrite = S value + c read;   dseen = (read . write) dy.

Gradients of shared vectors are added up over the groups of an item, in their order, in the rows of the item's part of a set.

The gradient of step drift is q = <H_old, S> rather than <H - write value^T, S_new>: the same number without a cancellation,
hence exactly zero where the memory was wiped.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.engine import Emitter, Pointer, register_lanes, simd, simd_lanes, tile_columns
from shippo_ssm.scan.algebra import Recurrence

# Tokens of a block between a prefetch and its use: few enough that what is fetched still lies in the first cache.
PREFETCH = 16
# Rows of a product that are unrolled.
STRIP = 4
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
    shared: bool
    """Whether several groups use one write and read."""
    streamed: bool = False
    """Whether gradients bypass the caches."""
    mirrored: bool = False
    """Whether the forward kernel goes back in time: see `build_forward`."""

    @property
    @functools.lru_cache  # noqa: B019
    def chunk(self) -> int:
        """Positions between two kept states: as few as 16, unless they would outgrow 6 % of the other tensors."""
        per_position = 2 * ((self.rank + 1) * (self.order + self.width) + 1 + self.has_right * self.width**2)
        return next((c for c in (16, 32, 64) if self.order * self.width <= 0.06 * per_position * c), 128)

    @property
    @functools.lru_cache  # noqa: B019
    def row(self) -> int:
        """N rounded up to whole vectors: the length of the rows of states in scratch and checkpoints."""
        lanes = simd_lanes(self.dtype, self.order)
        return -(-self.order // lanes) * lanes

    @property
    def numbers(self) -> int:
        """Numbers of one position and group that are splat one by one: right, value and dy."""
        return self.width * (self.width + self.rank + 1)

    @property
    def tiled(self) -> bool:
        """Whether a product with `right` takes several tiles."""
        return self.width > tile_columns(self.dtype, simd_lanes(self.dtype, self.order))


class Items(NamedTuple):
    """Work items, each one sequence and one block of groups: the first position of each sequence, [sequences + 1], and its
    first chunk; of each block the first group, how many, and their part of a set, [blocks, 3]; the largest block has `most`."""

    bounds: Any
    first_chunk: Any
    blocks: Any
    groups: int
    sets: int
    most: int
    parts: int


class Forward(NamedTuple):
    """Operands of the forward kernel; `checkpoints` [chunks, G, P, row] is empty where no state is kept."""

    items: Items
    recurrence: Recurrence
    initial_state: Any
    y: Any
    final_state: Any
    checkpoints: Any


class Backward(NamedTuple):
    """Operands of the backward kernel; the gradient of a constant drift is one partial [G, N] per sequence, those of shared
    write and read one partial per block of a set, [parts, B, T, Q, ..] in the dtype of states."""

    items: Items
    recurrence: Recurrence
    checkpoints: Any
    dy: Any
    dfinal: Any
    gradient: Recurrence
    dinitial: Any


class Scratch(NamedTuple):
    """Scratch of one item. Of one chunk or one position: states [position, group, P, row], decays [position, group, row] and,
    of operands in bfloat16, numbers that are splat one by one, [position, group, P P + r P + P] (right, value, dy).

    The other three are those of a backward pass: dLoss/dH [group, P, row], M = decay dLoss/dH of one group as [P, row], and
    ddrift [group, row] of a chunk.
    """

    states: Any
    decays: Any
    numbers: Any
    adjoint: Any
    moved: Any
    slopes: Any


class Place(NamedTuple):
    """Where one position of one group is: rows of operands (`dvector` of the gradient of its vector), and cells of scratch:
    `old` for its old state, decay and numbers, `new` for its new state, `group` in the adjoint. The next position is `near`
    tokens away, one of this block that comes soon `far` tokens."""

    token: Any
    vector: Any
    drift_row: Any
    dvector: Any
    old: Any
    new: Any
    group: Any
    near: Any
    far: Any


def build_forward(case: Case) -> Any:
    """The forward kernel: y, the final states and, unless `checkpoints` is empty, the state before every chunk.

    A mirrored one is S_{t-1} = L_t (S_t + write_t value_t^T) R_t^T, and gives the state before the first position alone.
    """
    step_forward, many = _forward_step(case, replays=False), case.numbers
    row, chunk, mirrored, tiled, size = case.row, case.chunk, case.mirrored, case.tiled, case.width * case.row
    locate, place_of, empty, load_states, store_states, copy = _helpers(case)

    def forward(operands, start, stop):
        items, recurrence, initial, y, final, checkpoints = operands
        bounds, first_chunk, groups, most = items.bounds, items.first_chunk, items.groups, items.most
        # A product of several tiles writes a new state beside the old one; a single tile updates it in place.
        other = most if tiled else 0
        cells = most + other
        states, homes = empty(cells * size), np.empty(most, np.int64)
        scratch = Scratch(states, empty(cells * row), empty(cells * many), states, states, states)
        for item in range(start, stop):
            sequence, first, count, _ = locate(items, item, homes)
            begin, end = bounds[sequence], bounds[sequence + 1]
            states[:] = 0
            if initial.size:
                load_states(initial, sequence * groups + first, count, states)
            old, new = 0, other
            for low in range(begin, end, chunk):
                if checkpoints.size:
                    kept = ((first_chunk[sequence] + (low - begin) // chunk) * groups + first) * size
                    copy(states, old * size, checkpoints, kept, count * size)
                for time in range(low, min(low + chunk, end)):
                    t = begin + end - 1 - time if mirrored else time
                    for g in range(count):
                        place = place_of(items, first, count, homes, 0, t, g, old + g, new + g)
                        step_forward(place, scratch, recurrence, y, recurrence)
                    old, new = new, old
            store_states(states, old * size, count, final, sequence * groups + first)

    return forward


def build_backward(case: Case) -> Any:
    """The backward kernel: gradients of every operand, those of a constant drift and of shared vectors as partials."""
    step_forward, step_backward = _forward_step(case, replays=True), _backward_step(case)
    order, row, chunk, varying = case.order, case.row, case.chunk, case.varying
    size, many = case.width * row, case.numbers
    locate, place_of, empty, load_states, store_states, copy = _helpers(case)

    def backward(operands, start, stop):
        items, recurrence, checkpoints, dy, dfinal, gradient, dinitial = operands
        bounds, first_chunk, _, groups, sets, most, _ = items
        states, homes = empty((chunk + 1) * most * size), np.empty(most, np.int64)
        adjoint, slopes = empty(most * size), empty(most * row)
        scratch = Scratch(states, empty(chunk * most * row), empty(chunk * most * many), adjoint, empty(size), slopes)
        for item in range(start, stop):
            sequence, first, count, part = locate(items, item, homes)
            begin, end = bounds[sequence], bounds[sequence + 1]
            # Where the gradients of this part of a set begin, in rows.
            own = part * bounds[-1] * sets
            adjoint[:] = 0
            if dfinal.size:
                load_states(dfinal, sequence * groups + first, count, adjoint)
            for index in range((end - begin + chunk - 1) // chunk - 1, -1, -1):
                low, high = begin + index * chunk, min(begin + index * chunk + chunk, end)
                kept = ((first_chunk[sequence] + index) * groups + first) * size
                copy(checkpoints, kept, states, 0, count * size)
                for t in range(low, high):
                    for g in range(count):
                        cell = (t - low) * most + g
                        place = place_of(items, first, count, homes, own, t, g, cell, cell + most)
                        step_forward(place, scratch, recurrence, dy, gradient)
                # A chunk's share of the drift gradient is summed apart, so that long sequences lose no digits.
                slopes[:] = 0
                for t in range(high - 1, low - 1, -1):
                    for g in range(count):
                        cell = (t - low) * most + g
                        place = place_of(items, first, count, homes, own, t, g, cell, cell + most)
                        step_backward(place, scratch, recurrence, dy, gradient)
                if not varying:
                    for g in range(count):
                        for n in range(order):
                            gradient.drift[(sequence * groups + first + g) * order + n] += slopes[g * row + n]
            if dinitial.size:
                store_states(adjoint, 0, count, dinitial, sequence * groups + first)

    return backward


def _helpers(case: Case) -> tuple[Any, ...]:
    """What kernels call besides the steps."""
    from numba import njit

    element, order, width, row = np.dtype(case.dtype).type, case.order, case.width, case.row
    itemsize, shared, varying = np.dtype(element).itemsize, case.shared, case.varying

    @njit(inline="always")
    def locate(items, item, homes):
        """Sequence, first group, number of groups and part of a set of an item; `homes` becomes the sets of the groups."""
        num_blocks = len(items.blocks) // 3
        sequence, corner = item // num_blocks, item % num_blocks * 3
        first, count, part = items.blocks[corner], items.blocks[corner + 1], items.blocks[corner + 2]
        for g in range(count):
            homes[g] = (first + g) // (items.groups // items.sets)
        return sequence, first, count, part

    @njit(inline="always")
    def place_of(items, first, count, homes, own, t, g, old, new):
        """Group first + g at position t; gradients of this part of a set begin at row `own`."""
        token = t * items.groups + first + g
        # All the same where nothing is shared, so that addresses are too.
        vector, dvector = (t * items.sets + homes[g], own + t * items.sets + homes[g]) if shared else (token, token)
        far = PREFETCH if g + PREFETCH < count else PREFETCH + items.groups - count
        return Place(token, vector, token if varying else first + g, dvector, old, new, g, items.groups, far)

    @njit(inline="always")
    def empty(length):
        """Scratch that begins on a cache line, since vectors that straddle two are slow to load and to store."""
        memory = np.empty(length + 64 // itemsize, element)
        skip = -memory.ctypes.data % 64 // itemsize
        return memory[skip : skip + length]

    @njit(inline="always")
    def load_states(operand, corner, count, states):
        """Operand [.., G, N, P] from group `corner` on to scratch [group, P, row]."""
        for g in range(count):
            for n in range(order):
                for p in range(width):
                    states[(g * width + p) * row + n] = operand[((corner + g) * order + n) * width + p]

    @njit(inline="always")
    def store_states(states, start, count, operand, corner):
        """The way back."""
        for g in range(count):
            for n in range(order):
                for p in range(width):
                    operand[((corner + g) * order + n) * width + p] = states[start + (g * width + p) * row + n]

    # That of a slice takes Numba four seconds to compile where it is the first.
    @simd(case.dtype, simd_lanes(case.dtype, order))
    def copy(emit: Emitter, source: Pointer, i: Any, target: Pointer, j: Any, length: Any) -> None:
        for n in emit.blocks(length):
            emit.store(target, emit.at(j, n), emit.load(source, emit.at(i, n)))

    return locate, place_of, empty, load_states, store_states, copy


def _prefetch(emit: Emitter, case: Case, place: Place, recurrence: Pointers, dy: Pointer, out: Pointers | None) -> None:
    """Ask for the short rows of the next position and for long rows that come soon: the processor's own prefetching fails at
    the gaps between blocks of groups. A forward pass, without `out`, gives y for dy."""
    value, write, read, step, _, right, _ = recurrence
    sources, vectors = case.rank * case.width, (not case.shared) * case.order
    rows = [(value, sources, False), (step, 1, False), (dy, case.width, out is None)]
    if out is not None:
        rows += [(out.value, sources, True), (out.step, 1, True)]
    long_rows = [(write, case.rank * vectors, False), (read, vectors, False), (right, case.has_right * case.width**2, False)]
    for distance, asked in (place.near, rows), (place.far, long_rows):
        for array, length, writes in asked:
            emit.prefetch(array, emit.times(emit.at(place.token, distance), length), length, writes=writes)


def _numbers(
    emit: Emitter, case: Case, place: Place, scratch: Scratch, *arrays: Pointer, widen: bool
) -> list[tuple[Pointer, Any]]:
    """Where the numbers of a token that are splat one by one stand, of right, value and dy: the array and an index, or those of
    scratch for bfloat16, which a forward step widens."""
    width, sources = case.width, case.rank * case.width
    found, begin = [], 0
    for array, length in zip(arrays, (case.has_right * width**2, sources, width)):
        start = emit.times(place.token, length)
        if array.storage:
            target = emit.at(emit.times(place.old, case.numbers), begin)
            if widen:
                emit.copy(array, start, scratch.numbers, target, length)
            array, start = scratch.numbers, target
        found.append((array, start))
        begin += length
    return found


def _forward_step(case: Case, *, replays: bool) -> Any:
    """One position of one group: the new state from the old one, and y; or dread, from dy, where it `replays` a chunk."""
    order, width, rank, row, has_right, has_seen = case.order, case.width, case.rank, case.row, case.has_right, case.has_seen
    lanes, mirrored = simd_lanes(case.dtype, order), case.mirrored
    columns = tile_columns(case.dtype, lanes)

    @simd(case.dtype, lanes)
    def forward_step(emit: Emitter, place: Place, scratch: Scratch, recurrence: Pointers, y: Pointer, out: Pointers) -> None:
        value, write, read, step, drift, right, seen = recurrence
        states, decays, token, vector = scratch.states, scratch.decays, place.token, place.vector
        old_state, new_state = emit.times(place.old, width * row), emit.times(place.new, width * row)
        _prefetch(emit, case, place, recurrence, y, out if replays else None)
        (right, matrix), (value, first), *cotangent = _numbers(
            emit, case, place, scratch, right, value, *[y] * replays, widen=True
        )
        sources, rate = emit.times(token, rank * width), emit.mul(emit.splat(step, token), emit.constant(math.log2(math.e)))
        (cotangents,) = _splats(emit, *cotangent[0], 1, width) if replays else [[]]
        own = [emit.dot(line, cotangents) for line in _splats(emit, seen, sources, rank * (has_seen and replays), width)]

        def decay(n: Any) -> Any:
            factor = emit.exp2(emit.mul(rate, emit.load(drift, emit.at(emit.times(place.drift_row, order), n))))
            if replays or case.tiled:
                emit[decays, emit.times(place.old, row), n] = factor
            return factor

        def store_dread(n: Any, rows: list[Any], writes: list[Any]) -> None:
            total = emit.dot(rows, cotangents)
            for c, where in zip(own, writes):
                total = emit.fma(c, where, total)
            _store_vector(emit, case, out.read, emit.at(emit.times(place.dvector, order), n), total)

        def load_writes(n: Any) -> list[Any]:
            return [emit.load(write, emit.at(emit.times(vector, rank * order), n, r * order)) for r in range(rank)]

        if case.tiled:
            for n in emit.blocks(order):
                decay(n)
        if mirrored:
            for n in emit.blocks(order):
                rows = emit.load_rows(states, emit.at(old_state, n), width, row)
                for where, line in zip(load_writes(n), _splats(emit, value, first, rank, width)):
                    rows = [emit.fma(where, x, h) for x, h in zip(line, rows)]
                emit.store_rows(states, emit.at(old_state, n), rows, row)
        # Between two columns of R, or of its transpose.
        stride = width if mirrored else 1
        for q, count in emit.strips(width, columns):
            values = [_splats(emit, value, emit.at(first, q, r * width), 1, count)[0] for r in range(rank)]
            outputs = [emit.variable() for _ in range(count * (not replays))]
            overlaps = [emit.variable() for _ in range(rank * (has_seen and not replays))]
            for n in emit.blocks(order):
                kept = emit.at(emit.times(place.old, row), n)
                left = emit[decays, kept] if case.tiled else decay(n)
                if has_right and case.tiled:
                    column = emit.at(matrix, emit.times(q, stride))
                    state = _tile(emit, width, count, states, emit.at(old_state, n), row, right, column, stride)
                elif has_right:
                    state = _product(emit, emit.load_rows(states, emit.at(old_state, n), width, row), right, matrix, stride)
                else:
                    state = emit.load_rows(states, emit.at(old_state, n, emit.times(q, row)), count, row)
                state = moved = [emit.mul(left, x) for x in state]
                writes = load_writes(n)
                for where, line in zip([] if mirrored else writes, values):
                    state = [emit.fma(where, x, h) for x, h in zip(line, state)]
                for p, h in enumerate(state):
                    emit[states, new_state, n, emit.times(emit.at(q, p), row)] = h
                shown = moved if has_seen else state
                if mirrored:
                    continue
                if not replays:
                    readout = emit.load(read, emit.at(emit.times(vector, order), n))
                    for output, h in zip(outputs, shown):
                        output.set(emit.fma(readout, h, output.get()))
                    for overlap, where in zip(overlaps, writes):
                        overlap.set(emit.fma(readout, where, overlap.get()))
                elif count == width:
                    store_dread(n, shown, writes)
            for r, overlap in enumerate(overlaps):
                for p, output in enumerate(outputs):
                    shown = emit.splat(seen, emit.at(sources, q, r * width + p))
                    output.set(emit.fma(overlap.get(), shown, output.get()))
            if not replays and not mirrored:
                emit.store_sums(y, emit.at(emit.times(token, width), q), [output.get() for output in outputs])
        if replays and case.tiled:
            for n in emit.blocks(order):
                rows, writes = emit.load_rows(states, emit.at(new_state, n), width, row), load_writes(n)
                if has_seen:
                    # The state without its own source.
                    for where, line in zip(writes, _splats(emit, value, first, rank, width)):
                        rows = [emit.sub(h, emit.mul(where, x)) for x, h in zip(line, rows)]
                store_dread(n, rows, writes)

    return forward_step


def _backward_step(case: Case) -> Any:
    """One position of one group, backwards: the adjoint of the new state becomes that of the old one."""
    dtype, order, width, rank, has_right, has_seen, varying, *_ = case
    row = case.row
    # The sums of this step fill the registers already: a vector may take no more than one.
    lanes = min(simd_lanes(dtype, order), register_lanes(dtype))
    columns = tile_columns(dtype, lanes)
    # A product of more than one tile reads its rows from scratch.
    tiled = has_right and width > columns

    @simd(dtype, lanes)
    def backward_step(emit: Emitter, place: Place, scratch: Scratch, recurrence: Pointers, dy: Pointer, out: Pointers) -> None:
        value, write, read, step, drift, right, seen = recurrence
        states, decays, _, adjoint, moved, slopes = scratch
        token, vector, dvector = place.token, place.vector, place.dvector
        old_state, state = emit.times(place.old, width * row), emit.times(place.group, width * row)
        sources = emit.times(token, rank * width)
        (right, matrix), source, cotangent = _numbers(emit, case, place, scratch, right, value, dy, widen=False)
        values, (cotangents,) = _splats(emit, *source, rank, width), _splats(emit, *cotangent, 1, width)
        rate = emit.splat(step, token)
        dvalues = [[emit.variable() for _ in range(width)] for _ in range(rank)]
        dsteps, overlaps = emit.variable(), [emit.variable() for _ in range(rank * has_seen)]
        own = [emit.dot(line, cotangents) for line in _splats(emit, seen, sources, rank * has_seen, width)]

        def store_slope(n: Any, lower: list[Any]) -> None:
            slope = emit.dot(emit.load_rows(states, emit.at(old_state, n), width, row), lower)
            drifts = emit.load(drift, emit.at(emit.times(place.drift_row, order), n))
            dsteps.set(emit.fma(slope, drifts, dsteps.get()))
            if varying:
                emit.store(out.drift, emit.at(emit.times(token, order), n), emit.mul(slope, rate))
            else:
                total = slopes, emit.times(place.group, row), n
                emit[total] = emit.fma(slope, rate, emit[total])

        for n in emit.blocks(order):
            readout = emit.load(read, emit.at(emit.times(vector, order), n))
            later = emit.load_rows(adjoint, emit.at(state, n), width, row)
            upper = [emit.fma(readout, c, x) for c, x in zip(cotangents, later)]
            source_adjoint = later if has_seen else upper
            for r in range(rank):
                where = emit.load(write, emit.at(emit.times(vector, rank * order), n, r * order))
                dwhere = emit.dot(source_adjoint, values[r])
                if has_seen:
                    dwhere = emit.fma(own[r], readout, dwhere)
                    overlaps[r].set(emit.fma(readout, where, overlaps[r].get()))
                _store_vector(emit, case, out.write, emit.at(emit.times(dvector, rank * order), n, r * order), dwhere)
                for total, x in zip(dvalues[r], source_adjoint):
                    total.set(emit.fma(where, x, total.get()))
            left = emit[decays, emit.times(place.old, row), n]
            lower = [emit.mul(left, x) for x in upper]
            if has_right:
                emit.store_rows(moved, n, lower, row)
            if has_right and not tiled:
                lower = _product(emit, lower, right, matrix, width)
            if not tiled:
                emit.store_rows(adjoint, emit.at(state, n), lower, row)
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
                        emit[adjoint, state, n, emit.times(emit.at(p, i), row)] = x
            for n in emit.blocks(order):
                store_slope(n, emit.load_rows(adjoint, emit.at(state, n), width, row))
        emit.store_sums(out.step, token, [dsteps.get()])
        if has_right:
            _store_dright(emit, case, states, old_state, moved, out.right, emit.times(token, width * width))

    return backward_step


def _store_dright(emit: Emitter, case: Case, states: Pointer, old: Any, moved: Pointer, dright: Pointer, start: Any) -> None:
    """H_old^T M in tiles of two by four: eight sums, six operands, within sixteen registers."""
    width, row, streamed = case.width, case.row, case.streamed and case.width % 4 == 0
    for top in range(0, width, 2):
        for left in range(0, width, 4):
            high, wide = min(2, width - top), min(4, width - left)
            tile = [[emit.variable() for _ in range(wide)] for _ in range(high)]
            for n in emit.blocks(case.order):
                columns = emit.load_rows(moved, emit.at(n, left * row), wide, row)
                for line, h in zip(tile, emit.load_rows(states, emit.at(old, n, top * row), high, row)):
                    for total, m in zip(line, columns):
                        total.set(emit.fma(h, m, total.get()))
            for p, line in enumerate(tile, start=top):
                place = emit.at(start, p * width + left)
                emit.store_sums(dright, place, [total.get() for total in line], streamed=streamed)


def _product(emit: Emitter, rows: list[Any], matrix: Pointer, start: Any, stride: int) -> list[Any]:
    """rows [P] times the P x P matrix at `start`, whose columns begin every `stride` numbers.

    One row after another, so that a matrix entry is loaded right where it is used.
    """
    width = len(rows)
    result: list[Any] = [None] * width
    for p, x in enumerate(rows):
        for q in range(width):
            entry = emit.splat(matrix, emit.at(start, p * (width // stride) + q * stride))
            result[q] = emit.mul(x, entry) if p == 0 else emit.fma(x, entry, result[q])
    return result


def _tile(
    emit: Emitter, width: int, count: int, array: Pointer, first: Any, row: int, matrix: Pointer, start: Any, stride: int
) -> list[Any]:
    """The same for `count` of the columns, the first at `start`, of rows that stand in `array`, one every `row` numbers."""
    sums = [emit.variable() for _ in range(count)]
    # A run-time loop, since what is unrolled has to be compiled.
    for strip, several in emit.strips(width, STRIP):
        for p in (emit.at(strip, i) for i in range(several)):
            vector = emit[array, first, emit.times(p, row)]
            for q, total in enumerate(sums):
                entry = emit.splat(matrix, emit.at(start, emit.times(p, width // stride), q * stride))
                total.set(emit.fma(entry, vector, total.get()))
    return [total.get() for total in sums]


def _store_vector(emit: Emitter, case: Case, gradient: Pointer, index: Any, vector: Any) -> None:
    """The gradient of a write or read: added to that of the groups before where they share it."""
    if case.shared:
        vector = emit.add(emit.load(gradient, index), vector)
    emit.store(gradient, index, vector, streamed=case.streamed and not case.shared)


def _splats(emit: Emitter, array: Pointer, start: Any, rows: int, columns: int) -> list[list[Any]]:
    return [[emit.splat(array, emit.at(start, i * columns + j)) for j in range(columns)] for i in range(rows)]
