"""Layers in a stack: `ShippoBlock` is u + Shippo(norm(u)), `ShippoBackbone` is a stack of blocks and a last norm.

Data path: u [B, T, d_model] passes n_layers blocks, each with its own `ShippoState`; the states of all layers are a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shippo_ssm.layers.mixer import Shippo
from shippo_ssm.layers.state import ShippoState


class ShippoBlock(nn.Module):
    """y = u + mixer(norm(u)): the pre-norm residual block.

    Args:
        d_model: width.
        mixer: the sequence layer inside; by default a `Shippo(d_model, **options)`.
        norm_eps: epsilon of the RMS norm.
        options: further arguments of `Shippo`, for the default mixer.

    Example:
        >>> import torch
        >>> from shippo_ssm import ShippoBlock
        >>> ShippoBlock(16, d_state=8, backend="reference")(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        mixer: nn.Module | None = None,
        *,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if mixer is not None and options:
            raise ValueError(
                f"ShippoBlock: `mixer` came with {', '.join(options)}; expected one of them; set options on the mixer"
            )
        self.norm = nn.RMSNorm(d_model, eps=norm_eps, device=device, dtype=dtype)
        self.mixer = Shippo(d_model, device=device, dtype=dtype, **options) if mixer is None else mixer

    def forward(self, u: Tensor, state: Any = None, **call: Any) -> Any:
        """u [B, T, d_model] and the arguments of the mixer's `forward`; returns y, or (y, state) with `output_state=True`."""
        mixed = self.mixer(self.norm(u), state, **call)
        if call.get("output_state"):
            return u + mixed[0], mixed[1]
        return u + mixed

    def step(self, u: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token, u [B, d_model]."""
        y, state = self.mixer.step(self.norm(u), state)  # pyright: ignore[reportCallIssue]
        return u + y, state

    def init_state(self, batch_size: int) -> Any:
        """The mixer's state before the first token."""
        return self.mixer.init_state(batch_size)  # pyright: ignore[reportCallIssue]


class ShippoBackbone(nn.Module):
    """A stack of `n_layers` blocks and a last RMS norm, with the same calls as one layer.

    Args:
        d_model: width.
        n_layers: number of blocks.
        norm_eps: epsilon of the norms.
        options: further arguments of every `Shippo`.

    Example:
        >>> import torch
        >>> from shippo_ssm import ShippoBackbone
        >>> model = ShippoBackbone(16, 2, d_state=8, backend="reference")
        >>> y, states = model(torch.randn(2, 5, 16), output_state=True)
        >>> y.shape, len(states)
        (torch.Size([2, 5, 16]), 2)
    """

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
        super().__init__()
        if n_layers < 1:
            raise ValueError(f"ShippoBackbone: `n_layers` is {n_layers}; expected at least 1")
        self.layers = nn.ModuleList(
            ShippoBlock(d_model, norm_eps=norm_eps, layer_idx=index, device=device, dtype=dtype, **options)
            for index in range(n_layers)
        )
        self.norm = nn.RMSNorm(d_model, eps=norm_eps, device=device, dtype=dtype)
        # Recompute each block in the backward pass instead of keeping what is inside it.
        self.gradient_checkpointing = False

    def forward(
        self,
        u: Tensor,
        states: Sequence[ShippoState] | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_state: bool = False,
    ) -> Any:
        """u [B, T, d_model] through all blocks; arguments as in `Shippo.forward`, with a list of states, one per layer."""
        self._check_states("ShippoBackbone.forward", states)
        call = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "output_state": output_state}
        after = []
        for index, layer in enumerate(self.layers):
            state = None if states is None else states[index]
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                u = checkpoint(layer, u, state, use_reentrant=False, **call)
            else:
                u = layer(u, state, **call)
            if output_state:
                u, state = u
                after.append(state)
        u = self.norm(u)
        return (u, after) if output_state else u

    def step(self, u: Tensor, states: Sequence[ShippoState]) -> tuple[Tensor, list[ShippoState]]:
        """One token through all blocks: u [B, d_model] and the states give y [B, d_model] and the next states."""
        self._check_states("ShippoBackbone.step", states)
        after = []
        for layer, state in zip(self.layers, states):
            assert isinstance(layer, ShippoBlock)
            u, state = layer.step(u, state)
            after.append(state)
        return self.norm(u), after

    def init_state(self, batch_size: int) -> list[ShippoState]:
        """The states of all layers before the first token."""
        return [layer.init_state(batch_size) for layer in self.layers]  # pyright: ignore[reportCallIssue]

    def _check_states(self, op: str, states: Sequence[ShippoState] | None) -> None:
        if states is not None and len(states) != len(self.layers):
            raise ValueError(
                f"{op}: `states` has {len(states)} entries; expected {len(self.layers)}, one per layer; the states belong to "
                "another model, make them with init_state(batch_size)"
            )
