"""A sequence cut into segments: summaries, their exclusive prefix, and the replay of each from the state that enters it.

Data path: a segment's summary is the `Affine` map from the state before its first position to the state after its last one. The
summaries of all segments are gathered in time order; their exclusive prefix under `compose` gives the state that
enters each segment; any backend then runs each segment from there. The adjoint S_{t-1} = L_t (S_t + read_t dy_t^T) R_t^T is the
same kind of recurrence run backwards, so it is cut the same way: its summaries have the left factors and the transposed right
factors of the forward ones, and their prefix, from the end, gives the gradient of each segment's last state. The backend's own
backward pass does the rest.

A `SegmentLayout` says where the segments are: in one process (`InPlace`), to fill all cores or a GPU with few sequences, or on
the ranks of a process group (`distributed.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shippo_ssm import dispatch
from shippo_ssm.dispatch import is_readable
from shippo_ssm.scan import fused, triton
from shippo_ssm.scan.algebra import Affine, Recurrence, apply, identity_affine, map_tensors
from shippo_ssm.scan.associative import cumulative_affine, widened

# A backend: (recurrence, initial_state, cu_seqlens) -> (y, final_state).
Run = Callable[[Recurrence, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]

# Positions of a segment, and most segments of a sequence, where one is cut to fill the cores of one machine. They depend on the
# sequence alone, so that results do not depend on the number of threads.
MOST_SEGMENTS = 64


class SegmentLayout(ABC):
    """Where the segments of a sequence are. Here a process holds some of them, as S rows; in all there are K, in time order."""

    @abstractmethod
    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors [S, ...] of the segments held here -> [K, ...] of all of them."""

    @abstractmethod
    def own(self, tensor: Tensor) -> Tensor:
        """The way back: [K, ...] -> [S, ...]."""

    def gather_adjoint(self, update: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor]:
        """`gather` of the adjoint's updates, and the gradient of the one last state."""
        return self.gather(update)[0], dfinal


def scan_segments(
    run: Run, recurrence: Recurrence, start: Tensor | None, cu_seqlens: Tensor | None, layout: SegmentLayout
) -> tuple[Tensor, Tensor]:
    """y of the segments held here (`recurrence`, with boundaries `cu_seqlens` where they are packed along T) and the last state
    of the whole sequence; differentiable once.

    `start` [S, G, N, P] is added to the state that enters each segment: the initial state for a first one, zero for others.
    """
    summary = summarise(run, recurrence, cu_seqlens)
    with torch.no_grad():
        if start is not None:
            summary = summary._replace(update=apply(summary, start))
        given = [tensor for tensor in summary if tensor is not None]
        gathered = layout.gather(*given)
        maps = Affine(gathered[0], None if summary.right is None else gathered[1], gathered[-1])
        states, final_state = prefix(maps)
        entering = layout.own(states)
    y, last = run(recurrence, entering if start is None else entering + start, cu_seqlens)
    return _Join.apply((run, layout, cu_seqlens, maps), y, last, final_state, start, *recurrence)


@torch.no_grad()
def summarise(run: Run, recurrence: Recurrence, cu_seqlens: Tensor | None = None) -> Affine:
    """The map H_0 -> H_T = left H_0 right + update of each sequence: left [S, G, N], right [S, G, P, P], update [S, G, N, P].

    The update is the last state of a run from zero, `right` that of a run from the identity without sources. The slowest decay
    of a group is taken from `left` into `right`: neither then leaves the range of its dtype where the map does not.
    """
    recurrence, bounds = _packed(recurrence, cu_seqlens)
    value, _, read, step, drift, right, _ = recurrence
    (_, length, groups, _, width), order, count = value.shape, read.shape[-1], len(bounds) - 1
    kind, varying = {"dtype": value.dtype, "device": value.device}, drift.ndim == 4
    if not value.numel() or not order:
        identity = identity_affine(order, width, batch_shape=(count, groups), **kind)
        return identity if right is not None else identity._replace(right=None)
    update = run(recurrence, None, bounds)[1]
    if right is not None:
        slowest = drift.amax(-1, keepdim=True).clamp_min(torch.finfo(drift.dtype).min)
        drift = drift - slowest
        none = value.new_zeros(1, length, 1, 1, width)
        slowest = slowest.expand(*drift.shape[:-1], width)
        silent = Recurrence(torch.zeros_like(value[..., :1, :]), none, none[..., 0, :], step, slowest, right)
        right = run(silent, torch.eye(width, **kind).expand(count, groups, width, width), bounds)[1]
    segment = torch.searchsorted(bounds[1:], torch.arange(length, device=value.device), right=True)
    rates = widened(step[0].unsqueeze(-1)) * (widened(drift[0]) if varying else 1)
    total = rates.new_zeros(count, *rates.shape[1:]).index_add(0, segment, rates)
    return Affine((total if varying else total * widened(drift)).exp().to(value.dtype), right, update)


@torch.no_grad()
def summarise_adjoint(run: Run, recurrence: Recurrence, dy: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The update [S, G, N, P] of the map S_T -> S_0 that S_{t-1} = L_t (S_t + read_t dy_t^T) R_t^T makes of the adjoint.

    Its left factor is that of `summarise`, its right factor the transpose of it; `value` and `write` play no part.
    """
    sources = recurrence._replace(value=dy.unsqueeze(-2), write=recurrence.read.unsqueeze(-2), seen=None)
    for kernels in (fused, triton):
        if run is kernels.run:
            # Kernels read memory, where a negative view has the other sign.
            return kernels.adjoint_update(sources.map(Tensor.resolve_neg), cu_seqlens)
    batch, groups, order = dy.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1, dy.shape[2], recurrence.read.shape[-1]
    state = dy.new_zeros(batch, groups, order, dy.shape[-1]).requires_grad_()
    if not dy.numel():
        return state.detach()
    with torch.enable_grad():
        y, _ = run(sources, state, cu_seqlens)
    return torch.autograd.grad(y, state, dy)[0]


def _packed(recurrence: Recurrence, cu_seqlens: Tensor | None) -> tuple[Recurrence, Tensor]:
    """The record with all sequences in one row, and their boundaries."""
    batch, length = recurrence.read.shape[:2]
    if cu_seqlens is not None:
        return recurrence, cu_seqlens
    bounds = torch.arange(batch + 1, device=recurrence.value.device) * length
    return recurrence.map_time(lambda tensor: tensor.flatten(0, 1).unsqueeze(0)), bounds


def prefix(maps: Affine, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The states [K, .., N, P] that enter the maps [K, ..] in turn, from `start` (or zeros), and the one after the last."""
    cumulative = cumulative_affine(maps, 0, balanced=True)
    behind = cumulative.update if start is None else apply(cumulative, start)
    first = torch.zeros_like(behind[:1]) if start is None else start.unsqueeze(0)
    return torch.cat([first, behind[:-1]]), behind[-1]


class InPlace(SegmentLayout):
    """All segments in one process, as neighbouring rows: those of the first sequence, of the second, .."""

    def __init__(self, num_segments: int) -> None:
        self.num_segments = num_segments

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.unflatten(0, (-1, self.num_segments)).movedim(1, 0) for tensor in tensors]

    def own(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(0, 1).flatten(0, 1)


def scan_in_place(
    run: Run, recurrence: Recurrence, cu_seqlens: Tensor | None, initial_state: Tensor | None, num_segments: int | None = None
) -> tuple[Tensor, Tensor]:
    """A backend's `run` on sequences that are cut into segments, so that few long ones fill many cores: by default one segment
    per `SEGMENT_LENGTH` positions, at most `MOST_SEGMENTS`."""
    batch, length = recurrence.read.shape[:2]
    device = recurrence.value.device
    recurrence, bounds = _packed(recurrence, cu_seqlens)
    # Reading the boundaries would stall a GPU.
    longest = length if cu_seqlens is None or not is_readable(bounds) else int(bounds.diff().max())
    if num_segments is None:
        num_segments = min(MOST_SEGMENTS, max(1, longest // dispatch.SEGMENT_LENGTH))
    cuts = bounds[:-1, None] + bounds.diff().unsqueeze(1) * torch.arange(num_segments, device=device) // num_segments
    cuts = torch.cat([cuts.flatten(), bounds[-1:]])
    start = None
    if initial_state is not None:
        # Only the first segment of a sequence begins at its initial state.
        others = initial_state.new_zeros(len(bounds) - 1, num_segments - 1, *initial_state.shape[1:])
        start = torch.cat([initial_state.unsqueeze(1), others], dim=1).flatten(0, 1)
    y, final_state = scan_segments(run, recurrence, start, cuts, InPlace(num_segments))
    return y.view(batch, length, *y.shape[2:]), final_state


class _Join(torch.autograd.Function):
    """The identity on y and the last state; backwards, the gradient that each segment's last state gets from later segments."""

    @staticmethod
    def forward(
        ctx: Any, call: tuple, y: Tensor, last: Tensor, final_state: Tensor, start: Tensor | None, *operands: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # All operands are arguments: a rank without positions takes part in the backward pass too.
        _, _, *needed, _ = operands
        ctx.call = call
        ctx.save_for_backward(*needed)
        # Not as views, which could not be changed in place.
        return y.detach(), final_state.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "transport_scan: a scan in segments, or over a process group, has no second derivative; call it without "
                'create_graph=True, or in one piece with backend="associative" or backend="reference"'
            )
        dy, dfinal = gradients
        (run, layout, cu_seqlens, maps), (read, *others) = ctx.call, ctx.saved_tensors
        update = summarise_adjoint(run, Recurrence(read, read, read, *others), dy, cu_seqlens)
        updates, dfinal = layout.gather_adjoint(update, dfinal)
        maps = Affine(maps.left, None if maps.right is None else maps.right.mT, updates)
        # Time runs backwards for the adjoint.
        adjoints, _ = prefix(map_tensors(lambda tensor: tensor.flip(0), maps), dfinal)
        return None, dy, layout.own(adjoints.flip(0)), *[None] * 9
