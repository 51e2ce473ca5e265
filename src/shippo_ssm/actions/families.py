"""Families of right actions: the identity, a given R, products of factors, exponentials of generators; and their names.

A family whose `inline` names a CPU kernel runs it as one operator of torch, `right_op`: kernels for the value and the gradient,
a torch formula for second derivatives. Everything else is torch.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from shippo_ssm._expect import expect_size
from shippo_ssm._private import real_numbers
from shippo_ssm.actions._expm_cpu import BlockOperands, LaneScheme
from shippo_ssm.actions._exponential_cpu import build_family
from shippo_ssm.actions.base import Factor, RightAction, not_finite, register_vmap
from shippo_ssm.actions.expm import check_square, expm, lane_schemes, launch_schemes
from shippo_ssm.actions.factors import (
    RankOne,
    apply_factors,
    coefficients,
    identity_columns,
    make_factors,
    positive_part,
)
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.actions.rotation import WIDTHS, rotation
from shippo_ssm.dispatch import MAX_ACTION_WIDTH, choose_action, compute_dtype, is_readable
from shippo_ssm.engine import LANES, allocate, custom_op, differentiate, launch

# Raw diagonal coordinate at which a softplus diagonal starts: softplus(-6) = 0.0025, so a unit step keeps 99.75 % of a column.
START = -6.0


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


@final
class Identity(RightAction):
    """R = I: no right action, no coordinates (coords has shape [.., 0])."""

    def __init__(self, width: int) -> None:
        super().__init__(width, [])

    def generator(self, coords: Tensor) -> Tensor:
        self.check(coords)
        return coords.new_zeros(*coords.shape[:-1], self.width, self.width)

    def dense(self, coords: Tensor, step: Tensor | float) -> Tensor:
        shape = self.check(coords, step).shape
        return torch.eye(self.width, dtype=coords.dtype, device=coords.device).expand(*shape, self.width, self.width)

    @property
    def stable(self) -> bool:
        return True


@final
class Oracle(RightAction):
    """R is given: the coordinates are its entries, row by row, or R itself [.., P, P] beside a step [..], which is not used.

    Example:
        >>> given = torch.randn(5, 2, 2)
        >>> Oracle(2).dense(given.flatten(-2), torch.ones(5)).equal(given)
        True
    """

    def __init__(self, width: int) -> None:
        # Names need the width before `super().__init__` can refuse it.
        expect_size("Oracle", "width", width)
        super().__init__(width, [f"R[{i},{j}]" for i in range(width) for j in range(width)])

    def dense(self, coords: Tensor, step: Tensor | float) -> Tensor:
        step_ndim = step.ndim if isinstance(step, Tensor) else -1
        if isinstance(coords, Tensor) and coords.ndim == step_ndim + 2 and coords.shape[-2:] == (self.width, self.width):
            coords = coords.flatten(-2)
        self.check(coords, step)
        return coords.unflatten(-1, (self.width, self.width))

    def generator(self, coords: Tensor) -> Tensor:
        # A given R need not have a real logarithm.
        raise ValueError("Oracle: it has no generator, since R is given; use dense(coords, step) instead")

    def init_coordinates(self, memory_length: float | None = None) -> Tensor:
        return torch.eye(self.width).flatten()


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

    @property
    def inline(self) -> Inline | None:
        if self.p is not None or self.width > MAX_ACTION_WIDTH:
            return None
        return Inline(self.kind, *self.sizes, self.clamp, int(self.bounded))

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


@final
class SplitFlow(Factored):
    """R = D_0 .. D_{P-1} Rot_{01} Rot_{02} .. Shear_{01} Shear_{02} .. Rank_0 Rank_1 .., multiplied from left to right.

    The coordinates, in the order of the product, each multiplied by the step:

        d[i]        D_i = exp(-step softplus(d[i]) e_i e_i^T), so the diagonal only shrinks: its entries lie in (0, 1]
        theta[i,j]  Rot_ij = exp(step theta[i,j] (e_j e_i^T - e_i e_j^T)), i < j
        eta[i,j]    Shear_ij = exp(step eta[i,j] e_i e_j^T), i < j
        zeta[l]     Rank_l = exp(step zeta[l] p_l q_l^T) with learnable p, q [rank, P]

    which are 16 for width 4 and rank 0. Applied to a state, D_0 acts first. Zero coordinates are the identity except on the
    diagonal; `init_coordinates` starts near the identity. step softplus(d) is cut at 0.9 log(largest number of the dtype), so
    that R stays invertible. Diagonals and rotations never lengthen a row; a shear by c does by at most exp(asinh(|c| / 2)).
    `bounded` divides R by the product of these: then ||R||_2 <= 1 for every input.

    Args:
        width: P.
        diagonal, rotations, shears: which kinds of factors take part.
        rank: number of rank-one factors.
        bounded: divide by the bound of the shears; not with rank-one factors.

    Example:
        >>> flow = SplitFlow(4)
        >>> flow.num_coordinates, flow.coordinates[4]
        (16, 'theta[0,1]')
        >>> flow.dense(torch.zeros(2, 7, 16), torch.ones(2, 7)).shape
        torch.Size([2, 7, 4, 4])
    """

    kind = "split"
    # Rank-one factors may overflow before their norm could be divided out.
    bounds_rank_one = False

    def dense(self, coords: Tensor, step: Tensor | float, *, backend: str = "auto") -> Tensor:
        """R [.., P, P].

        Args:
            coords: [.., K].
            step: [..], >= 0, broadcast with the leading shape of coords.
            backend: "torch", "fused" (the CPU kernel) or "auto", as `dispatch.choose_action` says.
        """
        step = self.check(coords, step)
        if choose_action("SplitFlow", (coords, step), self.width, 1, backend, gpu=False) == "torch":
            coef = self.coefficients(coords, step)
            right = apply_factors(identity_columns(self.width, coef), self.factors, coef).to(coords.dtype)
            return (right * self._shrink(coef)).to(coords.dtype) if self.bounded else right
        coords, step, inner = coords.expand(*step.shape, -1), step.to(coords.dtype), sum(self.sizes)
        right = right_op(coords[..., :inner], step, self.width, "split", [*self.sizes, 0, int(self.bounded)])
        if self.p is None:
            return right
        return apply_factors(right.unbind(-1), self.rank_one_factors(), step.unsqueeze(-1) * coords[..., inner:])

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R^{-1}: the inverse factors in the opposite order, each in closed form."""
        step = self.check(coords, step)
        coef = self.coefficients(coords, step)
        back = apply_factors(identity_columns(self.width, coef), self.factors[::-1], -coef.flip(-1))
        return (back / self._shrink(coef) if self.bounded else back).to(coords.dtype)

    def generator(self, coords: Tensor) -> Tensor:
        """A = -Diag(softplus(d)) + sum theta Omega + sum eta N + sum zeta p q^T; bounded, minus I sum |eta| / 2."""
        whole = self.matrix(coords)
        if not self.bounded:
            return whole
        rate = 0.5 * self._shears(coords).abs().sum(-1)
        return whole - rate[..., None, None] * torch.eye(self.width, dtype=whole.dtype, device=whole.device)

    @property
    def stable(self) -> bool:
        return self.bounded or (not self.sizes[2] and self.p is None)

    def _shears(self, coords: Tensor) -> Tensor:
        """Those of coordinates, or of coefficients, that belong to shears."""
        start = self.sizes[0] + self.sizes[1]
        return coords[..., start : start + self.sizes[2]]

    def _shrink(self, coef: Tensor) -> Tensor:
        return shear_shrink(self._shears(coef))


class Exponential(RightAction):
    """R = exp(step A) for families that differ only in how coordinates make A; bounded, A is `contracted`."""

    @abstractmethod
    def matrix(self, coords: Tensor) -> Tensor:
        """A [.., P, P] as the coordinates give it, before it is bounded."""

    def generator(self, coords: Tensor) -> Tensor:
        """A [.., P, P] of R = exp(step A)."""
        matrix = self.matrix(coords)
        return contracted(matrix) if self.bounded else matrix

    def dense(self, coords: Tensor, step: Tensor | float, *, backend: str = "auto") -> Tensor:
        """R [.., P, P]; the arguments are those of `SplitFlow.dense`."""
        step, inline, dtype = self.check(coords, step), self.inline, coords.dtype
        coords = coords.to(compute_dtype(dtype))
        if inline is None or choose_action(type(self).__name__, (coords, step), self.width, 1, backend) != "fused":
            return expm(self._logarithm(coords, step), backend=backend).to(dtype)
        coords = coords.expand(*step.shape, -1)
        return right_op(coords, step.to(coords.dtype), self.width, inline.kind, inline[1:]).to(dtype)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        return expm(-self._logarithm(coords, step)).to(coords.dtype)

    def _logarithm(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """step A, in float32 at least: rounded to a half type, a bounded A would no longer be."""
        step = self.check(coords, step)
        return self.generator(coords.to(compute_dtype(coords.dtype))) * step[..., None, None]

    @property
    def stable(self) -> bool:
        return self.bounded


def reflected(right: Tensor, vector: Tensor) -> Tensor:
    """right (I - (1 - cos |v|) v v^T / |v|^2) for v [.., P]: nothing changes at v = 0, and |v| = pi is a reflection.

    The factor has the eigenvalue cos |v| along v and 1 across it, so it never lengthens a row. Both ends are stationary: a
    learned reflection is exact to second order in the error of its coordinates.
    """
    square = vector.square().sum(-1, keepdim=True)
    # (1 - cos x) / x^2 = 2 sin(x / 2)^2 / x^2; its series near zero, where the square root has no slope.
    near = square < 1e-2
    far = torch.where(near, 1.0, square)
    series = 0.5 - square / 24 + square**2 / 720 - square**3 / 40320
    factor = torch.where(near, series, 2 * (far.sqrt() / 2).sin().square() / far)
    return right - (right @ vector.unsqueeze(-1)) * (factor * vector).unsqueeze(-2)


@final
class Orthogonal(Factored, Exponential):
    """R = exp(step sum theta[i,j] (e_j e_i^T - e_i e_j^T)), i < j: a rotation, R^T R = I, P (P - 1) / 2 coordinates.

    Zero coordinates are the identity exactly. Widths 2, 3 and 4 have closed forms (`rotation.py`), others take the exponential.
    Each R is orthogonal to rounding: a product of 100,000 float32 rotations is to 1e-4.

    A rotation has determinant 1. `reflections` appends a vector v of P coordinates whose factor (`reflected`) turns into a
    reflection at |step v| = pi; in between it shortens rows along v, so ||R||_2 <= 1, and R is orthogonal at both ends only.

    Example:
        >>> import torch
        >>> turn = Orthogonal(4).dense(torch.randn(6), 1.0)
        >>> torch.allclose(turn @ turn.mT, torch.eye(4), atol=1e-6)
        True
    """

    def __init__(self, width: int, reflections: bool = False) -> None:
        super().__init__(width, diagonal=False, rotations=True, shears=False)
        self.rotations = Orthogonal(width) if reflections else None
        if reflections:
            self.coordinates += tuple(f"v[{i}]" for i in range(width))
            self.num_coordinates += width

    @property
    def inline(self) -> Inline | None:
        if self.rotations is not None:
            return None
        return Inline("rotation") if self.width in WIDTHS else super().inline

    def matrix(self, coords: Tensor) -> Tensor:
        """The skew generator [.., P, P]; a reflection differs from the identity in second order only."""
        return super().matrix(coords) if self.rotations is None else self.rotations.matrix(coords[..., : -self.width])

    def dense(self, coords: Tensor, step: Tensor | float, *, backend: str = "auto") -> Tensor:
        """R [.., P, P]; the arguments are those of `SplitFlow.dense`."""
        if self.rotations is not None:
            step, vector = self.check(coords, step), coords[..., -self.width :]
            right = self.rotations.dense(coords[..., : -self.width], step, backend=backend)
            return reflected(right, step.unsqueeze(-1).to(vector.dtype) * vector)
        step = self.check(coords, step)
        # The closed form has a CPU kernel only; a GPU takes the kernel of the exponential.
        closed = self.width in WIDTHS
        if not closed or (kernel := choose_action("Orthogonal", (coords, step), self.width, 1, backend)) == "triton":
            return super().dense(coords, step, backend=backend)
        if kernel == "torch":
            return rotation(coords, step, self.width)
        # A compiled package takes an empty list for a missing argument: all numbers, zeros here.
        kind, *sizes = Inline("rotation")
        return right_op(coords.expand(*step.shape, -1), step.to(coords.dtype), self.width, kind, sizes)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R^{-1}: the rotation by the opposite angles, or solved for where there are reflections."""
        return self.dense(-coords, step) if self.rotations is None else RightAction.inverse(self, coords, step)

    @property
    def stable(self) -> bool:
        return True


@final
class Dissipative(Factored, Exponential):
    """R = exp(step (A - Diag(max(d, 0)))) with A skew, as in `Orthogonal`: ||R||_2 <= 1, P (P - 1) / 2 + P coordinates.

    The symmetric part of the generator is -Diag(max(d, 0)), so no row gets longer; where d > 0 it fades. d[i] come first, then
    theta[i,j]. Why the maximum: the start d = 0 must be the identity exactly and must have a slope. A softplus never reaches
    zero and a square has no slope there. The maximum, with the slope of its right side at zero, has both.

    Example:
        >>> import torch
        >>> family = Dissipative(4)
        >>> family.dense(family.init_coordinates(), 1.0).equal(torch.eye(4)), family.stable
        (True, True)
    """

    clamp = 1

    def __init__(self, width: int) -> None:
        super().__init__(width, diagonal=True, rotations=True, shears=False)

    @property
    def stable(self) -> bool:
        return True


@final
class DenseExp(Exponential):
    """R = exp(step A); the coordinates are the entries of A, row by row; `bounded`, A is `contracted`: ||R||_2 <= 1.

    Example:
        >>> DenseExp(3).dense(torch.zeros(9), 0.1).equal(torch.eye(3))
        True
    """

    def __init__(self, width: int, bounded: bool = False) -> None:
        # Names need the width before `super().__init__` can refuse it.
        expect_size("DenseExp", "width", width)
        super().__init__(width, [f"A[{i},{j}]" for i in range(width) for j in range(width)], bounded)

    def matrix(self, coords: Tensor) -> Tensor:
        self.check(coords)
        return coords.unflatten(-1, (self.width, self.width))

    @property
    def inline(self) -> Inline | None:
        return None if self.width > MAX_ACTION_WIDTH else Inline("exponential", bounded=int(self.bounded))


@final
class Structured(Factored, Exponential):
    """R = exp(step (-Diag(softplus(d)) + sum theta Omega + sum eta N + sum zeta p q^T)).

    Coordinates and arguments are those of `SplitFlow`; `bounded`, the sum is `contracted`: ||R||_2 <= 1.

    Example:
        >>> Structured(4).num_coordinates
        16
    """


@final
class Lie(Exponential):
    """R = exp(step sum_k coords_k G_k): generators G [K, P, P] shared by all tokens, trained if `learnable`.

    Example:
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
        if is_readable(generators) and not bool(torch.isfinite(generators).all()):
            raise not_finite("Lie", "generators")
        if learnable:
            self.generators = nn.Parameter(generators)
        else:
            self.register_buffer("generators", generators)

    def matrix(self, coords: Tensor) -> Tensor:
        self.check(coords)
        return torch.einsum("...k,kij->...ij", coords, self.generators.to(coords.dtype))


FAMILIES = {
    "orthogonal": Orthogonal,
    "dissipative": Dissipative,
    "split": SplitFlow,
    "structured": Structured,
    "dense": DenseExp,
    "none": Identity,
}


def get_family(right: str | RightAction, width: int, bounded: bool = False) -> RightAction:
    """The family for a name of `FAMILIES`, held to ||R||_2 <= 1 where `bounded`, or the given family if it has this width."""
    if isinstance(right, RightAction):
        if right.width != width:
            raise ValueError(
                f"get_family: `right` has width {right.width}; expected {width}; build it with the group width of the layer"
            )
        return right
    if not isinstance(right, str) or right not in FAMILIES:
        choices = ", ".join(repr(name) for name in FAMILIES)
        raise ValueError(f"get_family: `right` is {right!r}; expected one of {choices} or a RightAction")
    grows = right in ("split", "structured", "dense")
    return FAMILIES[right](width, bounded=bounded) if grows else FAMILIES[right](width)
