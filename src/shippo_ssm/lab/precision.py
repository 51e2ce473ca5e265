"""The precision of matrix products in training: float32, or bfloat16 where this machine is faster and right with it.

bfloat16 is automatic mixed precision (`torch.autocast`): linear layers multiply in bfloat16; the residual stream, the memory of
a scan, parameters and moments stay float32. Whether that pays differs from processor to processor: some have units for it, some
emulate it, and some name units that end the process. So "auto" measures, in a process of its own.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["float32", "bfloat16", "auto"]
# A product in bfloat16 must take at most this share of the time in float32.
WORTH = 0.8

_PROBE = """
import time, torch
torch.set_num_threads(1)
a, b = torch.randn(512, 256), torch.randn(256, 256)
half = a.bfloat16(), b.bfloat16()
def seconds(left, right):
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - begun)
    return sorted(times)[1]
error = (half[0] @ half[1] - a @ b).norm() / (a @ b).norm()
print(float(error), seconds(*half) / seconds(a, b))
"""


@functools.cache
def bfloat16_pays() -> bool:
    """Whether products in bfloat16 are right and faster here; measured in a process of its own, which may die of it."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
    except subprocess.SubprocessError:
        return False
    error, share = map(float, done.stdout.split())
    return error < 1e-2 and share < WORTH


def resolve_precision(precision: Precision) -> Precision:
    """The precision that is meant: "auto" is "bfloat16" where that pays, else "float32"."""
    if precision == "auto":
        return "bfloat16" if bfloat16_pays() else "float32"
    return precision


def products_in(precision: Precision) -> AbstractContextManager:
    """A context in which linear layers multiply in this precision."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else nullcontext()
