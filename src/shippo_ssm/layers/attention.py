"""Causal attention with rotary positions: the layer that hybrids mix in, and the Transformer of the baselines.

Data path: u [B, T, d_model] is projected to queries, keys and values [B, heads, T, d_head]; queries and keys are rotated by
their positions, which count the real tokens of a row; keys and values of earlier segments come first. Packed sequences run as
a padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm._expect import expect_size
from shippo_ssm.layers.mixer import Mixer, Segment
from shippo_ssm.layers.states import describe
from shippo_ssm.scan.packing import packing_of

# The kinds of layers in a hybrid, by transformers' names.
LAYER_TYPES = ("shippo", "full_attention", "sliding_attention")


def resolve_layer_types(op: str, num_layers: int, layer_types: Sequence[str] | None, attention_every: int | None) -> list[str]:
    """The kind of every layer, checked: as given, or "full_attention" for each `attention_every`-th one, else "shippo"."""
    if attention_every is not None:
        expect_size(op, "attention_every", attention_every, "at least 2, or None", 2)
    every = attention_every or num_layers + 1
    regular = ["shippo" if (index + 1) % every else "full_attention" for index in range(num_layers)]
    if layer_types is None:
        return regular
    if len(layer_types) != num_layers or set(layer_types) - set(LAYER_TYPES) or "shippo" not in layer_types:
        expected = f"{num_layers} of {', '.join(map(repr, LAYER_TYPES))}, at least one of them 'shippo'"
        raise ValueError(f"{op}: `layer_types` is {list(layer_types)}; expected {expected}")
    if attention_every is not None and list(layer_types) != regular:
        raise ValueError(f"{op}: `layer_types` and `attention_every` differ; expected one of them; leave the other out")
    return list(layer_types)


class AttentionCache(NamedTuple):
    """Keys (with rotary positions) and values of the tokens so far."""

    keys: Tensor
    """[B, heads, K, d_head]."""
    values: Tensor
    """[B, heads, K, d_head]."""
    positions: Tensor
    """[B, K], -1 at padding."""

    __repr__ = describe


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary positions: rotate channel pairs (i, i + d/2) of x [B, heads, T, d] by t base^(-2i/d) at positions t [B, T]."""
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    rates = base ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = positions[:, None, :, None].to(dtype) * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class CausalAttention(Mixer[AttentionCache]):
    """softmax(q k^T / sqrt(d_head)) v over the past, with rotary positions.

    Keys and values are appended to the cache of earlier segments, which grows with every token up to `window` tokens.
    Attention knows the order of tokens only: a `dt` of the segment is not used.

    Args:
        d_model: width, a multiple of 2 n_heads.
        n_heads: number of heads.
        window: tokens that a query sees, itself included; `None` for all.
        bias: whether the projections have a bias.

    Example:
        >>> import torch
        >>> from shippo_ssm.layers import CausalAttention
        >>> layer, u = CausalAttention(16, 2), torch.randn(1, 5, 16)
        >>> y, cache = layer(u[:, :4], output_state=True)
        >>> torch.allclose(layer.step(u[:, 4], cache)[0], layer(u)[:, 4], atol=1e-5)
        True
    """

    supports_all_states = True
    supports_positions = True
    supports_dt = True

    def __init__(self, d_model: int, n_heads: int, window: int | None = None, bias: bool = False) -> None:
        super().__init__(d_model)
        for name, size in (("d_model", d_model), ("n_heads", n_heads)):
            expect_size("CausalAttention", name, size)
        if window is not None:
            expect_size("CausalAttention", "window", window, "at least 2 tokens, or None", 2)
        if d_model % (2 * n_heads):
            raise ValueError(f"CausalAttention: `d_model` is {d_model}; expected a multiple of {2 * n_heads} for its heads")
        self.n_heads, self.d_head, self.window = n_heads, d_model // n_heads, window
        self.qkv_proj = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)

    def project(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [B, heads, T, d_head] each."""
        q, k, v = self.qkv_proj(u).unflatten(-1, (3, self.n_heads, self.d_head)).permute(2, 0, 3, 1, 4)
        return rotate(q, positions), rotate(k, positions), v

    def run(self, u: Tensor, state: AttentionCache | None, segment: Segment) -> tuple[Tensor, AttentionCache]:
        if segment.cu_seqlens is not None:
            packing = packing_of(segment.cu_seqlens)
            mask = packing.pad(torch.ones_like(u[..., 0], dtype=torch.bool))
            y, state = self.run(packing.pad(u), state, Segment(mask, return_all_states=segment.return_all_states))
            return segment.at_positions(packing.unpad(y)), state
        fresh = state is None
        if state is None:
            state = self.init_state(len(u), u)
        else:
            self._check_cache(u, state)
        past, length = state.positions.shape[1], u.shape[1]
        real = segment.mask if segment.mask is not None else torch.ones_like(u[..., 0], dtype=torch.bool)
        places = torch.arange(past + length, device=u.device)
        counted = real.cumsum(1) + F.pad(state.positions, (1, 0), value=-1).amax(1, keepdim=True)
        q, k, v = self.project(u, counted)
        keys, values = torch.cat([state.keys.to(k), k], dim=2), torch.cat([state.values.to(v), v], dim=2)
        held = torch.cat([state.positions, torch.where(real, counted, -1)], dim=1)
        if fresh and segment.mask is None and (self.window is None or length <= self.window):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            ages = counted.unsqueeze(-1) - held.unsqueeze(1)
            visible = (held >= 0).unsqueeze(1) & (ages >= 0)
            if self.window is not None:
                visible &= ages < self.window
            # A padded query sees its own key: a softmax over nothing is NaN.
            visible |= places == places[past:, None]
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible.unsqueeze(1))
        y = self.out_proj(segment.at_positions(y.transpose(1, 2).flatten(-2)))
        if segment.mask is not None:
            y = torch.where(segment.at_positions(segment.mask).unsqueeze(-1), y, 0)
        if segment.return_all_states:
            # After position t the later keys are padding.
            keys, values = (part.expand(length, *part.shape) for part in (keys, values))
            held = torch.where((places > places[past:, None]).unsqueeze(1), -1, held)
        elif self.window is not None and past + length >= self.window:
            latest = held.topk(self.window - 1, dim=1).indices
            keys, values = (part.take_along_dim(latest[:, None, :, None], 2) for part in (keys, values))
            held = held.gather(1, latest)
        return y, AttentionCache(keys, values, held)

    def _check_cache(self, u: Tensor, state: AttentionCache) -> None:
        if not isinstance(state, AttentionCache) or not all(isinstance(part, Tensor) for part in state):
            raise ValueError(f"CausalAttention: `state` is a {type(state).__name__}; expected an AttentionCache of tensors")
        keys, values, positions = state
        held = positions.shape[-1] if positions.ndim else 0
        shapes = [(len(u), self.n_heads, held, self.d_head)] * 2 + [(len(u), held)]
        kinds = keys.is_floating_point() and values.is_floating_point() and positions.dtype == torch.int64
        if [tuple(part.shape) for part in state] != shapes or not kinds or {part.device for part in state} != {u.device}:
            came = ", ".join(f"{tuple(part.shape)} {part.dtype} on {part.device}" for part in state)
            expected = f"floating keys and values and int64 positions of shapes {shapes} on {u.device}"
            raise ValueError(f"CausalAttention: `state` has {came}; expected {expected}; make one with init_state(batch_size)")

    def init_state(self, batch_size: int, like: Tensor | None = None) -> AttentionCache:
        like = self.qkv_proj.weight if like is None else like
        empty = like.new_zeros(batch_size, self.n_heads, 0, self.d_head)
        return AttentionCache(empty, empty, like.new_zeros(batch_size, 0, dtype=torch.int64))
