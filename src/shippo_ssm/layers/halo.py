"""What stood before a part of a sequence, where earlier ranks hold it: inputs of a convolution, the last source of the cell.

Data path: every rank sends the last W real items of each of its sequences, in one message, and how many of them there are. A
window of W items moves over the parts in time order: each part pushes its own items in from the right, and continues from what
the window was before. Gradients go back the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shippo_ssm.layers.mixer import Segment
from shippo_ssm.scan.distributed import keep_in_graph


def halo(tensors: Sequence[Tensor], windows: Sequence[Tensor], segment: Segment) -> tuple[list[Tensor], list[Tensor]]:
    """The windows [S, W, ..] before this rank's part and after the last one.

    Args:
        tensors: [B, T, ..] each, the items of this part.
        windows: [S, W, ..] each, what stood before the whole sequence; those of the first rank count.
        segment: padding, packing and the part.
    """
    part, width = segment.part, windows[0].shape[1]
    assert part is not None
    rows, places = _last_places(tensors[0], width, segment)
    counts = (places > 0).sum(1)
    tails = []
    for tensor, window in zip(tensors, windows):
        # Place 0 is nothing, place t + 1 is position t.
        tail = torch.cat([tensor.new_zeros(tensor.shape[0], 1, *tensor.shape[2:]), tensor], dim=1)[rows, places]
        tails.append(_push(window.to(tensor.dtype), tail, counts) if part.rank == 0 else tail)
    if part.rank == 0:
        counts = torch.full_like(counts, width)
    # Half-precision items travel in float32, which holds them exactly.
    wire = torch.promote_types(tensors[0].dtype, torch.float32)
    *gathered, all_counts = part.exchange(*(tail.to(wire) for tail in tails), counts.to(wire))
    before, after = [], []
    for tensor, window, items in zip(tensors, windows, gathered):
        moving = [items[0]]
        for rank in range(1, len(part.lengths)):
            moving.append(_push(moving[-1], items[rank], all_counts[rank].long()))
        entering = window.to(tensor.dtype) if part.rank == 0 else moving[part.rank - 1].to(tensor.dtype)
        before.append(keep_in_graph(entering, *gathered))
        after.append(moving[-1].to(tensor.dtype))
    return before, after


def _last_places(tensor: Tensor, width: int, segment: Segment) -> tuple[Tensor, Tensor]:
    """(rows, places) [S, W] of the last W real items of each sequence; place t + 1 is position t, place 0 is none."""
    batch, length = tensor.shape[:2]
    span = torch.arange(width, device=tensor.device)
    if segment.cu_seqlens is not None:
        bounds = segment.cu_seqlens.to(torch.int64).unsqueeze(1)
        places = bounds[1:] - width + 1 + span
        return torch.zeros_like(places), torch.where(places > bounds[:-1], places, 0)
    rows = torch.arange(batch, device=tensor.device).unsqueeze(1).expand(batch, width)
    if segment.mask is None:
        return rows, (length - width + 1 + span).clamp_min(0).expand(batch, width)
    positions = torch.where(segment.mask, torch.arange(1, length + 1, device=tensor.device), 0).sort(dim=1).values
    return rows, torch.cat([positions.new_zeros(batch, width), positions], dim=1)[:, length:]


def _push(window: Tensor, items: Tensor, counts: Tensor) -> Tensor:
    """The window [S, W, ..] after the last `counts` [S] of `items` [S, W, ..] came in from the right."""
    width = window.shape[1]
    places = torch.arange(width, device=window.device)
    shifted = counts.unsqueeze(1) + places
    index = torch.where(shifted < width, shifted, width + places)
    rows = torch.arange(window.shape[0], device=window.device).unsqueeze(1)
    return torch.cat([window, items], dim=1)[rows, index]
