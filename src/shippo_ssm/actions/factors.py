"""Factors with closed-form exponentials, each exp(coef G) acting on the right of a state, and their products.

A factor costs O(N) for a state [.., N, P], a rank-one factor O(N P).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from shippo_ssm.actions.base import Factor
from shippo_ssm.dispatch import compute_dtype


def check_index(name: str, index: int, width: int) -> int:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < width:
        raise ValueError(f"factor: `{name}` is {index!r}; expected a channel, an integer in 0..{width - 1}")
    return index


def check_pair(width: int, i: int, j: int) -> tuple[int, int]:
    if check_index("i", i, width) == check_index("j", j, width):
        raise ValueError(f"factor: `i` and `j` are {i} both; expected two different channels")
    return i, j


def phi(kappa: Tensor) -> Tensor:
    """(e^k - 1) / k, equal to 1 at k = 0; near zero, where autograd of expm1(k) / k would cancel, by its Taylor series."""
    small = kappa.abs() < 0.5
    near = torch.where(small, kappa, torch.zeros_like(kappa))
    far = torch.where(small, torch.ones_like(kappa), kappa)
    series = torch.full_like(kappa, 1.0 / math.factorial(17))
    for k in range(16, 0, -1):
        series = series * near + 1.0 / math.factorial(k)
    return torch.where(small, series, torch.expm1(far) / far)


def elementary(width: int, entries: dict[tuple[int, int], float]) -> Tensor:
    out = torch.zeros(width, width)
    for place, value in entries.items():
        out[place] = value
    return out


@final
class Diagonal(Factor):
    """exp(coef e_i e_i^T): scale column i by exp(coef).

    Example:
        >>> Diagonal(2, 0).dense(0.0).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(self, width: int, i: int) -> None:
        self.width, self.i = width, check_index("i", i, width)

    @property
    def generator(self) -> Tensor:
        return elementary(self.width, {(self.i, self.i): 1.0})

    def act_columns(self, columns: Sequence[Tensor], coef: Tensor) -> list[Tensor]:
        out = list(columns)
        out[self.i] = out[self.i] * torch.exp(coef)
        return out


@final
class Rotation(Factor):
    """exp(coef (e_j e_i^T - e_i e_j^T)): columns (i, j) times [[cos, -sin], [sin, cos]].

    Example:
        >>> Rotation(2, 0, 1).dense(math.pi).round().tolist()
        [[-1.0, 0.0], [-0.0, -1.0]]
    """

    def __init__(self, width: int, i: int, j: int) -> None:
        self.width, (self.i, self.j) = width, check_pair(width, i, j)

    @property
    def generator(self) -> Tensor:
        return elementary(self.width, {(self.j, self.i): 1.0, (self.i, self.j): -1.0})

    def act_columns(self, columns: Sequence[Tensor], coef: Tensor) -> list[Tensor]:
        cos, sin = torch.cos(coef), torch.sin(coef)
        out = list(columns)
        first, second = out[self.i], out[self.j]
        out[self.i], out[self.j] = first * cos + second * sin, second * cos - first * sin
        return out


@final
class Shear(Factor):
    """exp(coef e_i e_j^T) = I + coef e_i e_j^T: add coef times column i to column j.

    Example:
        >>> Shear(2, 0, 1).dense(3.0).tolist()
        [[1.0, 3.0], [0.0, 1.0]]
    """

    def __init__(self, width: int, i: int, j: int) -> None:
        self.width, (self.i, self.j) = width, check_pair(width, i, j)

    @property
    def generator(self) -> Tensor:
        return elementary(self.width, {(self.i, self.j): 1.0})

    def act_columns(self, columns: Sequence[Tensor], coef: Tensor) -> list[Tensor]:
        out = list(columns)
        out[self.j] = out[self.j] + coef * out[self.i]
        return out


@final
class RankOne(Factor):
    """exp(coef u v^T) = I + phi(coef v.u) coef u v^T, with phi(k) = (e^k - 1) / k and phi(0) = 1.

    Example:
        >>> RankOne(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).dense(2.0).tolist()
        [[1.0, 2.0], [0.0, 1.0]]
    """

    def __init__(self, u: Tensor, v: Tensor) -> None:
        if u.ndim != 1 or u.shape != v.shape or len(u) == 0:
            raise ValueError(
                f"RankOne: `u` and `v` have shapes {tuple(u.shape)} and {tuple(v.shape)}; expected vectors [P] of one length"
            )
        self.width, self.u, self.v = len(u), u, v

    @property
    def generator(self) -> Tensor:
        return torch.outer(self.u, self.v)

    def act_columns(self, columns: Sequence[Tensor], coef: Tensor) -> list[Tensor]:
        u, v = self.u.to(coef.dtype), self.v.to(coef.dtype)
        inner = torch.stack([column * weight for column, weight in zip(columns, u.unbind())]).sum(0)
        gain = phi(coef * torch.dot(u, v)) * coef * inner
        return [column + gain * weight for column, weight in zip(columns, v.unbind())]


def make_factors(width: int, sizes: Sequence[int]) -> list[Factor]:
    """The factors without parameters, in order; `sizes` counts diagonals, rotations and shears."""
    pairs = list(itertools.combinations(range(width), 2))
    out: list[Factor] = [Diagonal(width, i) for i in range(sizes[0])]
    return out + [kind(width, i, j) for kind, size in ((Rotation, sizes[1]), (Shear, sizes[2])) for i, j in pairs[:size]]


def positive_part(x: Tensor) -> Tensor:
    """max(x, 0) with slope one at zero: `clamp_min` has slope zero there since torch 2.14, as `relu` always had."""
    return torch.where(x < 0, 0.0, x)


def coefficients(coords: Tensor, step: Tensor, num_diagonals: int, clamp: int = 0) -> Tensor:
    """The coefficient of every factor [.., K]: step coords, and -step softplus(d) or -step max(d, 0) on the diagonal."""
    dtype = compute_dtype(coords.dtype)
    coords, step = coords.to(dtype), step.to(dtype).unsqueeze(-1)
    decay, rest = coords[..., :num_diagonals], coords[..., num_diagonals:]
    if clamp:
        return step * torch.cat([-positive_part(decay), rest], -1)
    # A limit that keeps R invertible in floating point.
    largest = 0.9 * math.log(torch.finfo(dtype).max)
    return torch.cat([-(step * F.softplus(decay)).clamp_max(largest), step * rest], -1)


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
