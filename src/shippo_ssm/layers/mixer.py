"""The contract of every sequence layer: run a segment from a state, give the outputs and the state after it.

A `Mixer` turns u [B, T, d_model] into y [B, T, d_model], causally. What it must say is `run` and `init_state`; `forward`, with
its checks and its optional state, and `step` are written here, once. Blocks, stacks, experiments and audits know only this.

Data path: `forward` checks `u` and what is said about its positions, puts the latter into a `Segment`, and calls `run`. A
mixer that holds others hands the segment on, so that nothing is checked twice.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import PackedSequence

from shippo_ssm.dispatch import asks_gradients, is_readable
from shippo_ssm.layers.spec import UnknownOption
from shippo_ssm.layers.states import map_states
from shippo_ssm.scan.checks import FLOATS, check_cu_seqlens, checksum, expect_placement
from shippo_ssm.scan.distributed import SequenceShard, negotiate_shards

State = TypeVar("State")

# Times beyond it would be infinite in float32.
MAX_DT = torch.finfo(torch.float32).max


class Segment(NamedTuple):
    """Which positions of a call are real, where outputs are wanted and what happens to the state; already checked.

    Args:
        mask: [B, T] bool, `False` at padding; `None` where every position is real.
        cu_seqlens: [num_sequences + 1] boundaries of sequences packed along T, with B = 1; `None` for one sequence per row.
        in_place: whether the given state may be overwritten.
        return_all_states: whether to return the state after every position, with a leading T axis on all its tensors.
        part: which part of a longer sequence this is, where the ranks of a process group hold the others; boundaries are then
            those inside this part.
        positions: [n] sorted indices into the flattened [B T] where outputs are wanted; y is then [n, ..] instead of
            [B, T, ..]. `None` wants all. The state is that of the whole segment.
        dt: [B, T] times since the previous sample, 0 at padding; `None` where they are all one.
    """

    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    in_place: bool = False
    return_all_states: bool = False
    part: SequenceShard | None = None
    positions: Tensor | None = None
    dt: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether every position is real and wanted, every row is one sequence, and no other rank has a part of it."""
        return self.mask is None and self.cu_seqlens is None and self.part is None and self.positions is None

    def at_positions(self, tensor: Tensor) -> Tensor:
        """`tensor` [B, T, ..] at the wanted positions, [n, ..], or all of it."""
        return tensor if self.positions is None else tensor.flatten(0, 1).index_select(0, self.positions)


# Whole rows; the same with a state that may be overwritten; the same with the state after every position.
WHOLE, IN_PLACE, ALL_STATES = Segment(), Segment(in_place=True), Segment(return_all_states=True)


class SegmentOptions(TypedDict, total=False):
    """What a call may say about the positions of its input, as keyword arguments."""

    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    group: ProcessGroup | None
    dt: Tensor | None


class Mixer(nn.Module, ABC, Generic[State]):
    """y, state = run(u, state): a causal sequence layer that continues exactly from the state it gave."""

    supports_masks: ClassVar[bool] = True
    """Whether the layer knows padding and packed sequences."""
    supports_all_states: ClassVar[bool] = False
    """Whether `run` gives the state after every position where a segment asks for it; otherwise positions go one by one."""
    supports_group: ClassVar[bool] = False
    """Whether the layer can run on a part of a sequence whose other parts are on other ranks of a process group."""
    supports_positions: ClassVar[bool] = False
    """Whether `run` gives outputs at the positions that a segment asks only; otherwise all are computed, and those taken."""
    supports_dt: ClassVar[bool] = False
    """Whether the layer knows the time between positions."""
    reads_tokens: ClassVar[bool] = False
    """Whether `u` is integers, for a layer that embeds them itself."""

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
            segment: padding and packing; a layer with `supports_masks = False` gets neither.

        Returns:
            y [B, T, d_model], or [n, d_model] where the segment wants n positions and the layer has
            `supports_positions`; and the state after the segment, one per sequence.
        """

    @abstractmethod
    def init_state(self, batch_size: int) -> State:
        """The state before the first position, for `batch_size` sequences."""

    @overload
    def forward(
        self, u: Tensor, state: State | None = None, segment: Segment | None = None, *, output_state: Literal[False] = False,
        **options: Unpack[SegmentOptions],
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, u: Tensor, state: State | None = None, segment: Segment | None = None, *, output_state: Literal[True],
        **options: Unpack[SegmentOptions],
    ) -> tuple[Tensor, State]: ...  # fmt: skip
    def forward(
        self,
        u: Tensor,
        state: State | None = None,
        segment: Segment | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        dt: Tensor | None = None,
        group: ProcessGroup | None = None,
        output_state: bool = False,
        **unknown: Any,
    ) -> Tensor | tuple[Tensor, State]:
        """Run the layer over a segment.

        Args:
            u: [B, T, d_model].
            state: the state of an earlier segment; a fresh start by default.
            segment: what the next four say as a checked record, in their place: what a stack hands to its layers.
            attention_mask: [B, T], bool or 0/1 integers; padding may stand left, right or between, and leaves the state alone.
            cu_seqlens: [num_sequences + 1] boundaries of sequences packed along T, with B = 1; one state per sequence.
            dt: [B, T] times since the previous sample, 0 or more, a factor of every step; one by default. A position with a
                time of zero leaves the memory as it is; padding has no time.
            group: a process group whose ranks hold contiguous parts of T, in their order; `u`, `attention_mask` and `dt` are
                this rank's, the state and `cu_seqlens` those of the whole sequence. Gradients of parameters add up over ranks.
            output_state: whether to return the state after the segment.

        Returns:
            y [B, T, d_model] (zeros at padding; [n, d_model] where `segment` asks n positions), or (y, state) with
            `output_state=True`.
        """
        if unknown:
            known = ("state", "output_state", *SegmentOptions.__annotations__)
            raise UnknownOption(type(self).__name__, next(iter(unknown)), known)
        if segment is None:
            segment = check_segment(self, u, attention_mask, cu_seqlens, group, dt)
        if segment is not WHOLE:
            self._refuse(segment)
        if segment.mask is not None:
            # Zero padded inputs so that a NaN there cannot leak.
            u = torch.where(segment.mask.unsqueeze(-1), u, 0)
        run = self.run if self.supports_all_states or not segment.return_all_states else self.run_stepwise
        if segment.positions is None or (self.supports_positions and not segment.return_all_states):
            y, state = run(u, state, segment)
        else:
            y, state = run(u, state, segment._replace(positions=None))
            y = segment.at_positions(y)
        return (y, state) if output_state else y

    if TYPE_CHECKING:
        __call__ = forward

    def step(
        self, u: Tensor, state: State | None = None, *, dt: Tensor | None = None, in_place: bool = False
    ) -> tuple[Tensor, State]:
        """One position.

        Args:
            u: [B, d_model].
            state: what an earlier call gave; a fresh start by default.
            dt: [B] times since the previous position; one by default.
            in_place: whether `state` is the caller's alone and may be written over.

        Returns:
            y [B, d_model] and the next state.
        """
        if not isinstance(u, Tensor) or u.ndim != 2:
            raise ValueError(f"{type(self).__name__}.step: `u` is {_describe(u)}; expected [B, d_model], one position")
        u = u.unsqueeze(1)
        segment = check_segment(self, u, dt=dt.unsqueeze(-1) if isinstance(dt, Tensor) else dt)
        if in_place:
            segment = segment._replace(in_place=True)
        y, after = self(u, state, segment, output_state=True)
        return y.squeeze(1), after

    def run_stepwise(self, u: Tensor, state: State | None, segment: Segment) -> tuple[Tensor, State]:
        """`run` with the state after every position, one position after another."""
        outputs, states = [], []
        for t, position in enumerate(u.split(1, dim=1)):
            mask, dt = (None if told is None else told[:, t : t + 1] for told in (segment.mask, segment.dt))
            y, state = self.run(position, state, Segment(mask, dt=dt))
            outputs.append(y)
            states.append(state)
        return torch.cat(outputs, dim=1), map_states(lambda *tensors: torch.stack(tensors), *states)

    def right_actions(self, u: Tensor) -> Tensor | None:
        """R [B, T, G, P, P] that the layer would apply along `u` [B, T, d_model]; `None` for one without right actions."""
        return None

    def _refuse(self, segment: Segment) -> None:
        """Raise where a segment says what this layer cannot know."""
        name = type(self).__name__
        if not self.supports_masks and (segment.mask is not None or segment.cu_seqlens is not None):
            came = "`attention_mask` or `cu_seqlens`"
            raise ValueError(f"{name}: {came} came; expected `None`, this layer moves at every position; leave padding out")
        if segment.part is not None and not self.supports_group:
            raise ValueError(f"{name}: `group` came; expected `None`, this layer needs whole sequences; take a Shippo layer")
        if segment.dt is not None and not self.supports_dt:
            raise ValueError(f"{name}: `dt` came; expected `None`, this layer has no time; take a Shippo layer or a lift")


def check_segment(
    module: nn.Module, u: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
    group: ProcessGroup | None = None, dt: Tensor | None = None, is_part: bool = False,
) -> Segment:  # fmt: skip
    """Check `u` [B, T, ..] and what `module`, which will run, was told about its positions, on all ranks of `group` at once.

    With `is_part`, `u` is a rank's part of the row that `cu_seqlens` cuts.
    """
    if group is not None:
        return _check_on_all_ranks(module, u, group, attention_mask=attention_mask, cu_seqlens=cu_seqlens, dt=dt)
    op = type(module).__name__
    if isinstance(module, Mixer):
        if isinstance(u, PackedSequence) or (isinstance(u, Tensor) and u.is_nested):
            kind = "PackedSequence" if isinstance(u, PackedSequence) else "nested tensor"
            remedy = "pad it and pass `attention_mask`, or pass `cu_seqlens`"
            raise ValueError(f"{op}: `u` is a {kind}; expected [B, T, d_model]; {remedy}")
        if not isinstance(u, Tensor) or u.ndim != 3 or u.shape[-1] != module.d_model:
            expected = f"[B, T, d_model] with d_model = {module.d_model}; reshape or project it first"
            raise ValueError(f"{op}: `u` is {_describe(u)}; expected {expected}")
        if u.is_floating_point() == module.reads_tokens:
            expected = "integers" if module.reads_tokens else "a floating dtype; embed token ids first"
            raise ValueError(f"{op}: `u` has dtype {u.dtype}; expected {expected}")
    if attention_mask is None and cu_seqlens is None and dt is None:
        return WHOLE
    if cu_seqlens is not None:
        if attention_mask is not None:
            raise ValueError(f"{op}: `attention_mask` came with `cu_seqlens`; expected one of them; pack without padding")
        check_cu_seqlens(op, cu_seqlens, u.shape[0], None if is_part else u.shape[1], u.device)
    mask = None if attention_mask is None else _check_mask(op, u, attention_mask)
    return Segment(mask, cu_seqlens, dt=None if dt is None else _check_dt(op, u, dt, mask))


def _check_on_all_ranks(module: nn.Module, u: Tensor, group: ProcessGroup, **told: Any) -> Segment:
    op, cu_seqlens, dt = type(module).__name__, told["cu_seqlens"], told["dt"]
    found: list[Segment] = []

    def facts() -> dict[str, Any]:
        found.append(check_segment(module, u, **told, is_part=True))
        shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
        return {
            "T": u.shape[1],
            "`u` has B": u.shape[0],
            "`u` has dtype": str(u.dtype),
            "`cu_seqlens` has checksum": checksum(cu_seqlens),
            "`dt` is there": dt is not None,
            "the checksum of the parameters' shapes": zlib.crc32(str(shapes).encode()),
            "a gradient of `u` or a parameter is asked for": asks_gradients(u, *module.parameters()),
            "a gradient of `dt` is asked for": dt is not None and asks_gradients(dt),
        }

    part = negotiate_shards(op, group, facts)
    return found[0]._replace(cu_seqlens=None if cu_seqlens is None else part.bounds(op, cu_seqlens), part=part)


def last_positions(u: Tensor, segment: Segment) -> Tensor:
    """[num_sequences] indices into the flattened [B T] of the last real position of every sequence of `u` [B, T, ..]."""
    if segment.part is not None or not u.shape[1]:
        raise ValueError("SequenceModel: `pool` is 'last' without positions or with `group`; expected nonempty sequences")
    if segment.cu_seqlens is not None:
        if is_readable(segment.cu_seqlens) and not bool(segment.cu_seqlens.diff().all()):
            raise ValueError("SequenceModel: `cu_seqlens` has an empty sequence; expected a last position for `pool`")
        return segment.cu_seqlens[1:].long() - 1
    columns = torch.arange(u.shape[1], device=u.device).expand(u.shape[:2])
    last = (columns if segment.mask is None else columns * segment.mask).amax(1)
    return last + u.shape[1] * torch.arange(len(u), device=u.device)


def _check_mask(op: str, u: Tensor, attention_mask: Tensor) -> Tensor:
    """The mask of `u` [B, T, ..] as bool; an integer mask must be of 0 and 1."""
    shape = tuple(u.shape[:2])
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != shape:
        raise ValueError(f"{op}: `attention_mask` is {_describe(attention_mask)}; expected [B, T] = {shape}, as `u` has")
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise ValueError(f"{op}: `attention_mask` has dtype {attention_mask.dtype}; expected bool or integers 0 and 1")
    # The values of an integer mask are looked at where that costs nothing: not on a GPU, not while tracing.
    looked_at = attention_mask.dtype != torch.bool and is_readable(attention_mask)
    if looked_at and not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(f"{op}: `attention_mask` has entries other than 0 and 1; expected 1 at real positions, 0 at padding")
    return attention_mask.bool()


def _check_dt(op: str, u: Tensor, dt: Tensor, mask: Tensor | None) -> Tensor:
    """Times of the positions of `u` [B, T, ..], zero at padding whatever stands there."""
    shape = tuple(u.shape[:2])
    if not isinstance(dt, Tensor) or tuple(dt.shape) != shape or not dt.is_floating_point():
        came = f"{_describe(dt)} and dtype {dt.dtype}" if isinstance(dt, Tensor) else _describe(dt)
        raise ValueError(f"{op}: `dt` is {came}; expected floating [B, T] = {shape}, times since the sample before")
    expect_placement(op, "dt", dt, u.device, FLOATS)
    dt = dt if mask is None else torch.where(mask, dt, 0)
    # Steps are float32 at least.
    if is_readable(dt) and not bool(((dt >= 0) & (dt <= MAX_DT)).all()):
        raise ValueError(f"{op}: `dt` has negative, infinite or NaN entries; expected finite times >= 0; sort the samples")
    return dt


def _describe(thing: Any) -> str:
    return f"shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else f"a {type(thing).__name__}"
