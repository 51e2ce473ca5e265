"""The split product R = D_0 .. D_{P-1} Rot_01 Rot_02 .. Shear_01 Shear_02 .. from coordinates [.., K] and steps [..].

Data path. `coefficients` turns coordinates into the coefficient of every factor; `apply_factors` carries columns
through the factors one after the other, in torch, differentiable to any order. `split_op` is the same map as one
compiled CPU op: its gradient is a compiled op too, and where a second derivative is asked for (create_graph=True) the
gradient is taken through the torch formula instead, which has one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from shippo_ssm._dtypes import compute_dtype
from shippo_ssm.actions import fused
from shippo_ssm.actions.base import Factor
from shippo_ssm.actions.factors import Diagonal, Rotation, Shear


def channel_pairs(width: int) -> list[tuple[int, int]]:
    """The pairs i < j of channels, in the order of the product."""
    return list(itertools.combinations(range(width), 2))


def make_factors(width: int, sizes: Sequence[int]) -> list[Factor]:
    """The factors without parameters, in the order of the product; `sizes` counts diagonals, rotations and shears."""
    out: list[Factor] = [Diagonal(width, i) for i in range(sizes[0])]
    out += [Rotation(width, i, j) for i, j in channel_pairs(width)[: sizes[1]]]
    return out + [Shear(width, i, j) for i, j in channel_pairs(width)[: sizes[2]]]


def coefficients(coords: Tensor, step: Tensor, num_diagonal: int) -> Tensor:
    """The coefficient of every factor, [.., K]: step coords, and -step softplus(coords) on the diagonal."""
    dtype = compute_dtype(coords.dtype)
    coords, step = coords.to(dtype), step.to(dtype).unsqueeze(-1)
    limit = 0.9 * math.log(torch.finfo(dtype).max)
    decay = (step * F.softplus(coords[..., :num_diagonal])).clamp_max(limit)
    return torch.cat([-decay, step * coords[..., num_diagonal:]], -1)


def apply_factors(columns: Sequence[Tensor], factors: Iterable[Factor], coef: Tensor) -> Tensor:
    """state exp(c_0 G_0) exp(c_1 G_1) .. for the columns [.., N] of a state and coefficients [.., K]."""
    columns = list(columns)
    for factor, weight in zip(factors, coef.unsqueeze(-2).unbind(-1)):
        columns = factor.act_columns(columns, weight)
    return torch.stack(torch.broadcast_tensors(*columns), -1)


def identity_columns(width: int, coef: Tensor) -> Sequence[Tensor]:
    """The columns of the identity, one matrix per leading index of the coefficients."""
    eye = torch.eye(width, dtype=coef.dtype, device=coef.device)
    return eye.expand(*coef.shape[:-1], width, width).unbind(-1)


def split_product(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
    """R [.., P, P] in torch."""
    coef = coefficients(coords, step, sizes[0])
    return apply_factors(identity_columns(width, coef), make_factors(width, sizes), coef).to(coords.dtype)


@torch.library.custom_op("shippo_ssm::split_flow", mutates_args=())
def split_op(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
    """R [.., P, P] by the compiled kernel; coords [.., K] and step [..] have one leading shape."""
    right = torch.empty(*step.shape, width, width, dtype=coords.dtype)
    fused.run_split(coords, step, right, None, (sizes[0], sizes[1], sizes[2]))
    return right


@torch.library.custom_op("shippo_ssm::split_flow_backward", mutates_args=())
def split_backward_op(
    coords: Tensor, step: Tensor, right: Tensor, cotangent: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Gradients of <cotangent, R> with respect to coords and step by the compiled kernel."""
    return fused.run_split(coords, step, right, cotangent, (sizes[0], sizes[1], sizes[2]))


@split_op.register_fake
def _(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
    return coords.new_empty(*step.shape, width, width)


@split_backward_op.register_fake
def _(coords: Tensor, step: Tensor, right: Tensor, cotangent: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    return coords.new_empty(coords.shape), coords.new_empty(step.shape)


def _save(ctx, inputs, output) -> None:
    coords, step, ctx.width, ctx.sizes = inputs
    ctx.save_for_backward(coords, step, output)


def _split_backward(ctx, cotangent: Tensor):
    coords, step, right = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return *split_backward_op(coords, step, right, cotangent, ctx.sizes), None, None
    wanted = [tensor for tensor in (coords, step) if tensor.requires_grad]
    product = split_product(coords, step, ctx.width, ctx.sizes)
    gradients = iter(torch.autograd.grad(product, wanted, cotangent, create_graph=True))
    return *(next(gradients) if tensor.requires_grad else None for tensor in (coords, step)), None, None


split_op.register_autograd(_split_backward, setup_context=_save)


@split_op.register_vmap
def _(info, in_dims, coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]):
    parts = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip((coords, step), in_dims)
    ]
    return split_op(*parts, width, sizes), 0
