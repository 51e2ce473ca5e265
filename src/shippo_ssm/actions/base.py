"""The two contracts of this package: a `Factor` has one coefficient, a `RightAction` family has K coordinates and a step.

A family maps coordinates [.., K] and a step [..], whose leading shapes broadcast, to right actions R [.., P, P]. Shapes are
checked, values are not: reading them would stall a GPU and break a graph. A step must be >= 0 for the stated bounds to hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shippo_ssm._expect import expect_size
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.dispatch import compute_dtype


class Factor(ABC):
    """R = exp(coef G) for a fixed generator G of which the exponential has a closed form."""

    width: int

    @property
    @abstractmethod
    def generator(self) -> Tensor:
        """G [P, P] in float32, or in the dtype of the vectors that define it."""

    @abstractmethod
    def act_columns(self, columns: Sequence[Tensor], coef: Tensor) -> list[Tensor]:
        """The P columns [.., N] of `state exp(coef G)`, given those of `state`; `coef` broadcasts against a column."""

    def act(self, state: Tensor, coef: Tensor | float) -> Tensor:
        """state exp(coef G) for a state [.., N, P] and one coefficient per leading index [..], or a number."""
        check_state(self, state)
        coef = torch.as_tensor(coef, dtype=state.dtype, device=state.device)
        return torch.stack(torch.broadcast_tensors(*self.act_columns(state.unbind(-1), coef.unsqueeze(-1))), -1)

    def dense(self, coef: Tensor | float) -> Tensor:
        """exp(coef G) [.., P, P] for coefficients [..]."""
        coef = torch.as_tensor(coef)
        coef = coef if coef.is_floating_point() else coef.to(torch.get_default_dtype())
        return self.act(torch.eye(self.width, dtype=coef.dtype, device=coef.device), coef)

    def inverse(self, coef: Tensor | float) -> Tensor:
        """exp(-coef G) [.., P, P], the inverse of `dense(coef)`."""
        return self.dense(-coef)


class RightAction(nn.Module, ABC):
    """A family of right actions R(coords, step) of one group of width P; calling it is `dense`.

    Args:
        width: P.
        coordinates: the names of the K coordinates, in order.
        bounded: whether an option holds ||R||_2 <= 1; fixed at construction.
    """

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

    @property
    def inline(self) -> Inline | None:
        """The kernel that can compute R inside another one; `None` where that kernel must be given R."""
        return None

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

    def forward(self, coords: Tensor, step: Tensor | float) -> Tensor:
        return self.dense(coords, step)

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


def register_vmap(op: Any, num_tensors: int) -> None:
    """Under `vmap`, call the op with the mapped axis first; its first arguments are tensors."""

    def mapped(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Tensor, int]:
        tensors = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(arguments[:num_tensors], in_dims)
        ]
        return op(*tensors, *arguments[num_tensors:]), 0

    op.register_vmap(mapped)


def check_state(action: Factor | RightAction, state: Tensor) -> None:
    """Raise where a state is not [.., N, P] for the width P of an action."""
    if state.ndim < 2 or state.shape[-1] != action.width:
        raise ValueError(
            f"{type(action).__name__}: `state` has shape {tuple(state.shape)}; expected [.., N, {action.width}]; "
            "the last axis counts the channels of one group"
        )


def not_finite(op: str, name: str) -> ValueError:
    """Error for an argument with a NaN or an infinity."""
    return ValueError(f"{op}: `{name}` has an entry that is not finite; expected numbers; look for a NaN where it is made")
