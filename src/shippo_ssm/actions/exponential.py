"""R = exp(step A): what families of exponentials share, and the plain families."""

from __future__ import annotations

from abc import abstractmethod
from typing import final

import torch
from torch import Tensor, nn

from shippo_ssm.actions.base import RightAction, entry_names, not_finite
from shippo_ssm.actions.coordinates import contracted, right_op
from shippo_ssm.actions.expm import check_square, expm
from shippo_ssm.actions.factored import Factored
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.dispatch import MAX_ACTION_WIDTH, choose_action, compute_dtype, is_readable


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
        step, inline, dtype = self.check(coords, step), self.inline, coords.dtype
        coords = coords.to(compute_dtype(dtype))
        if inline is None or choose_action(type(self).__name__, (coords, step), self.width, 1, backend) != "fused":
            return expm(self._logarithm(coords, step), backend=backend).to(dtype)
        coords = coords.expand(*step.shape, -1)
        return right_op(coords, step.to(coords.dtype), self.width, inline.kind, inline[1:]).to(dtype)

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        return expm(-self._logarithm(coords, step)).to(coords.dtype)

    def _logarithm(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """step A, in float32 at least: rounded to a half type, a bounded A would no longer be."""
        step = self.check(coords, step)
        return self.generator(coords.to(compute_dtype(coords.dtype))) * step[..., None, None]

    @property
    def stable(self) -> bool:
        return self.bounded


class FactoredExponential(Factored, Exponential):
    """R = exp(step A) with A the sum of the generators of factors."""

    @property
    def inline(self) -> Inline | None:
        if self.p is not None or self.width > MAX_ACTION_WIDTH:
            return None
        return Inline("exponential", *self.sizes, self.clamp, int(self.bounded))


@final
class Dissipative(FactoredExponential):
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


@final
class DenseExp(Exponential):
    """R = exp(step A); the coordinates are the entries of A, row by row; `bounded`, A is `contracted`: ||R||_2 <= 1.

    Example:
        >>> DenseExp(3).dense(torch.zeros(9), 0.1).equal(torch.eye(3))
        True
    """

    def __init__(self, width: int, bounded: bool = False) -> None:
        super().__init__(width, entry_names("A", width), bounded)

    def matrix(self, coords: Tensor) -> Tensor:
        self.check(coords)
        return coords.unflatten(-1, (self.width, self.width))

    @property
    def inline(self) -> Inline | None:
        return None if self.width > MAX_ACTION_WIDTH else Inline("exponential", bounded=int(self.bounded))


@final
class Structured(FactoredExponential):
    """R = exp(step (-Diag(softplus(d)) + sum theta Omega + sum eta N + sum zeta p q^T)).

    Coordinates and arguments are those of `SplitFlow`; `bounded`, the sum is `contracted`: ||R||_2 <= 1.

    Example:
        >>> Structured(4).num_coordinates
        16
    """


@final
class Lie(Exponential):
    """R = exp(step sum_k coords_k G_k): generators G [K, P, P] shared by all tokens, trained if `learnable`.

    Example:
        >>> shears = torch.tensor([[[0.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]]])
        >>> Lie(shears).dense(torch.tensor([2.0, 0.0]), 1.0).tolist()
        [[1.0, 2.0], [0.0, 1.0]]
    """

    def __init__(self, generators: Tensor, learnable: bool = True) -> None:
        check_square("Lie", "generators", generators)
        if generators.ndim != 3:
            raise ValueError(f"Lie: `generators` has shape {tuple(generators.shape)}; expected [K, P, P]; stack them")
        super().__init__(generators.shape[-1], [f"rho[{k}]" for k in range(len(generators))])
        generators = generators.detach().clone()
        if is_readable(generators) and not bool(torch.isfinite(generators).all()):
            raise not_finite("Lie", "generators")
        if learnable:
            self.generators = nn.Parameter(generators)
        else:
            self.register_buffer("generators", generators)

    def matrix(self, coords: Tensor) -> Tensor:
        self.check(coords)
        return torch.einsum("...k,kij->...ij", coords, self.generators.to(coords.dtype))
