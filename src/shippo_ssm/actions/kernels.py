"""The compiled CPU path of right actions: when a call takes it, and the ops that are built on a kernel.

Data path. Tensors [.., P, P] (or coordinates [.., K] and steps [..]) are taken as flat contiguous arrays of M items;
`engine.launch` compiles the kernel for their dtype and width on first use and shares the blocks of eight items between
threads. Every block is computed the same way whatever thread takes it, so results do not
depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shippo_ssm._private import is_transformed
from shippo_ssm.actions.base import negative_step, not_finite
from shippo_ssm.engine import LANES, launch

BACKENDS = ("auto", "torch", "fused")
# From this many items on, "auto" takes the compiled kernel: for a handful of matrices compilation does not pay.
FEWEST_ITEMS = 32
# Widths with a compiled kernel: code grows with P^2, and from here on batched matrix products are as good.
LARGEST_WIDTH = 8
DTYPES = (torch.float32, torch.float64)


def choose_kernel(op: str, tensor: Tensor, width: int, axes: int, backend: str = "auto") -> str:
    """The kernel that a call takes: "torch" or "fused".

    "auto" is "fused" for at least 32 plain float32 or float64 items on the CPU with width <= 8, else "torch";
    `torch.func` transforms need the torch formulas.

    Args:
        op: who asks, for messages.
        tensor: generators [.., P, P] (`axes` 2) or coordinates [.., K] (`axes` 1).
        width: P.
        axes: how many axes at the end belong to one item.
        backend: "torch", "fused" or "auto".
    """
    if backend not in BACKENDS:
        raise ValueError(f"{op}: `backend` is {backend!r}; expected one of {', '.join(map(repr, BACKENDS))}")
    if backend == "torch":
        return backend
    possible = tensor.device.type == "cpu" and tensor.dtype in DTYPES and width <= LARGEST_WIDTH
    if backend == "auto":
        many = math.prod(tensor.shape[:-axes]) >= FEWEST_ITEMS
        return "fused" if possible and many and not is_transformed(tensor) else "torch"
    if not possible:
        raise ValueError(
            f'{op}: `backend` is "fused" for {tensor.dtype} on {tensor.device.type} with width {width}; expected float32 or '
            f'float64 on the CPU with width <= {LARGEST_WIDTH}; pass backend="torch" or "auto"'
        )
    return backend


class Operands(NamedTuple):
    """What the kernel of a `coordinate_op` takes, for `count` items; forward it has no cotangent and no gradients."""

    coords: Any
    step: Any
    right: Any
    cotangent: Any
    d_coords: Any
    d_step: Any
    faults: Any
    count: int


def coordinate_op(name: str, op: str, build: Callable[..., Any], formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """right = op(coords, step, width, sizes): a map from coordinates to matrices with a compiled value and gradient.

    Where a second derivative is asked for (create_graph=True) the gradient is taken through the torch formula instead,
    which has one.

    Args:
        name: of the torch op, below `shippo::`.
        op: who asks, for messages.
        build: builder of a kernel for `Operands`, in blocks of LANES items, from dtype, width, sizes and backward. Forward it
            fills `right`; backward it fills the gradients. faults[0] becomes 1 where a step is negative or not a number,
            faults[1] where a coordinate is not finite.
        formula: the same map in torch, differentiable to any order.

    Returns:
        The op for coords [.., K] and step [..] with one leading shape; `sizes` are integers that mean something to both.
    """

    @torch.library.custom_op(f"shippo::{name}", mutates_args=())
    def forward_op(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
        right = torch.empty(*step.shape, width, width, dtype=coords.dtype)
        faults, count, dtype = np.zeros(2, np.int64), step.numel(), str(coords.dtype).removeprefix("torch.")
        operands = Operands(coords, step, right, None, None, None, faults, count)
        launch(build, -(-count // LANES), operands, dtype=dtype, width=width, sizes=tuple(sizes), backward=False)
        if faults.any():
            raise negative_step(op, step) if faults[0] else not_finite(op, "coords")
        return right

    @torch.library.custom_op(f"shippo::{name}_backward", mutates_args=())
    def backward_op(
        coords: Tensor, step: Tensor, right: Tensor, cotangent: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        d_coords, d_step = (torch.empty(tensor.shape, dtype=coords.dtype) for tensor in (coords, step))
        # The forward pass has looked for faults already.
        faults, count, dtype = np.zeros(2, np.int64), step.numel(), str(coords.dtype).removeprefix("torch.")
        operands = Operands(coords, step, right, cotangent, d_coords, d_step, faults, count)
        launch(build, -(-count // LANES), operands, dtype=dtype, width=right.shape[-1], sizes=tuple(sizes), backward=True)
        return d_coords, d_step

    @forward_op.register_fake
    def _(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
        return coords.new_empty(*step.shape, width, width)

    @backward_op.register_fake
    def _(coords: Tensor, step: Tensor, right: Tensor, cotangent: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        return coords.new_empty(coords.shape), coords.new_empty(step.shape)

    def save(ctx, inputs, output) -> None:
        coords, step, ctx.width, ctx.sizes = inputs
        ctx.save_for_backward(coords, step, output)

    def pull_back(ctx, cotangent: Tensor):
        coords, step, right = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *backward_op(coords, step, right, cotangent, ctx.sizes), None, None
        wanted = [tensor for tensor in (coords, step) if tensor.requires_grad]
        right = formula(coords, step, ctx.width, ctx.sizes)
        gradients = iter(torch.autograd.grad(right, wanted, cotangent, create_graph=True))
        return *(next(gradients) if tensor.requires_grad else None for tensor in (coords, step)), None, None

    forward_op.register_autograd(pull_back, setup_context=save)

    @forward_op.register_vmap
    def _(info, in_dims, coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]):
        return forward_op(*batch_first(info, in_dims, coords, step), width, sizes), 0

    return forward_op


def batch_first(info: Any, in_dims: Sequence[int | None], *tensors: Tensor) -> list[Tensor]:
    """Operands of an op under `vmap` with the mapped axis first."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims)
    ]
