"""Layers in a stack: a `Block` is u + mixer(norm(u)), a `Stack` is blocks one after another with their states.

Data path: u [B, T, d_model] passes the blocks, each with the state of its own mixer; the states of all blocks are a list.
`ShippoBackbone` is a stack and a norm; the sequence model and the Hugging Face model put embeddings, heads and caches around.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shippo_ssm.layers.attention import CausalAttention
from shippo_ssm.layers.mixer import ALL_STATES, Mixer, Segment
from shippo_ssm.layers.rows import RMSNorm
from shippo_ssm.layers.shippo import Shippo
from shippo_ssm.layers.spec import make_spec
from shippo_ssm.layers.states import ShippoState


class Block(Mixer[Any]):
    """y = u + mixer(norm(u)), then y + mlp(norm(y)) where there is an mlp: the pre-norm residual block.

    Args:
        mixer: the sequence layer inside.
        mlp: a module that works on each position for itself, [.., d_model] -> [.., d_model]; none by default.
        norm_eps: epsilon of the RMS norms.
        dropout: probability that a number of a branch is set to zero in training.
        place: device and dtype of the norms.
    """

    supports_all_states = True
    supports_group = True
    supports_positions = True
    supports_dt = True

    def __init__(
        self, mixer: Mixer[Any], mlp: nn.Module | None = None, *, norm_eps: float = 1e-5, dropout: float = 0.0, **place: Any
    ) -> None:
        super().__init__(mixer.d_model)
        if not 0 <= dropout < 1:
            raise ValueError(f"Block: `dropout` is {dropout!r}; expected a probability, at least 0 and below 1")
        self.dropout = dropout
        self.norm = RMSNorm(self.d_model, eps=norm_eps, **place)
        self.mixer = mixer
        self.mlp_norm = None if mlp is None else RMSNorm(self.d_model, eps=norm_eps, **place)
        self.mlp = mlp

    def run(self, u: Tensor, state: Any, segment: Segment) -> tuple[Tensor, Any]:
        mixed, state = self.mixer(self.norm(u), state, segment, output_state=True)
        u = segment.at_positions(u) + F.dropout(mixed, self.dropout, self.training)
        if self.mlp is not None and self.mlp_norm is not None:
            u = u + F.dropout(self.mlp(self.mlp_norm(u)), self.dropout, self.training)
        return u, state

    def init_state(self, batch_size: int) -> Any:
        return self.mixer.init_state(batch_size)


class Bidirectional(Mixer[None]):
    """y = forward_mixer(u) + reverse(backward_mixer(reverse(u))), each sequence reversed by itself.

    It takes whole sequences: it has no state, and cannot step.

    Example:
        >>> import torch
        >>> from shippo_ssm import Shippo
        >>> from shippo_ssm.layers import Bidirectional
        >>> layer = Bidirectional(Shippo(16, d_state=8), Shippo(16, d_state=8))
        >>> layer(torch.randn(2, 5, 16), attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])).shape
        torch.Size([2, 5, 16])
    """

    # Refused in `run`.
    supports_all_states = True
    supports_dt = True

    def __init__(self, forward_mixer: Mixer[Any], backward_mixer: Mixer[Any]) -> None:
        super().__init__(forward_mixer.d_model)
        if backward_mixer.d_model != self.d_model or backward_mixer is forward_mixer:
            raise ValueError(
                f"Bidirectional: `backward_mixer` is no second one of width {self.d_model}; make one per direction"
            )
        self.forward_mixer, self.backward_mixer = forward_mixer, backward_mixer

    def run(self, u: Tensor, state: None, segment: Segment) -> tuple[Tensor, None]:
        if segment.return_all_states:
            raise ValueError("Bidirectional: a step or a state came; expected whole sequences; use one direction to stream")
        mask, cu_seqlens, dt = segment.mask, segment.cu_seqlens, segment.dt
        # The whole row is reversed: packed sequences come in reverse order, and padding stays the identity wherever it stands.
        turned = Segment(
            None if mask is None else mask.flip(1),
            None if cu_seqlens is None else cu_seqlens[-1] - cu_seqlens.flip(0),
            dt=None if dt is None else _next_times(dt, segment).flip(1),
        )
        return self.forward_mixer(u, None, segment) + self.backward_mixer(u.flip(1), None, turned).flip(1), None

    def init_state(self, batch_size: int) -> None:
        return None

    def step(self, u: Tensor, state: None = None, **options: Any) -> tuple[Tensor, None]:
        """Refuse: the backward direction needs what comes later."""
        return self.run(u, state, ALL_STATES)


def _next_times(dt: Tensor, segment: Segment) -> Tensor:
    """The time from each real position to the next of its sequence; the last one takes that before the first."""
    places = torch.arange(dt.shape[1], device=dt.device)
    if segment.cu_seqlens is not None:
        bounds = segment.cu_seqlens.to(torch.int64)
        first, last = (ends[bounds.diff() > 0] for ends in (bounds[:-1], bounds[1:] - 1))
        return dt[:, (places + 1).index_copy(0, last, first)]
    if segment.mask is None:
        return dt.roll(-1, 1)
    # Real positions in front, in their order.
    order = (~segment.mask).to(torch.int8).argsort(dim=1, stable=True)
    following = torch.where(places + 1 < segment.mask.sum(1, keepdim=True), places + 1, 0)
    times = torch.zeros_like(dt).scatter(1, order, dt.gather(1, order.gather(1, following)))
    return torch.where(segment.mask, times, 0)


class Stack(nn.ModuleList):
    """Blocks one after another, each with its own state.

    Attributes:
        recompute: run each block again in the backward pass instead of keeping what is inside it (gradient checkpointing).
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__(blocks)
        if not len(self):
            raise ValueError("Stack: `blocks` is empty; expected at least 1 layer")
        self.recompute = False

    def __iter__(self) -> Iterator[Block]:
        return super().__iter__()  # pyright: ignore[reportReturnType]

    def run(self, u: Tensor, states: Sequence[Any] | None, segment: Segment) -> tuple[Tensor, list[Any]]:
        """u [B, T, d_model] through all blocks; the last one alone is asked at few positions, if the segment asks so."""
        if states is not None and len(states) != len(self):
            raise ValueError(f"Stack: `states` has {len(states)} entries; expected {len(self)}, one per layer")
        after, everywhere = [], segment if segment.positions is None else segment._replace(positions=None)
        for index, (block, state) in enumerate(zip(self, states or [None] * len(self))):
            asks = segment if index == len(self) - 1 else everywhere
            if self.recompute and self.training and torch.is_grad_enabled():
                u, state = checkpoint(block, u, state, asks, output_state=True, use_reentrant=False)
            else:
                u, state = block(u, state, asks, output_state=True)
            after.append(state)
        return u, after

    @torch.no_grad()
    def scale_branches(self) -> None:
        """Divide the out-projections by sqrt(number of layers), so that the sum of all branches starts at one scale."""
        for block in self:
            if isinstance(block.mixer, (Shippo, CausalAttention)):
                block.mixer.out_proj.weight.div_(len(self) ** 0.5)

    def init_state(self, batch_size: int) -> list[Any]:
        """The states of all blocks before the first position."""
        return [block.init_state(batch_size) for block in self]


class ShippoBackbone(Mixer[list[ShippoState]]):
    """A stack of `n_layers` blocks with a `Shippo` each, and a last RMS norm; its state is a list, one per layer.

    Args:
        d_model: width.
        n_layers: number of blocks.
        norm_eps: epsilon of the norms.
        preset, options: as for `Shippo`; the default is "language".
        dropout: as in `Block`.
    """

    supports_all_states = True
    supports_group = True
    supports_positions = True
    supports_dt = True

    def __init__(
        self, d_model: int, n_layers: int, *, norm_eps: float = 1e-5, preset: str | None = "language", dropout: float = 0.0,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(d_model)
        spec, place = make_spec("ShippoBackbone", preset, **options), {"device": device, "dtype": dtype}
        layers = (Shippo(d_model, spec=spec, layer_idx=index, **place) for index in range(n_layers))
        self.layers = Stack(Block(layer, norm_eps=norm_eps, dropout=dropout, **place) for layer in layers)
        self.layers.scale_branches()
        self.norm = RMSNorm(d_model, eps=norm_eps, **place)

    def run(self, u: Tensor, state: Sequence[ShippoState] | None, segment: Segment) -> tuple[Tensor, list[ShippoState]]:
        u, after = self.layers.run(u, state, segment)
        return self.norm(u), after

    def init_state(self, batch_size: int) -> list[ShippoState]:
        return self.layers.init_state(batch_size)
