"""What the Triton kernels of all rooms share: small arrays of an item as single numbers, one tile of items for each.

An item is a row of an array [.., SIZE]. A block of BM items is loaded and stored as one tile [BM, SIZE], so that neighbouring
lanes touch neighbouring places, and used as numbers, tiles [BM], so that arithmetic needs no exchange between lanes.
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
        low, high = tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, SIZE // 2)), (0, 2, 1)))
        return unbind(low, SIZE // 2) + unbind(high, SIZE // 2)


@triton.jit
def load_numbers(array, u, real, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Row u of an array [.., SIZE] as SIZE numbers, zeros where an item is not real, and some more to a power of two."""
    k = tl.arange(0, padded(SIZE))
    tile = tl.load(array + u[:, None] * SIZE + k[None, :], mask=real[:, None] & (k < SIZE)[None, :], other=0.0)
    return unbind(tile.to(DTYPE), padded(SIZE))


@triton.jit
def bind(numbers, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """The tile [BM, SIZE] whose columns are numbers[FIRST], .., numbers[FIRST + SIZE - 1]."""
    if SIZE == 1:
        return tl.reshape(numbers[FIRST], (numbers[FIRST].shape[0], 1))
    else:
        halves = tl.join(bind(numbers, FIRST, SIZE // 2), bind(numbers, FIRST + SIZE // 2, SIZE // 2))
        return tl.reshape(tl.permute(halves, (0, 2, 1)), (numbers[FIRST].shape[0], SIZE))


@triton.jit
def store_numbers(array, u, real, numbers, SIZE: tl.constexpr):
    """Row u of an array [.., SIZE], from its SIZE numbers."""
    filled = numbers
    for _ in tl.static_range(padded(SIZE) - SIZE):
        filled += (numbers[0],)
    k = tl.arange(0, padded(SIZE))
    tile = bind(filled, 0, padded(SIZE)).to(array.dtype.element_ty)
    tl.store(array + u[:, None] * SIZE + k[None, :], tile, mask=real[:, None] & (k < SIZE)[None, :])
