"""Rotations, with or without reflections."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from shippo_ssm.actions.families.bases import Factored
from shippo_ssm.actions.family import Exponential, RightAction
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.actions.rotation import WIDTHS, rotation
from shippo_ssm.dispatch import choose_action


def reflected(right: Tensor, vector: Tensor) -> Tensor:
    """right (I - (1 - cos |v|) v v^T / |v|^2) for v [.., P]: nothing changes at v = 0, and |v| = pi is a reflection.

    The factor has the eigenvalue cos |v| along v and 1 across it, so it never lengthens a row. Both ends are stationary: a
    learned reflection is exact to second order in the error of its coordinates.
    """
    square = vector.square().sum(-1, keepdim=True)
    # (1 - cos x) / x^2 = 2 sin(x / 2)^2 / x^2; its series near zero, where the square root has no slope.
    near = square < 1e-2
    far = torch.where(near, 1.0, square)
    series = 0.5 - square / 24 + square**2 / 720 - square**3 / 40320
    factor = torch.where(near, series, 2 * (far.sqrt() / 2).sin().square() / far)
    return right - (right @ vector.unsqueeze(-1)) * (factor * vector).unsqueeze(-2)


@final
class Orthogonal(Factored, Exponential):
    """R = exp(step sum theta[i,j] (e_j e_i^T - e_i e_j^T)), i < j: a rotation, R^T R = I, P (P - 1) / 2 coordinates.

    Zero coordinates are the identity exactly. Widths 2, 3 and 4 have closed forms (`rotation.py`), others take the exponential.
    Each R is orthogonal to rounding: a product of 100,000 float32 rotations is to 1e-4.

    A rotation has determinant 1. `reflections` appends a vector v of P coordinates whose factor (`reflected`) turns into a
    reflection at |step v| = pi; in between it shortens rows along v, so ||R||_2 <= 1, and R is orthogonal at both ends only.

    Example:
        >>> import torch
        >>> turn = Orthogonal(4).dense(torch.randn(6), 1.0)
        >>> torch.allclose(turn @ turn.mT, torch.eye(4), atol=1e-6)
        True
    """

    def __init__(self, width: int, reflections: bool = False) -> None:
        super().__init__(width, diagonal=False, rotations=True, shears=False)
        self.rotations = Orthogonal(width) if reflections else None
        if reflections:
            self.coordinates += tuple(f"v[{i}]" for i in range(width))
            self.num_coordinates += width
            self.inline = None
        elif width in WIDTHS:
            self.inline = Inline("rotation")

    def matrix(self, coords: Tensor) -> Tensor:
        """The skew generator [.., P, P]; a reflection differs from the identity in second order only."""
        return super().matrix(coords) if self.rotations is None else self.rotations.matrix(coords[..., : -self.width])

    def formula(self, coords: Tensor, step: Tensor, backend: str) -> Tensor:
        """`dense` in torch, or by the exponential of a matrix, for checked arguments."""
        if self.rotations is not None:
            vector = coords[..., -self.width :]
            right = self.rotations.dense(coords[..., : -self.width], step, backend=backend)
            return reflected(right, step.unsqueeze(-1).to(vector.dtype) * vector)
        # The closed form has a CPU kernel only; a GPU takes the kernel of the exponential.
        closed = self.width in WIDTHS and choose_action("Orthogonal", (coords, step), self.width, 1, backend) != "triton"
        return rotation(coords, step, self.width) if closed else super().formula(coords, step, backend)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R^{-1}: the rotation by the opposite angles, or solved for where there are reflections."""
        return self.dense(-coords, step) if self.rotations is None else RightAction.inverse(self, coords, step)

    @property
    def stable(self) -> bool:
        return True
