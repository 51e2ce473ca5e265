"""The scan and its adjoint for cards, in Triton: time inside a program, the state in registers.

A program is one sequence and one block of BG groups. Column p of the state is a tile [BG, BN], with the state order N along
the lanes of a warp (BN is N rounded up to a power of two); the P columns are P tiles, a tuple. Numbers that belong to a group
alone (value, right, step, dy) are tiles [BG]. Row u = t G + g of an operand is position t of group g, with all sequences of a
batch one after another, as in `_fused_kernels.py`, whose formulas these are.

Forward, one position after another, loads running STAGES positions ahead through shared memory:

    M = exp(step drift) * (H right),    H <- M + write value^T,    y = read^T H    (nothing waits for y).

The state before every KEEP positions goes to `kept` where a backward pass will want it.

Backward, chunks of KEEP positions from the last to the first: the states of a chunk are computed again from the kept one into
a scratch of the program's own, small enough for the cache, then the adjoint S goes back through them.

`crowd`, how many chains there are, is not read: the autotuner's choice depends on it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shippo_ssm.engine._triton_kernels import load_numbers, padded, store_numbers

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_lines(array, u, n, real, ROWS: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr):
    """Row u of an array [.., ROWS, N] as ROWS tiles [BG, BN]."""
    lines = ()
    for i in tl.static_range(ROWS):
        at = array + (u[:, None] * ROWS + i) * N + n[None, :]
        lines += (tl.load(at, mask=real[:, None] & (n < N)[None, :], other=0.0).to(DTYPE),)
    return lines


@triton.jit
def store_line(array, u, n, real, tile, ROW: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    """Line ROW of row u of an array [.., ROWS, N]."""
    at = array + (u[:, None] * ROWS + ROW) * N + n[None, :]
    tl.store(at, tile.to(array.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


@triton.jit
def load_state(array, row, n, real, N: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr):
    """The columns of row `row` of states [.., N, P]."""
    columns = ()
    for p in tl.static_range(P):
        at = array + (row[:, None] * N + n[None, :]) * P + p
        columns += (tl.load(at, mask=real[:, None] & (n < N)[None, :], other=0.0).to(DTYPE),)
    return columns


@triton.jit
def store_state(array, row, n, real, columns, N: tl.constexpr, P: tl.constexpr):
    for p in tl.static_range(P):
        at = array + (row[:, None] * N + n[None, :]) * P + p
        tl.store(at, columns[p].to(array.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


@triton.jit
def zero_state(BG: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr):
    columns = ()
    for _ in tl.static_range(P):
        columns += (tl.zeros((BG, BN), DTYPE),)
    return columns


@triton.jit
def dot(tiles, numbers, FIRST: tl.constexpr, STRIDE: tl.constexpr, P: tl.constexpr):
    """sum_p tiles[p] numbers[FIRST + p STRIDE]."""
    total = tiles[0] * numbers[FIRST][:, None]
    for p in tl.static_range(1, P):
        total += tiles[p] * numbers[FIRST + p * STRIDE][:, None]
    return total


@triton.jit
def move(state, left, right, HAS_RIGHT: tl.constexpr, P: tl.constexpr):
    """exp(step drift) * (H right)."""
    moved = ()
    for q in tl.static_range(P):
        column = dot(state, right, q, P, P) if HAS_RIGHT else state[q]
        moved += (left * column,)
    return moved


@triton.jit
def add_source(moved, write, value, RANK: tl.constexpr, P: tl.constexpr):
    """M + write value^T."""
    state = ()
    for p in tl.static_range(P):
        column = moved[p]
        for r in tl.static_range(RANK):
            column += write[r] * value[r * P + p][:, None]
        state += (column,)
    return state


@triton.jit
def span(bounds, length, sequence, HAS_BOUNDS: tl.constexpr, INDEX: tl.constexpr):
    """First position of a sequence and the one behind its last."""
    if HAS_BOUNDS:
        begin, end = tl.load(bounds + sequence).to(INDEX), tl.load(bounds + sequence + 1).to(INDEX)
    else:
        begin = sequence.to(INDEX) * length
        end = begin + length
    return begin, end


@triton.jit
def chunk_of(begin, sequence, KEEP: tl.constexpr):
    """The first chunk of a sequence: each begins one of its own, so that at most one chunk of a sequence is not full."""
    return begin // KEEP + sequence


@triton.jit
def forward(
    value, write, read, step, drift, right, seen, initial, bounds, y, final, kept, length, groups, crowd,
    N: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SEEN: tl.constexpr,
    VARYING: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_BOUNDS: tl.constexpr, KEEP: tl.constexpr, DTYPE: tl.constexpr,
    INDEX: tl.constexpr, BG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y, the final states and, unless KEEP is 0, the state before every KEEP positions of a sequence."""
    BN: tl.constexpr = padded(N)
    sequence = tl.program_id(1)
    begin, end = span(bounds, length, sequence, HAS_BOUNDS, INDEX)
    g, n = tl.program_id(0) * BG + tl.arange(0, BG), tl.arange(0, BN)
    real = g < groups
    row = sequence.to(INDEX) * groups + g
    state = load_state(initial, row, n, real, N, P, DTYPE) if HAS_INITIAL else zero_state(BG, BN, P, DTYPE)
    rate = load_lines(drift, g, n, real, 1, N, DTYPE)[0] * LOG2_E if not VARYING else 0.0
    first_chunk = chunk_of(begin, sequence, KEEP) if KEEP else 0
    for t in tl.range(0, (end - begin).to(tl.int32), num_stages=STAGES):
        u = (begin + t) * groups + g
        if KEEP:
            for p in tl.static_range(P):
                store_line(kept, (first_chunk + t // KEEP) * groups + g, n, real & (t % KEEP == 0), state[p], p, P, N)
        wheres = load_lines(write, u, n, real, RANK, N, DTYPE)
        readout = load_lines(read, u, n, real, 1, N, DTYPE)[0]
        values = load_numbers(value, u, real, RANK * P, DTYPE)
        rights = load_numbers(right, u, real, P * P, DTYPE) if HAS_RIGHT else ()
        steps = tl.load(step + u, mask=real, other=0.0).to(DTYPE)
        if VARYING:
            rate = load_lines(drift, u, n, real, 1, N, DTYPE)[0] * LOG2_E
        moved = move(state, tl.exp2(steps[:, None] * rate), rights, HAS_RIGHT, P)
        state = add_source(moved, wheres, values, RANK, P)
        shown = load_numbers(seen, u, real, RANK * P, DTYPE) if HAS_SEEN else ()
        outputs = ()
        for p in tl.static_range(P):
            output = tl.sum(readout * (moved[p] if HAS_SEEN else state[p]), 1)
            if HAS_SEEN:
                for r in tl.static_range(RANK):
                    output += tl.sum(readout * wheres[r], 1) * shown[r * P + p]
            outputs += (output,)
        store_numbers(y, u, real, outputs, P)
    store_state(final, row, n, real, state, N, P)


@triton.jit
def backward(
    value, write, read, step, drift, right, seen, bounds, kept, states, dy, dfinal,
    dvalue, dwrite, dread, dstep, ddrift, dright, dseen, dinitial, length, groups, crowd,
    N: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SEEN: tl.constexpr,
    VARYING: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    KEEP: tl.constexpr, DTYPE: tl.constexpr, INDEX: tl.constexpr, BG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of all operands; that of a constant drift is left as one partial [G, N] per sequence."""
    BN: tl.constexpr = padded(N)
    sequence = tl.program_id(1)
    begin, end = span(bounds, length, sequence, HAS_BOUNDS, INDEX)
    g, n = tl.program_id(0) * BG + tl.arange(0, BG), tl.arange(0, BN)
    real = g < groups
    row = sequence.to(INDEX) * groups + g
    adjoint = load_state(dfinal, row, n, real, N, P, DTYPE) if HAS_FINAL else zero_state(BG, BN, P, DTYPE)
    drifts = load_lines(drift, g, n, real, 1, N, DTYPE)[0] if not VARYING else 0.0
    slopes = tl.zeros((BG, BN), DTYPE)
    first_chunk = chunk_of(begin, sequence, KEEP)
    chunks = tl.cdiv((end - begin).to(tl.int32), KEEP)
    for c in range(chunks):
        chunk = chunks - 1 - c
        low = begin + chunk * KEEP
        count = tl.minimum(end - low, KEEP).to(tl.int32)
        # All threads are done with the states of the chunk before.
        tl.debug_barrier()
        state = load_lines(kept, (first_chunk + chunk) * groups + g, n, real, P, N, DTYPE)
        for i in tl.range(0, count, num_stages=STAGES):
            u = (low + i) * groups + g
            for p in tl.static_range(P):
                store_line(states, row * KEEP + i, n, real, state[p], p, P, N)
            wheres = load_lines(write, u, n, real, RANK, N, DTYPE)
            values = load_numbers(value, u, real, RANK * P, DTYPE)
            rights = load_numbers(right, u, real, P * P, DTYPE) if HAS_RIGHT else ()
            steps = tl.load(step + u, mask=real, other=0.0).to(DTYPE)
            if VARYING:
                drifts = load_lines(drift, u, n, real, 1, N, DTYPE)[0]
            left = tl.exp2(steps[:, None] * (drifts * LOG2_E))
            state = add_source(move(state, left, rights, HAS_RIGHT, P), wheres, values, RANK, P)
        # A thread may read what another one has written.
        tl.debug_barrier()
        # A chunk's share of the drift gradient is summed apart, so that long sequences lose no digits.
        share = tl.zeros((BG, BN), DTYPE)
        for c_back in tl.range(0, count, num_stages=STAGES):
            i = count - 1 - c_back
            u = (low + i) * groups + g
            wheres = load_lines(write, u, n, real, RANK, N, DTYPE)
            readout = load_lines(read, u, n, real, 1, N, DTYPE)[0]
            values = load_numbers(value, u, real, RANK * P, DTYPE)
            rights = load_numbers(right, u, real, P * P, DTYPE) if HAS_RIGHT else ()
            steps = tl.load(step + u, mask=real, other=0.0).to(DTYPE)
            if VARYING:
                drifts = load_lines(drift, u, n, real, 1, N, DTYPE)[0]
            cotangents = load_numbers(dy, u, real, P, DTYPE)
            shown = load_numbers(seen, u, real, RANK * P, DTYPE) if HAS_SEEN else ()
            old = load_lines(states, row * KEEP + i, n, real, P, N, DTYPE)
            left = tl.exp2(steps[:, None] * (drifts * LOG2_E))
            upper = ()
            for p in tl.static_range(P):
                upper += (adjoint[p] + readout * cotangents[p][:, None],)
            sources = adjoint if HAS_SEEN else upper
            # `state` is the one after position i.
            dreadout = dot(state, cotangents, 0, 1, P)
            dvalues, dshown = (), ()
            for r in tl.static_range(RANK):
                dwhere = dot(sources, values, r * P, 1, P)
                if HAS_SEEN:
                    own, extra = tl.zeros((BG,), DTYPE), tl.zeros((BG,), DTYPE)
                    overlap = tl.sum(readout * wheres[r], 1)
                    for p in tl.static_range(P):
                        own += shown[r * P + p] * cotangents[p]
                        extra += (shown[r * P + p] - values[r * P + p]) * cotangents[p]
                        dshown += (overlap * cotangents[p],)
                    dreadout += extra[:, None] * wheres[r]
                    dwhere += own[:, None] * readout
                store_line(dwrite, u, n, real, dwhere, r, RANK, N)
                for p in tl.static_range(P):
                    dvalues += (tl.sum(wheres[r] * sources[p], 1),)
            store_numbers(dvalue, u, real, dvalues, RANK * P)
            if HAS_SEEN:
                store_numbers(dseen, u, real, dshown, RANK * P)
            store_line(dread, u, n, real, dreadout, 0, 1, N)
            lower = ()
            for p in tl.static_range(P):
                lower += (left * upper[p],)
            slope = tl.zeros((BG, BN), DTYPE)
            adjoint, drights = (), ()
            for p in tl.static_range(P):
                if HAS_RIGHT:
                    for q in tl.static_range(P):
                        drights += (tl.sum(old[p] * lower[q], 1),)
                    column = dot(lower, rights, p * P, 1, P)
                else:
                    column = lower[p]
                slope += old[p] * column
                adjoint += (column,)
            if HAS_RIGHT:
                store_numbers(dright, u, real, drights, P * P)
            tl.store(dstep + u, tl.sum(slope * drifts, 1).to(dstep.dtype.element_ty), mask=real)
            if VARYING:
                store_line(ddrift, u, n, real, slope * steps[:, None], 0, 1, N)
            else:
                share += slope * steps[:, None]
            state = old
        slopes += share
    if not VARYING:
        store_line(ddrift, row, n, real, slopes, 0, 1, N)
    if HAS_INITIAL:
        store_state(dinitial, row, n, real, adjoint, N, P)
