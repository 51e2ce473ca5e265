"""Baselines: GRU, LSTM, Mamba, a Transformer block, and a static encoder and decoder around a layer without right action."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm.layers import Block, CausalAttention, Mixer, Segment, Shippo, ShippoSpec, ShippoState


class GRUMixer(Mixer[Tensor]):
    """One `nn.GRU` layer of width d_model; its state is the hidden vector [B, d_model]."""

    supports_masks = False

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.gru = nn.GRU(d_model, d_model, batch_first=True)

    def run(self, u: Tensor, state: Tensor | None, segment: Segment) -> tuple[Tensor, Tensor]:
        y, hidden = self.gru(u, None if state is None else state.unsqueeze(0))
        return y, hidden.squeeze(0)

    def init_state(self, batch_size: int) -> Tensor:
        return next(self.gru.parameters()).new_zeros(batch_size, self.d_model)


class LSTMMixer(Mixer[tuple[Tensor, Tensor]]):
    """One `nn.LSTM` layer of width d_model; its state is the hidden vector and the cell, [B, d_model] each."""

    supports_masks = False

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)

    def run(self, u: Tensor, state: tuple[Tensor, Tensor] | None, segment: Segment) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, (hidden, cell) = self.lstm(u, None if state is None else (state[0].unsqueeze(0), state[1].unsqueeze(0)))
        return y, (hidden.squeeze(0), cell.squeeze(0))

    def init_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        zeros = next(self.lstm.parameters()).new_zeros(batch_size, self.d_model)
        return zeros, zeros


class MambaMixer(Mixer[tuple[Tensor, Tensor]]):
    """A block of mambapy (the `bench` extra); its state is the hidden state and the window of the convolution.

    It cannot begin a segment of several tokens from a state.
    """

    supports_masks = False

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        try:
            mamba = importlib.import_module("mambapy.mamba")
        except ImportError as error:
            raise ValueError(f"MambaMixer: {error}; expected mambapy, which is in the extra `bench`; install it") from error
        self.block = mamba.MambaBlock(mamba.MambaConfig(d_model=d_model, n_layers=1))

    def run(self, u: Tensor, state: Any, segment: Segment) -> tuple[Tensor, Any]:
        if state is None:
            return self.block(u), self.init_state(len(u))
        if u.shape[1] != 1:
            raise ValueError(f"MambaMixer: `u` has {u.shape[1]} positions with a state; expected 1, or no state")
        y, state = self.block.step(u.squeeze(1), state)
        return y.unsqueeze(1), state

    def init_state(self, batch_size: int) -> Any:
        config, weight = self.block.config, self.block.in_proj.weight
        sizes = (config.d_inner, config.d_state), (config.d_inner, config.d_conv - 1)
        return tuple(weight.new_zeros(batch_size, *size) for size in sizes)


class FreeMixer(Mixer[ShippoState]):
    """decoder(memory(encoder(u))): learned static bases [d_model, d_model] around a `Shippo` of `spec` with right = "none"."""

    supports_group = True
    supports_positions = True
    supports_dt = True

    def __init__(self, d_model: int, spec: ShippoSpec, layer_idx: int | None = None) -> None:
        super().__init__(d_model)
        self.encoder = nn.Linear(d_model, d_model, bias=False)
        self.memory = Shippo(d_model, spec=replace(spec, right="none"), layer_idx=layer_idx)
        self.decoder = nn.Linear(d_model, d_model, bias=False)
        # Both bases start as the identity: the baseline starts as the layer inside.
        nn.init.eye_(self.encoder.weight)
        nn.init.eye_(self.decoder.weight)

    def run(self, u: Tensor, state: ShippoState | None, segment: Segment) -> tuple[Tensor, ShippoState]:
        y, after = self.memory(self.encoder(u), state, segment, output_state=True)
        return self.decoder(y), after

    def init_state(self, batch_size: int) -> ShippoState:
        return self.memory.init_state(batch_size)


class SwiGLU(nn.Module):
    """W_out (silu(W_gate u) W_up u), with 8/3 d_model hidden channels: as many weights as an MLP of width 4 d_model."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.hidden = 8 * d_model // 3
        self.in_proj = nn.Linear(d_model, 2 * self.hidden, bias=False)
        self.out_proj = nn.Linear(self.hidden, d_model, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        gate, up = self.in_proj(u).chunk(2, dim=-1)
        return self.out_proj(F.silu(gate) * up)


def transformer_block(d_model: int, n_heads: int, norm_eps: float = 1e-5, dropout: float = 0.0, mlp: str = "swiglu") -> Block:
    """A causal pre-norm Transformer block: attention, then "swiglu", or a "gelu" MLP of width 4 d_model, with biases."""
    gelu, wide = mlp == "gelu", 4 * d_model
    attention = CausalAttention(d_model, n_heads, bias=gelu)
    inside = nn.Sequential(nn.Linear(d_model, wide), nn.GELU(), nn.Linear(wide, d_model)) if gelu else SwiGLU(d_model)
    return Block(attention, inside, norm_eps=norm_eps, dropout=dropout)
