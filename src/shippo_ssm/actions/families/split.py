"""The fixed-order product of factors."""

from typing import final

import torch
from torch import Tensor

from shippo_ssm.actions.factors import apply_factors, identity_columns
from shippo_ssm.actions.families.bases import Factored
from shippo_ssm.actions.family import right_op, shear_shrink
from shippo_ssm.dispatch import choose_action


@final
class SplitFlow(Factored):
    """R = D_0 .. D_{P-1} Rot_{01} Rot_{02} .. Shear_{01} Shear_{02} .. Rank_0 Rank_1 .., multiplied from left to right.

    The coordinates, in the order of the product, each multiplied by the step:

        d[i]        D_i = exp(-step softplus(d[i]) e_i e_i^T), so the diagonal only shrinks: its entries lie in (0, 1]
        theta[i,j]  Rot_ij = exp(step theta[i,j] (e_j e_i^T - e_i e_j^T)), i < j
        eta[i,j]    Shear_ij = exp(step eta[i,j] e_i e_j^T), i < j
        zeta[l]     Rank_l = exp(step zeta[l] p_l q_l^T) with learnable p, q [rank, P]

    which are 16 for width 4 and rank 0. Applied to a state, D_0 acts first. Zero coordinates are the identity except on the
    diagonal; `init_coordinates` starts near the identity. step softplus(d) is cut at 0.9 log(largest number of the dtype), so
    that R stays invertible. Diagonals and rotations never lengthen a row; a shear by c does by at most exp(asinh(|c| / 2)).
    `bounded` divides R by the product of these: then ||R||_2 <= 1 for every input.

    Args:
        width: P.
        diagonal, rotations, shears: which kinds of factors take part.
        rank: number of rank-one factors.
        bounded: divide by the bound of the shears; not with rank-one factors.

    Example:
        >>> flow = SplitFlow(4)
        >>> flow.num_coordinates, flow.coordinates[4]
        (16, 'theta[0,1]')
        >>> flow.dense(torch.zeros(2, 7, 16), torch.ones(2, 7)).shape
        torch.Size([2, 7, 4, 4])
    """

    kind = "split"
    # Rank-one factors may overflow before their norm could be divided out.
    bounds_rank_one = False

    def dense(self, coords: Tensor, step: Tensor | float, *, backend: str = "auto") -> Tensor:
        """R [.., P, P].

        Args:
            coords: [.., K].
            step: [..], >= 0, broadcast with the leading shape of coords.
            backend: "torch", "fused" (the CPU kernel) or "auto", as `dispatch.choose_action` says.
        """
        step = self.check(coords, step)
        if choose_action("SplitFlow", (coords, step), self.width, 1, backend, gpu=False) == "torch":
            coef = self.coefficients(coords, step)
            right = apply_factors(identity_columns(self.width, coef), self.factors, coef).to(coords.dtype)
            return (right * self._shrink(coef)).to(coords.dtype) if self.bounded else right
        coords, step, inner = coords.expand(*step.shape, -1), step.to(coords.dtype), sum(self.sizes)
        right = right_op(coords[..., :inner], step, self.width, "split", [*self.sizes, 0, int(self.bounded)])
        if self.p is None:
            return right
        return apply_factors(right.unbind(-1), self.rank_one_factors(), step.unsqueeze(-1) * coords[..., inner:])

    def inverse(self, coords: Tensor, step: Tensor | float) -> Tensor:
        """R^{-1}: the inverse factors in the opposite order, each in closed form."""
        step = self.check(coords, step)
        coef = self.coefficients(coords, step)
        back = apply_factors(identity_columns(self.width, coef), self.factors[::-1], -coef.flip(-1))
        return (back / self._shrink(coef) if self.bounded else back).to(coords.dtype)

    def generator(self, coords: Tensor) -> Tensor:
        """A = -Diag(softplus(d)) + sum theta Omega + sum eta N + sum zeta p q^T; bounded, minus I sum |eta| / 2."""
        whole = self.matrix(coords)
        if not self.bounded:
            return whole
        rate = 0.5 * self._shears(coords).abs().sum(-1)
        return whole - rate[..., None, None] * torch.eye(self.width, dtype=whole.dtype, device=whole.device)

    @property
    def stable(self) -> bool:
        return self.bounded or (not self.sizes[2] and self.p is None)

    def _shears(self, coords: Tensor) -> Tensor:
        """Those of coordinates, or of coefficients, that belong to shears."""
        start = self.sizes[0] + self.sizes[1]
        return coords[..., start : start + self.sizes[2]]

    def _shrink(self, coef: Tensor) -> Tensor:
        return shear_shrink(self._shears(coef))
