"""The scan on a CPU at the speed of its memory traffic: forward and backward as compiled kernels.

Data path: `value` [B, T, G, r, P], `write` [B, T, G, r, N], `read` [B, T, G, N], `step` [B, T, G], `drift` [G, N] or
[B, T, G, N], `right` [B, T, G, P, P] and `shown` (like `value`) go, contiguous, to one custom operator that returns y
[B, T, G, P], the final states and the states at chunk boundaries; its gradient is a second operator that recomputes the
states inside each chunk. Both cut their work into (sequence, block of groups) items, which are independent of each other,
so results are the same bit for bit with any number of threads. `_fused_kernels.py` holds the machine code, compiled on
first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shippo_ssm._numba import jit, parallel_for

__all__ = ["transport_scan"]

# Sequences for each thread from which they are not split over blocks of groups.
_ITEMS_PER_THREAD = 4
# Bytes of recomputed states that one backward item keeps: they are written and read again, and should stay in cache.
_BACKWARD_SCRATCH = 1 << 19
# Bytes from which NumPy takes large pages.
_LARGE = 1 << 22


def transport_scan(
    value: Tensor,
    write: Tensor,
    read: Tensor,
    step: Tensor,
    drift: Tensor,
    right: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    shown: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """H_t = exp(step_t drift_t) H_{t-1} right_t + write_t value_t^T, y_t = read_t^T H_t, in compiled kernels.

    Arguments and results are those of `shippo_ssm.scan.transport_scan`, for CPU tensors of one dtype, float32 or float64,
    with P <= 16. Differentiable once; ask backend="associative" or "reference" for second derivatives.

    Example:
        >>> import torch
        >>> ones = torch.ones(1, 3, 1, 1)
        >>> y, _ = transport_scan(ones, ones, ones, ones[..., 0], torch.zeros(1, 1))
        >>> y.flatten().tolist()
        [1.0, 2.0, 3.0]
    """
    if value.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"transport_scan: `value` is {value.dtype}; the fused kernels take float32 or float64; "
            "convert the operands, or call shippo_ssm.scan.transport_scan, which does"
        )
    if value.ndim == 4:
        value, write = value.unsqueeze(-2), write.unsqueeze(-2)
        shown = None if shown is None else shown.unsqueeze(-2)
    operands = (value, write, read, step, drift, right, initial_state, shown)
    keep = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)
    y, final_state, _ = _scan(*operands, cu_seqlens, keep)
    return y, final_state if output_final_state else None


def chunk_length(order: int, width: int, rank: int, has_right: bool) -> int:
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
    initial_state: Tensor | None,
    shown: Tensor | None,
    cu_seqlens: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from shippo_ssm.scan._fused_kernels import build_forward

    y, final_state, checkpoints = outputs = _empty_outputs(_allocate, value, read, right, cu_seqlens, keep)
    bounds, first_chunk, chunk = _layout(value, read, right, cu_seqlens)
    operands = (value, write, read, step, drift, right, initial_state, shown)
    flats = [_flat(operand, value) for operand in operands]
    kernel = _kernel(build_forward, "aaaaaaaaiiaaannnn", value, read, drift, right, shown, chunk)
    sequences, groups = len(bounds) - 1, value.shape[2]
    block = _group_block(sequences, groups, groups)
    arrays = [*flats, bounds, first_chunk, *(_flat(output, value) for output in (y, final_state, checkpoints))]
    parallel_for(sequences * -(-groups // block), lambda start, stop: kernel(*arrays, groups, block, start, stop))
    return outputs


@torch.library.custom_op("shippo::transport_scan_backward", mutates_args=())
def _scan_backward(
    value: Tensor,
    write: Tensor,
    read: Tensor,
    step: Tensor,
    drift: Tensor,
    right: Tensor | None,
    initial_state: Tensor | None,
    shown: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from shippo_ssm.scan._fused_kernels import build_backward

    if checkpoints.numel() == 0:
        _, _, checkpoints = _scan(value, write, read, step, drift, right, initial_state, shown, cu_seqlens, True)
    gradients = _empty_gradients(_allocate, value, write, read, step, drift, right, initial_state, shown)
    bounds, first_chunk, chunk = _layout(value, read, right, cu_seqlens)
    sequences, groups, order = len(bounds) - 1, value.shape[2], read.shape[-1]
    # A constant drift collects one partial per sequence, added in order below: no thread count can change the sum.
    partials = value.new_zeros(sequences, groups, order) if drift.ndim == 2 else gradients[4]
    results = [*gradients[:4], partials, *gradients[5:]]
    arrays = [
        *(_flat(operand, value) for operand in (value, write, read, step, drift, right, shown, dy, dfinal)),
        *(bounds, first_chunk, _flat(checkpoints, value)),
        *(_flat(result, value) for result in results),
    ]
    kernel = _kernel(build_backward, "aaaaaaaaaiiaaaaaaaaannnn", value, read, drift, right, shown, chunk)
    per_group = chunk * order * value.shape[-1] * value.element_size()
    block = _group_block(sequences, groups, max(1, _BACKWARD_SCRATCH // max(1, per_group)))
    parallel_for(sequences * -(-groups // block), lambda start, stop: kernel(*arrays, groups, block, start, stop))
    if drift.ndim == 2:
        gradients[4].copy_(torch.from_numpy(partials.numpy().sum(axis=0, dtype=np.float64)))
    return gradients


@_scan.register_fake
def _(value, write, read, step, drift, right, initial_state, shown, cu_seqlens, keep):
    return _empty_outputs(torch.Tensor.new_empty, value, read, right, cu_seqlens, keep)


@_scan_backward.register_fake
def _(value, write, read, step, drift, right, initial_state, shown, cu_seqlens, checkpoints, dy, dfinal):
    return _empty_gradients(torch.Tensor.new_empty, value, write, read, step, drift, right, initial_state, shown)


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


def _empty_outputs(
    empty: Callable[[Tensor, tuple], Tensor],
    value: Tensor,
    read: Tensor,
    right: Tensor | None,
    cu_seqlens: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from shippo_ssm.scan._fused_kernels import padded_order

    batch, length, groups, rank, width = value.shape
    order = int(read.shape[-1])
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunk = chunk_length(order, int(width), int(rank), right is not None)
    # Each sequence begins a chunk: never more than one partly filled chunk for each.
    kept = batch * length // chunk + sequences if keep else 0
    return (
        empty(value, (batch, length, groups, width)),
        empty(value, (sequences, groups, order, width)),
        empty(value, (kept, groups, width, padded_order(_name(value), order))),
    )


def _empty_gradients(empty: Callable[[Tensor, tuple], Tensor], value: Tensor, *others: Tensor | None) -> Any:
    return tuple(empty(value, (0,) if operand is None else operand.shape) for operand in (value, *others))


def _allocate(like: Tensor, shape: tuple) -> Tensor:
    """`like.new_empty(shape)` on large pages.

    Touching a fresh page costs more than filling it with results: NumPy asks the system for large pages where an array
    is large, PyTorch's allocator does not.
    """
    num_bytes = math.prod(shape) * like.element_size()
    if num_bytes < _LARGE:
        return like.new_empty(shape)
    buffer = np.empty(num_bytes + 64, np.uint8)
    # Vectors that straddle two cache lines are slow: begin on one.
    skip = -buffer.ctypes.data % 64
    return torch.from_numpy(buffer[skip : skip + num_bytes]).view(like.dtype).view(shape)


def _layout(value: Tensor, read: Tensor, right: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Any, Any, int]:
    """Where sequences begin and end in the flat token axis, the first checkpoint of each, and the chunk length."""
    batch, length, _, rank, width = value.shape
    chunk = chunk_length(read.shape[-1], width, rank, right is not None)
    if cu_seqlens is None:
        bounds = np.arange(batch + 1, dtype=np.int64) * length
    else:
        bounds = np.ascontiguousarray(cu_seqlens.numpy(), dtype=np.int64)
    chunks = -(-np.diff(bounds) // chunk)
    return bounds, np.cumsum(chunks) - chunks, chunk


def _group_block(sequences: int, groups: int, most: int) -> int:
    """Groups in one item: all of them where memory can be streamed, fewer only to give every thread an equal share."""
    threads = torch.get_num_threads()
    blocks = 1 if sequences >= _ITEMS_PER_THREAD * threads else threads // math.gcd(max(1, sequences), threads)
    return max(1, min(most, -(-groups // blocks)))


def _kernel(
    build: Callable,
    arguments: str,
    value: Tensor,
    read: Tensor,
    drift: Tensor,
    right: Tensor | None,
    shown: Tensor | None,
    chunk: int,
):
    dtype = _name(value)
    kinds = {"a": f"{dtype}[::1]", "i": "int64[::1]", "n": "int64"}
    return jit(
        build,
        f"void({', '.join(kinds[letter] for letter in arguments)})",
        dtype=dtype,
        order=read.shape[-1],
        width=value.shape[-1],
        rank=value.shape[-2],
        has_right=right is not None,
        has_shown=shown is not None,
        varying=drift.ndim == 4,
        chunk=chunk,
    )


def _flat(tensor: Tensor | None, like: Tensor) -> Any:
    if tensor is None:
        return np.empty(0, _name(like))
    return tensor.detach().contiguous().view(-1).numpy()


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
