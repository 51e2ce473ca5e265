"""Large arrays whose memory is used again: touching a fresh page costs more than filling it with results.

Freed blocks wait for the next array of about the same size, up to an eighth of the memory.
Sizes come in eight steps between powers of two, so that batches of many lengths share a few blocks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import deque
from pathlib import Path

import numpy as np

# Freed blocks, the longest waiting first. Every change is one atomic call, so the list needs no lock: an array can be freed
# inside any line, also of this file.
_idle: deque[np.ndarray] = deque()


def recycled(num_bytes: int) -> np.ndarray:
    """Uninitialised memory [num_bytes] that begins on a cache line; it is used again once nothing refers to the array."""
    # The number is kept to its four leading bits, rounded up.
    step = 1 << max(0, num_bytes.bit_length() - 4)
    block = _take(-(-num_bytes // step) * step + 64)
    # Vectors that straddle two cache lines are slow: begin on one.
    skip = -block.ctypes.data % 64
    array = block[skip : skip + num_bytes].view()
    weakref.finalize(array, _keep, block).atexit = False
    return array


def _take(size: int) -> np.ndarray:
    with contextlib.suppress(IndexError):
        for _ in range(len(_idle)):
            block = _idle.pop()
            if block.size == size:
                return block
            _idle.appendleft(block)
    # NumPy asks the system for large pages, which are cheaper to touch; PyTorch's allocator does not.
    return np.empty(size, np.uint8)


def _keep(block: np.ndarray) -> None:
    _idle.append(block)
    with contextlib.suppress(IndexError):
        while sum(block.size for block in tuple(_idle)) > _max_idle_bytes():
            _idle.popleft()


@functools.cache
def _max_idle_bytes() -> int:
    """An eighth of the memory of the machine or of the container, whichever is smaller."""
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        machine = 8 << 30
    return min([machine, *container_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]) // 8


def container_limits(groups: Path, root: Path) -> list[int]:
    """Bytes that the control groups of this process may use, version 1 and 2, from the list of `groups` mounted at `root`."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
            own = base / path.lstrip("/")
            for folder in (own, *own.parents):
                # "max" stands for no limit.
                with contextlib.suppress(OSError, ValueError):
                    limits.append(int((folder / name).read_text()))
                if folder == base:
                    break
    return limits
