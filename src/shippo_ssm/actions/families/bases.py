"""Families whose coordinates belong to factors."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from shippo_ssm._expect import expect_size
from shippo_ssm._private import real_numbers
from shippo_ssm.actions.base import Factor
from shippo_ssm.actions.factors import RankOne, coefficients, make_factors
from shippo_ssm.actions.family import RightAction
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.dispatch import MAX_ACTION_WIDTH

# Raw diagonal coordinate at which a softplus diagonal starts: softplus(-6) = 0.0025, so a unit step keeps 99.75 % of a column.
START = -6.0


class Factored(RightAction):
    """Coordinates of factors: d[i], theta[i,j], eta[i,j] and zeta[l].

    Args:
        width: P.
        diagonal, rotations, shears: which kinds of factors take part.
        rank: number of rank-one factors, with learnable p, q [rank, P].
        bounded: hold ||R||_2 <= 1, by the family's own means.
    """

    # `Inline.kind` and `Inline.clamp`, and whether `bounded` works with rank-one factors.
    kind = "exponential"
    clamp = 0
    bounds_rank_one = True

    def __init__(
        self,
        width: int,
        diagonal: bool = True,
        rotations: bool = True,
        shears: bool = True,
        rank: int = 0,
        bounded: bool = False,
    ) -> None:
        # Names need the width before `super().__init__` can refuse it.
        expect_size(type(self).__name__, "width", width)
        pairs = list(itertools.combinations(range(width), 2))
        names = [f"d[{i}]" for i in range(width)] if diagonal else []
        names += [f"theta[{i},{j}]" for i, j in pairs] if rotations else []
        names += [f"eta[{i},{j}]" for i, j in pairs] if shears else []
        super().__init__(width, names + [f"zeta[{index}]" for index in range(rank)], bounded)
        if rank < 0:
            raise ValueError(f"{type(self).__name__}: `rank` is {rank}; expected a number of factors >= 0")
        if bounded and rank and not self.bounds_rank_one:
            raise ValueError(
                f"{type(self).__name__}: `bounded` came with rank-one factors; expected rank 0; use a bounded Structured"
            )
        self.sizes = (width if diagonal else 0, len(pairs) if rotations else 0, len(pairs) if shears else 0)
        # Plain numbers: a module built on the meta device needs nothing restored.
        with real_numbers():
            self._basis = [factor.generator.flatten().tolist() for factor in make_factors(width, self.sizes)]
        # p q^T has unit scale at any width.
        self.p = nn.Parameter(torch.randn(rank, width) / math.sqrt(width)) if rank else None
        self.q = nn.Parameter(torch.randn(rank, width) / math.sqrt(width)) if rank else None
        if names and not rank and width <= MAX_ACTION_WIDTH:
            self.inline = Inline(self.kind, *self.sizes, self.clamp, int(bounded))

    @property
    def factors(self) -> list[Factor]:
        """The factors in the order of the product, one per coordinate."""
        return make_factors(self.width, self.sizes) + self.rank_one_factors()

    def rank_one_factors(self) -> list[Factor]:
        return [] if self.p is None or self.q is None else [RankOne(u, v) for u, v in zip(self.p, self.q)]

    def coefficients(self, coords: Tensor, step: Tensor) -> Tensor:
        """The coefficient of every factor [.., K]."""
        return coefficients(coords, step, self.sizes[0], self.clamp)

    def matrix(self, coords: Tensor) -> Tensor:
        """The sum of all generators times their coefficients at a unit step, [.., P, P]."""
        coef = self.coefficients(coords, self.check(coords))
        basis = torch.tensor(self._basis, dtype=coef.dtype, device=coef.device).view(-1, self.width**2)
        if self.p is not None and self.q is not None:
            basis = torch.cat([basis, (self.p[:, :, None] * self.q[:, None, :]).flatten(1).to(basis)])
        return (coef @ basis).unflatten(-1, (self.width, self.width)).to(coords.dtype)

    def init_coordinates(self, memory_length: float | None = None) -> Tensor:
        start = torch.zeros(self.num_coordinates)
        if not self.clamp:
            # The inverse of the softplus: the diagonal fades over `memory_length` unit steps.
            start[: self.sizes[0]] = START if memory_length is None else math.log(math.expm1(1 / memory_length))
        return start
