"""Rotations and fading: never longer."""

from typing import final

from shippo_ssm.actions.families.bases import Factored
from shippo_ssm.actions.family import Exponential


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
