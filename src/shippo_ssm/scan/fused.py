"""The scan on a CPU at the speed of its memory traffic: forward and backward as compiled kernels.

Data path: the tensors of a `Recurrence` go to one custom operator that returns y [B, T, G, P], the final states and the
states at chunk boundaries; its gradient is a second operator that recomputes the states inside each chunk. Both cut
their work into (sequence, block of groups) items, which are independent of each other, so results are the same bit for
bit with any number of threads. `_cpu_kernels.py` holds the machine code, compiled on first use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shippo_ssm.dispatch import asks_gradients
from shippo_ssm.engine import allocate, custom_op, launch, save_tensors
from shippo_ssm.scan._cpu_kernels import (
    Backward,
    Case,
    Forward,
    Items,
    build_backward,
    build_forward,
)
from shippo_ssm.scan.algebra import Recurrence
from shippo_ssm.scan.checks import invalid_bounds

# Sequences for each thread from which they are not split over blocks of groups.
_ITEMS_PER_THREAD = 4
# Bytes of recomputed states that one backward item keeps: they are written and read again, and should stay in cache.
_BACKWARD_SCRATCH = 1 << 19
# Backward items of a call, where a set is split to have them, and the fewest groups of one.
_SPLIT_ITEMS, _SPLIT_GROUPS = 16, 8
# Bytes of `write` or `right` from which gradients bypass the caches, where nothing would find them later.
_STREAMED = 1 << 23


def adjoint_update(recurrence: Recurrence, cu_seqlens: Tensor | None = None) -> Tensor:
    """S_0 [S, G, N, P] of S_{t-1} = L_t (S_t + write_t value_t^T) R_t^T from S_T = 0; no gradients."""
    value, case = recurrence.value, _case(recurrence)._replace(mirrored=True)
    sequences = value.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    update = value.new_empty(sequences, value.shape[2], case.order, case.width)
    _forward(case, recurrence, None, cu_seqlens, Outputs(None, update, update.new_empty(0)))
    return update


class Outputs(NamedTuple):
    """y [B, T, G, P] in the dtype of `value`; final states and the states kept for a backward pass in that of states."""

    y: Tensor | None
    final: Tensor
    kept: Tensor


class Pullback(NamedTuple):
    """What a backward pass takes, and the gradients that it fills."""

    recurrence: Recurrence
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    kept: Tensor
    dy: Tensor
    dfinal: Tensor | None
    gradient: Recurrence
    dinitial: Tensor


def scan_operators(
    name: str, case_of: Callable[..., Any], forward: Callable[..., None], backward: Callable[..., None]
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Any, Any]:
    """A backend, the scan and its gradient as custom operators below it, from a backend's own two passes.

    Args:
        name: of the operator, below `shippo::`.
        case_of: recurrence -> case, with case.chunk positions between two kept states and case.row numbers in a row of them.
        forward: (case, recurrence, initial_state, cu_seqlens, outputs), fills the outputs; none are kept where `kept` is empty.
        backward: (case, pullback), fills the gradients.

    Returns:
        The backend; the scan, of the fields of a record, initial_state, cu_seqlens and whether to keep; and its gradient.
    """

    def run(
        recurrence: Recurrence, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """y and the final state. Differentiable once; "associative" and "reference" have second derivatives."""
        y, final_state, _ = scan_op(*recurrence, initial_state, cu_seqlens, asks_gradients(*recurrence, initial_state))
        return y, final_state

    given = (
        "Tensor value, Tensor write, Tensor read, Tensor step, Tensor drift, Tensor? right, Tensor? seen, "
        "Tensor? initial_state, Tensor? cu_seqlens"
    )
    scan_schema = f"({given}, bool keep) -> (Tensor, Tensor, Tensor)"
    backward_schema = f"({given}, Tensor kept, Tensor dy, Tensor? dfinal) -> ({', '.join(['Tensor'] * 8)})"

    # Both operators, and without `compute` what a graph sees of them: the outputs' shapes and dtypes.
    def scan(*arguments: Any, compute: bool = True) -> Any:
        *operands, initial_state, cu_seqlens, keep = arguments
        recurrence = Recurrence(*operands)
        case, value, new = case_of(recurrence), recurrence.value, allocate if compute else _new_empty
        batch, length, groups, _, width = value.shape
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        # Each sequence begins a chunk: never more than one partly filled chunk for each.
        kept = batch * length // case.chunk + sequences if keep else 0
        dtype = torch.promote_types(value.dtype, torch.float32)
        outputs = Outputs(
            new(value, (batch, length, groups, width), value.dtype),
            new(value, (sequences, groups, recurrence.read.shape[-1], width), dtype),
            new(value, (kept, groups, width, case.row), dtype),
        )
        if compute:
            forward(case, recurrence, initial_state, cu_seqlens, outputs)
        return tuple(outputs)

    def scan_backward(*arguments: Any, compute: bool = True) -> tuple[Tensor, ...]:
        *operands, initial_state, cu_seqlens, kept, dy, dfinal = arguments
        recurrence, new = Recurrence(*operands), allocate if compute else _new_empty
        # An operator returns tensors only: an empty one stands for the gradient of what is not there.
        gradients = tuple(
            recurrence.value.new_empty(0) if x is None else new(x, tuple(x.shape), x.dtype) for x in arguments[:8]
        )
        if compute:
            if kept.numel() == 0:
                _, _, kept = scan_op(*arguments[:9], True)
            call = Pullback(recurrence, initial_state, cu_seqlens, kept, dy, dfinal, Recurrence(*gradients[:7]), gradients[7])
            backward(case_of(recurrence), call)
        return gradients

    scan_op = custom_op(f"shippo::{name}", scan_schema)(scan)
    backward_op = custom_op(f"shippo::{name}_backward", backward_schema)(scan_backward)
    scan_op.register_fake(functools.partial(scan, compute=False))
    backward_op.register_fake(functools.partial(scan_backward, compute=False))

    def pull_back(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: None) -> tuple:
        *operands, kept = ctx.saved_tensors
        if dy is None and dfinal is None:
            return (None,) * 10
        dy = torch.zeros_like(operands[0][..., 0, :]) if dy is None else dy
        gradients = backward_op(*operands, kept, dy, dfinal)
        needed = zip(gradients, operands[:8], ctx.needs_input_grad)
        return (*(gradient if operand is not None and need else None for gradient, operand, need in needed), None, None)

    scan_op.register_autograd(pull_back, setup_context=save_tensors)
    backward_op.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)
    torch.library.register_vmap(scan_op, _map_each(scan_op))
    torch.library.register_vmap(backward_op, _map_each(backward_op))
    return run, scan_op, backward_op


def _new_empty(like: Tensor, shape: tuple, dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _refuse(ctx: Any, *cotangents: Tensor | None) -> tuple:
    raise RuntimeError(
        "transport_scan: the compiled kernels have no second derivative; "
        'call transport_scan with backend="associative" or backend="reference" where one is needed'
    )


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


def _forward(
    case: Case, recurrence: Recurrence, initial_state: Tensor | None, cu_seqlens: Tensor | None, outputs: Outputs
) -> None:
    sizes, sets = recurrence.value.shape[:3], recurrence.write.shape[2]
    bounds = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    count, items = _items(bounds, *sizes, sets, case.chunk, sizes[2], torch.get_num_threads())
    launch(build_forward, count, Forward(items, recurrence, initial_state, *outputs), case=case)


def _backward(case: Case, call: Pullback) -> None:
    recurrence, _, cu_seqlens, kept, dy, dfinal, gradient, dinitial = call
    value, write, right = recurrence.value, recurrence.write, recurrence.right
    dtype = kept.dtype
    per_group = case.chunk * case.order * case.width * dtype.itemsize
    sizes, most = (*value.shape[:3], write.shape[2]), _BACKWARD_SCRATCH // max(1, per_group)
    bounds = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    count, items = _items(bounds, *sizes, case.chunk, most, torch.get_num_threads(), sums=True)
    # Sums over sequences and over blocks of a set are added in order below: no thread count can change them.
    results = gradient
    if not case.varying:
        results = results._replace(drift=value.new_zeros(len(items.first_chunk), *recurrence.drift.shape, dtype=dtype))
    if case.shared and (items.parts > 1 or value.dtype != dtype):
        parts = [allocate(value, (items.parts, *vector.shape), dtype) for vector in recurrence[1:3]]
        results = results._replace(write=parts[0], read=parts[1])
    if case.shared:
        results.write.zero_()
        results.read.zero_()
    # Whole, aligned blocks alone can be streamed.
    large = max(write.nbytes, 0 if right is None else right.nbytes)
    case = case._replace(streamed=large >= _STREAMED and case.order % 8 == 0)
    launch(build_backward, count, Backward(items, recurrence, kept, dy, dfinal, results, dinitial), case=case)
    if not case.varying:
        gradient.drift.copy_(torch.from_numpy(results.drift.numpy().sum(axis=0, dtype=np.float64)))
    if results.write is not gradient.write:
        for total, (first, *others) in zip(gradient[1:3], results[1:3]):
            total.copy_(functools.reduce(Tensor.add_, others, first))


def _case(recurrence: Recurrence) -> Case:
    """What the kernels for these operands are made for."""
    value, _, read, _, drift, right, seen = recurrence
    dtype = str(torch.promote_types(value.dtype, torch.float32)).removeprefix("torch.")
    # Sizes that are symbols while tracing are numbers from here on.
    sizes = int(read.shape[-1]), int(value.shape[-1]), int(value.shape[-2])
    return Case(dtype, *sizes, right is not None, seen is not None, drift.ndim == 4, bool(read.shape[2] != value.shape[2]))


@functools.lru_cache
def _items(
    bounds: tuple[int, ...] | None, batch: int, length: int, groups: int, sets: int, chunk: int, most: int, threads: int,
    sums: bool = False,
) -> tuple[int, Items]:  # fmt: skip
    """The number of work items, of at most `most` groups each, and where they lie; with `sums` over the groups of a set."""
    if bounds is None:
        bounds = tuple(index * length for index in range(batch + 1))
    # The operator sees real values also where `transport_scan` saw none: compiled, exported or under `vmap`.
    elif bounds[0] != 0 or bounds[-1] != length or sorted(bounds) != list(bounds):
        raise invalid_bounds("transport_scan", list(bounds), length)
    sequences, most = len(bounds) - 1, max(1, most)
    # All groups together where memory can be streamed, fewer only to give every thread an equal share.
    shares = 1 if sequences >= _ITEMS_PER_THREAD * threads else threads // math.gcd(max(1, sequences), threads)
    # Groups of a block, and those that are cut into blocks together.
    block, span, shared = max(1, min(most, -(-groups // shares))), max(1, groups), groups // max(1, sets)
    if sums and shared > 1:
        # Whole sets, or blocks of one that do not depend on the number of threads.
        parts = max(-(-shared // most), min(shared // _SPLIT_GROUPS, -(-_SPLIT_ITEMS // max(1, sequences * sets))), 1)
        block, span = (max(1, block // shared) * shared, span) if parts == 1 else (-(-shared // parts), shared)
    blocks = [
        (first, min(block, start + span - first), (first - start) // block if block < shared else 0)
        for start in range(0, groups, span)
        for first in range(start, start + span, block)
    ]
    starts = np.array(bounds, np.int64)
    chunks = -(-np.diff(starts) // chunk)
    parts = 1 + max((part for *_, part in blocks), default=0)
    table = np.array(blocks, np.int64).ravel()
    return sequences * len(blocks), Items(starts, np.cumsum(chunks) - chunks, table, groups, sets, min(block, span), parts)


# For CPU tensors in float32, bfloat16 (with states in float32) or float64, with P <= 16.
run, _scan, _scan_backward = scan_operators("transport_scan", _case, _forward, _backward)
