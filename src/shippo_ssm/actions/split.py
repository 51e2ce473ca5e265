"""The split product R = D_0 .. D_{P-1} Rot_01 Rot_02 .. Shear_01 Shear_02 .. from coordinates [.., K] and steps [..].

Data path. `coefficients` turns coordinates into the coefficient of every factor; `apply_factors` carries columns
through the factors one after the other, in torch, differentiable to any order. `split_op` is the same map as one
compiled CPU op with a compiled gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shippo_ssm._dtypes import compute_dtype
from shippo_ssm.actions._split_kernels import build_split
from shippo_ssm.actions.base import Factor
from shippo_ssm.actions.factors import Diagonal, Rotation, Shear
from shippo_ssm.actions.kernels import coordinate_op
from shippo_ssm.engine import launch


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
    decay = (step * F.softplus(coords[..., :num_diagonal])).clamp_max(largest_decay(dtype))
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


def shear_shrink(coef: Tensor) -> Tensor:
    """One over the product of the norms of shears, [.., 1, 1], from their coefficients [.., K]."""
    return torch.exp(-torch.asinh(0.5 * coef.abs()).sum(-1))[..., None, None]


def split_product(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
    """R [.., P, P] in torch; `sizes` as in `build_split`."""
    *counts, bounded = sizes
    coef = coefficients(coords, step, counts[0])
    right = apply_factors(identity_columns(width, coef), make_factors(width, counts), coef)
    return (right * shear_shrink(coef[..., counts[0] + counts[1] :]) if bounded else right).to(coords.dtype)


def largest_decay(dtype: torch.dtype) -> float:
    """Where step softplus(d) is cut, so that R stays invertible in floating point."""
    return 0.9 * math.log(torch.finfo(dtype).max)


def _card_constants(dtype: torch.dtype, sizes: Sequence[int]) -> dict[str, Any]:
    names: dict[str, Any] = dict(zip(("DIAGONALS", "ROTATIONS", "SHEARS"), sizes))
    return names | {"LIMIT": largest_decay(dtype), "TERMS": 8 if dtype == torch.float32 else 18}


split_op = coordinate_op("split_flow", partial(launch, build_split), split_product, ("split", _card_constants))
