"""The two contracts of this room: a `Factor` has one coefficient, a `RightAction` family has K coordinates and a step.

A factor is one closed form exp(coef G) with a fixed generator G [P, P]. It is written once, as an update of the
columns of a state (`act_columns`), touching only the columns it changes; `act`, `dense` and `inverse` follow from it.

A family maps coordinates [.., K] and a step [..], whose leading shapes broadcast, to the right action R [.., P, P] of
one token. A family says what `dense` and `generator` are and names its coordinates; `act` and `inverse` follow, and a
family that knows better overrides them. Families are modules, so that one with learnable parts is saved, moved and
trained with the layer that holds it.

Shapes are checked, values are not: a look at them would stall a card and break a graph. A step is >= 0 by contract, where
what is said of a family's growth holds; a NaN in a coordinate or step is a NaN in R.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shippo_ssm._dtypes import compute_dtype
from shippo_ssm._expect import expect_size


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
        """state exp(coef G).

        Args:
            state: [.., N, P].
            coef: [..], one coefficient per leading index of `state`, or a number.
        """
        check_state(self, state)
        coef = torch.as_tensor(coef, dtype=state.dtype, device=state.device)
        return torch.stack(torch.broadcast_tensors(*self.act_columns(state.unbind(-1), coef.unsqueeze(-1))), -1)

    def dense(self, coef: Tensor | float) -> Tensor:
        """exp(coef G) [.., P, P] for coefficients [..]."""
        coef = torch.as_tensor(coef)
        if not coef.is_floating_point():
            coef = coef.to(torch.get_default_dtype())
        return self.act(torch.eye(self.width, dtype=coef.dtype, device=coef.device), coef)

    def inverse(self, coef: Tensor | float) -> Tensor:
        """exp(-coef G) [.., P, P], the inverse of `dense(coef)`."""
        return self.dense(-coef)


class Inline(NamedTuple):
    """How a compiled kernel can compute a family itself; see `lanes.py`."""

    kind: str
    """"rotation" (closed form), "split" (product of factors) or "exponential"."""
    sizes: tuple[int, int, int] = (0, 0, 0)
    """Numbers of diagonals, rotations and shears; all zero where the coordinates are the entries of the generator."""
    diagonal: str = "softplus"
    """What a diagonal coordinate d stands for: "softplus" is -softplus(d), "clamp" is -max(d, 0)."""
    bounded: bool = False


class RightAction(nn.Module, ABC):
    """A family of right actions R(coords, step) of one group of width P; calling it is `dense`.

    Attributes:
        width: P.
        coordinates: the names of the K coordinates, in order.
        num_coordinates: K.
    """

    def __init__(self, width: int, coordinates: Sequence[str]) -> None:
        super().__init__()
        expect_size(type(self).__name__, "width", width)
        self.width = width
        self.coordinates = tuple(coordinates)
        self.num_coordinates = len(self.coordinates)

    @abstractmethod
    def dense(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R [.., P, P] for coordinates [.., K] and steps [..], >= 0 by contract."""

    @abstractmethod
    def generator(self, coords: Tensor) -> Tensor:
        """A [.., P, P] such that R agrees with exp(step A) to first order in the step."""

    def act(self, state: Tensor, coords: Tensor, step: Tensor | float) -> Tensor:
        """state R for a state [.., N, P] whose leading shape broadcasts with that of R."""
        check_state(self, state)
        return state @ self.dense(coords, step)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R^{-1} [.., P, P], the true inverse (never a transpose)."""
        return torch.linalg.inv(self.dense(coords, step))

    @property
    def inline(self) -> Inline | None:
        """How a compiled kernel can compute R itself; `None` where it has to be given R."""
        return None

    @property
    def stable(self) -> bool:
        """Whether ||R||_2 <= 1 for every input, up to rounding: then no number of tokens makes the memory grow."""
        return False

    def growth_bound(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """An upper bound [..] of ||R||_2, the most by which R can lengthen a row of the memory; here the norm itself."""
        right = self.dense(coords, step)
        return torch.linalg.matrix_norm(right.to(compute_dtype(right.dtype)), 2)

    def init_coordinates(self, memory_length: float | None = None) -> Tensor:
        """Coordinates [K] at which R is the identity, or near it: where a controller's bias should start.

        Args:
            memory_length: unit steps that the memory should last; only for a family that cannot start at the identity.
        """
        return torch.zeros(self.num_coordinates)

    def forward(self, coords: Tensor, step: Tensor | float) -> Tensor:
        return self.dense(coords, step)

    def extra_repr(self) -> str:
        return f"width={self.width}, num_coordinates={self.num_coordinates}"

    def check(self, coords: Tensor, step: Tensor | float = 1.0) -> Tensor:
        """Check the shapes of both arguments, and return the step as a tensor beside the coordinates."""
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
            torch.broadcast_shapes(coords.shape[:-1], step.shape)
        except RuntimeError:
            raise ValueError(
                f"{op}: `step` has shape {tuple(step.shape)}; expected to broadcast with {tuple(coords.shape[:-1])}, the "
                "leading shape of `coords`; expand or index it to match"
            ) from None
        return step


def check_state(action: Factor | RightAction, state: Tensor) -> None:
    """Raise where a state is not [.., N, P] for the width P of an action."""
    if state.ndim < 2 or state.shape[-1] != action.width:
        raise ValueError(
            f"{type(action).__name__}: `state` has shape {tuple(state.shape)}; expected [.., N, {action.width}]; "
            "the last axis counts the channels of one group"
        )


def not_finite(op: str, name: str) -> ValueError:
    """The error of an argument with a NaN or an infinity in it."""
    return ValueError(
        f"{op}: `{name}` has an entry that is not finite; expected numbers; look for a NaN or an overflow where it is made"
    )
