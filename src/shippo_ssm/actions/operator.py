"""The operator behind the families: R by the CPU kernel that a family's `inline` names, and its gradient.

`right_op` is one operator of torch: kernels for the value and the gradient, `right_formula` in torch for second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shippo_ssm.actions._expm_cpu import BlockOperands, LaneScheme
from shippo_ssm.actions._exponential_cpu import build_family
from shippo_ssm.actions.base import register_vmap
from shippo_ssm.actions.expm import expm, lane_schemes, launch_schemes
from shippo_ssm.actions.factors import apply_factors, coefficients, identity_columns, make_factors, positive_part
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.actions.rotation import rotation
from shippo_ssm.engine import LANES, allocate, custom_op, differentiate, launch


class Operands(NamedTuple):
    """The operands of a kernel for `count` items; without cotangent and gradients in the forward pass."""

    coords: Any
    step: Any
    right: Any
    cotangent: Any
    d_coords: Any
    d_step: Any
    count: int


def contracted(generator: Tensor) -> Tensor:
    """A - mu I with mu >= 0 such that the symmetric part of the result has no positive eigenvalue, [.., P, P].

    mu is Gershgorin's bound max_i (s_ii + sum_{j != i} |s_ij|) of the largest eigenvalue of S = (A + A^T) / 2 where that is
    positive: it has a gradient everywhere, and leaves skew generators unchanged.
    """
    symmetric = 0.5 * (generator + generator.mT)
    diagonal = symmetric.diagonal(dim1=-2, dim2=-1)
    sums = diagonal + symmetric.abs().sum(-1) - diagonal.abs()
    # A little more than needed, so that rounding cannot leave a positive eigenvalue.
    width = generator.shape[-1]
    excess = positive_part(sums.amax(-1)) * (1.0 + 4.0 * width * torch.finfo(generator.dtype).eps)
    return generator - excess[..., None, None] * torch.eye(width, dtype=generator.dtype, device=generator.device)


def shear_shrink(coef: Tensor) -> Tensor:
    """One over the product of the norms of shears, [.., 1, 1], from their coefficients [.., K]."""
    return torch.exp(-torch.asinh(0.5 * coef.abs()).sum(-1))[..., None, None]


def right_formula(coords: Tensor, step: Tensor, width: int, inline: Inline) -> Tensor:
    """R [.., P, P] in torch, differentiable to any order."""
    counts = inline[1:4]
    if inline.kind == "rotation":
        return rotation(coords, step, width)
    if inline.kind == "split":
        coef = coefficients(coords, step, counts[0])
        right = apply_factors(identity_columns(width, coef), make_factors(width, counts), coef)
        return (right * shear_shrink(coef[..., sum(counts[:2]) :]) if inline.bounded else right).to(coords.dtype)
    if any(counts):
        weights = coefficients(coords, torch.ones_like(step), counts[0], inline.clamp)
        basis = torch.stack([factor.generator.flatten() for factor in make_factors(width, counts)])
        coords = weights @ basis.to(weights)
    matrix = coords.unflatten(-1, (width, width))
    return expm((contracted(matrix) if inline.bounded else matrix) * step[..., None, None], backend="torch")


def _run_kernel(operands: Operands, width: int, inline: Inline) -> None:
    """Fill `right`, or the gradients where there is a cotangent."""
    dtype, backward = str(operands.coords.dtype).removeprefix("torch."), operands.cotangent is not None
    constants: dict[str, Any] = {"dtype": dtype, "width": width, "inline": inline, "backward": backward}
    if inline.kind == "exponential":
        launch_schemes(build_family, operands, lane_schemes(dtype, width, backward), **constants)
    else:
        num_blocks = -(-operands.count // LANES)
        given = BlockOperands(operands, np.ones(num_blocks, np.int8))
        launch(build_family, num_blocks, given, scheme=LaneScheme(dtype), **constants)


@custom_op("shippo::right_action")
def right_op(coords: Tensor, step: Tensor, width: int, kind: str, sizes: Sequence[int]) -> Tensor:
    """R [.., P, P] for coords [.., K] and step [..] by the kernel of `Inline(kind, *sizes)`."""
    right = allocate(coords, (*step.shape, width, width))
    _run_kernel(Operands(coords, step, right, None, None, None, step.numel()), width, Inline(kind, *sizes))
    return right


@custom_op("shippo::right_action_backward")
def right_backward_op(
    coords: Tensor, step: Tensor, right: Tensor, cotangent: Tensor, kind: str, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The gradients by coords and step."""
    d_coords, d_step = (allocate(coords, tensor.shape) for tensor in (coords, step))
    operands = Operands(coords, step, right, cotangent, d_coords, d_step, step.numel())
    _run_kernel(operands, right.shape[-1], Inline(kind, *sizes))
    return d_coords, d_step


def _save(ctx, inputs, output) -> None:
    coords, step, ctx.width, ctx.kind, ctx.sizes = inputs
    ctx.save_for_backward(coords, step, output)


def _pull_back(ctx, cotangent: Tensor):
    coords, step, right = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return *right_backward_op(coords, step, right, cotangent, ctx.kind, ctx.sizes), None, None, None
    # With create_graph=True the gradient has a derivative itself.
    formula = partial(right_formula, width=ctx.width, inline=Inline(ctx.kind, *ctx.sizes))
    return *differentiate(formula, (coords, step), ctx.needs_input_grad[:2], (cotangent,)), None, None, None


right_op.register_fake(lambda coords, step, width, *_: coords.new_empty(*step.shape, width, width))
right_backward_op.register_fake(lambda coords, step, *_: (coords.new_empty(coords.shape), coords.new_empty(step.shape)))
right_op.register_autograd(_pull_back, setup_context=_save)
register_vmap(right_op, 2)
