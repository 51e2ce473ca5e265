"""Factors with closed-form exponentials: the pieces of a split flow, each exp(coef G) acting on the right of a state
[.., N, P].

    Diagonal(width, i)     G = e_i e_i^T              scales column i by exp(coef)                      O(N)
    Rotation(width, i, j)  G = e_j e_i^T - e_i e_j^T  turns columns i and j by the angle coef           O(N)
    Shear(width, i, j)     G = e_i e_j^T              adds coef times column i to column j              O(N)
    RankOne(u, v)          G = u v^T                  adds phi(coef v.u) coef (state u) v^T             O(N P)

where phi(k) = (e^k - 1) / k. All P diagonals together are the paper's diagonal scaling, O(N P).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from shippo_ssm.actions.base import Factor


def check_index(name: str, index: int, width: int) -> int:
    """Raise where an index is not a channel of a group of this width."""
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < width:
        raise ValueError(f"factor: `{name}` is {index!r}; expected a channel, an integer in 0..{width - 1}")
    return index


def check_pair(width: int, i: int, j: int) -> tuple[int, int]:
    """Raise where (i, j) is not a pair of different channels."""
    if check_index("i", i, width) == check_index("j", j, width):
        raise ValueError(f"factor: `i` and `j` are {i} both; expected two different channels")
    return i, j


def phi(kappa: Tensor) -> Tensor:
    """(e^k - 1) / k, equal to 1 at k = 0, with derivatives of the same quality.

    Near zero, where autograd of expm1(k) / k would cancel, the Taylor series takes over.
    """
    small = kappa.abs() < 0.5
    near = torch.where(small, kappa, torch.zeros_like(kappa))
    far = torch.where(small, torch.ones_like(kappa), kappa)
    series = torch.full_like(kappa, 1.0 / math.factorial(17))
    for k in range(16, 0, -1):
        series = series * near + 1.0 / math.factorial(k)
    return torch.where(small, series, torch.expm1(far) / far)


def elementary(width: int, entries: dict[tuple[int, int], float]) -> Tensor:
    """The matrix [P, P] with these entries and zeros elsewhere."""
    out = torch.zeros(width, width)
    for place, value in entries.items():
        out[place] = value
    return out


@final
class Diagonal(Factor):
    """exp(coef e_i e_i^T): scale column i by exp(coef).

    Example:
        >>> from shippo_ssm.actions import Diagonal
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
        >>> import math
        >>> from shippo_ssm.actions import Rotation
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
        >>> from shippo_ssm.actions import Shear
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

    Args:
        u: [P].
        v: [P].

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import RankOne
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
