"""Layers in a stack: a `Block` is u + mixer(norm(u)), a `Stack` is blocks one after another with their states.

Data path: u [B, T, d_model] passes the blocks, each with the state of its own mixer; the states of all blocks are a list. What
stands before the stack and behind its last norm (embeddings, heads, caches) is the model's affair: `ShippoBackbone` is a stack
and a norm, the sequence model and the Hugging Face model put theirs around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shippo_ssm.layers.mixer import Mixer, Segment
from shippo_ssm.layers.norm import RMSNorm
from shippo_ssm.layers.shippo import Shippo
from shippo_ssm.layers.spec import ShippoSpec
from shippo_ssm.layers.state import ShippoState


class Block(Mixer[Any]):
    """y = u + mixer(norm(u)), then y + mlp(norm(y)) where there is an mlp: the pre-norm residual block.

    Args:
        mixer: the sequence layer inside.
        mlp: a module that works on each position for itself, [.., d_model] -> [.., d_model]; none by default.
        norm_eps: epsilon of the RMS norms.

    Example:
        >>> import torch
        >>> from shippo_ssm import Shippo
        >>> from shippo_ssm.layers import Block
        >>> Block(Shippo(16, d_state=8, backend="reference"))(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    takes_every = True
    takes_group = True
    takes_asked = True

    def __init__(
        self,
        mixer: Mixer[Any],
        mlp: nn.Module | None = None,
        *,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(mixer.d_model)
        self.norm = RMSNorm(self.d_model, eps=norm_eps, device=device, dtype=dtype)
        self.mixer = mixer
        self.mlp_norm = None if mlp is None else RMSNorm(self.d_model, eps=norm_eps, device=device, dtype=dtype)
        self.mlp = mlp

    def run(self, u: Tensor, state: Any, segment: Segment) -> tuple[Tensor, Any]:
        mixed, state = self.mixer(self.norm(u), state, segment, output_state=True)
        u = segment.at_asked(u) + mixed
        if self.mlp is not None and self.mlp_norm is not None:
            u = u + self.mlp(self.mlp_norm(u))
        return u, state

    def init_state(self, batch_size: int) -> Any:
        return self.mixer.init_state(batch_size)


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
            raise ValueError(
                f"Stack: `states` has {len(states)} entries; expected {len(self)}, one per layer; the states belong to another "
                "model, make them with init_state(batch_size)"
            )
        after, everywhere = [], segment if segment.asked is None else segment._replace(asked=None)
        for index, block in enumerate(self):
            state = None if states is None else states[index]
            asks = segment if index == len(self) - 1 else everywhere
            if self.recompute and self.training and torch.is_grad_enabled():
                u, state = checkpoint(block, u, state, asks, output_state=True, use_reentrant=False)
            else:
                u, state = block(u, state, asks, output_state=True)
            after.append(state)
        return u, after

    def init_state(self, batch_size: int) -> list[Any]:
        """The states of all blocks before the first position."""
        return [block.init_state(batch_size) for block in self]


class ShippoBackbone(Mixer[list[ShippoState]]):
    """A stack of `n_layers` blocks with a `Shippo` each, and a last RMS norm; its state is a list, one per layer.

    Args:
        d_model: width.
        n_layers: number of blocks.
        norm_eps: epsilon of the norms.
        options: the fields of `ShippoSpec`.

    Example:
        >>> import torch
        >>> from shippo_ssm import ShippoBackbone
        >>> model = ShippoBackbone(16, 2, d_state=8, backend="reference")
        >>> y, states = model(torch.randn(2, 5, 16), output_state=True)
        >>> y.shape, len(states)
        (torch.Size([2, 5, 16]), 2)
    """

    takes_every = True
    takes_group = True
    takes_asked = True

    def __init__(
        self,
        d_model: int,
        n_layers: int,
        *,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model)
        spec, place = ShippoSpec(**options), {"device": device, "dtype": dtype}
        layers = (Shippo(d_model, spec=spec, layer_idx=index, device=device, dtype=dtype) for index in range(n_layers))
        self.layers = Stack(Block(layer, norm_eps=norm_eps, device=device, dtype=dtype) for layer in layers)
        self.norm = RMSNorm(d_model, eps=norm_eps, **place)

    def run(self, u: Tensor, state: Sequence[ShippoState] | None, segment: Segment) -> tuple[Tensor, list[ShippoState]]:
        u, after = self.layers.run(u, state, segment)
        return self.norm(u), after

    def init_state(self, batch_size: int) -> list[ShippoState]:
        return self.layers.init_state(batch_size)
