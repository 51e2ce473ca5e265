"""Mixers to compare with: GRU, LSTM, causal attention, and a static encoder and decoder around a layer without right action."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm._expect import expect_size
from shippo_ssm.layers import Block, Mixer, Segment, Shippo, ShippoSpec, ShippoState


class GRUMixer(Mixer[Tensor]):
    """One `nn.GRU` layer of width d_model; its state is the hidden vector [B, d_model].

    Example:
        >>> import torch
        >>> from shippo_ssm.models import GRUMixer
        >>> GRUMixer(8)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    takes_gaps = False

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.gru = nn.GRU(d_model, d_model, batch_first=True)

    def run(self, u: Tensor, state: Tensor | None, segment: Segment) -> tuple[Tensor, Tensor]:
        y, hidden = self.gru(u, None if state is None else state.unsqueeze(0))
        return y, hidden.squeeze(0)

    def init_state(self, batch_size: int) -> Tensor:
        return next(self.gru.parameters()).new_zeros(batch_size, self.d_model)


class LSTMMixer(Mixer[tuple[Tensor, Tensor]]):
    """One `nn.LSTM` layer of width d_model; its state is the hidden vector and the cell, [B, d_model] each.

    Example:
        >>> import torch
        >>> from shippo_ssm.models import LSTMMixer
        >>> LSTMMixer(8)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    takes_gaps = False

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)

    def run(self, u: Tensor, state: tuple[Tensor, Tensor] | None, segment: Segment) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, (hidden, cell) = self.lstm(u, None if state is None else (state[0].unsqueeze(0), state[1].unsqueeze(0)))
        return y, (hidden.squeeze(0), cell.squeeze(0))

    def init_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        zeros = next(self.lstm.parameters()).new_zeros(batch_size, self.d_model)
        return zeros, zeros


class FreeMixer(Mixer[ShippoState]):
    """decoder(memory(encoder(u))): free static bases, d_model x d_model each, around a `Shippo` with right = "none".

    Args:
        d_model: width.
        spec: the options of the layer inside; its right action is taken out.
    """

    takes_group = True
    takes_asked = True

    def __init__(self, d_model: int, spec: ShippoSpec, layer_idx: int | None = None) -> None:
        super().__init__(d_model)
        self.encoder = nn.Linear(d_model, d_model, bias=False)
        self.memory = Shippo(d_model, spec=replace(spec, right="none"), layer_idx=layer_idx)
        self.decoder = nn.Linear(d_model, d_model, bias=False)
        # Both bases start as the identity, so that the control starts as the layer it controls for.
        with torch.no_grad():
            nn.init.eye_(self.encoder.weight)
            nn.init.eye_(self.decoder.weight)

    def run(self, u: Tensor, state: ShippoState | None, segment: Segment) -> tuple[Tensor, ShippoState]:
        y, after = self.memory(self.encoder(u), state, segment, output_state=True)
        return self.decoder(y), after

    def init_state(self, batch_size: int) -> ShippoState:
        return self.memory.init_state(batch_size)


class AttentionCache(NamedTuple):
    """Keys and values of all tokens so far, [B, heads, T, d_head] each; keys are already turned by their position."""

    keys: Tensor
    values: Tensor


def rotate(x: Tensor, start: int, base: float = 10000.0) -> Tensor:
    """Turn channel pairs (i, i + d/2) of x [.., T, d] at position t by the angle t base^(-2i/d), for t = start, .."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    positions = torch.arange(start, start + x.shape[-2], device=x.device, dtype=torch.float32)
    angles = positions.unsqueeze(-1) * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class CausalAttention(Mixer[AttentionCache]):
    """softmax(q k^T / sqrt(d_head)) v over the past, with rotary positions.

    Queries and keys [B, heads, T, d_head] are turned by their absolute position; keys and values are appended to the cache of
    earlier segments. Unlike a recurrent state, the cache grows with every token.

    Args:
        d_model: width; a multiple of 2 n_heads.
        n_heads: number of heads.

    Example:
        >>> import torch
        >>> from shippo_ssm.models import CausalAttention
        >>> layer, u = CausalAttention(16, 2), torch.randn(1, 5, 16)
        >>> y, cache = layer(u[:, :4], output_state=True)
        >>> torch.allclose(layer.step(u[:, 4], cache)[0], layer(u)[:, 4], atol=1e-5)
        True
    """

    takes_gaps = False
    takes_asked = True

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model)
        for name, size in (("d_model", d_model), ("n_heads", n_heads)):
            expect_size("CausalAttention", name, size)
        if d_model % (2 * n_heads):
            raise ValueError(
                f"CausalAttention: `d_model` is {d_model} with n_heads = {n_heads}; expected a multiple of {2 * n_heads}"
            )
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def run(self, u: Tensor, state: AttentionCache | None, segment: Segment) -> tuple[Tensor, AttentionCache]:
        q, k, v = self.qkv_proj(u).unflatten(-1, (3, self.n_heads, self.d_head)).permute(2, 0, 3, 1, 4)
        past = 0 if state is None else state.keys.shape[2]
        q, k = rotate(q, past), rotate(k, past)
        if state is not None:
            k, v = torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2)
        if past == 0:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=u.device).tril(past)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out_proj(segment.at_asked(y.transpose(1, 2).flatten(-2))), AttentionCache(k, v)

    def init_state(self, batch_size: int) -> AttentionCache:
        empty = self.qkv_proj.weight.new_zeros(batch_size, self.n_heads, 0, self.d_head)
        return AttentionCache(empty, empty)


def transformer_block(d_model: int, n_heads: int, norm_eps: float = 1e-5) -> Block:
    """A causal pre-norm Transformer block: attention, then a GELU network of width 4 d_model."""
    attention = CausalAttention(d_model, n_heads)
    mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
    return Block(attention, mlp, norm_eps=norm_eps)
