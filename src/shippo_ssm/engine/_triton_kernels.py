"""What Triton kernels share: small arrays of an item as single numbers, one tile of items for each.

An item is a row of an array [.., SIZE]. A block of BM items is loaded and stored as one tile [BM, SIZE], so that neighbouring
lanes touch neighbouring places, and used as numbers, tiles [BM], so that arithmetic needs no exchange between lanes. COUNT rows
of an item, `stride` rows apart, are one tile [BM, COUNT SIZE]. A block is named by its first row and the items in it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def padded(size):
    """The next power of two: tiles have no other sizes."""
    return triton.next_power_of_2(size)


@triton.jit
def unbind(tile, SIZE: tl.constexpr):
    """The SIZE columns [BM] of a tile [BM, SIZE]."""
    if SIZE == 1:
        return (tl.reshape(tile, (tile.shape[0],)),)
    else:
        even, odd = tl.split(tl.reshape(tile, (tile.shape[0], SIZE // 2, 2)))
        evens, odds = unbind(even, SIZE // 2), unbind(odd, SIZE // 2)
        numbers = ()
        for k in tl.static_range(SIZE // 2):
            numbers += (evens[k], odds[k])
        return numbers


@triton.jit
def bind(numbers, FIRST: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """The tile [BM, SIZE] whose columns are numbers[FIRST], numbers[FIRST + STRIDE], .."""
    if SIZE == 1:
        return tl.reshape(numbers[FIRST], (numbers[FIRST].shape[0], 1))
    else:
        evens = bind(numbers, FIRST, 2 * STRIDE, SIZE // 2)
        odds = bind(numbers, FIRST + STRIDE, 2 * STRIDE, SIZE // 2)
        return tl.reshape(tl.join(evens, odds), (numbers[FIRST].shape[0], SIZE))


@triton.jit
def filled(numbers, SIZE: tl.constexpr):
    """`numbers` and some more, to a power of two."""
    for _ in tl.static_range(padded(SIZE) - SIZE):
        numbers += (numbers[0],)
    return numbers


@triton.jit
def places(m, real, SIZE: tl.constexpr, stride, COUNT: tl.constexpr, limit):
    """Where the COUNT rows of an item lie in an array [.., SIZE], and which are meant: all, or the first `limit` rows."""
    k = tl.arange(0, padded(COUNT * SIZE))
    rows = COUNT * SIZE if limit is None else limit * SIZE
    return (m[:, None] + (k // SIZE * stride)[None, :]) * SIZE + (k % SIZE)[None, :], real[:, None] & (k < rows)[None, :]


@triton.jit
def load_numbers(array, row, m, real, SIZE: tl.constexpr, DTYPE: tl.constexpr, stride=0, COUNT: tl.constexpr = 1, limit=None):
    """COUNT rows of an array [.., SIZE] from row + m on as COUNT SIZE numbers, and some more to a power of two.

    Zeros where an item is not real, and behind its first `limit` rows.
    """
    at, here = places(m, real, SIZE, stride, COUNT, limit)
    return unbind(tl.load(array + row * SIZE + at, mask=here, other=0.0).to(DTYPE), padded(COUNT * SIZE))


@triton.jit
def store_tile(array, row, m, real, tile, SIZE: tl.constexpr, stride=0, COUNT: tl.constexpr = 1, limit=None):
    """COUNT rows of an array [.., SIZE] from a tile [BM, COUNT SIZE] that is filled to a power of two."""
    at, here = places(m, real, SIZE, stride, COUNT, limit)
    tl.store(array + row * SIZE + at, tile.to(array.dtype.element_ty), mask=here)


@triton.jit
def load_state(array, row, g, n, real, N: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr):
    """The P columns, tiles [BG, BN], of row `row` + g of states [.., N, P]."""
    columns = ()
    for p in tl.static_range(P):
        at = array + row * (N * P) + ((g[:, None] * N + n[None, :]) * P + p)
        columns += (tl.load(at, mask=real[:, None] & (n < N)[None, :], other=0.0).to(DTYPE),)
    return columns


@triton.jit
def store_state(array, row, g, n, real, columns, N: tl.constexpr, P: tl.constexpr):
    """Row `row` + g of states [.., N, P], from its columns."""
    for p in tl.static_range(P):
        at = array + row * (N * P) + ((g[:, None] * N + n[None, :]) * P + p)
        tl.store(at, columns[p].to(array.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])
