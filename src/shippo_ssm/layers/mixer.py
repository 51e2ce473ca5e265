"""The contract of every sequence layer: run a segment from a state, give the outputs and the state after it.

A `Mixer` turns u [B, T, d_model] into y [B, T, d_model], causally. What it must say is `run` and `init_state`; `forward`, with
its checks and its optional state, and `step` are written here, once. Blocks, stacks, experiments and audits know only this.

Data path: `forward` checks `u` and what is said about its positions, puts the latter into a `Segment`, and calls `run`. A
mixer that holds others hands the segment on, so that nothing is checked twice.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shippo_ssm._private import values_visible
from shippo_ssm.layers.states import map_states
from shippo_ssm.scan.checks import asks_gradients, check_cu_seqlens, checksum
from shippo_ssm.scan.distributed import Part, agree

State = TypeVar("State")


class Segment(NamedTuple):
    """What a call says about its positions and its state, checked already.

    Args:
        mask: [B, T] bool, `False` at padding; `None` where every position is real.
        cu_seqlens: [num_sequences + 1] boundaries of sequences packed along T, with B = 1; `None` for one sequence per row.
        owned: whether the state that is given may be written over.
        every: whether the state that is returned is that after every position, with a leading T axis on all its tensors.
        part: which part of a longer sequence the positions are, where the ranks of a process group hold the others; boundaries
            are then those inside this part.
        asked: [n] the places in the flattened [B T] at which an output is wanted, each once, in their order; y is then [n, ..]
            in the place of [B, T, ..]. `None` where every position is asked. The states are those of the whole segment.
    """

    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    owned: bool = False
    every: bool = False
    part: Part | None = None
    asked: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether every position is real and asked, every row one sequence, and none of it elsewhere."""
        return self.mask is None and self.cu_seqlens is None and self.part is None and self.asked is None

    def num_sequences(self, u: Tensor) -> int:
        """Sequences in `u` [B, T, ..], each with a state of its own."""
        return u.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def at_asked(self, tensor: Tensor) -> Tensor:
        """`tensor` [B, T, ..] at the positions that are asked, [n, ..], or all of it."""
        return tensor if self.asked is None else tensor.flatten(0, 1).index_select(0, self.asked)


# Whole rows, every position real.
WHOLE = Segment()
# The same, from a state that may be written over; and with the state after every position.
OWNED, EVERY = Segment(owned=True), Segment(every=True)


class Mixer(nn.Module, ABC, Generic[State]):
    """y, state = run(u, state): a causal sequence layer that continues exactly from the state it gave.

    Example:
        >>> import torch
        >>> from shippo_ssm.layers import Mixer
        >>> class Sum(Mixer[torch.Tensor]):
        ...     def run(self, u, state, segment):
        ...         y = u.cumsum(1) + (0 if state is None else state.unsqueeze(1))
        ...         return y, y[:, -1]
        ...     def init_state(self, batch_size):
        ...         return torch.zeros(batch_size, self.d_model)
        >>> layer = Sum(d_model=3)
        >>> y, state = layer(torch.ones(2, 5, 3), output_state=True)
        >>> layer.step(torch.ones(2, 3), state)[0][0].tolist()
        [6.0, 6.0, 6.0]
    """

    takes_gaps: ClassVar[bool] = True
    """Whether the layer knows padding and packed sequences."""
    takes_every: ClassVar[bool] = False
    """Whether `run` gives the state after every position where a segment asks for it; otherwise positions go one by one."""
    takes_group: ClassVar[bool] = False
    """Whether the layer can run on a part of a sequence whose other parts are on other ranks of a process group."""
    takes_asked: ClassVar[bool] = False
    """Whether `run` gives outputs at the positions that a segment asks only; otherwise all are computed, and those taken."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        # Switched off by `identity_right`, which replaces R by I at evaluation.
        self.use_right = True

    @abstractmethod
    def run(self, u: Tensor, state: State | None, segment: Segment) -> tuple[Tensor, State]:
        """One segment.

        Args:
            u: [B, T, d_model].
            state: what an earlier segment gave; `None` for a fresh start.
            segment: padding and packing; a layer with `takes_gaps = False` gets neither.

        Returns:
            y [B, T, d_model], or [n, d_model] where the segment asks n positions of a layer with `takes_asked`; and the state
            after the segment, one per sequence.
        """

    @abstractmethod
    def init_state(self, batch_size: int) -> State:
        """The state before the first position, for `batch_size` sequences."""

    @overload
    def forward(
        self,
        u: Tensor,
        state: State | None = None,
        segment: Segment | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        group: ProcessGroup | None = None,
        output_state: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        u: Tensor,
        state: State | None = None,
        segment: Segment | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        group: ProcessGroup | None = None,
        output_state: Literal[True],
    ) -> tuple[Tensor, State]: ...
    def forward(
        self,
        u: Tensor,
        state: State | None = None,
        segment: Segment | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        group: ProcessGroup | None = None,
        output_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """Run the layer over a segment.

        Args:
            u: [B, T, d_model].
            state: the state of an earlier segment; a fresh start by default.
            segment: what the next three say as a checked record, in their place: what a stack hands to its layers.
            attention_mask: [B, T], bool or 0/1 integers; padding may stand left, right or between, and leaves the state alone.
            cu_seqlens: [num_sequences + 1] boundaries of sequences packed along T, with B = 1; one state per sequence.
            group: a process group whose ranks hold contiguous parts of T, in their order; `u` and `attention_mask` are this
                rank's, the state and `cu_seqlens` those of the whole sequence. Gradients of parameters add up over the ranks.
            output_state: whether to return the state after the segment.

        Returns:
            y [B, T, d_model] (zeros at padding; [n, d_model] where `segment` asks n positions), or (y, state) with
            `output_state=True`.
        """
        if segment is None:
            segment = self.check(u, attention_mask, cu_seqlens, group)
        if not self.takes_gaps and not segment._replace(part=None, asked=None).whole:
            raise ValueError(
                f"{type(self).__name__}: `attention_mask` or `cu_seqlens` came; expected `None`, this layer moves at every "
                "position; leave padding out, or take a Shippo layer"
            )
        if segment.part is not None and not self.takes_group:
            raise ValueError(
                f"{type(self).__name__}: `group` came; expected `None`, this layer needs whole sequences; take a Shippo layer"
            )
        if segment.mask is not None:
            # What stands at padding, were it NaN, reaches neither outputs nor gradients.
            u = torch.where(segment.mask.unsqueeze(-1), u, 0)
        run = self.run if self.takes_every or not segment.every else self.run_each
        if segment.asked is None or (self.takes_asked and not segment.every):
            y, state = run(u, state, segment)
        else:
            y, state = run(u, state, segment._replace(asked=None))
            y = segment.at_asked(y)
        return (y, state) if output_state else y

    if TYPE_CHECKING:
        __call__ = forward

    def step(self, u: Tensor, state: State | None = None, *, in_place: bool = False) -> tuple[Tensor, State]:
        """One position.

        Args:
            u: [B, d_model].
            state: what an earlier call gave; a fresh start by default.
            in_place: whether `state` is the caller's alone and may be written over.

        Returns:
            y [B, d_model] and the next state.
        """
        if not isinstance(u, Tensor) or u.ndim != 2:
            raise ValueError(f"{type(self).__name__}.step: `u` is {_describe(u)}; expected [B, d_model], one position")
        u = u.unsqueeze(1)
        self.check(u)
        y, after = self(u, state, OWNED if in_place else WHOLE, output_state=True)
        return y.squeeze(1), after

    def run_each(self, u: Tensor, state: State | None, segment: Segment) -> tuple[Tensor, State]:
        """`run` with the state after every position, one position after another."""
        outputs, states = [], []
        for position in u.split(1, dim=1):
            y, state = self.run(position, state, WHOLE)
            outputs.append(y)
            states.append(state)
        return torch.cat(outputs, dim=1), map_states(lambda *tensors: torch.stack(tensors), *states)

    def right_actions(self, u: Tensor) -> Tensor | None:
        """R [B, T, G, P, P] that the layer would apply along `u` [B, T, d_model]; `None` for one without right actions."""
        return None

    def check(
        self,
        u: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> Segment:
        """Check `u` and what is said about its positions; returns the latter as a record."""
        op, width = type(self).__name__, self.d_model
        if group is not None:
            return agree_on_segment(self, op, u, attention_mask, cu_seqlens, group, self.check)
        if not isinstance(u, Tensor) or u.ndim != 3 or u.shape[-1] != width:
            raise ValueError(
                f"{op}: `u` is {_describe(u)}; expected [B, T, d_model] with d_model = {width}; reshape or project it first"
            )
        if not u.is_floating_point():
            raise ValueError(f"{op}: `u` has dtype {u.dtype}; expected a floating dtype; embed token ids first")
        if attention_mask is None and cu_seqlens is None:
            return WHOLE
        return check_gaps(op, u, attention_mask, cu_seqlens)


def agree_on_segment(
    module: nn.Module,
    op: str,
    u: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    group: ProcessGroup,
    check: Callable[[Tensor, Tensor | None], Any],
) -> Segment:
    """The `Segment` of this rank's part `u` [B, T, ..], checked on all ranks of `group` at once.

    Args:
        module: what will run; its parameters must have the same shapes on every rank.
        op: its name, for messages.
        check: checks (u, attention_mask) on this rank alone.
    """

    def facts() -> dict[str, Any]:
        check(u, attention_mask)
        if cu_seqlens is not None:
            if attention_mask is not None:
                raise ValueError(_ONE_OF_THEM.format(op=op))
            check_cu_seqlens(op, cu_seqlens, u.shape[0], None, u.device)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
        return {
            "T": u.shape[1],
            "`u` has B": u.shape[0],
            "`u` has dtype": str(u.dtype),
            "`cu_seqlens` has checksum": checksum(cu_seqlens),
            "the checksum of the parameters' shapes": zlib.crc32(str(shapes).encode()),
            "a gradient of `u` or a parameter is asked for": asks_gradients(u, *module.parameters()),
        }

    part = agree(op, group, facts)
    mask = None if attention_mask is None else attention_mask.bool()
    return Segment(mask, None if cu_seqlens is None else part.bounds(op, cu_seqlens), part=part)


def check_segment(
    module: nn.Module,
    u: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Segment:
    """What a model that is no mixer was told about the positions of `u` [B, T, ..], checked."""
    op = type(module).__name__
    if group is not None:
        return agree_on_segment(module, op, u, attention_mask, cu_seqlens, group, lambda u, mask: check_gaps(op, u, mask))
    return WHOLE if attention_mask is None and cu_seqlens is None else check_gaps(op, u, attention_mask, cu_seqlens)


_ONE_OF_THEM = "{op}: `attention_mask` came with `cu_seqlens`; expected one of them; leave padding out of packed sequences"


def check_gaps(op: str, u: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None = None) -> Segment:
    """Padding or packing of `u` [B, T, ..] as a `Segment`; an integer mask must be of 0 and 1."""
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, u.shape[0], u.shape[1], u.device)
    if attention_mask is None:
        return Segment(None, cu_seqlens)
    if cu_seqlens is not None:
        raise ValueError(_ONE_OF_THEM.format(op=op))
    shape = tuple(u.shape[:2])
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != shape:
        raise ValueError(
            f"{op}: `attention_mask` is {_describe(attention_mask)}; expected [B, T] = {shape}, one entry per position of `u`"
        )
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise ValueError(
            f"{op}: `attention_mask` has dtype {attention_mask.dtype}; expected bool or integers 0 and 1; pass the padding "
            "mask, not an additive one"
        )
    # The values of an integer mask are looked at where that costs nothing: not on a card, not while tracing.
    looked_at = attention_mask.dtype != torch.bool and values_visible(attention_mask)
    if looked_at and not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(f"{op}: `attention_mask` has entries other than 0 and 1; expected 1 at real positions, 0 at padding")
    return Segment(attention_mask.bool(), None)


def _describe(thing: Any) -> str:
    return f"shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else f"a {type(thing).__name__}"
