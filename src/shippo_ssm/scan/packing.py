"""Packed sequences: one row of T positions holds several sequences, `cu_seqlens` says where each starts and ends.

The batched scans see them as a padded batch, [num_sequences, longest, ...], whose padding is the identity map: step 0
(left = I), right = I, write and value 0 (update = 0). It comes first, so that every sequence ends in the last column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shippo_ssm.scan.algebra import Recurrence


class Packing(NamedTuple):
    """Where each packed position lies in the padded batch.

    Args:
        rows: [T] sequence of each position.
        columns: [T] place of each position in its row.
        shape: (num_sequences, longest).
    """

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    def pad(self, packed: Tensor) -> Tensor:
        """[1, T, ...] -> [num_sequences, longest, ...], zeros in the padding."""
        padded = packed.new_zeros(*self.shape, *packed.shape[2:])
        return padded.index_put((self.rows, self.columns), packed[0])

    def pad_right(self, packed: Tensor) -> Tensor:
        """[1, T, G, P, P] -> [num_sequences, longest, G, P, P], identities in the padding."""
        eye = torch.eye(packed.shape[-1], dtype=packed.dtype, device=packed.device)
        padded = eye.expand(*self.shape, *packed.shape[2:])
        return padded.index_put((self.rows, self.columns), packed[0])

    def pad_recurrence(self, packed: Recurrence) -> Recurrence:
        """The record of the padded batch: identity maps in the padding."""
        right = None if packed.right is None else self.pad_right(packed.right)
        return packed._replace(right=None).map_time(self.pad)._replace(right=right)

    def unpad(self, padded: Tensor) -> Tensor:
        """[num_sequences, longest, ...] -> [1, T, ...]."""
        return padded[self.rows, self.columns].unsqueeze(0)


def packing_of(cu_seqlens: Tensor) -> Packing:
    """The `Packing` of boundaries `cu_seqlens` [num_sequences + 1]."""
    bounds = cu_seqlens.to(torch.int64)
    lengths = bounds.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths)
    longest = int(lengths.max()) if len(lengths) else 0
    columns = torch.arange(len(rows), device=bounds.device) - bounds[1:][rows] + longest
    return Packing(rows, columns, (len(lengths), longest))


def scan_packed(
    run: Callable[..., tuple[Tensor, Tensor]], recurrence: Recurrence, initial_state: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """`run` on packed sequences as a padded batch; y comes back packed, one final state per sequence."""
    packing = packing_of(cu_seqlens)

    def run_padded(initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        return run(packing.pad_recurrence(recurrence), initial_state)

    y, final_state = keep_empty(run_padded, initial_state, cu_seqlens)
    return packing.unpad(y), final_state


def keep_empty(
    run: Callable[[Tensor | None], tuple[Tensor, Tensor]], initial_state: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """`run` from `initial_state`, where an empty sequence ends as it began: a constant drift of NaN is one in padding too."""
    filled = (cu_seqlens.diff() > 0)[:, None, None, None]
    y, final_state = run(None if initial_state is None else torch.where(filled, initial_state, 0))
    return y, torch.where(filled, final_state, 0 if initial_state is None else initial_state)
