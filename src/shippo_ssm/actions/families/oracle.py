"""A given R."""

from typing import final

import torch
from torch import Tensor

from shippo_ssm._expect import expect_size
from shippo_ssm.actions.family import RightAction


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
