"""The exponential of any generator."""

from __future__ import annotations

from typing import final

from torch import Tensor

from shippo_ssm._expect import expect_size
from shippo_ssm.actions.family import Exponential
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.dispatch import MAX_ACTION_WIDTH


@final
class DenseExp(Exponential):
    """R = exp(step A); the coordinates are the entries of A, row by row; `bounded`, A is `contracted`: ||R||_2 <= 1.

    Example:
        >>> import torch
        >>> DenseExp(3).dense(torch.zeros(9), 0.1).equal(torch.eye(3))
        True
    """

    def __init__(self, width: int, bounded: bool = False) -> None:
        # Names need the width before `super().__init__` can refuse it.
        expect_size("DenseExp", "width", width)
        super().__init__(width, [f"A[{i},{j}]" for i in range(width) for j in range(width)], bounded)
        if width <= MAX_ACTION_WIDTH:
            self.inline = Inline("exponential", bounded=int(bounded))

    def matrix(self, coords: Tensor) -> Tensor:
        self.check(coords)
        return coords.unflatten(-1, (self.width, self.width))
