"""Rotations: the exponential of a skew generator, in closed form for widths 2, 3 and 4."""

from __future__ import annotations

from functools import partial
from typing import final

from torch import Tensor

from shippo_ssm.actions._rotation_cpu import build_rotation
from shippo_ssm.actions.base import coordinate_op
from shippo_ssm.actions.exponential import FactoredExponential
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.actions.rotation import WIDTHS, rotation
from shippo_ssm.dispatch import choose_action
from shippo_ssm.engine import launch

rotation_op = coordinate_op("rotation", "rotation", partial(launch, build_rotation), rotation)


@final
class Orthogonal(FactoredExponential):
    """R = exp(step sum theta[i,j] (e_j e_i^T - e_i e_j^T)), i < j: a rotation, R^T R = I, P (P - 1) / 2 coordinates.

    Zero coordinates are the identity exactly. Widths 2, 3 and 4 have closed forms (`rotation.py`), others take the exponential.
    Each R is orthogonal to rounding: a product of 100,000 float32 rotations is to 1e-4.

    Example:
        >>> import torch
        >>> turn = Orthogonal(4).dense(torch.randn(6), 1.0)
        >>> torch.allclose(turn @ turn.mT, torch.eye(4), atol=1e-6)
        True
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, diagonal=False, rotations=True, shears=False)

    @property
    def inline(self) -> Inline | None:
        return Inline("rotation") if self.width in WIDTHS else super().inline

    def dense(self, coords: Tensor, step: Tensor | float, *, backend: str = "auto") -> Tensor:
        """R [.., P, P]; the arguments are those of `SplitFlow.dense`."""
        if self.width not in WIDTHS:
            return super().dense(coords, step, backend=backend)
        step = self.check(coords, step)
        kernel = choose_action("Orthogonal", (coords, step), self.width, 1, backend)
        if kernel == "torch":
            return rotation(coords, step, self.width)
        if kernel == "triton":
            # The closed form has a CPU kernel only; a GPU takes the kernel of the exponential.
            return super().dense(coords, step, backend=backend)
        # A compiled package takes an empty list for a missing argument: all numbers, zeros here.
        return rotation_op(coords.expand(*step.shape, -1), step.to(coords.dtype), self.width, Inline("rotation")[1:])

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R^{-1}, the rotation by the opposite angles."""
        return self.dense(-coords, step)

    @property
    def stable(self) -> bool:
        return True
