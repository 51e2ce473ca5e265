"""The contract of a family of right actions, and what families with a kernel run: one operator of torch, and its gradient.

A family maps coordinates [.., K] and a step [..], whose leading shapes broadcast, to right actions R [.., P, P]. Shapes are
checked, values are not: reading them would stall a GPU and break a graph. A step must be >= 0 for the stated bounds to hold.

`right_op` computes R by the CPU kernel that a family's `inline` names. Its gradient is a kernel too; `right_formula`, in torch,
serves second derivatives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shippo_ssm._expect import expect_size
from shippo_ssm.actions._expm_cpu import BlockOperands, LaneScheme
from shippo_ssm.actions._exponential_cpu import build_family
from shippo_ssm.actions.base import check_state, register_vmap
from shippo_ssm.actions.expm import expm, lane_schemes, launch_schemes
from shippo_ssm.actions.factors import apply_factors, coefficients, identity_columns, make_factors, positive_part
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.actions.rotation import rotation
from shippo_ssm.dispatch import choose_action, compute_dtype
from shippo_ssm.engine import LANES, allocate, custom_op, differentiate, launch, save_tensors


class RightAction(nn.Module, ABC):
    """A family of right actions R(coords, step) of one group of width P; calling it is `dense`.

    Args:
        width: P.
        coordinates: the names of the K coordinates, in order.
        bounded: whether an option holds ||R||_2 <= 1; fixed at construction.
    """

    inline: Inline | None = None
    """The kernel that can compute R, alone or inside another one; `None` where that one must be given R."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "dense" in vars(cls):
            cls.forward = cls.dense

    def __init__(self, width: int, coordinates: Sequence[str], bounded: bool = False) -> None:
        super().__init__()
        expect_size(type(self).__name__, "width", width)
        self.width = width
        self.coordinates = tuple(coordinates)
        self.num_coordinates = len(self.coordinates)
        self._bounded = bounded

    @abstractmethod
    def dense(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R [.., P, P] for coordinates [.., K] and steps [..], >= 0."""

    @abstractmethod
    def generator(self, coords: Tensor) -> Tensor:
        """A [.., P, P] such that R agrees with exp(step A) to first order in the step."""

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R^{-1} [.., P, P], the true inverse (never a transpose)."""
        return torch.linalg.inv(self.dense(coords, step))

    @property
    def bounded(self) -> bool:
        """Whether the family was built with a bound on its norm; read-only."""
        return self._bounded

    def signature(self) -> Hashable:
        """Everything a compiled plan may assume about the family: class, sizes and inline kernel. Compare it before reuse."""
        return type(self), self.width, self.num_coordinates, self.inline

    @property
    def stable(self) -> bool:
        """Whether ||R||_2 <= 1 for every input, up to rounding: then the memory cannot grow."""
        return False

    def act(self, state: Tensor, coords: Tensor, step: Tensor | float) -> Tensor:
        """state R for a state [.., N, P] whose leading shape broadcasts with that of R."""
        check_state(self, state)
        return state @ self.dense(coords, step)

    def growth_bound(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """The largest factor [..] by which R can lengthen a row, its norm ||R||_2."""
        right = self.dense(coords, step)
        return torch.linalg.matrix_norm(right.to(compute_dtype(right.dtype)), 2)

    def init_coordinates(self, memory_length: float | None = None) -> Tensor:
        """Coordinates [K] at which R is the identity, or so near it that the memory lasts `memory_length` unit steps."""
        return torch.zeros(self.num_coordinates)

    def extra_repr(self) -> str:
        return f"width={self.width}, num_coordinates={self.num_coordinates}"

    def check(self, coords: Tensor, step: Tensor | float = 1.0) -> Tensor:
        """Check the shapes of both arguments; returns the step as a tensor with the leading shape of both."""
        op, wanted = type(self).__name__, f"[.., {self.num_coordinates}]"
        if not isinstance(coords, Tensor) or not coords.is_floating_point():
            raise ValueError(f"{op}: `coords` is {coords!r:.60}; expected a floating tensor {wanted}; convert it with .to()")
        if coords.ndim < 1 or coords.shape[-1] != self.num_coordinates:
            raise ValueError(
                f"{op}: `coords` has shape {tuple(coords.shape)}; expected {wanted} for width {self.width}; "
                f"its coordinates are {', '.join(self.coordinates) or 'none'}"
            )
        step = torch.as_tensor(step, dtype=coords.dtype, device=coords.device) if not isinstance(step, Tensor) else step
        try:
            return step.expand(torch.broadcast_shapes(coords.shape[:-1], step.shape))
        except RuntimeError:
            raise ValueError(
                f"{op}: `step` has shape {tuple(step.shape)}; expected to broadcast with {tuple(coords.shape[:-1])}, the "
                "leading shape of `coords`; expand or index it to match"
            ) from None


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


def _compute(
    coords: Tensor, step: Tensor, width: int, kind: str, sizes: Sequence[int], right: Any = None, cotangent: Any = None
) -> Any:
    """R [.., P, P] for coords [.., K] and step [..] by the kernel of `Inline(kind, *sizes)`; or, with R and its cotangent, the
    gradients by coords and step."""
    dtype, backward, count = str(coords.dtype).removeprefix("torch."), cotangent is not None, step.numel()
    if backward:
        results = allocate(coords, coords.shape), allocate(coords, step.shape)
        operands = Operands(coords, step, right, cotangent, *results, count)
    else:
        results = allocate(coords, (*step.shape, width, width))
        operands = Operands(coords, step, results, None, None, None, count)
    constants: dict[str, Any] = {"dtype": dtype, "width": width, "inline": Inline(kind, *sizes), "backward": backward}
    if kind == "exponential":
        launch_schemes(build_family, operands, lane_schemes(dtype, width, backward), **constants)
    else:
        num_blocks = -(-count // LANES)
        given = BlockOperands(operands, np.ones(num_blocks, np.int8))
        launch(build_family, num_blocks, given, scheme=LaneScheme(dtype), **constants)
    return results


_GIVEN = "Tensor coords, Tensor step, int width, str kind, int[] sizes"
right_op = custom_op("shippo::right_action", f"({_GIVEN}) -> Tensor")(_compute)
right_backward_op = custom_op(
    "shippo::right_action_backward", f"({_GIVEN}, Tensor right, Tensor cotangent) -> (Tensor, Tensor)"
)(_compute)


def _pull_back(ctx, cotangent: Tensor):
    (coords, step, right), (width, kind, sizes) = ctx.saved_tensors, ctx.options
    if not torch.is_grad_enabled():
        return *right_backward_op(coords, step, width, kind, sizes, right, cotangent), None, None, None
    # With create_graph=True the gradient has a derivative itself.
    formula = partial(right_formula, width=width, inline=Inline(kind, *sizes))
    return *differentiate(formula, (coords, step), ctx.needs_input_grad[:2], (cotangent,)), None, None, None


right_op.register_fake(lambda coords, step, width, *_: coords.new_empty(*step.shape, width, width))
right_backward_op.register_fake(lambda coords, step, *_: (coords.new_empty(coords.shape), coords.new_empty(step.shape)))
right_op.register_autograd(_pull_back, setup_context=save_tensors)
register_vmap(right_op, 2)


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
        step, inline, given = self.check(coords, step), self.inline, coords
        if inline is not None and inline.kind == "exponential":
            given = coords.to(compute_dtype(coords.dtype))
        if inline is None or choose_action(type(self).__name__, (given, step), self.width, 1, backend) != "fused":
            return self.formula(coords, step, backend)
        right = right_op(given.expand(*step.shape, -1), step.to(given.dtype), self.width, inline.kind, inline[1:])
        return right.to(coords.dtype)

    def formula(self, coords: Tensor, step: Tensor, backend: str) -> Tensor:
        """`dense` by the exponential of a matrix, for checked arguments."""
        return expm(self._logarithm(coords, step), backend=backend).to(coords.dtype)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        return expm(-self._logarithm(coords, step)).to(coords.dtype)

    def _logarithm(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """step A, in float32 at least: rounded to a half type, a bounded A would no longer be."""
        step = self.check(coords, step)
        return self.generator(coords.to(compute_dtype(coords.dtype))) * step[..., None, None]

    @property
    def stable(self) -> bool:
        return self.bounded
