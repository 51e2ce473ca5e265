"""glibc malloc settings for training processes: keep freed memory instead of returning it to the system.

By default glibc maps each large tensor anew, and the page faults take up to a third of a Transport-MQAR step. The
settings hold for the whole process, so only the lab's own processes use them.
"""

import ctypes
import mmap
import sys

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
# Bytes that get huge pages: more than a training step holds. They are used only when touched.
_HUGE_PAGE_BYTES = 4 << 30


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; returns whether the C library supports it (glibc does)."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    # One heap for all requests, no separate mappings, never trimmed.
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _ARENA_MAX: 1}
    if not all(library.mallopt(parameter, value) == 1 for parameter, value in settings.items()):
        return False
    library.malloc.restype = ctypes.c_void_p
    block = library.malloc(ctypes.c_size_t(_HUGE_PAGE_BYTES))
    if block:
        start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(_HUGE_PAGE_BYTES - mmap.PAGESIZE), mmap.MADV_HUGEPAGE)
        library.free(ctypes.c_void_p(block))
    return True
