"""Families of right actions: coordinates [.., K] and a step [..] in, R [.., P, P] out.

    SplitFlow(width)    a fixed-order product of closed-form factors; the order is part of its meaning
    Structured(width)   R = exp(step A) with A the sum of the generators of those factors, same coordinates
    DenseExp(width)     R = exp(step A), the coordinates are the P^2 entries of A
    Orthogonal(width)   R = exp(step A) with A skew: R^T R = I
    Dissipative(width)  R = exp(step (A - D)) with A skew and D >= 0 diagonal: ||R||_2 <= 1
    Lie(generators)     R = exp(step sum_k coords_k G_k), with learnable generators
    Identity(width)     R = I, no coordinates
    Oracle(width)       R is given: the coordinates are its entries, the step is not used

What a family can do to the norm of the memory, it says itself: `stable` is true where ||R||_2 <= 1 for every input, and
`growth_bound(coords, step)` is an upper bound of ||R||_2. The norm of a product of T actions is at most the product of
their bounds, so with a stable family no sequence is too long.

`get_family` turns the word of a configuration ("split", "orthogonal", "none", ..) into one of them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from shippo_ssm._dtypes import compute_dtype
from shippo_ssm._expect import expect_size
from shippo_ssm._private import real_numbers, values_visible
from shippo_ssm.actions._expm_kernels import FamilyOperands, build_family
from shippo_ssm.actions._rotation_kernels import build_rotation
from shippo_ssm.actions.base import Factor, Inline, RightAction, check_state, not_finite
from shippo_ssm.actions.expm import check_square, expm, launch_schemes, to_do
from shippo_ssm.actions.factors import RankOne
from shippo_ssm.actions.kernels import LARGEST_WIDTH, Operands, choose_kernel, coordinate_op
from shippo_ssm.actions.rotations import WIDTHS, rotation
from shippo_ssm.actions.split import (
    apply_factors,
    channel_pairs,
    coefficients,
    identity_columns,
    make_factors,
    shear_shrink,
    split_op,
)
from shippo_ssm.engine import launch

rotation_op = coordinate_op("rotation", partial(launch, build_rotation), rotation, ("rotation", lambda dtype, sizes: {}))

# What the diagonal coordinates of an exponential stand for, by the number that its op knows it by.
DIAGONALS = ("softplus", "clamp")

# Raw diagonal coordinate at which a split flow starts: softplus(-6) = 0.0025, so a unit step keeps 99.75 % of a column.
START = -6.0


def entry_names(letter: str, width: int) -> list[str]:
    """letter[0,0], letter[0,1], .. in row-major order."""
    return [f"{letter}[{i},{j}]" for i in range(width) for j in range(width)]


class Factored(RightAction):
    """Families whose coordinates are those of factors: diagonals, rotations, shears and rank-one maps, in this order.

    Args:
        width: P.
        diagonal, rotations, shears: which kinds of factors take part.
        rank: number of rank-one factors, with learnable p, q [rank, P].
        bounded: hold ||R||_2 <= 1, in the way of the family.
    """

    def __init__(
        self,
        width: int,
        diagonal: bool = True,
        rotations: bool = True,
        shears: bool = True,
        rank: int = 0,
        bounded: bool = False,
    ) -> None:
        # Names need the width before `super().__init__` has a chance to refuse it.
        expect_size(type(self).__name__, "width", width)
        pairs = channel_pairs(width)
        names = [f"d[{i}]" for i in range(width)] if diagonal else []
        names += [f"theta[{i},{j}]" for i, j in pairs] if rotations else []
        names += [f"eta[{i},{j}]" for i, j in pairs] if shears else []
        super().__init__(width, names + [f"zeta[{index}]" for index in range(rank)])
        if rank < 0:
            raise ValueError(f"{type(self).__name__}: `rank` is {rank}; expected a number of factors >= 0")
        if bounded and rank and not isinstance(self, Exponential):
            # Rank-one factors of a product may overflow before anything could be divided by their norm.
            raise ValueError(
                "SplitFlow: `bounded` came with rank-one factors; expected rank 0; use Structured(.., bounded=True)"
            )
        self.bounded = bounded
        self.sizes = (width if diagonal else 0, len(pairs) if rotations else 0, len(pairs) if shears else 0)
        # Plain numbers, so that a module built without storage, on the meta device, needs nothing restored.
        with real_numbers():
            self._basis = [factor.generator.flatten().tolist() for factor in make_factors(width, self.sizes)]
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

    def coefficients(self, coords: Tensor, step: Tensor) -> Tensor:
        """The coefficient of every factor [.., K]: step coords, and -step softplus(coords) on the diagonal."""
        return coefficients(coords, step, self.sizes[0])

    def matrix(self, coords: Tensor) -> Tensor:
        """The sum of all generators times their coefficients at a unit step, [.., P, P]."""
        coef = self.coefficients(coords, self.check(coords))
        basis = torch.tensor(self._basis, dtype=coef.dtype, device=coef.device).view(-1, self.width**2)
        if self.p is not None and self.q is not None:
            basis = torch.cat([basis, (self.p[:, :, None] * self.q[:, None, :]).flatten(1).to(basis)])
        return (coef @ basis).unflatten(-1, (self.width, self.width)).to(coords.dtype)

    def init_coordinates(self, memory_length: float | None = None) -> Tensor:
        start = torch.zeros(self.num_coordinates)
        # The inverse of the softplus: a diagonal that never is the identity fades over `memory_length` unit steps.
        start[: self.sizes[0]] = START if memory_length is None else math.log(math.expm1(1 / memory_length))
        return start

    @property
    def inline(self) -> Inline | None:
        if self.p is not None or self.width > LARGEST_WIDTH:
            return None
        if isinstance(self, Orthogonal) and self.width in WIDTHS:
            return Inline("rotation")
        kind = "exponential" if isinstance(self, Exponential) else "split"
        return Inline(kind, self.sizes, "clamp" if isinstance(self, Dissipative) else "softplus", self.bounded)


@final
class SplitFlow(Factored):
    """R = D_0 .. D_{P-1} Rot_{01} Rot_{02} .. Shear_{01} Shear_{02} .. Rank_0 Rank_1 .., multiplied from left to right.

    The coordinates, in the order of the product, each multiplied by the step:

        d[i]        D_i = exp(-step softplus(d[i]) e_i e_i^T), so the diagonal only shrinks: its entries lie in (0, 1]
        theta[i,j]  Rot_ij = exp(step theta[i,j] (e_j e_i^T - e_i e_j^T)), i < j
        eta[i,j]    Shear_ij = exp(step eta[i,j] e_i e_j^T), i < j
        zeta[l]     Rank_l = exp(step zeta[l] p_l q_l^T) with learnable p, q [rank, P]

    which are 16 for width 4 and rank 0. Applied to a state, D_0 acts first and the last factor last. Zero coordinates
    are the identity except on the diagonal, where softplus(0) = 0.69; `init_coordinates` starts near the
    identity, at d = -6 or, in unit time, where the diagonal fades over the longest memory: the softplus is the paper's, and it
    has no zero. To keep R invertible in floating point, step softplus(d) is cut at 0.9 log(largest number of the dtype), 79.8
    in float32.

    Growth. Diagonals and rotations never lengthen a row. A shear by c can, by at most (|c| + sqrt(c^2 + 4)) / 2 =
    exp(asinh(|c| / 2)). `growth_bound` multiplies these, and `bounded` divides R by them: then ||R||_2 <= 1 for every
    input, and a product without shears is left as it is. The norms of shears are known in closed form, where that of
    their product would take a singular value decomposition per token. Rank-one factors grow like an exponential and can
    overflow before anything is divided; `Structured` bounds them inside its exponential.

    Args:
        width: P.
        diagonal, rotations, shears: which kinds of factors take part.
        rank: number of rank-one factors.
        bounded: divide by the bound of what shears can do; not with rank-one factors.

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import SplitFlow
        >>> flow = SplitFlow(4)
        >>> flow.num_coordinates, flow.coordinates[4]
        (16, 'theta[0,1]')
        >>> flow.dense(torch.zeros(2, 7, 16), torch.ones(2, 7)).shape
        torch.Size([2, 7, 4, 4])
    """

    def dense(self, coords: Tensor, step: Tensor | float, *, backend: str = "auto") -> Tensor:
        """R [.., P, P].

        Args:
            coords: [.., K].
            step: [..], >= 0 by contract, broadcast with the leading shape of coords.
            backend: "torch", "fused" (the CPU kernel), "triton" (the card's) or "auto", as `kernels.choose_kernel` says.
        """
        step = self.check(coords, step)
        kernel = choose_kernel("SplitFlow", (coords, step), self.width, 1, backend)
        if kernel == "torch":
            coef = self.coefficients(coords, step)
            right = apply_factors(identity_columns(self.width, coef), self.factors, coef).to(coords.dtype)
        else:
            shape = torch.broadcast_shapes(coords.shape[:-1], step.shape)
            coords, step = coords.expand(*shape, -1), step.to(coords.dtype).expand(shape)
            inner = sum(self.sizes)
            # The card's kernel knows no bound: there it is taken off below.
            shrunk = self.bounded and kernel == "fused"
            right = split_op(coords[..., :inner], step, self.width, (*self.sizes, int(shrunk)), kernel)
            if shrunk:
                return right
            if self.p is not None:
                right = apply_factors(right.unbind(-1), self._rank_one_factors(), step.unsqueeze(-1) * coords[..., inner:])
        return (right * self._shrink(coords, step)).to(coords.dtype) if self.bounded else right

    def act(self, state: Tensor, coords: Tensor, step: Tensor | float) -> Tensor:
        check_state(self, state)
        step = self.check(coords, step)
        coef = self.coefficients(coords, step)
        moved = apply_factors(state.to(coef.dtype).unbind(-1), self.factors, coef)
        return (moved * self._shrink(coords, step) if self.bounded else moved).to(state.dtype)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R^{-1}: the inverse factors in the opposite order, each in closed form."""
        step = self.check(coords, step)
        coef = self.coefficients(coords, step)
        back = apply_factors(identity_columns(self.width, coef), self.factors[::-1], -coef.flip(-1))
        return (back / self._shrink(coords, step) if self.bounded else back).to(coords.dtype)

    def generator(self, coords: Tensor) -> Tensor:
        """A = -Diag(softplus(d)) + sum theta Omega + sum eta N + sum zeta p q^T: what `dense` splits.

        Bounded, the multiple sum |eta| / 2 of I is taken off.
        """
        whole = self.matrix(coords)
        if not self.bounded:
            return whole
        rate = 0.5 * self._eta(coords).abs().sum(-1)
        return whole - rate[..., None, None] * torch.eye(self.width, dtype=whole.dtype, device=whole.device)

    @property
    def stable(self) -> bool:
        return self.bounded or (not self.sizes[2] and self.p is None)

    def growth_bound(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """exp(-min_i step softplus(d_i)), times the norms of the shears unless these are divided by; with rank-one factors the
        norm itself."""
        if self.p is not None:
            return super().growth_bound(coords, step)
        step = self.check(coords, step)
        shrink = self._shrink(coords, step)[..., 0, 0]
        kept = self.coefficients(coords, step)[..., : self.sizes[0]]
        bound = kept.amax(-1).exp() if self.sizes[0] else torch.ones_like(shrink)
        return bound if self.bounded else bound / shrink

    def _eta(self, coords: Tensor) -> Tensor:
        """The coordinates of the shears."""
        start = self.sizes[0] + self.sizes[1]
        return coords[..., start : start + self.sizes[2]]

    def _shrink(self, coords: Tensor, step: Tensor) -> Tensor:
        """One over the product of the norms of the shears, [.., 1, 1]."""
        dtype = compute_dtype(coords.dtype)
        return shear_shrink(self._eta(coords).to(dtype) * step.to(dtype).unsqueeze(-1))


def decays(coords: Tensor, step: Tensor, num_diagonal: int) -> Tensor:
    """`coefficients` with -step max(coords, 0) on the diagonal."""
    dtype = compute_dtype(coords.dtype)
    coords, step = coords.to(dtype), step.to(dtype).unsqueeze(-1)
    # The gradient of a clamp is one at its edge, that of a relu zero.
    return step * torch.cat([-coords[..., :num_diagonal].clamp_min(0.0), coords[..., num_diagonal:]], -1)


def run_family(blocks: int, operands: Operands, *, sizes: tuple[int, ...], **constants: Any) -> None:
    """exp(step A) or its gradient by the compiled kernel; the `sizes` are the inline's, its kind of diagonal, and bounded."""
    diagonals, rotations, shears, diagonal, bounded = sizes
    inline = Inline("exponential", (diagonals, rotations, shears), DIAGONALS[diagonal], bool(bounded))
    launch_schemes(build_family, FamilyOperands(operands, to_do(blocks)), inline=inline, **constants)


def family_formula(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
    """exp(step A) in torch, differentiable to any order; see `run_family`."""
    *counts, diagonal, bounded = sizes
    if any(counts):
        weights = (coefficients, decays)[diagonal](coords, torch.ones_like(step), counts[0])
        basis = torch.stack([factor.generator.flatten() for factor in make_factors(width, counts)])
        coords = weights @ basis.to(weights)
    matrix = coords.unflatten(-1, (width, width))
    return expm((contracted(matrix) if bounded else matrix) * step[..., None, None], backend="torch")


exponential_op = coordinate_op("exponential", run_family, family_formula, None)


def contracted(generator: Tensor) -> Tensor:
    """A - mu I with mu >= 0 such that the symmetric part of the result has no positive eigenvalue, [.., P, P].

    mu is Gershgorin's bound max_i (s_ii + sum_{j != i} |s_ij|) of the largest eigenvalue of S = (A + A^T) / 2 where that is
    positive. It costs a few sums and has a gradient everywhere, where eigenvalues cost a decomposition per token; it is
    exact where S is diagonal, so that skew generators and those with a dominant negative diagonal are left as they are.
    """
    symmetric = 0.5 * (generator + generator.mT)
    diagonal = symmetric.diagonal(dim1=-2, dim2=-1)
    sums = diagonal + symmetric.abs().sum(-1) - diagonal.abs()
    # A little more than needed, so that rounding cannot leave a positive eigenvalue.
    width = generator.shape[-1]
    excess = sums.amax(-1).clamp_min(0.0) * (1.0 + 4.0 * width * torch.finfo(generator.dtype).eps)
    return generator - excess[..., None, None] * torch.eye(width, dtype=generator.dtype, device=generator.device)


class Exponential(RightAction):
    """R = exp(step A) for families that differ only in how coordinates make A.

    Growth. ||exp(step A)||_2 <= exp(step mu) with mu the largest eigenvalue of (A + A^T) / 2, which is the `growth_bound`.
    """

    bounded = False
    """Whether A loses a multiple of I so that ||R||_2 <= 1 for every input; see `contracted`."""

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
        if inline is None or choose_kernel(type(self).__name__, (coords, step), self.width, 1, backend) != "fused":
            return expm(self._logarithm(coords, step), backend=backend).to(dtype)
        shape = torch.broadcast_shapes(coords.shape[:-1], step.shape)
        coords, step = coords.expand(*shape, -1), step.to(coords.dtype).expand(shape)
        facts = (*inline.sizes, DIAGONALS.index(inline.diagonal), inline.bounded)
        return exponential_op(coords, step, self.width, facts, "fused").to(dtype)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        return expm(-self._logarithm(coords, step)).to(coords.dtype)

    def _logarithm(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """step A, in float32 at least: rounded to a half type, a bounded A would no longer be."""
        step = self.check(coords, step)
        return self.generator(coords.to(compute_dtype(coords.dtype))) * step[..., None, None]

    @property
    def stable(self) -> bool:
        return self.bounded

    def growth_bound(self, coords: Tensor, step: Tensor | float) -> Tensor:
        step = self.check(coords, step)
        matrix = self.generator(coords)
        symmetric = 0.5 * (matrix + matrix.mT).to(compute_dtype(matrix.dtype))
        return torch.exp(step * torch.linalg.eigvalsh(symmetric)[..., -1])


@final
class DenseExp(Exponential):
    """R = exp(step A); the coordinates are the entries of A, row by row.

    Args:
        width: P.
        bounded: take off a multiple of I so that ||R||_2 <= 1; see `contracted`.

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import DenseExp
        >>> DenseExp(3).dense(torch.zeros(9), 0.1).equal(torch.eye(3))
        True
    """

    def __init__(self, width: int, bounded: bool = False) -> None:
        super().__init__(width, entry_names("A", width) if isinstance(width, int) else [])
        self.bounded = bounded

    def matrix(self, coords: Tensor) -> Tensor:
        self.check(coords)
        return coords.unflatten(-1, (self.width, self.width))

    @property
    def inline(self) -> Inline | None:
        return None if self.width > LARGEST_WIDTH else Inline("exponential", bounded=self.bounded)


@final
class Structured(Factored, Exponential):
    """R = exp(step (-Diag(softplus(d)) + sum theta Omega + sum eta N + sum zeta p q^T)): the generator that `SplitFlow`
    splits, in one exponential, with the same coordinates.

    Args:
        width: P.
        diagonal, rotations, shears: which kinds of generators take part.
        rank: number of rank-one generators.
        bounded: take off a multiple of I so that ||R||_2 <= 1; see `contracted`.

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import Structured
        >>> Structured(4).num_coordinates
        16
    """


@final
class Orthogonal(Factored, Exponential):
    """R = exp(step sum theta[i,j] (e_j e_i^T - e_i e_j^T)), i < j: a rotation, R^T R = I, P (P - 1) / 2 coordinates.

    It keeps every length, so that a memory neither grows nor fades through it; zero coordinates are the identity exactly.
    Widths 2, 3 and 4 have closed forms (see `rotations.py`) and a compiled CPU kernel with a compiled gradient; other
    widths take the dense exponential. Each R is orthogonal to rounding, so the error of a product of different ones grows
    like the root of its length: below 1e-4 after 100,000 float32 steps.

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import Orthogonal
        >>> turn = Orthogonal(4).dense(torch.randn(6), 1.0)
        >>> torch.allclose(turn @ turn.mT, torch.eye(4), atol=1e-6)
        True
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, diagonal=False, rotations=True, shears=False)

    def dense(self, coords: Tensor, step: Tensor | float, *, backend: str = "auto") -> Tensor:
        """R [.., P, P]; the arguments are those of `SplitFlow.dense`."""
        if self.width not in WIDTHS:
            return super().dense(coords, step, backend=backend)
        step = self.check(coords, step)
        kernel = choose_kernel("Orthogonal", (coords, step), self.width, 1, backend)
        if kernel == "torch":
            return rotation(coords, step, self.width)
        shape = torch.broadcast_shapes(coords.shape[:-1], step.shape)
        return rotation_op(coords.expand(*shape, -1), step.to(coords.dtype).expand(shape), self.width, self.sizes, kernel)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R^{-1}, the rotation by the opposite angles."""
        return self.dense(-coords, step)

    @property
    def stable(self) -> bool:
        return True


@final
class Dissipative(Factored, Exponential):
    """R = exp(step (A - Diag(max(d, 0)))) with A skew, as in `Orthogonal`: ||R||_2 <= 1, P (P - 1) / 2 + P coordinates.

    The symmetric part of the generator is -Diag(max(d, 0)), which has no positive eigenvalue, so no row gets longer; where
    d > 0 it fades. d[i] come first, then theta[i,j].

    Why the maximum: the start d = 0 must be the identity exactly, and must have a slope. A softplus never reaches zero and
    a square has no slope there; cut at zero, with the slope of the right side at the cut, there is both, and a whole
    half line of coordinates at which nothing is lost, which a long memory needs.

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import Dissipative
        >>> family = Dissipative(4)
        >>> family.dense(family.init_coordinates(), 1.0).equal(torch.eye(4)), family.stable
        (True, True)
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, diagonal=True, rotations=True, shears=False)

    def coefficients(self, coords: Tensor, step: Tensor) -> Tensor:
        """The coefficient of every factor [.., K]: step coords, and -step max(coords, 0) on the diagonal."""
        return decays(coords, step, self.width)

    def init_coordinates(self, memory_length: float | None = None) -> Tensor:
        return torch.zeros(self.num_coordinates)

    @property
    def stable(self) -> bool:
        return True


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
        if values_visible(generators) and not bool(torch.isfinite(generators).all()):
            raise not_finite("Lie", "generators")
        if learnable:
            self.generators = nn.Parameter(generators)
        else:
            self.register_buffer("generators", generators)

    def matrix(self, coords: Tensor) -> Tensor:
        self.check(coords)
        return torch.einsum("...k,kij->...ij", coords, self.generators.to(coords.dtype))


@final
class Identity(RightAction):
    """R = I: no right action, no coordinates (coords has shape [.., 0])."""

    def __init__(self, width: int) -> None:
        super().__init__(width, [])

    def generator(self, coords: Tensor) -> Tensor:
        self.check(coords)
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

    @property
    def stable(self) -> bool:
        return True


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
        step_ndim = step.ndim if isinstance(step, Tensor) else -1
        if isinstance(coords, Tensor) and coords.ndim == step_ndim + 2 and coords.shape[-2:] == (self.width, self.width):
            coords = coords.flatten(-2)
        self.check(coords, step)
        return coords.unflatten(-1, (self.width, self.width))

    def generator(self, coords: Tensor) -> Tensor:
        """Refused: a given R need not have a real logarithm; its own entries serve where a set of actions is asked for."""
        raise ValueError("Oracle: it has no generator, since R is given; use dense(coords, step) instead")

    def init_coordinates(self, memory_length: float | None = None) -> Tensor:
        return torch.eye(self.width).flatten()


FAMILIES = {
    "orthogonal": Orthogonal,
    "dissipative": Dissipative,
    "split": SplitFlow,
    "structured": Structured,
    "dense": DenseExp,
    "none": Identity,
}


def get_family(right: str | RightAction, width: int, bounded: bool = False) -> RightAction:
    """The family that a word or an object stands for; the words are the keys of `FAMILIES`.

    Args:
        right: one of the words, or a family of the right width, which is returned as it is.
        width: P.
        bounded: for a word, whether a family that can grow is held to ||R||_2 <= 1; the others are bounded as they are.
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
    grows = right in ("split", "structured", "dense")
    return FAMILIES[right](width, bounded=bounded) if grows else FAMILIES[right](width)
