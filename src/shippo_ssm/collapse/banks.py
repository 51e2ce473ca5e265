"""The independent banks of a collapsed recurrence.

With Q the basis of a reduction, H~_t = H_t Q follows H~_t = L_t H~_{t-1} (Q^{-1} R_t Q) + b_t (Q^T x_t)^T, whose right action
is block diagonal: each block of width P_i is a recurrence of its own. Write, read, step and drift are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from shippo_ssm.actions import Lie
from shippo_ssm.collapse.reduction import Reduction, off_block
from shippo_ssm.scan import Recurrence


@dataclass(frozen=True, slots=True)
class Banks:
    """Independent recurrences, one per block, and the maps between their coordinates and those of the whole."""

    recurrences: tuple[Recurrence, ...]
    basis: Tensor
    """Q [P, P] in the dtype of the recurrence."""
    blocks: tuple[int, ...]

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The blocks [.., P_i] of `rows Q` for states or values [.., P]."""
        return (rows @ self.basis).split(self.blocks, -1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Outputs or states [.., P_i] of the banks back in one: [.., P] = concatenation Q^{-1}."""
        widths = tuple(part.shape[-1] for part in parts)
        if widths != self.blocks:
            raise ValueError(f"Banks: `parts` have widths {widths}; expected {self.blocks}, the widths of the blocks")
        return torch.linalg.solve(self.basis, torch.cat(list(parts), -1), left=False)


def block_parts(matrices: Tensor, reduction: Reduction, name: str, tol: float | None) -> list[Tensor]:
    """Diagonal blocks of Q^{-1} M Q for matrices [.., P, P]; raise if more than `tol` is outside them."""
    width, basis = len(reduction.basis), reduction.basis.to(matrices)
    if matrices.ndim < 2 or matrices.shape[-2:] != (width, width):
        raise ValueError(f"bank: `{name}` has shape {tuple(matrices.shape)}; expected [.., {width}, {width}] as the reduction")
    carried = torch.linalg.solve(basis, matrices @ basis)
    if tol is None:
        tol = max(100.0 * reduction.residual, 1e3 * torch.finfo(matrices.dtype).eps)
    outside = off_block(
        matrices.detach().reshape(-1, width, width).double().cpu().numpy(), reduction.basis.numpy(), reduction.blocks
    )
    if outside > tol:
        raise ValueError(
            f"bank: `{name}` does not collapse along this reduction, {outside:.1e} of it lies outside the blocks "
            f"{reduction.blocks}; expected at most {tol:.1e}; use the reduction of these actions"
        )
    return [carried[..., part, part] for part in reduction.slices]


@overload
def bank(recurrence: Lie, reduction: Reduction, *, tol: float | None = None) -> tuple[Lie, ...]: ...
@overload
def bank(recurrence: Sequence[Tensor], reduction: Reduction, *, tol: float | None = None) -> Banks: ...
def bank(recurrence: Lie | Sequence[Tensor], reduction: Reduction, *, tol: float | None = None) -> Banks | tuple[Lie, ...]:
    """Split a collapsed recurrence, or a family of generators, into its independent banks.

    Args:
        recurrence: (value, write, read, step, drift, right), the operands of `transport_scan`; or a `Lie` family.
        reduction: the result of `collapse` for the generators or the actions.
        tol: largest norm outside the blocks, relative to the whole; default 100 times the residual of the reduction.

    Returns:
        `Banks` with one recurrence per block and the map back (`join`), or one `Lie` family per block.

    Example:
        >>> import torch
        >>> from shippo_ssm.collapse import bank, collapse
        >>> right = torch.tensor([[1.0, 0.5], [0.5, 1.0]]).expand(1, 3, 1, 2, 2)
        >>> ones = torch.ones(1, 3, 1, 2)
        >>> banks = bank((ones, ones, ones, ones[..., 0], torch.zeros(1, 2), right), collapse(right[0, :, 0]))
        >>> banks.blocks, banks.join(banks.split(ones)).allclose(ones)
        ((1, 1), True)
    """
    if isinstance(recurrence, Lie):
        parts = block_parts(recurrence.generators, reduction, "generators", tol)
        return tuple(Lie(part, learnable=recurrence.generators.requires_grad) for part in parts)
    whole = Recurrence(*recurrence)
    width = len(reduction.basis)
    if whole.right is None:
        raise ValueError("bank: `right` is None; expected [B, T, G, P, P]; without it every channel is a bank")
    if whole.value.shape[-1] != width:
        raise ValueError(f"bank: `value` has shape {tuple(whole.value.shape)}; expected [.., {width}] as the reduction")
    rights = block_parts(whole.right, reduction, "right", tol)
    basis = reduction.basis.to(whole.value)
    parts = zip((whole.value @ basis).split(reduction.blocks, -1), rights)
    banks = tuple(whole._replace(value=value, right=right) for value, right in parts)
    return Banks(banks, basis, reduction.blocks)
