"""The `Shippo` layer with the calls of the layers of `fla` (flash-linear-attention)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shippo_ssm.layers import CellState, Shippo, ShippoState


class FlaShippo(nn.Module):
    """Shippo with the calls of a layer of `fla`: `(o, None, past_key_values) = layer(hidden_states, attention_mask, ..)`.

    The state is in `past_key_values[layer_idx]`: memory and last source as "recurrent_state", the windows of the convolutions
    as "conv_state". Their cache reorders and moves both.

    Args:
        hidden_size: width of input and output.
        layer_idx: index in the stack, required with a cache.
        options: the fields of `ShippoSpec`.

    Example:
        >>> import torch
        >>> from shippo_ssm.integrations.fla import FlaShippo
        >>> o, attentions, past_key_values = FlaShippo(hidden_size=16, d_state=8)(torch.randn(2, 3, 16))
        >>> o.shape, attentions, past_key_values
        (torch.Size([2, 3, 16]), None, None)
    """

    def __init__(self, hidden_size: int, layer_idx: int | None = None, **options: Any) -> None:
        super().__init__()
        self.hidden_size, self.layer_idx = hidden_size, layer_idx
        self.mixer = Shippo(hidden_size, layer_idx=layer_idx, **options)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None,
        use_cache: bool | None = False, output_attentions: bool | None = False, **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:  # fmt: skip
        """o [B, T, hidden_size], no attentions, and the cache.

        Args:
            hidden_states: [B, T, hidden_size].
            attention_mask: [B, T] or, with a cache, [B, all positions so far], of 0 and 1.
            past_key_values: an fla cache to continue from and to update.
            use_cache, output_attentions: ignored; a cache that is passed is always updated.
            kwargs: `cu_seqlens` and `dt` [B, T] are used.
        """
        length, state = hidden_states.shape[1], None
        if past_key_values is not None:
            if self.layer_idx is None:
                raise ValueError("FlaShippo: `layer_idx` is None; expected an index in the stack with a cache; pass it")
            held = past_key_values[self.layer_idx] if len(past_key_values) > self.layer_idx else None
            if held is not None:
                conv, controller = held["conv_state"]
                state = ShippoState(conv, CellState(*held["recurrent_state"]), controller)
        mask = None if attention_mask is None else attention_mask[:, -length:]
        told = {name: kwargs.get(name) for name in ("cu_seqlens", "dt")}
        o, after = self.mixer(hidden_states, state, attention_mask=mask, output_state=True, **told)
        if past_key_values is not None:
            windows, cell = (after.conv, after.controller), tuple(after.cell)
            past_key_values.update(recurrent_state=cell, conv_state=windows, layer_idx=self.layer_idx, offset=length)
        return o, None, past_key_values
