"""The scan on a CPU at the speed of its memory traffic: forward and backward as compiled kernels.

Data path: the tensors of a `Recurrence` go to one custom operator that returns y [B, T, G, P], the final states and the
states at chunk boundaries; its gradient is a second operator that recomputes the states inside each chunk. Both cut
their work into (sequence, block of groups) items, which are independent of each other, so results are the same bit for
bit with any number of threads. `_fused_kernels.py` holds the machine code, compiled on first use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shippo_ssm.engine import launch
from shippo_ssm.scan._fused_kernels import (
    Backward,
    Case,
    Forward,
    Items,
    Summary,
    build_backward,
    build_forward,
    build_summary,
    padded_order,
)
from shippo_ssm.scan.algebra import Affine, Recurrence

# The largest P whose sums fit into registers.
WIDEST = 16
# Sequences for each thread from which they are not split over blocks of groups.
_ITEMS_PER_THREAD = 4
# Bytes of recomputed states that one backward item keeps: they are written and read again, and should stay in cache.
_BACKWARD_SCRATCH = 1 << 19
# Bytes from which NumPy takes large pages.
_LARGE = 1 << 22


def obstacle(value: Tensor) -> str | None:
    """Why the kernels cannot run on `value` [.., P]; `None` where they can."""
    if value.device.type != "cpu":
        return f"tensors on {value.device.type}, and the fused kernels run on a CPU"
    if not 1 <= value.shape[-1] <= WIDEST:
        return f"width P = {value.shape[-1]}, and the fused kernels take 1 to {WIDEST}"
    return None


def run(recurrence: Recurrence, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y and the final state in compiled kernels, for CPU tensors in float32 or float64 with P <= 16.

    Differentiable once; ask backend="associative" or "reference" for second derivatives.
    """
    operands = (*recurrence, initial_state)
    keep = False
    if torch.is_grad_enabled():
        for operand in operands:
            keep = keep or (operand is not None and operand.requires_grad)
    y, final_state, _ = _scan(*operands, cu_seqlens, keep)
    return y, final_state


def summary(recurrence: Recurrence, cu_seqlens: Tensor | None = None, *, mirrored: bool = False) -> Affine:
    """What the recurrence does to a state that enters it, one `Affine` per sequence and group; no gradients.

    Args:
        recurrence: value, write, step, drift and right are read; dy and `read` stand for value and write where `mirrored`.
        cu_seqlens: boundaries of packed sequences.
        mirrored: the summary of S_{t-1} = L_t (S_t + read_t dy_t^T) R_t^T, from after the last position to before the first.
    """
    value, write, _, _, drift, right, _ = recurrence
    sizes = int(write.shape[-1]), int(value.shape[-1]), int(value.shape[-2])
    case = _make_case(value.dtype, *sizes, right is not None, False, drift.ndim == 4)
    count, items = _items(value, cu_seqlens, case.chunk, value.shape[2])
    corner = (len(items.first_chunk), value.shape[2])
    left, update = value.new_empty(*corner, case.order), value.new_empty(*corner, case.order, case.width)
    turned = None if right is None else value.new_empty(*corner, case.width, case.width)
    # The kernel looks at neither `read` nor `seen`.
    record = recurrence._replace(read=write, seen=None)
    launch(build_summary, count, Summary(items, record, left, turned, update), case=case, mirrored=mirrored)
    return Affine(left, turned, update)


def keep_every(order: int, width: int, rank: int, has_right: bool) -> int:
    """Positions between two kept states: as few as 16, unless the kept states would outgrow 6 % of the other tensors."""
    per_position = 2 * ((rank + 1) * (order + width) + 1 + has_right * width * width)
    chunk = 16
    while order * width > 0.06 * per_position * chunk and chunk < 128:
        chunk *= 2
    return chunk


@torch.library.custom_op("shippo::transport_scan", mutates_args=())
def _scan(
    value: Tensor,
    write: Tensor,
    read: Tensor,
    step: Tensor,
    drift: Tensor,
    right: Tensor | None,
    seen: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    recurrence = Recurrence(value, write, read, step, drift, right, seen)
    case = _case(recurrence)
    y, final_state, checkpoints = _allocate(value, *_output_shapes(case, value, cu_seqlens, keep))
    count, items = _items(value, cu_seqlens, case.chunk, value.shape[2])
    launch(build_forward, count, Forward(items, recurrence, initial_state, y, final_state, checkpoints), case=case)
    return y, final_state, checkpoints


@torch.library.custom_op("shippo::transport_scan_backward", mutates_args=())
def _scan_backward(
    value: Tensor,
    write: Tensor,
    read: Tensor,
    step: Tensor,
    drift: Tensor,
    right: Tensor | None,
    seen: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    recurrence = Recurrence(value, write, read, step, drift, right, seen)
    if checkpoints.numel() == 0:
        _, _, checkpoints = _scan(*recurrence, initial_state, cu_seqlens, True)
    case = _case(recurrence)
    gradients = _allocate(value, *_gradient_shapes(*recurrence, initial_state))
    *gradient, dinitial = gradients
    gradient = Recurrence(*gradient)
    per_group = case.chunk * case.order * case.width * value.element_size()
    count, items = _items(value, cu_seqlens, case.chunk, _BACKWARD_SCRATCH // max(1, per_group))
    # A constant drift collects one partial per sequence, added in order below: no thread count can change the sum.
    partials = gradient.drift if case.varying else value.new_zeros(len(items.first_chunk), *drift.shape)
    results = gradient._replace(drift=partials)
    launch(build_backward, count, Backward(items, recurrence, checkpoints, dy, dfinal, results, dinitial), case=case)
    if not case.varying:
        gradient.drift.copy_(torch.from_numpy(partials.numpy().sum(axis=0, dtype=np.float64)))
    return gradients


@_scan.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *operands, _, cu_seqlens, keep = arguments
    value = operands[0]
    shapes = _output_shapes(_case(Recurrence(*operands)), value, cu_seqlens, keep)
    return tuple(value.new_empty(shape) for shape in shapes)


@_scan_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(arguments[0].new_empty(shape) for shape in _gradient_shapes(*arguments[:8]))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *operands, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*operands, output[0], output[2])


def _scan_vjp(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: None) -> tuple:
    *operands, y, checkpoints = ctx.saved_tensors
    if dy is None and dfinal is None:
        return (None,) * 10
    gradients = _scan_backward(*operands, checkpoints, torch.zeros_like(y) if dy is None else dy, dfinal)
    needed = zip(gradients, operands[:8], ctx.needs_input_grad)
    return (*(gradient if operand is not None and need else None for gradient, operand, need in needed), None, None)


def _keep_nothing(ctx: Any, inputs: tuple, output: tuple) -> None:
    pass


def _refuse(ctx: Any, *cotangents: Tensor | None) -> tuple:
    raise RuntimeError(
        "transport_scan: the fused kernels have no second derivative; "
        'call transport_scan with backend="associative" or backend="reference" where one is needed'
    )


_scan.register_autograd(_scan_vjp, setup_context=_setup_context)
_scan_backward.register_autograd(_refuse, setup_context=_keep_nothing)


def _map_each(operator: Callable) -> Callable:
    """`torch.func.vmap` as a loop over the mapped axis: each element is a whole scan that uses all threads by itself."""

    def rule(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        calls = [
            operator(*(a if axis is None else a.select(axis, i) for a, axis in zip(arguments, in_dims)))
            for i in range(info.batch_size)
        ]
        outputs = tuple(torch.stack(parts) for parts in zip(*calls))
        return outputs, (0,) * len(outputs)

    return rule


torch.library.register_vmap(_scan, _map_each(_scan))
torch.library.register_vmap(_scan_backward, _map_each(_scan_backward))


def _case(recurrence: Recurrence) -> Case:
    """What the kernels for these operands are made for."""
    value, _, read, _, drift, right, seen = recurrence
    # Sizes that are symbols while tracing are numbers from here on.
    sizes = int(read.shape[-1]), int(value.shape[-1]), int(value.shape[-2])
    return _make_case(value.dtype, *sizes, right is not None, seen is not None, drift.ndim == 4)


@functools.lru_cache
def _make_case(dtype: torch.dtype, order: int, width: int, rank: int, has_right: bool, has_seen: bool, varying: bool) -> Case:
    name, chunk = str(dtype).removeprefix("torch."), keep_every(order, width, rank, has_right)
    return Case(name, order, width, rank, has_right, has_seen, varying, chunk, padded_order(name, order))


def _output_shapes(case: Case, value: Tensor, cu_seqlens: Tensor | None, keep: bool) -> tuple[tuple, tuple, tuple]:
    batch, length, groups, _, width = value.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # Each sequence begins a chunk: never more than one partly filled chunk for each.
    kept = batch * length // case.chunk + sequences if keep else 0
    return (batch, length, groups, width), (sequences, groups, case.order, width), (kept, groups, width, case.row)


def _gradient_shapes(*operands: Tensor | None) -> list[tuple]:
    return [(0,) if operand is None else tuple(operand.shape) for operand in operands]


def _allocate(like: Tensor, *shapes: tuple) -> Any:
    """`like.new_empty(shape)` for each shape, on large pages.

    Touching a fresh page costs more than filling it with results: NumPy asks the system for large pages where an array
    is large, PyTorch's allocator does not.
    """
    tensors = []
    for shape in shapes:
        num_bytes = math.prod(shape) * like.element_size()
        if num_bytes < _LARGE:
            tensors.append(like.new_empty(shape))
            continue
        buffer = np.empty(num_bytes + 64, np.uint8)
        # Vectors that straddle two cache lines are slow: begin on one.
        skip = -buffer.ctypes.data % 64
        tensors.append(torch.from_numpy(buffer[skip : skip + num_bytes]).view(like.dtype).view(shape))
    return tuple(tensors)


def _items(value: Tensor, cu_seqlens: Tensor | None, chunk: int, most: int) -> tuple[int, Items]:
    """The number of work items, of at most `most` groups each, and where they lie."""
    batch, length, groups = value.shape[:3]
    threads = torch.get_num_threads()
    if cu_seqlens is None:
        return _even_items(batch, length, groups, chunk, most, threads)
    return _make_items(np.ascontiguousarray(cu_seqlens.numpy(), dtype=np.int64), groups, chunk, most, threads)


@functools.lru_cache
def _even_items(batch: int, length: int, groups: int, chunk: int, most: int, threads: int) -> tuple[int, Items]:
    return _make_items(np.arange(batch + 1, dtype=np.int64) * length, groups, chunk, most, threads)


def _make_items(bounds: np.ndarray, groups: int, chunk: int, most: int, threads: int) -> tuple[int, Items]:
    sequences, chunks = len(bounds) - 1, -(-np.diff(bounds) // chunk)
    # All groups together where memory can be streamed, fewer only to give every thread an equal share.
    blocks = 1 if sequences >= _ITEMS_PER_THREAD * threads else threads // math.gcd(max(1, sequences), threads)
    block = max(1, min(most, -(-groups // blocks)))
    return sequences * -(-groups // block), Items(bounds, np.cumsum(chunks) - chunks, groups, block)
