"""The CPU op from coordinates to right actions: a compiled kernel with its gradient.

`engine.launch` compiles the kernel of `_NAME_cpu.py` for a dtype and width on first use and shares the blocks of LANES items
between threads. On a GPU the exponential has a kernel (`_expm_triton.py`); split products run in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shippo_ssm._private import custom_op
from shippo_ssm.engine import LANES, LaneMap, allocate, block_reader, block_writer


class Scratch:
    """The vectors of a scratch array: `s[a, b]` is the one that starts at a + b."""

    def __init__(self, emit: Any, w: Any) -> None:
        self.emit, self.w = emit, w

    def __getitem__(self, place: Any) -> Any:
        return self.emit.load(self.w, self._index(place), padded=True)

    def __setitem__(self, place: Any, vector: Any) -> None:
        self.emit.store(self.w, self._index(place), vector, padded=True)

    def _index(self, place: Any) -> Any:
        return self.emit.at(*place) if isinstance(place, tuple) else place


class CoordinateMap(NamedTuple):
    """A map from coordinates [K, LANES] and steps [LANES] to matrices [P P, LANES] in a scratch array, and its gradient."""

    lanes: LaneMap
    matrix: int | None
    """Where `pull_back` needs the matrices; `None` where it does not."""
    cotangent: int
    d_coords: int
    d_step: int
    pull_back: Callable[..., None]
    """pull_back(w): from the cotangent to d_coords and d_step."""


class Operands(NamedTuple):
    """The operands of a `coordinate_op` for `count` items; without cotangent and gradients in the forward pass."""

    coords: Any
    step: Any
    right: Any
    cotangent: Any
    d_coords: Any
    d_step: Any
    count: int


def coordinate_kernel(width: int, count_coords: int, maps: CoordinateMap, backward: bool) -> Callable[..., None]:
    """kernel(operands, start, stop) of a `CoordinateMap` for `Operands`."""
    (dtype, scratch, coords_at, step_at, fill), matrix_at, cotangent_at, d_coords_at, d_step_at, pull_back = maps
    element, lanes, has_matrix, matrix_at = np.dtype(dtype), LANES, matrix_at is not None, matrix_at or 0
    read_coords, write_coords = (block(dtype, dtype, count_coords) for block in (block_reader, block_writer))
    read_step, write_step = (block(dtype, dtype, 1) for block in (block_reader, block_writer))
    read_matrix, write_matrix = (block(dtype, dtype, width * width) for block in (block_reader, block_writer))

    def kernel(operands, start, stop):
        coords, step, right, cotangent, d_coords, d_step, count = operands
        w = np.zeros(scratch, dtype=element)
        for block in range(start, stop):
            first = block * lanes
            here = min(lanes, count - first)
            read_coords(coords, first, here, w, coords_at)
            read_step(step, first, here, w, step_at)
            if backward:
                if has_matrix:
                    read_matrix(right, first, here, w, matrix_at)
                read_matrix(cotangent, first, here, w, cotangent_at)
                pull_back(w)
                write_coords(w, d_coords_at, d_coords, first, here)
                write_step(w, d_step_at, d_step, first, here)
            else:
                write_matrix(w, fill(w), right, first, here)

    return kernel


def coordinate_op(name: str, launch: Callable[..., None], formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """right = op(coords [.., K], step [..], width, sizes): a map from coordinates to matrices with a compiled gradient.

    With create_graph=True the gradient is taken through the torch formula, which has a second derivative.

    Args:
        name: of the torch op, below `shippo::`.
        launch: called with the number of blocks of LANES items, `Operands`, and dtype, width, sizes and backward by name.
            It fills `right`, or backward the gradients.
        formula: the same map in torch, differentiable to any order.
    """

    def run(operands: Operands, width: int, sizes: Sequence[int]) -> None:
        dtype, backward = str(operands.coords.dtype).removeprefix("torch."), operands.cotangent is not None
        launch(-(-operands.count // LANES), operands, dtype=dtype, width=width, sizes=tuple(sizes), backward=backward)

    @custom_op(f"shippo::{name}")
    def forward_op(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
        right = allocate(coords, (*step.shape, width, width))
        run(Operands(coords, step, right, None, None, None, step.numel()), width, sizes)
        return right

    @custom_op(f"shippo::{name}_backward")
    def backward_op(
        coords: Tensor, step: Tensor, right: Tensor, cotangent: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        d_coords, d_step = (allocate(coords, tensor.shape) for tensor in (coords, step))
        run(Operands(coords, step, right, cotangent, d_coords, d_step, step.numel()), right.shape[-1], sizes)
        return d_coords, d_step

    @forward_op.register_fake
    def _(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
        return coords.new_empty(*step.shape, width, width)

    @backward_op.register_fake
    def _(coords, step, right, cotangent, sizes) -> tuple[Tensor, Tensor]:
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
