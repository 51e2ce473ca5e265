"""Run kernels: operands flattened, machine code looked up, the work shared between threads.

Threads are torch's own, a team of OpenMP: threads of ours would have to share a core with them. Where torch has no such team,
and in a forked process, which it does not survive, a kernel runs on one thread. A kernel computes each of its items the same
way whatever slice it is called with, so results do not depend on the number of threads.

`run_team` writes a call as a row of machine words: a head, then the operands as Numba's machine code takes them. The row goes
to GOMP_parallel, whose threads draw numbers of slices from a counter in the head and call the kernel on them, without entering
Python: what a thread does with rows of n words is machine code too (`_work`).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from shippo_ssm._private import link_module, openmp_parallel, private
from shippo_ssm.engine.compiler import Kernel, compile_kernel
from shippo_ssm.engine.memory import recycled

# Bytes from which results are recycled: smaller ones come from the allocator's own stock.
_LARGE = 1 << 20

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

# Asked once: the system takes longer to answer than a small kernel.
_CORES = os.cpu_count() or 1

_kernels: dict[tuple, Kernel] = {}
_lock = threading.RLock()
_FLOATS = (torch.float32, torch.float64, torch.bfloat16)
# The address of OpenMP's call for a team of threads, 0 where there is none, `None` before it is looked for.
_parallel: int | None = None


def custom_op(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op` without mutated arguments, whose first call does not import torch's compiler, a second's work.

    Torch keeps its compiler from tracing into a kernel; where the compiler is not loaded nothing can trace.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(name, mutates_args=(), schema=schema)(function)
        kernels = private(op, "_backend_fns", "torch")
        guarded = kernels[None]

        def call(*arguments: Any) -> Any:
            return (guarded if "torch._dynamo" in sys.modules else function)(*arguments)

        kernels[None] = call
        register_fake = op.register_fake

        def register_checked(fake: Callable[..., Any]) -> Any:
            def checked(*arguments: Any) -> Any:
                check_one_device(name, arguments)
                return fake(*arguments)

            return register_fake(checked)

        op.register_fake = register_checked
        return op

    return decorate


def save_tensors(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep for the gradient of an operator its tensors, which come before its options, and its last output.

    The last of several outputs is there for the gradient alone, and has none itself.
    """
    *others, last = output if isinstance(output, tuple) else (output,)
    if others:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(last)
    tensors = [given for given in inputs if given is None or isinstance(given, torch.Tensor)]
    ctx.options = inputs[len(tensors) :]
    ctx.save_for_backward(*tensors, last)


def check_one_device(name: str, arguments: Iterable[Any]) -> None:
    """Raise where tensors are on several devices: one without memory, given to an exported program, would leave the others'
    results without numbers."""
    devices = {str(argument.device) for argument in arguments if isinstance(argument, torch.Tensor)}
    if len(devices) > 1:
        raise ValueError(f"{name}: operands are on {' and '.join(sorted(devices))}; expected one device")


def differentiate(
    formula: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    needed: tuple[bool, ...],
    cotangents: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `formula(*inputs)` in torch, which can be differentiated again where the gradient of a kernel cannot; `None`
    for inputs that are not `needed`."""
    wanted = [tensor for tensor, need in zip(inputs, needed) if need]
    with torch.enable_grad():
        outputs = formula(*inputs)
    found = iter(torch.autograd.grad(outputs, wanted, cotangents, create_graph=True))
    return tuple(next(found) if need else None for need in needed)


def launch(
    builder: Callable[..., Callable],
    count: int,
    operands: Any,
    /,
    min_items_per_thread: int = 1,
    raw: bool = False,
    **constants: Any,
) -> None:
    """Run the kernel `builder(**constants)` on `operands` for all items of `range(count)`, on all threads.

    Args:
        builder: module-level function returning the kernel, a function (operands, start, stop). What it closes over is a
            compile-time constant. Machine code on disk is known by the text of the builder's module, of the modules that this
            imports functions from, and of this package. A kernel calls traces (`simd`), but no other compiled function.
        count: number of items; the kernel's result for an item must not depend on the slice it comes in.
        operands: a named tuple whose fields are CPU tensors, flat arrays, integers, `None`, or further named tuples. The
            kernel sees the same record with flat contiguous arrays, empty ones for `None` (of the dtype of the field
            before). Tensors that it writes must be contiguous already.
        min_items_per_thread: items that are worth a thread of their own.
        raw: the record holds integers alone, addresses and sizes: a call costs little more than its kernel.
        constants: keyword arguments of the builder; hashable, with a `repr` that tells them apart.
    """
    kinds: list[Any] = []
    flat = operands if raw else _flatten(operands, kinds)
    key = (builder, *kinds, *constants.items())
    kernel = _kernels.get(key)
    if kernel is None:
        if raw:
            _flatten(operands, kinds)
        elif np.dtype("float32") in kinds and np.dtype("float64") in kinds:
            # An exported program checks no dtypes.
            raise ValueError(f"{builder.__name__}: float32 came with float64; expected one of them; convert with .to()")
        with _lock:
            kernel = _kernels[key] = _kernels.get(key) or compile_kernel(builder, tuple(kinds), constants)
    num_threads = 1 if count < 2 * min_items_per_thread else min(torch.get_num_threads(), _CORES, count)
    global _parallel
    if num_threads > 1 and _parallel is None:
        _parallel = openmp_parallel()
    if num_threads > 1 and _parallel:
        run_team(kernel.address, flat, count, num_threads, _parallel)
    else:
        kernel.call(flat, 0, count)


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


def allocate(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """`like.new_empty(shape)`, in recycled memory where it is large and lies in the memory of a CPU."""
    dtype = dtype or like.dtype
    num_bytes = math.prod(shape) * dtype.itemsize
    if like.device.type != "cpu" or num_bytes < _LARGE:
        return like.new_empty(shape, dtype=dtype)
    return torch.from_numpy(recycled(num_bytes)).view(dtype).view(shape)


def _flatten(record: tuple, kinds: list[Any]) -> tuple:
    """The fields of `record` as a kernel takes them; appends to `kinds` what each of them is."""
    kinds.append(type(record))
    fields = []
    for operand in record:
        if isinstance(operand, tuple):
            fields.append(_flatten(operand, kinds))
            continue
        if operand is None:
            operand = np.empty(0, kinds[-1])
        elif isinstance(operand, torch.Tensor):
            if operand.dtype not in _FLOATS:
                raise ValueError(
                    f"a kernel came with {operand.dtype}; expected float32, float64 or bfloat16; convert it with .to()"
                )
            operand = operand.detach().contiguous().view(-1)
            # NumPy has no bfloat16: traces know its bits by this dtype.
            operand = (operand.view(torch.int16) if operand.dtype == torch.bfloat16 else operand).numpy()
        kinds.append(int if isinstance(operand, int) else operand.dtype)
        fields.append(operand)
    return tuple(fields)


def _after_fork() -> None:
    # A forked child inherits no threads of OpenMP, and a lock that nobody may hold any more.
    global _parallel, _lock
    _parallel, _lock = 0, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
