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
import torch.nn.functional as F
from torch import Tensor

from shippo_ssm import dispatch
from shippo_ssm.dispatch import is_readable, scan_kernels
from shippo_ssm.scan import fused, triton
from shippo_ssm.scan.algebra import Affine, Recurrence, apply, map_tensors, outer
from shippo_ssm.scan.associative import cumulative_affine, widened
from shippo_ssm.scan.packing import packing_of

# A backend: (recurrence, initial_state, cu_seqlens) -> (y, final_state).
Run = Callable[[Recurrence, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]

# Positions of a segment, and most segments of a sequence, where one is cut to fill the cores of one machine. They depend on the
# sequence alone, so that results do not depend on the number of threads.
MOST_SEGMENTS = 64
_BACKENDS = {"fused": fused, "triton": triton}


class SegmentLayout(ABC):
    """Where the segments of a sequence are. Here a process holds some of them, as S rows; in all there are K, in time order."""

    is_first = False
    """Whether only first segments are here."""
    is_last = False
    """Whether only last segments are here."""

    @abstractmethod
    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors [S, ...] of the segments held here -> [K, ...] of all of them."""

    @abstractmethod
    def own(self, tensor: Tensor) -> Tensor:
        """The way back: [K, ...] -> [S, ...]."""

    @abstractmethod
    def gather_adjoint(self, update: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor]:
        """`gather` of the adjoint's updates, and the gradient of the one last state."""


def scan_segments(
    run: Run,
    recurrence: Recurrence,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    layout: SegmentLayout,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor]:
    """y of the segments held here and the last state of the whole sequence; differentiable once.

    Args:
        run: the backend that runs each segment.
        recurrence: the operands of the segments held here.
        start: [S, G, N, P], added to the state that enters each segment: the initial state for a first one, zero for others.
        cu_seqlens: boundaries of the segments where they are packed along T.
        layout: where the other segments are.
        output_final_state: whether the last state is needed; it is undefined if not.
    """
    if layout.is_last and not output_final_state:
        # Only the last state needs this summary.
        summary = summarise(recurrence.between(0, 0), None if cu_seqlens is None else torch.zeros_like(cu_seqlens))
    else:
        summary = summarise(recurrence, cu_seqlens)
    with torch.no_grad():
        if start is not None:
            summary = summary._replace(update=apply(summary, start))
        given = [tensor for tensor in summary if tensor is not None]
        gathered = layout.gather(*given)
        maps = Affine(gathered[0], None if summary.right is None else gathered[1], gathered[-1])
        states, final_state = prefix(maps)
        entering = layout.own(states)
    y, last = run(recurrence, entering if start is None else entering + start, cu_seqlens)
    return _Join.apply(layout, cu_seqlens, y, last, final_state, maps.left, maps.right, start, *recurrence)


@torch.no_grad()
def summarise(recurrence: Recurrence, cu_seqlens: Tensor | None = None) -> Affine:
    """The map H_0 -> H_T = left H_0 right + update of each sequence: left [S, G, N], right [S, G, P, P], update [S, G, N, P].

    With D_t and W_t the products of the left and the right factors after position t, the update is the sum of
    (D_t write_t) (value_t^T W_t). `left` and `right` are the products up to a power of two between them, which keeps both in
    range.
    """
    if kernels := scan_kernels(recurrence.value):
        # Kernels read memory, where a negative view has the other sign.
        return _BACKENDS[kernels].summary(recurrence.map(Tensor.resolve_neg), cu_seqlens)
    return _summarise_rows(recurrence if cu_seqlens is None else packing_of(cu_seqlens).pad_recurrence(recurrence))


@torch.no_grad()
def summarise_adjoint(recurrence: Recurrence, dy: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The update [S, G, N, P] of the map S_T -> S_0 that S_{t-1} = L_t (S_t + read_t dy_t^T) R_t^T makes of the adjoint.

    Its left factor is that of `summarise`, its right factor the transpose of it; `value` and `write` play no part.
    """
    sources = recurrence._replace(value=dy.unsqueeze(-2), write=recurrence.read.unsqueeze(-2), seen=None)
    if kernels := scan_kernels(dy):
        return _BACKENDS[kernels].summary(sources.map(Tensor.resolve_neg), cu_seqlens, mirrored=True).update
    if cu_seqlens is not None:
        sources = packing_of(cu_seqlens).pad_recurrence(sources)
    # L (S + read dy^T) R^T = L S R^T + (L read) (R dy)^T, a recurrence in reversed time.
    value, write, _, step, drift, right, _ = sources.per_group()
    write = (step.unsqueeze(-1) * drift).exp().unsqueeze(-2) * write
    value = value if right is None else value @ right.mT
    mirror = sources._replace(value=value, write=write, right=None if right is None else right.mT)
    return _summarise_rows(mirror.map_time(lambda tensor: tensor.flip(1))).update


def prefix(maps: Affine, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The states [K, .., N, P] that enter the maps [K, ..] in turn, from `start` (or zeros), and the one after the last."""
    if scan_kernels(maps.update) == "triton":
        return triton.prefix(maps, start)
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

    def gather_adjoint(self, update: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor]:
        return self.gather(update)[0], dfinal


def scan_in_place(
    run: Run, recurrence: Recurrence, initial_state: Tensor | None, cu_seqlens: Tensor | None, num_segments: int | None = None
) -> tuple[Tensor, Tensor]:
    """A backend's `run` on sequences that are cut into segments, so that few long ones fill many cores.

    Args:
        run: a backend that takes packed sequences.
        num_segments: of each sequence; by default one per `SEGMENT_LENGTH` positions, at most `MOST_SEGMENTS`.
    """
    batch, length = recurrence.read.shape[:2]
    device, longest = recurrence.value.device, length
    if cu_seqlens is None:
        bounds = torch.arange(batch + 1, device=device) * length
        recurrence = recurrence.map_time(lambda tensor: tensor.flatten(0, 1).unsqueeze(0))
    else:
        bounds = cu_seqlens
        # Reading the boundaries would stall a GPU.
        longest = int(bounds.diff().max()) if is_readable(bounds) else length
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
        ctx: Any,
        layout: SegmentLayout,
        cu_seqlens: Tensor | None,
        y: Tensor,
        last: Tensor,
        final_state: Tensor,
        lefts: Tensor,
        rights: Tensor | None,
        start: Tensor | None,
        *operands: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # All operands are arguments: a rank without positions takes part in the backward pass too.
        _, _, read, step, drift, right, _ = operands
        ctx.layout = layout
        ctx.save_for_backward(cu_seqlens, read, step, drift, right, lefts, rights)
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
        cu_seqlens, read, step, drift, right, lefts, rights = ctx.saved_tensors
        # No segment before the first one needs its summary.
        if ctx.layout.is_first:
            update = torch.zeros_like(dfinal)
        else:
            update = summarise_adjoint(Recurrence(read, read, read, step, drift, right), dy, cu_seqlens)
        updates, dfinal = ctx.layout.gather_adjoint(update, dfinal)
        maps = Affine(lefts, None if rights is None else rights.mT, updates)
        # Time runs backwards for the adjoint.
        adjoints, _ = prefix(map_tensors(lambda tensor: tensor.flip(0), maps), dfinal)
        return None, None, dy, ctx.layout.own(adjoints.flip(0)), *[None] * 11


def _summarise_rows(recurrence: Recurrence) -> Affine:
    """`summarise` of whole rows in plain torch, with the memory of the operands, in double precision where there is one."""
    dtype = recurrence.value.dtype
    value, write, _, step, drift, right, _ = recurrence.per_group().map(widened)
    log_left = step.unsqueeze(-1) * drift
    total, log_total = None, log_left.sum(1)
    # Summed without the position's own, which may be so large that a difference would lose the others.
    log_behind = F.pad(log_left, (0, 0, 0, 0, 0, 1))[:, 1:].flip(1).cumsum(1).flip(1)
    if right is not None:
        eye = torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
        padded = torch.cat([right, eye.expand(right.shape[0], 1, *right.shape[2:])], dim=1)
        # R_t .. R_T, in reversed time and transposed a product from the start: (R_t .. R_T)^T = R_T^T .. R_t^T.
        products, log_scale = _products(padded.mT.flip(1), 1)
        products, log_scale = products.mT.flip(1), log_scale.flip(1)
        total, log_total = products[:, 0], log_total + log_scale[:, 0]
        value, log_behind = value @ products[:, 1:], log_behind + log_scale[:, 1:]
    # One sum over positions and ranks: [B, G, T r, ..].
    sources = [tensor.movedim(1, 2).flatten(2, 3) for tensor in (log_behind.exp().unsqueeze(-2) * write, value)]
    return map_tensors(lambda tensor: tensor.to(dtype), Affine(log_total.exp(), total, outer(*sources)))


def _products(matrices: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """M_1 .. M_t for all t along `dim`, each over a scale that keeps it in range, and the logarithms [.., 1] of the scales."""
    scale, span = matrices.new_zeros(matrices.shape[:-2]).unsqueeze(-1), 1
    length = matrices.shape[dim]
    while span < length:
        joined = matrices.narrow(dim, 0, length - span) @ matrices.narrow(dim, span, length - span)
        size = torch.linalg.matrix_norm(joined).unsqueeze(-1)
        size = torch.where((size > 0) & size.isfinite(), size, 1.0)
        joined = joined / size.unsqueeze(-1)
        shift = scale.narrow(dim, 0, length - span) + scale.narrow(dim, span, length - span) + size.log()
        matrices = torch.cat([matrices.narrow(dim, 0, span), joined], dim)
        scale = torch.cat([scale.narrow(dim, 0, span), shift], dim)
        span *= 2
    return matrices, scale
