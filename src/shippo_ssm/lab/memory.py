"""Freed memory kept for the next training step.

A step makes and frees the same large tensors over and over. glibc asks the system for each of them and gives it back when it
is freed, so that every page is found and cleared anew: up to a third of a step of a Transport-MQAR model. Here all requests
come from one heap, which is never cut, and which begins with a stretch of large pages. The switch is one for the whole
process, therefore only thrown in processes of our own: the workers of a run, and `shippo run` with one job.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
# Bytes for which large pages are asked: more than a training step holds. They are taken when they are touched, not before.
_STRETCH = 4 << 30


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; returns whether the C library knows how (glibc does)."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    # Every request from the one heap, none from a mapping of its own, and the heap never cut.
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _ARENA_MAX: 1}
    if not all(library.mallopt(parameter, value) == 1 for parameter, value in settings.items()):
        return False
    library.malloc.restype = ctypes.c_void_p
    stretch = library.malloc(ctypes.c_size_t(_STRETCH))
    if stretch:
        start = -(-stretch // mmap.PAGESIZE) * mmap.PAGESIZE
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(_STRETCH - mmap.PAGESIZE), mmap.MADV_HUGEPAGE)
        library.free(ctypes.c_void_p(stretch))
    return True
