"""A sequence cut over the ranks of a process group: every rank holds a contiguous part of T, also an empty one.

Data path: a public call first tells all ranks what this one was given: the length of its part, its operands, and any error
(`negotiate_shards`). So all ranks raise the same error and no rank waits for one that failed. `SequenceShard` then gathers the
summaries of the segments (`segments.py`): one message of left, right and update in the forward pass, one of the adjoint's
updates in the backward pass, in the dtype of the state.

The initial state is that of the first rank, the loss is the sum of the ranks' losses, and gradients of what the ranks share
(parameters, drift, the initial state) add up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shippo_ssm.scan.segments import SegmentLayout


class SequenceShard(SegmentLayout):
    """The part of a sequence that this rank of `group` holds; `lengths` are the positions of all of them."""

    def __init__(self, group: dist.ProcessGroup, lengths: Sequence[int]) -> None:
        self.group, self.lengths, self.rank = group, tuple(lengths), dist.get_rank(group)

    @property
    def total(self) -> int:
        """T of the whole sequence."""
        return sum(self.lengths)

    def bounds(self, op: str, cu_seqlens: Tensor) -> Tensor:
        """The boundaries of packed sequences inside this part; a sequence that is not here is empty here."""
        if int(cu_seqlens[-1]) != self.total:
            raise ValueError(
                f"{op}: `cu_seqlens` ends at {int(cu_seqlens[-1])}; expected {self.total}, the length of the whole sequence "
                f"in the parts {self.lengths} of `group`; give every rank the boundaries of the whole sequence"
            )
        return (cu_seqlens - sum(self.lengths[: self.rank])).clamp(0, self.lengths[self.rank])

    def first(self, tensor: Tensor) -> Tensor:
        """`tensor` on the first rank and zeros on the others, with zeros as their gradients."""
        return torch.where(torch.tensor(self.rank == 0, device=tensor.device), tensor, 0)

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors of one dtype, [..] on every rank -> [K, ..]: one message."""
        message = torch.cat([tensor.reshape(-1) for tensor in tensors])
        received = message.new_empty(len(self.lengths), message.numel())
        dist.all_gather(list(received.unbind()), message, group=self.group)
        parts = received.split([tensor.numel() for tensor in tensors], dim=1)
        return [part.reshape(-1, *tensor.shape) for part, tensor in zip(parts, tensors)]

    def own(self, tensor: Tensor) -> Tensor:
        return tensor[self.rank]

    def gather_adjoint(self, update: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor]:
        """Every rank has the last state, so that its gradient is the sum over all of them."""
        updates, dfinals = self.gather(update, dfinal)
        return updates, dfinals.sum(0)

    def exchange(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`gather` with gradients: each rank gets the sum of what all ranks ask of its tensors."""
        return _Exchange.apply(self, *tensors)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: SequenceShard, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.part = part
        return tuple(part.gather(*tensors))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        message = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)
        dist.all_reduce(message, group=ctx.part.group)
        parts = message[ctx.part.rank].split([gradient[0].numel() for gradient in gradients])
        return None, *(part.view_as(gradient[0]) for part, gradient in zip(parts, gradients))


class _KeepInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients, *[None] * (len(ctx.needs_input_grad) - 1)


def keep_in_graph(tensor: Tensor, *others: Tensor) -> Tensor:
    """`tensor`, in a graph that holds `others` as well: a rank that has no use for what it received still answers for it."""
    return _KeepInGraph.apply(tensor, *others)


def negotiate_shards(op: str, group: dist.ProcessGroup, check: Callable[[], dict[str, Any]]) -> SequenceShard:
    """The `SequenceShard` of this rank, if all ranks of `group` agree; otherwise the same `ValueError` on every rank.

    Args:
        op: the public call, for messages.
        group: the process group.
        check: checks what this rank was given (raising `ValueError`) and describes it: {what: plain value}. All but "T", the
            length of this part, must be the same on every rank.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{op}: `group` came without torch.distributed; expected init_process_group before; start with torchrun"
        )
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"{op}: `group` is a {type(group).__name__} that this process is not in; expected one of its own process groups; "
            "call it on the ranks of the group alone"
        )
    try:
        header = check()
    except ValueError as error:
        header = {"error": str(error)}
    headers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(headers, header, group=group)
    for rank, other in enumerate(headers):
        if "error" in other:
            raise ValueError(header.get("error", f"{other['error']} (on rank {rank} of `group`)"))
    for rank, other in enumerate(headers):
        for what, found in other.items():
            if what != "T" and found != headers[0].get(what):
                raise ValueError(
                    f"{op}: {what} = {found} on rank {rank} of `group` and {headers[0].get(what)} on rank 0; expected the same "
                    "on every rank; only T is cut"
                )
    return SequenceShard(group, [other["T"] for other in headers])
