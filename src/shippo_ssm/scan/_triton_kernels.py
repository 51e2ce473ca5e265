"""The scan and its adjoint for GPUs, in Triton: time inside a program, the state in registers.

A program is one sequence and one block of BG groups. Column p of the state is a tile [BG, BN], with the state order N along
the lanes of a warp (BN is N rounded up to a power of two); the P columns are P tiles, a tuple. Numbers that belong to a group
alone (value, right, step, dy) are tiles [BG]. Row `token` = t G + g of an operand is position t of group g, with all sequences
of a batch one after another, as in `_cpu_kernels.py`, whose formulas these are. Row `vector` = t Q + g // SHARED of write and
read belongs to SHARED groups: where these fill whole programs, a program loads it once, as a tile [1, BN].

`scan` goes through time, BT positions in a round, loads running STAGES rounds ahead through shared memory:

    M = exp(step drift) * (H right),    H <- M + write value^T,    y = read^T H    (nothing waits for y),

or, as a mirror, from the last position to the first, with dy in the place of `value` and `read` in that of `write`:

    S <- exp(step drift) * ((S + write value^T) right^T).

`gradients` then needs no order in time: a program takes SPAN positions, with the adjoint S behind them and the state H
before every KEEP of them, both left there by `scan`. It computes the states between again, in registers, and goes back through
BT of them at once.

Sums over N (y, and the gradients of value, right and step) are made for many numbers at once, by `fold`: one by one they would
take more instructions than the recurrence.

EVEN says that rounds fill all sequences. `crowd`, how many chains there are, is not read: the autotuner's choice depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shippo_ssm.engine._triton_kernels import (
    bind,
    filled,
    load_numbers,
    load_state,
    padded,
    places,
    store_state,
    store_tile,
    unbind,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_lines(
    array, row, g, n, real, ROWS: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, stride=0, COUNT: tl.constexpr = 1,
    limit=None,
):  # fmt: skip
    """COUNT rows of an array [.., ROWS, N] from row + g on, `stride` rows apart, as COUNT ROWS tiles [BG, BN].

    They are loaded as one tile. Zeros where an item is not real, and behind its first `limit` rows.
    """
    BG: tl.constexpr = g.shape[0]
    BN: tl.constexpr = n.shape[0]
    LINES: tl.constexpr = padded(COUNT * ROWS)
    at, here = places(g, real, ROWS, stride, COUNT, limit)
    at = at[:, :, None] * N + n[None, None, :]
    tile = tl.load(array + row * (ROWS * N) + at, mask=here[:, :, None] & (n < N)[None, None, :], other=0.0).to(DTYPE)
    numbers = unbind(tl.reshape(tl.permute(tile, (0, 2, 1)), (BG * BN, LINES)), LINES)
    lines = ()
    for k in tl.static_range(COUNT * ROWS):
        lines += (tl.reshape(numbers[k], (BG, BN)),)
    return lines


@triton.jit
def store_line(array, row, g, n, real, tile, ROW: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    """Line ROW of row `row` + g of an array [.., ROWS, N]."""
    at = array + row * (ROWS * N) + ((g[:, None] * ROWS + ROW) * N + n[None, :])
    tl.store(at, tile.to(array.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


@triton.jit
def store_lines(array, row, g, n, real, tiles, N: tl.constexpr, ROWS: tl.constexpr):
    """Row `row` + g of an array [.., ROWS, N], from its ROWS lines."""
    for i in tl.static_range(ROWS):
        store_line(array, row, g, n, real, tiles[i], i, ROWS, N)


@triton.jit
def sets_of(first_group, g, SHARED: tl.constexpr, BG: tl.constexpr):
    """Where the write and read of groups first_group + g stand among the Q of a position: a first row, and the rows behind."""
    if SHARED == 1:
        return first_group, g
    elif SHARED % BG == 0:
        return first_group // SHARED, tl.arange(0, 1)
    else:
        return first_group * 0, (first_group + g) // SHARED


@triton.jit
def load_shared(
    array, row, sets, n, real, BG: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, stride=0,
    COUNT: tl.constexpr = 1, limit=None,
):  # fmt: skip
    """`load_lines` of the rows `sets` of an array of writes or reads, for all BG groups."""
    lines = load_lines(array, row, sets, n, real, ROWS, N, DTYPE, stride, COUNT, limit)
    tiles = ()
    for k in tl.static_range(COUNT * ROWS):
        tiles += (tl.broadcast_to(lines[k], (BG, n.shape[0])),)
    return tiles


@triton.jit
def store_shared(array, row, sets, n, real, tile, ROW: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    """`store_line` of a gradient of a write or read: of each group, or their sum where they have one row."""
    if sets.shape[0] != tile.shape[0]:
        tile = tl.sum(tile, 0)[None, :]
    store_line(array, row, sets, n, real, tile, ROW, ROWS, N)


@triton.jit
def zero_state(BG: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr):
    columns = ()
    for _ in tl.static_range(P):
        columns += (tl.zeros((BG, BN), DTYPE),)
    return columns


@triton.jit
def fold(firsts, seconds, COUNT: tl.constexpr, HALVES: tl.constexpr):
    """sum_n firsts[k] seconds[k] for COUNT pairs of tiles [BG, BN], as one tile [BG, COUNT], filled to a power of two.

    What lies in one lane, 2^HALVES numbers, is added there; the rest is turned around, so that a lane holds all numbers of one
    sum: this takes one exchange and one addition for a number, where sums by halves would take log2(BN) of both.
    """
    SIZE: tl.constexpr = padded(COUNT)
    PARTS: tl.constexpr = 2**HALVES
    BG: tl.constexpr = firsts[0].shape[0]
    REST: tl.constexpr = firsts[0].shape[1] // PARTS
    products = ()
    for k in tl.static_range(COUNT):
        a = unbind(tl.reshape(firsts[k], (BG * REST, PARTS)), PARTS)
        b = unbind(tl.reshape(seconds[k], (BG * REST, PARTS)), PARTS)
        here = a[0] * b[0]
        for part in tl.static_range(1, PARTS):
            here = tl.fma(a[part], b[part], here)
        products += (here,)
    tile = tl.reshape(bind(filled(products, COUNT), 0, 1, SIZE), (BG, REST, SIZE))
    return tl.reshape(total(tl.reshape(tl.permute(tile, (0, 2, 1)), (BG * SIZE, REST)), REST), (BG, SIZE))


@triton.jit
def fold_outer(rows, columns, P: tl.constexpr, HALVES: tl.constexpr):
    """sum_n rows[p] columns[q] for all p and q, as one tile [BG, P P], filled to a power of two."""
    firsts, seconds = (), ()
    for p in tl.static_range(P):
        seconds += columns
        for _ in tl.static_range(P):
            firsts += (rows[p],)
    return fold(firsts, seconds, P * P, HALVES)


@triton.jit
def total(tile, SIZE: tl.constexpr):
    """The sums of the rows of a tile [M, SIZE], each in one lane: halves are added to halves."""
    if SIZE == 1:
        return tl.reshape(tile, (tile.shape[0],))
    else:
        left, right = tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, SIZE // 2)), (0, 2, 1)))
        return total(left + right, SIZE // 2)


@triton.jit
def dot(tiles, numbers, FIRST: tl.constexpr, STRIDE: tl.constexpr, P: tl.constexpr):
    """sum_p tiles[p] numbers[FIRST + p STRIDE]."""
    result = tiles[0] * numbers[FIRST][:, None]
    for p in tl.static_range(1, P):
        result = tl.fma(tiles[p], numbers[FIRST + p * STRIDE][:, None], result)
    return result


@triton.jit
def move(state, left, right, FIRST: tl.constexpr, MIRROR: tl.constexpr, HAS_RIGHT: tl.constexpr, P: tl.constexpr):
    """exp(step drift) * (H right), or with the transpose of `right`, whose numbers begin at FIRST."""
    moved = ()
    for q in tl.static_range(P):
        if HAS_RIGHT:
            column = dot(state, right, FIRST + q * P, 1, P) if MIRROR else dot(state, right, FIRST + q, P, P)
        else:
            column = state[q]
        moved += (column * left,)
    return moved


@triton.jit
def add_source(moved, write, value, FIRST: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr):
    """M + write value^T, with the numbers of `value` from FIRST on."""
    state = ()
    for p in tl.static_range(P):
        column = moved[p]
        for r in tl.static_range(RANK):
            column = tl.fma(write[r], value[FIRST + r * P + p][:, None], column)
        state += (column,)
    return state


@triton.jit
def extent(bounds, length, sequence, HAS_BOUNDS: tl.constexpr):
    """First position of a sequence and the one behind its last; `bounds` are in range and do not decrease."""
    if HAS_BOUNDS:
        begin, end = tl.load(bounds + sequence).to(tl.int64), tl.load(bounds + sequence + 1).to(tl.int64)
    else:
        begin = sequence.to(tl.int64) * length
        end = begin + length
    return begin, end


@triton.jit
def poisoned(state, bad, P: tl.constexpr):
    """The state, or NaN where bounds are `bad`."""
    columns = ()
    for p in tl.static_range(P):
        columns += (tl.where(bad, float("nan"), state[p]),)
    return columns


@triton.jit
def real_groups(first, g, G: tl.constexpr, BG: tl.constexpr):
    """Which groups of a block there are: nothing is asked where blocks fill them."""
    return first + g < G if G % BG else tl.full((BG,), True, tl.int1)


@triton.jit
def kept_of(begin, length, sequence, HAS_BOUNDS: tl.constexpr, KEEP: tl.constexpr):
    """Where the kept states of a sequence begin: those before every KEEP positions, and behind the last if these are full."""
    return (begin // KEEP if HAS_BOUNDS else sequence * (length // KEEP)) + sequence


@triton.jit
def spans_of(length, SPAN: tl.constexpr):
    """How many spans a sequence has; also an empty one has its adjoint."""
    return tl.maximum(tl.cdiv(length, SPAN), 1)


@triton.jit
def span_of(begin, length, sequence, HAS_BOUNDS: tl.constexpr, SPAN: tl.constexpr):
    """The first span of SPAN positions of a sequence: each begins one of its own, so that at most one of it is not full."""
    return begin // SPAN + sequence if HAS_BOUNDS else sequence * spans_of(length, SPAN)


@triton.jit
def scan(
    value, write, read, step, drift, right, seen, initial, bounds, y, final, kept, length, crowd,
    G: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SEEN: tl.constexpr, VARYING: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_BOUNDS: tl.constexpr, MIRROR: tl.constexpr,
    READS: tl.constexpr, KEEP: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, BG: tl.constexpr, BT: tl.constexpr,
    HALVES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The final states; with READS also y; unless KEEP is 0 the state before every KEEP positions of a sequence. A mirror that
    keeps the states behind every KEEP positions has no use for the first of them, and ends there."""
    BN: tl.constexpr = padded(N)
    sequence = tl.program_id(1)
    begin, end = extent(bounds, length, sequence, HAS_BOUNDS)
    count = (end - begin).to(tl.int32)
    first_group, g, n = tl.program_id(0) * BG, tl.arange(0, BG), tl.arange(0, BN)
    real = real_groups(first_group, g, G, BG)
    Q: tl.constexpr = G // SHARED
    first_set, sets = sets_of(first_group, g, SHARED, BG)
    has_set = real if sets.shape[0] == BG else tl.full((1,), True, tl.int1)
    row = sequence.to(tl.int64) * G + first_group
    state = load_state(initial, row, g, n, real, N, P, DTYPE) if HAS_INITIAL else zero_state(BG, BN, P, DTYPE)
    if HAS_BOUNDS:
        state = poisoned(state, tl.load(bounds + tl.num_programs(1) + 1) == 0, P)
    rate = load_lines(drift, first_group, g, n, real, 1, N, DTYPE)[0] * LOG2_E if not VARYING else tl.zeros((BG, BN), DTYPE)
    # Of a sequence's kept states.
    place = row
    if KEEP and not MIRROR:
        place = kept_of(begin, length, sequence, HAS_BOUNDS, KEEP) * G + first_group
    if MIRROR and KEEP:
        place = span_of(begin, length, sequence, HAS_BOUNDS, KEEP) * G + first_group
        store_lines(kept, place + tl.maximum(count - 1, 0) // KEEP * G, g, n, real, state, N, P)
        begin += KEEP
        count = tl.maximum(count - KEEP, 0)
    # Rounds of BT positions, and unless these are EVEN the few that do not fill one, which a mirror meets first.
    SIZES: tl.constexpr = (1, BT + 1, max(1, BT - 1)) if MIRROR and not EVEN else (BT, BT - 1 if EVEN else 0, min(-1, 1 - BT))
    for size in tl.static_range(SIZES[0], SIZES[1], SIZES[2]):
        rounds = count // BT if size == BT else count % BT
        first = (count - rounds) * (0 if size == BT else 1)
        for done in tl.range(0, rounds, num_stages=STAGES):
            t = first + (rounds - 1 - done if MIRROR else done) * size
            token, vector = (begin + t) * G + first_group, (begin + t) * Q + first_set
            values = load_numbers(value, token, g, real, RANK * P, DTYPE, G, size)
            rights = load_numbers(right, token, g, real, P * P, DTYPE, G, size) if HAS_RIGHT else ()
            steps = load_numbers(step, token, g, real, 1, DTYPE, G, size)
            shown = load_numbers(seen, token, g, real, RANK * P, DTYPE, G, size) if HAS_SEEN else ()
            lines = load_shared(write, vector, sets, n, has_set, BG, RANK, N, DTYPE, Q, size)
            readouts = load_shared(read, vector, sets, n, has_set, BG, 1, N, DTYPE, Q, size) if READS else ()
            rates = load_lines(drift, token, g, n, real, 1, N, DTYPE, G, size) if VARYING else ()
            # Before they are needed, since they take long.
            lefts = ()
            for k in tl.static_range(size):
                lefts += (tl.exp2((rates[k] * LOG2_E if VARYING else rate) * steps[k][:, None]),)
            firsts, answers = (), ()
            for k in tl.static_range(size - 1 if MIRROR else 0, -1 if MIRROR else size, -1 if MIRROR else 1):
                if KEEP and not MIRROR and k % KEEP == 0:
                    here = real if size % KEEP == 0 else tl.where(t % KEEP == 0, real, False)
                    store_lines(kept, place + (t + k) // KEEP * G, g, n, here, state, N, P)
                wheres = lines[k * RANK : (k + 1) * RANK]
                if MIRROR:
                    state = add_source(state, wheres, values, k * RANK * P, RANK, P)
                state = move(state, lefts[k], rights, k * P * P, MIRROR, HAS_RIGHT, P)
                if HAS_SEEN:
                    answer = add_source(state, wheres, shown, k * RANK * P, RANK, P)
                if not MIRROR:
                    state = add_source(state, wheres, values, k * RANK * P, RANK, P)
                if READS:
                    for _ in tl.static_range(P):
                        firsts += (readouts[k],)
                    answers += answer if HAS_SEEN else state
            if KEEP and MIRROR:
                store_lines(kept, place + t // KEEP * G, g, n, tl.where(t % KEEP == 0, real, False), state, N, P)
            if READS:
                store_tile(y, token, g, real, fold(firsts, answers, size * P, HALVES), P, G, size)
    if KEEP and not MIRROR:
        store_lines(kept, place + count // KEEP * G, g, n, tl.where(count % KEEP == 0, real, False), state, N, P)
    if not (MIRROR and KEEP):
        store_state(final, row, g, n, real, state, N, P)


@triton.jit
def gradients(
    value, write, read, step, drift, right, seen, bounds, whose, kept, adjoints, dy,
    dvalue, dwrite, dread, dstep, ddrift, dright, dseen, dinitial, length, crowd, positions,
    G: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SEEN: tl.constexpr, VARYING: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_BOUNDS: tl.constexpr, KEEP: tl.constexpr,
    SPAN: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, BG: tl.constexpr, BT: tl.constexpr,
    HALVES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of all operands; that of a constant drift is left as one partial [G, N] per SPAN positions, those of shared
    vectors as one per program of a set, or group where a program has several sets: [parts, positions, Q, ..]."""
    BN: tl.constexpr = padded(N)
    slot = tl.program_id(1)
    sequence = tl.load(whose + slot).to(tl.int32) if HAS_BOUNDS else slot // spans_of(length, SPAN)
    begin, end = extent(bounds, length, sequence, HAS_BOUNDS)
    offset = (slot - span_of(begin, length, sequence, HAS_BOUNDS, SPAN)).to(tl.int32) * SPAN
    # Nothing is left to do behind the end of a sequence.
    count = tl.minimum((end - begin).to(tl.int32) - offset, SPAN)
    first_group, g, n = tl.program_id(0) * BG, tl.arange(0, BG), tl.arange(0, BN)
    real = real_groups(first_group, g, G, BG)
    Q: tl.constexpr = G // SHARED
    first_set, sets = sets_of(first_group, g, SHARED, BG)
    has_set = real if sets.shape[0] == BG else tl.full((1,), True, tl.int1)
    # The rows of this program's, or of each group's, part of a set's gradients.
    parts = sets
    if SHARED > 1:
        part = first_group % SHARED // BG if SHARED % BG == 0 else (first_group + g) % SHARED
        parts = sets + part.to(tl.int64) * positions * Q
    place = slot.to(tl.int64) * G + first_group
    adjoint = load_lines(adjoints, place, g, n, real, P, N, DTYPE)
    drifts = load_lines(drift, first_group, g, n, real, 1, N, DTYPE)[0] if not VARYING else tl.zeros((BG, BN), DTYPE)
    slopes = tl.zeros((BG, BN), DTYPE)
    first = (kept_of(begin, length, sequence, HAS_BOUNDS, KEEP) + offset // KEEP) * G + first_group
    # Where every block begins at a kept state, the state behind it is that before the next one.
    HAS_NEXT: tl.constexpr = KEEP == BT
    here = tl.where(count > 0, real, False)
    after = load_lines(kept, first + count // KEEP * G, g, n, here, P, N, DTYPE) if HAS_NEXT else ()
    blocks = tl.cdiv(count, BT)
    for block in tl.range(0, blocks, num_stages=STAGES):
        low = (blocks - 1 - block) * BT
        state = load_lines(kept, first + low // KEEP * G, g, n, real, P, N, DTYPE)
        if KEEP > BT:
            # From the kept state to the block.
            for t in range(low // KEEP * KEEP, low):
                token = (begin + offset + t) * G + first_group
                wheres = load_shared(write, (begin + offset + t) * Q + first_set, sets, n, has_set, BG, RANK, N, DTYPE)
                values = load_numbers(value, token, g, real, RANK * P, DTYPE)
                rights = load_numbers(right, token, g, real, P * P, DTYPE) if HAS_RIGHT else ()
                steps = tl.load(step + token + g, mask=real, other=0.0).to(DTYPE)
                if VARYING:
                    drifts = load_lines(drift, token, g, n, real, 1, N, DTYPE)[0]
                moved = move(state, tl.exp2(steps[:, None] * (drifts * LOG2_E)), rights, 0, False, HAS_RIGHT, P)
                state = add_source(moved, wheres, values, 0, RANK, P)
        # States 0 .. BT of the block, one after another; those behind the end of a sequence are not used.
        token, vector = (begin + offset + low) * G + first_group, (begin + offset + low) * Q + first_set
        limit = None if EVEN else tl.minimum(count - low, BT)
        values = load_numbers(value, token, g, real, RANK * P, DTYPE, G, BT, limit)
        rights = load_numbers(right, token, g, real, P * P, DTYPE, G, BT, limit) if HAS_RIGHT else ()
        steps = load_numbers(step, token, g, real, 1, DTYPE, G, BT, limit)
        cotangents = load_numbers(dy, token, g, real, P, DTYPE, G, BT, limit)
        shown = load_numbers(seen, token, g, real, RANK * P, DTYPE, G, BT, limit) if HAS_SEEN else ()
        wheres = load_shared(write, vector, sets, n, has_set, BG, RANK, N, DTYPE, Q, BT, limit)
        readouts = load_shared(read, vector, sets, n, has_set, BG, 1, N, DTYPE, Q, BT, limit)
        rates = load_lines(drift, token, g, n, real, 1, N, DTYPE, G, BT, limit) if VARYING else ()
        states, lefts = state, ()
        for k in tl.static_range(BT):
            if not VARYING:
                rates += (drifts,)
            lefts += (tl.exp2(rates[k] * LOG2_E * steps[k][:, None]),)
            if k < BT - 1 or not HAS_NEXT:
                moved = move(state, lefts[k], rights, k * P * P, False, HAS_RIGHT, P)
                state = add_source(moved, wheres[k * RANK : (k + 1) * RANK], values, k * RANK * P, RANK, P)
                states += state
        if HAS_NEXT:
            states += after
            after = states[:P]
        # Factors of what is summed over N.
        pulled, pullers, looked, lookers, tilts = (), (), (), (), ()
        # A block's share of the drift gradient is summed apart, so that long sequences lose no digits.
        share = tl.zeros((BG, BN), DTYPE)
        for k in tl.static_range(BT - 1, -1, -1):
            here, at = real if EVEN else tl.where(k < limit, real, False), token + k * G
            kept_set, at_set = has_set if EVEN else tl.where(k < limit, has_set, False), vector + k * Q
            old = states[k * P : (k + 1) * P]
            readout = readouts[k]
            upper = add_source(adjoint, (readout,), cotangents, k * P, 1, P)
            sources = adjoint if HAS_SEEN else upper
            dreadout = dot(states[(k + 1) * P : (k + 2) * P], cotangents, k * P, 1, P)
            for r in tl.static_range(RANK - 1, -1, -1):
                where = wheres[k * RANK + r]
                dwhere = dot(sources, values, (k * RANK + r) * P, 1, P)
                if HAS_SEEN:
                    own, extra = tl.zeros((BG,), DTYPE), tl.zeros((BG,), DTYPE)
                    for p in tl.static_range(P):
                        own += shown[(k * RANK + r) * P + p] * cotangents[k * P + p]
                        extra += (shown[(k * RANK + r) * P + p] - values[(k * RANK + r) * P + p]) * cotangents[k * P + p]
                    dreadout += extra[:, None] * where
                    dwhere += own[:, None] * readout
                    for p in tl.static_range(P - 1, -1, -1):
                        looked, lookers = (readout * cotangents[k * P + p][:, None],) + looked, (where,) + lookers
                store_shared(dwrite, at_set, parts, n, kept_set, dwhere, r, RANK, N)
                for p in tl.static_range(P - 1, -1, -1):
                    pulled, pullers = (where,) + pulled, (sources[p],) + pullers
            store_shared(dread, at_set, parts, n, kept_set, dreadout, 0, 1, N)
            faded = ()
            for p in tl.static_range(P):
                faded += (upper[p] * lefts[k],)
            before = faded
            if HAS_RIGHT:
                before = ()
                for p in tl.static_range(P):
                    before += (dot(faded, rights, k * P * P + p * P, 1, P),)
                store_tile(dright, at, g, here, fold_outer(old, faded, P, HALVES), P * P)
            slope = old[0] * before[0]
            for p in tl.static_range(1, P):
                slope = tl.fma(old[p], before[p], slope)
            tilts = (slope,) + tilts
            if VARYING:
                store_line(ddrift, at, g, n, here, slope * steps[k][:, None], 0, 1, N)
            else:
                share = tl.fma(slope, steps[k][:, None], share)
            # The adjoint goes through what is behind the end as it is.
            passed = ()
            for p in tl.static_range(P):
                passed += (before[p] if EVEN else tl.where(k < limit, before[p], adjoint[p]),)
            adjoint = passed
        store_tile(dvalue, token, g, real, fold(pulled, pullers, BT * RANK * P, HALVES), RANK * P, G, BT, limit)
        store_tile(dstep, token, g, real, fold(tilts, rates, BT, HALVES), 1, G, BT, limit)
        if HAS_SEEN:
            store_tile(dseen, token, g, real, fold(looked, lookers, BT * RANK * P, HALVES), RANK * P, G, BT, limit)
        slopes += share
    if not VARYING:
        store_line(ddrift, place, g, n, real, slopes, 0, 1, N)
    if HAS_INITIAL:
        store_state(dinitial, sequence.to(tl.int64) * G + first_group, g, n, tl.where(offset == 0, real, False), adjoint, N, P)
