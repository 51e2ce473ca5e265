"""Freed memory kept for the next training step.

A step makes and frees the same large tensors over and over. glibc asks the system for each of them and gives it back when it
is freed, so that every page is found and cleared anew: up to a third of a step of a Transport-MQAR model. The switch is
one for the whole process, therefore only thrown in processes of our own, the workers of a run.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; returns whether the C library knows how (glibc does)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    # Every request from the one heap, none from a mapping of its own, and the heap never cut.
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _ARENA_MAX: 1}
    return all(mallopt(parameter, value) == 1 for parameter, value in settings.items())
