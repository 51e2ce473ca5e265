"""The identity, a given R, and the families that a configuration can name."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from shippo_ssm.actions.base import RightAction, entry_names
from shippo_ssm.actions.exponential import DenseExp, Dissipative, Structured
from shippo_ssm.actions.orthogonal import Orthogonal
from shippo_ssm.actions.split import SplitFlow


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

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        return self.dense(coords, step)

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
        super().__init__(width, entry_names("R", width))

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
