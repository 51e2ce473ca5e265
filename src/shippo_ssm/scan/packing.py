"""Packed sequences: one row of T positions holds several sequences, `cu_seqlens` says where each starts and ends.

The batched scans see them as a padded batch, [num_sequences, longest, ...], whose padding is the identity map: step 0
(left = I), right = I, write and value 0 (update = 0). It comes first, so that every sequence ends in the last column.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

    def pad(self, packed: Tensor, filler: Tensor | None = None) -> Tensor:
        """[1, T, ...] -> [num_sequences, longest, ...], zeros in the padding, or what expands to it."""
        filler = packed.new_zeros(()) if filler is None else filler
        return filler.expand(*self.shape, *packed.shape[2:]).index_put((self.rows, self.columns), packed[0])

    def pad_recurrence(self, packed: Recurrence) -> Recurrence:
        """The record of the padded batch: identity maps in the padding."""
        padded, right = packed._replace(right=None).map_time(self.pad), packed.right
        if right is None:
            return padded
        return padded._replace(right=self.pad(right, torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)))

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
    y, final_state = keep_empty(partial(run, packing.pad_recurrence(recurrence)), initial_state, cu_seqlens)
    return packing.unpad(y), final_state


def keep_empty(
    run: Callable[[Tensor | None], tuple[Tensor, Tensor]], initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`run` from `initial_state`, where an empty sequence ends as it began: a constant drift of NaN is one in padding too."""
    if cu_seqlens is None:
        return run(initial_state)
    filled = (cu_seqlens.diff() > 0)[:, None, None, None]
    y, final_state = run(None if initial_state is None else torch.where(filled, initial_state, 0))
    return y, torch.where(filled, final_state, 0 if initial_state is None else initial_state)
