"""Large arrays whose memory is used again: touching a fresh page costs more than filling it with results.

The system hands out large blocks empty and takes them back when they are freed, so a training step would pay for every page
of its results and gradients anew. Blocks that nobody holds any longer wait here for the next array of about the same size,
which the next step asks for. Sizes come in eight steps between powers of two, so that batches of many lengths share a few
blocks; what is left over of a block takes no memory until a larger array uses it.
"""

from __future__ import annotations

import os
import weakref
from collections import deque

import numpy as np

# Blocks that nobody holds, the longest waiting first. One call at a time changes the list, so it needs no lock: an array can
# die inside any line, also of this file.
_idle: deque[np.ndarray] = deque()


def recycled(num_bytes: int) -> np.ndarray:
    """Uninitialised memory [num_bytes] that begins on a cache line; it is used again once nothing refers to the array.

    Example:
        >>> first = recycled(1 << 22)
        >>> place = first.ctypes.data
        >>> del first
        >>> recycled(1 << 22).ctypes.data == place
        True
    """
    # The number is kept to its four leading bits, rounded up.
    step = 1 << max(0, num_bytes.bit_length() - 4)
    block = _take(-(-num_bytes // step) * step + 64)
    # Vectors that straddle two cache lines are slow: begin on one.
    skip = -block.ctypes.data % 64
    array = block[skip : skip + num_bytes].view()
    weakref.finalize(array, _release, block).atexit = False
    return array


def _take(size: int) -> np.ndarray:
    for _ in range(len(_idle)):
        try:
            block = _idle.pop()
        except IndexError:
            break
        if block.size == size:
            return block
        _idle.appendleft(block)
    # NumPy asks the system for large pages, which are cheaper to touch; PyTorch's allocator does not.
    return np.empty(size, np.uint8)


def _release(block: np.ndarray) -> None:
    _idle.append(block)
    limit = _most_bytes()
    while sum(block.size for block in tuple(_idle)) > limit:
        try:
            _idle.popleft()
        except IndexError:
            break


def _most_bytes() -> int:
    """Bytes that may wait: an eighth of the machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
    except (ValueError, OSError, AttributeError):
        return 1 << 30
