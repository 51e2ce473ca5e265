"""Kernels on the threads of OpenMP: slices are handed out by machine code, so that no thread has to enter Python.

Data path: `run_team` writes a call as a row of machine words: a head, then the operands as Numba's machine code takes them. The
row goes to GOMP_parallel, whose threads draw numbers of slices from a counter in the head and call the kernel on them. What a
thread does with rows of n words is machine code too (`_work`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from typing import Any

from shippo_ssm._private import link_module

# Slices handed out per thread: enough that a core taken away by another process does not hold up the whole call.
_SLICES_PER_THREAD = 4
# The head: address of the kernel, number of items, number of slices, the next slice, slices that failed.
_HEAD = 5
_KERNEL, _COUNT, _SLICES, _NEXT, _FAILED = range(_HEAD)
# GOMP_parallel(work, row, number of threads, flags).
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
# Numba's codes for a call that went well, and for one that gave `None`.
_FINE = (0, -2)
_made = itertools.count()


def run_team(kernel: int, operands: tuple, count: int, num_threads: int, parallel: int) -> None:
    """Run the machine code at address `kernel` on the items of `range(count)`; `parallel` is the address of GOMP_parallel."""
    row = array("q", (kernel, count, min(count, num_threads * _SLICES_PER_THREAD), 0, 0))
    _append(row, operands)
    work, _ = _work(len(row) - _HEAD)
    _PARALLEL(parallel)(work, row.buffer_info()[0], num_threads, 0)
    if row[_FAILED]:
        raise MemoryError("a kernel has no memory left to compute with")


def _append(row: array[int], operands: tuple) -> None:
    for operand in operands:
        if isinstance(operand, int):
            row.append(operand)
        elif isinstance(operand, tuple):
            _append(row, operand)
        else:
            (address, _), size, itemsize = operand.__array_interface__["data"], operand.size, operand.itemsize
            # No owner, number of items and their size, address, shape, strides.
            row.extend((0, 0, size, itemsize, address, size, itemsize))


@functools.cache
def _work(num_words: int) -> tuple[int, Any]:
    """The address of work(row): draw slices until none is left, and call the kernel on each; and what it is freed with."""
    from llvmlite import ir

    word, code, none = ir.IntType(64), ir.IntType(32), ir.VoidType()
    pointer = word.as_pointer()
    # Machine code is linked by name: two Python threads may stand here at once.
    module = ir.Module(f"team_{num_words}_{next(_made)}")
    work = ir.Function(module, ir.FunctionType(none, [pointer]), f"{module.name}_work")
    build = ir.IRBuilder(work.append_basic_block())
    draw, slice_, end = (work.append_basic_block(name) for name in ("draw", "slice", "end"))
    fields = [build.gep(work.args[0], [code(index)]) for index in range(_HEAD + num_words)]
    kernel, count, slices, *words = (build.load(fields[i]) for i in (_KERNEL, _COUNT, _SLICES, *range(_HEAD, len(fields))))
    # Where Numba's functions leave a result and an exception.
    left = [build.alloca(word) for _ in range(2)]
    kernel = build.inttoptr(kernel, ir.FunctionType(code, [pointer] * 2 + [word] * (num_words + 2)).as_pointer())
    build.branch(draw)
    build.position_at_end(draw)
    index = build.atomic_rmw("add", fields[_NEXT], word(1), "monotonic")
    build.cbranch(build.icmp_signed("<", index, slices), slice_, end)
    build.position_at_end(slice_)
    bounds = [build.sdiv(build.mul(i, count), slices) for i in (index, build.add(index, word(1)))]
    given = build.call(kernel, [*left, *words, *bounds])
    first, other = (build.icmp_signed("!=", given, code(fine)) for fine in _FINE)
    build.atomic_rmw("add", fields[_FAILED], build.zext(build.and_(first, other), word), "monotonic")
    build.branch(draw)
    build.position_at_end(end)
    build.ret_void()
    return link_module(module, work.name)
