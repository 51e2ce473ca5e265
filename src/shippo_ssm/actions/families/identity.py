"""The identity: no right action."""

from typing import final

import torch
from torch import Tensor

from shippo_ssm.actions.family import RightAction


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
