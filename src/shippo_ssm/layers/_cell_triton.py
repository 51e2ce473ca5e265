"""One position of the two-point cell for GPUs, in Triton: state in, state out, one launch; formulas of `cell.py`.

A program is one row of the batch and one block of BG groups, with the tiles of `scan/_triton_kernels.py`. Nothing depends on
numbers that the host would have to know, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shippo_ssm.engine._triton_kernels import load_numbers, load_state, padded, store_state, store_tile
from shippo_ssm.scan._triton_kernels import LOG2_E, add_source, fold, load_lines, load_shared, move, sets_of


@triton.jit
def scaled(numbers, factor, COUNT: tl.constexpr):
    """The first COUNT numbers times a factor."""
    out = ()
    for k in tl.static_range(COUNT):
        out += (numbers[k] * factor,)
    return out


@triton.jit
def cell_step(
    value, write, read, step, mix, drift, right, memory, last_write, last_value, y, after, groups, crowd,
    SHARED: tl.constexpr, N: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr, HAS_RIGHT: tl.constexpr, VARYING: tl.constexpr,
    DTYPE: tl.constexpr, BG: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """H' = L (H + (1 - mix) step U_last) right + mix step U, and y = read^T H'."""
    home, g, n = tl.program_id(0) * BG, tl.arange(0, BG), tl.arange(0, padded(N))
    real = home + g < groups
    u = tl.program_id(1).to(tl.int64) * groups + home
    first_set, s = sets_of(home, g, SHARED, BG)
    has_set = real if s.shape[0] == BG else tl.full((1,), True, tl.int1)
    v = tl.program_id(1).to(tl.int64) * (groups // SHARED) + first_set
    steps = tl.load(step + u + g, mask=real, other=0.0).to(DTYPE)
    gamma = tl.load(mix + u + g, mask=real, other=0.0).to(DTYPE) * steps
    rates = load_lines(drift, u if VARYING else home, g, n, real, 1, N, DTYPE)[0] * LOG2_E
    rights = load_numbers(right, u, g, real, P * P, DTYPE) if HAS_RIGHT else ()
    entering = scaled(load_numbers(last_value, u, g, real, RANK * P, DTYPE), steps - gamma, RANK * P)
    sources = scaled(load_numbers(value, u, g, real, RANK * P, DTYPE), gamma, RANK * P)
    state = load_state(memory, u, g, n, real, N, P, DTYPE)
    state = add_source(state, load_shared(last_write, v, s, n, has_set, BG, RANK, N, DTYPE), entering, 0, RANK, P)
    state = move(state, tl.exp2(steps[:, None] * rates), rights, 0, False, HAS_RIGHT, P)
    state = add_source(state, load_shared(write, v, s, n, has_set, BG, RANK, N, DTYPE), sources, 0, RANK, P)
    readout = load_shared(read, v, s, n, has_set, BG, 1, N, DTYPE)[0]
    readouts = ()
    for _ in tl.static_range(P):
        readouts += (readout,)
    store_tile(y, u, g, real, fold(readouts, state, P, HALVES), P)
    store_state(after, u, g, n, real, state, N, P)
