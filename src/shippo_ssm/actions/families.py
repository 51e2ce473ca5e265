"""Families of right actions: coordinates [.., K] and a step [..] in, R [.., P, P] out.

    SplitFlow(width)   a fixed-order product of closed-form factors; the order is part of its meaning
    DenseExp(width)    R = exp(step A), the coordinates are the P^2 entries of A
    Lie(generators)    R = exp(step sum_k coords_k G_k), with learnable generators
    Identity(width)    R = I, no coordinates
    Oracle(width)      R is given: the coordinates are its entries, the step is not used

`get_family` turns the word of a configuration ("split", "dense", "none") into one of them.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn

from shippo_ssm.actions.base import Factor, RightAction, check_state, not_finite
from shippo_ssm.actions.expm import check_square, expm
from shippo_ssm.actions.factors import RankOne
from shippo_ssm.actions.kernels import choose_kernel
from shippo_ssm.actions.split import (
    apply_factors,
    channel_pairs,
    coefficients,
    identity_columns,
    make_factors,
    split_op,
)

# Raw diagonal coordinate at which a split flow starts: softplus(-6) = 0.0025, so a unit step keeps 99.75 % of a column.
START = -6.0


def entry_names(letter: str, width: int) -> list[str]:
    """letter[0,0], letter[0,1], .. in row-major order."""
    return [f"{letter}[{i},{j}]" for i in range(width) for j in range(width)]


@final
class SplitFlow(RightAction):
    """R = D_0 .. D_{P-1} Rot_{01} Rot_{02} .. Shear_{01} Shear_{02} .. Rank_0 Rank_1 .., multiplied from left to right.

    The coordinates, in the order of the product, each multiplied by the step:

        d[i]        D_i = exp(-step softplus(d[i]) e_i e_i^T), so the diagonal only shrinks: its entries lie in (0, 1]
        theta[i,j]  Rot_ij = exp(step theta[i,j] (e_j e_i^T - e_i e_j^T)), i < j
        eta[i,j]    Shear_ij = exp(step eta[i,j] e_i e_j^T), i < j
        zeta[l]     Rank_l = exp(step zeta[l] p_l q_l^T) with learnable p, q [rank, P]

    which are 16 for width 4 and rank 0. Applied to a state, D_0 acts first and the last factor last. Zero coordinates
    are the identity except on the diagonal, where softplus(0) = 0.69; `init_coordinates` starts at d = -6, near the
    identity. To keep R invertible in floating point, step softplus(d) is cut at 0.9 log(largest number of the dtype),
    79.8 in float32.

    Args:
        width: P.
        diagonal, rotations, shears: which kinds of factors take part.
        rank: number of rank-one factors.

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import SplitFlow
        >>> flow = SplitFlow(4)
        >>> flow.num_coordinates, flow.coordinates[4]
        (16, 'theta[0,1]')
        >>> flow.dense(torch.zeros(2, 7, 16), torch.ones(2, 7)).shape
        torch.Size([2, 7, 4, 4])
    """

    def __init__(self, width: int, diagonal: bool = True, rotations: bool = True, shears: bool = True, rank: int = 0) -> None:
        pairs = channel_pairs(width) if isinstance(width, int) else []
        names = [f"d[{i}]" for i in range(width)] if diagonal else []
        names += [f"theta[{i},{j}]" for i, j in pairs] if rotations else []
        names += [f"eta[{i},{j}]" for i, j in pairs] if shears else []
        super().__init__(width, names + [f"zeta[{index}]" for index in range(rank)])
        if rank < 0:
            raise ValueError(f"SplitFlow: `rank` is {rank}; expected a number of factors >= 0")
        self.sizes = (width if diagonal else 0, len(pairs) if rotations else 0, len(pairs) if shears else 0)
        # Unit scale of p q^T for any width, and no dependence on the coordinates' start: zeta = 0 is the identity.
        self.p = nn.Parameter(torch.randn(rank, width) / math.sqrt(width)) if rank else None
        self.q = nn.Parameter(torch.randn(rank, width) / math.sqrt(width)) if rank else None

    @property
    def factors(self) -> list[Factor]:
        """The factors in the order of the product, one per coordinate."""
        return make_factors(self.width, self.sizes) + self._rank_one_factors()

    def _rank_one_factors(self) -> list[Factor]:
        if self.p is None or self.q is None:
            return []
        return [RankOne(u, v) for u, v in zip(self.p.unbind(), self.q.unbind())]

    def dense(self, coords: Tensor, step: Tensor | float, *, backend: str = "auto") -> Tensor:
        """R [.., P, P].

        Args:
            coords: [.., K].
            step: [..] >= 0, broadcast with the leading shape of coords.
            backend: "torch", "fused" (the CPU kernel) or "auto", as `kernels.choose_kernel` says for coords.
        """
        step = self.check(coords, step, values=False)
        if choose_kernel("SplitFlow", coords, self.width, 1, backend) == "torch":
            self.check_values(coords, step)
            coef = coefficients(coords, step, self.sizes[0])
            return apply_factors(identity_columns(self.width, coef), self.factors, coef).to(coords.dtype)
        shape = torch.broadcast_shapes(coords.shape[:-1], step.shape)
        coords, step = coords.expand(*shape, -1), step.to(coords.dtype).expand(shape)
        inner = sum(self.sizes)
        right = split_op(coords[..., :inner], step, self.width, self.sizes)
        if self.p is None:
            return right
        return apply_factors(right.unbind(-1), self._rank_one_factors(), step.unsqueeze(-1) * coords[..., inner:])

    def act(self, state: Tensor, coords: Tensor, step: Tensor | float) -> Tensor:
        check_state(self, state)
        coef = coefficients(coords, self.check(coords, step), self.sizes[0])
        return apply_factors(state.to(coef.dtype).unbind(-1), self.factors, coef).to(state.dtype)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R^{-1}: the inverse factors in the opposite order, each in closed form."""
        coef = coefficients(coords, self.check(coords, step), self.sizes[0])
        return apply_factors(identity_columns(self.width, coef), self.factors[::-1], -coef.flip(-1)).to(coords.dtype)

    def generator(self, coords: Tensor) -> Tensor:
        """A = -Diag(softplus(d)) + sum theta Omega + sum eta N + sum zeta p q^T: what `dense` splits."""
        coef = coefficients(coords, self.check(coords, values=False), self.sizes[0])
        if not self.num_coordinates:
            return coef.new_zeros(*coef.shape[:-1], self.width, self.width)
        basis = torch.stack([factor.generator.to(coef) for factor in self.factors])
        return torch.einsum("...k,kij->...ij", coef, basis).to(coords.dtype)

    def init_coordinates(self) -> Tensor:
        start = torch.zeros(self.num_coordinates)
        start[: self.sizes[0]] = START
        return start


class Exponential(RightAction):
    """R = exp(step A) for families that differ only in how coordinates make A."""

    def dense(self, coords: Tensor, step: Tensor | float, *, backend: str = "auto") -> Tensor:
        step = self.check(coords, step)
        return expm(self.generator(coords) * step[..., None, None], backend=backend)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        step = self.check(coords, step)
        return expm(-self.generator(coords) * step[..., None, None])


@final
class DenseExp(Exponential):
    """R = exp(step A); the coordinates are the entries of A, row by row.

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import DenseExp
        >>> DenseExp(3).dense(torch.zeros(9), 0.1).equal(torch.eye(3))
        True
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, entry_names("A", width) if isinstance(width, int) else [])

    def generator(self, coords: Tensor) -> Tensor:
        self.check(coords, values=False)
        return coords.unflatten(-1, (self.width, self.width))


@final
class Lie(Exponential):
    """R = exp(step sum_k coords_k G_k): K generators shared by all tokens, K coefficients per token.

    Args:
        generators: G [K, P, P], the start of the generators (true, zero or random: the caller's choice).
        learnable: whether the generators are trained.

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import Lie
        >>> shears = torch.tensor([[[0.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]]])
        >>> Lie(shears).dense(torch.tensor([2.0, 0.0]), 1.0).tolist()
        [[1.0, 2.0], [0.0, 1.0]]
    """

    def __init__(self, generators: Tensor, learnable: bool = True) -> None:
        check_square("Lie", "generators", generators)
        if generators.ndim != 3:
            raise ValueError(f"Lie: `generators` has shape {tuple(generators.shape)}; expected [K, P, P]; stack them")
        super().__init__(generators.shape[-1], [f"rho[{k}]" for k in range(len(generators))])
        generators = generators.detach().clone()
        if not bool(torch.isfinite(generators).all()):
            raise not_finite("Lie", "generators")
        if learnable:
            self.generators = nn.Parameter(generators)
        else:
            self.register_buffer("generators", generators)

    def generator(self, coords: Tensor) -> Tensor:
        self.check(coords, values=False)
        return torch.einsum("...k,kij->...ij", coords, self.generators.to(coords.dtype))


@final
class Identity(RightAction):
    """R = I: no right action, no coordinates (coords has shape [.., 0])."""

    def __init__(self, width: int) -> None:
        super().__init__(width, [])

    def generator(self, coords: Tensor) -> Tensor:
        self.check(coords, values=False)
        return coords.new_zeros(*coords.shape[:-1], self.width, self.width)

    def dense(self, coords: Tensor, step: Tensor | float) -> Tensor:
        step = self.check(coords, step)
        shape = torch.broadcast_shapes(coords.shape[:-1], step.shape)
        return torch.eye(self.width, dtype=coords.dtype, device=coords.device).expand(*shape, self.width, self.width)

    def act(self, state: Tensor, coords: Tensor, step: Tensor | float) -> Tensor:
        check_state(self, state)
        self.check(coords, step)
        return state

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        return self.dense(coords, step)


@final
class Oracle(RightAction):
    """R is given: the coordinates are its entries, row by row, or R itself [.., P, P] beside a step [..], which is not used.

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import Oracle
        >>> given = torch.randn(5, 2, 2)
        >>> Oracle(2).dense(given.flatten(-2), torch.ones(5)).equal(given)
        True
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, entry_names("R", width) if isinstance(width, int) else [])

    def dense(self, coords: Tensor, step: Tensor | float) -> Tensor:
        step_ndim = step.ndim if isinstance(step, Tensor) else coords.ndim - 1
        if coords.ndim == step_ndim + 2 and coords.shape[-2:] == (self.width, self.width):
            coords = coords.flatten(-2)
        self.check(coords, step)
        return coords.unflatten(-1, (self.width, self.width))

    def generator(self, coords: Tensor) -> Tensor:
        """Refused: a given R need not have a real logarithm; its own entries serve where a set of actions is asked for."""
        raise ValueError("Oracle: it has no generator, since R is given; use dense(coords, step) instead")

    def init_coordinates(self) -> Tensor:
        return torch.eye(self.width).flatten()


FAMILIES = {"split": SplitFlow, "dense": DenseExp, "none": Identity}


def get_family(right: str | RightAction, width: int) -> RightAction:
    """The family that a word or an object stands for: "split" -> SplitFlow, "dense" -> DenseExp, "none" -> Identity.

    Args:
        right: one of the words, or a family of the right width, which is returned as it is.
        width: P.
    """
    if isinstance(right, RightAction):
        if right.width != width:
            raise ValueError(
                f"get_family: `right` has width {right.width}; expected {width}; build it with the group width of the layer"
            )
        return right
    if not isinstance(right, str) or right not in FAMILIES:
        choices = ", ".join(repr(name) for name in FAMILIES)
        raise ValueError(f"get_family: `right` is {right!r}; expected one of {choices} or a RightAction")
    return FAMILIES[right](width)
