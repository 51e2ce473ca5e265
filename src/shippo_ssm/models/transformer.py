"""The attention baseline: a causal pre-norm Transformer block with rotary positions and a key-value cache.

Data path: norm(u) [B, T, d_model] is projected to queries, keys and values [B, heads, T, d_head]; queries and keys are turned
by their absolute position; keys and values are appended to the cache of earlier segments; PyTorch's scaled dot-product
attention mixes them causally; a second residual branch is a GELU network of width 4 d_model. Unlike a recurrent state, the
cache grows with every token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d_head)) v over the past, with rotary positions.

    Args:
        d_model: width; a multiple of 2 n_heads.
        n_heads: number of heads.
    """

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        if d_model % (2 * n_heads):
            raise ValueError(
                f"CausalAttention: `d_model` is {d_model} with n_heads = {n_heads}; expected a multiple of {2 * n_heads}"
            )
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, u: Tensor, cache: AttentionCache | None = None) -> tuple[Tensor, AttentionCache]:
        """u [B, T, d_model] after what is in the cache; returns y [B, T, d_model] and the longer cache."""
        q, k, v = self.qkv_proj(u).unflatten(-1, (3, self.n_heads, self.d_head)).permute(2, 0, 3, 1, 4)
        past = 0 if cache is None else cache.keys.shape[2]
        q, k = rotate(q, past), rotate(k, past)
        if cache is not None:
            k, v = torch.cat([cache.keys, k], dim=2), torch.cat([cache.values, v], dim=2)
        if past == 0:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=u.device).tril(past)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out_proj(y.transpose(1, 2).flatten(-2)), AttentionCache(k, v)


class TransformerBlock(nn.Module):
    """u + attention(norm(u)), then + mlp(norm(.)), with the calls of a `ShippoBlock`.

    Args:
        d_model: width.
        n_heads: attention heads.
        norm_eps: epsilon of the norms.

    Example:
        >>> import torch
        >>> from shippo_ssm.models import TransformerBlock
        >>> block, u = TransformerBlock(16, 2), torch.randn(1, 5, 16)
        >>> y, cache = block(u[:, :4], output_state=True)
        >>> torch.allclose(block.step(u[:, 4], cache)[0], block(u)[:, 4], atol=1e-5)
        True
    """

    def __init__(self, d_model: int, n_heads: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.attention = CausalAttention(d_model, n_heads)
        self.mlp_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, u: Tensor, state: AttentionCache | None = None, *, output_state: bool = False) -> Any:
        """u [B, T, d_model]; returns y, or (y, cache) with `output_state=True`."""
        mixed, cache = self.attention(self.attention_norm(u), state)
        u = u + mixed
        u = u + self.mlp(self.mlp_norm(u))
        return (u, cache) if output_state else u

    def step(self, u: Tensor, state: AttentionCache) -> tuple[Tensor, AttentionCache]:
        """One token, u [B, d_model]."""
        y, cache = self(u.unsqueeze(1), state, output_state=True)
        return y.squeeze(1), cache

    def init_state(self, batch_size: int) -> AttentionCache:
        """An empty cache."""
        weight = self.attention.qkv_proj.weight
        empty = weight.new_zeros(batch_size, self.attention.n_heads, 0, self.attention.d_head)
        return AttentionCache(empty, empty)
