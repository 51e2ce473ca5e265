"""A `Shippo` layer behind the calls of other projects: `mamba_ssm`'s `Mamba` and the layers of `fla`.

Each is the layer itself in a thin module: names and the place of the state are theirs, the numbers are ours. Where a stack of
one of those projects takes a class or a function that builds a layer, give it one of these.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shippo_ssm.layers import CellState, Shippo, ShippoState


class MambaShippo(nn.Module):
    """Shippo with the calls of `mamba_ssm.Mamba`: `forward(u, inference_params)`, `step`, `allocate_inference_cache`.

    The two tensors of its cache are written in place, as theirs are: `conv_state` [B, D, d_conv - 1] is the window of the
    convolution, `ssm_state` [B, G, ..] holds per group the memory and the last source. A call with an offset continues from
    the cache with any number of tokens.

    Args:
        d_model: width of input and output.
        use_fast_path: `False` takes the reference loop.
        dt_rank, dt_init, dt_scale, dt_init_floor: taken and not used, the controller projects to steps directly.
        layer_idx: place in the stack, needed with a cache.
        options: the fields of `ShippoSpec`; d_state, d_conv, expand, dt_min, dt_max, conv_bias and bias are among them.

    Example:
        >>> import torch
        >>> from shippo_ssm.models import MambaShippo
        >>> layer = MambaShippo(16, d_state=8, dt_rank="auto", layer_idx=0)
        >>> u, cache = torch.randn(2, 3, 16), layer.allocate_inference_cache(2, max_seqlen=3)
        >>> with torch.no_grad():
        ...     steps = [layer.step(u[:, t : t + 1], *cache)[0] for t in range(3)]
        >>> torch.allclose(torch.cat(steps, 1), layer(u), atol=1e-5)
        True
    """

    def __init__(
        self,
        d_model: int,
        *,
        use_fast_path: bool = True,
        dt_rank: int | str = "auto",
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        layer_idx: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if options.get("controller_conv"):
            raise ValueError("MambaShippo: `controller_conv` came; expected 0, the cache has one window; leave it out")
        options = options if use_fast_path else options | {"backend": "reference"}
        self.d_model, self.layer_idx = d_model, layer_idx
        self.mixer = Shippo(d_model, layer_idx=layer_idx, **options)

    def forward(self, hidden_states: Tensor, inference_params: Any = None, **kwargs: Any) -> Tensor:
        """y [B, T, d_model]; with `inference_params` the layer's cache is made or continued, by `seqlen_offset`."""
        if inference_params is None:
            return self.mixer(hidden_states, **kwargs)
        if self.layer_idx is None:
            raise ValueError("MambaShippo: `layer_idx` is None; expected the place in the stack with a cache; pass it")
        caches = inference_params.key_value_memory_dict
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(hidden_states.shape[0], 0)
        conv_state, ssm_state = caches[self.layer_idx]
        state = self._load(conv_state, ssm_state) if inference_params.seqlen_offset > 0 else None
        return self._run(hidden_states, state, conv_state, ssm_state)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One position [B, 1, d_model]; gives y [B, 1, d_model] and the two tensors, which it has written."""
        state = self._load(conv_state, ssm_state)
        return self._run(hidden_states, state, conv_state, ssm_state), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The cache of a sequence that has not begun, whatever `max_seqlen`; `dtype` is that of the window."""
        state = self.mixer.init_state(batch_size)
        conv_state = state.conv.mT if dtype is None else state.conv.mT.to(dtype)
        return conv_state.detach().clone(), self._pack(state.cell)

    def _run(self, u: Tensor, state: ShippoState | None, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        y, after = self.mixer(u, state, output_state=True)
        conv_state.copy_(after.conv.detach().mT)
        ssm_state.copy_(self._pack(after.cell))
        return y

    @staticmethod
    def _pack(cell: CellState) -> Tensor:
        return torch.cat([part.detach().flatten(2) for part in cell], dim=-1)

    def _load(self, conv_state: Tensor, ssm_state: Tensor) -> ShippoState:
        # Copies: the cache is written again while a graph may still hold what was read.
        shapes = self.mixer.state_shapes(ssm_state.shape[0])
        shapes = [shapes[name] for name in CellState._fields]
        parts = ssm_state.clone().split([math.prod(shape[2:]) for shape in shapes], dim=-1)
        cell = CellState(*(part.reshape(shape) for part, shape in zip(parts, shapes)))
        return ShippoState(conv_state.mT.clone(), cell)


class FlaShippo(nn.Module):
    """Shippo with the calls of a layer of `fla`: `(o, None, past_key_values) = layer(hidden_states, attention_mask, ..)`.

    The state lies in `past_key_values[layer_idx]`, under their names: the memory and the last source as "recurrent_state", the
    windows of the convolutions as "conv_state"; their cache reorders and moves both.

    Args:
        hidden_size: width of input and output.
        layer_idx: place in the stack, needed with a cache.
        options: the fields of `ShippoSpec`.

    Example:
        >>> import torch
        >>> from shippo_ssm.models import FlaShippo
        >>> o, attentions, past_key_values = FlaShippo(hidden_size=16, d_state=8)(torch.randn(2, 3, 16))
        >>> o.shape, attentions, past_key_values
        (torch.Size([2, 3, 16]), None, None)
    """

    def __init__(self, hidden_size: int, layer_idx: int | None = None, **options: Any) -> None:
        super().__init__()
        self.hidden_size, self.layer_idx = hidden_size, layer_idx
        self.mixer = Shippo(hidden_size, layer_idx=layer_idx, **options)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """o [B, T, hidden_size], no attentions, and the cache.

        Args:
            hidden_states: [B, T, hidden_size].
            attention_mask: [B, T] or, with a cache, [B, all positions so far], of 0 and 1.
            past_key_values: their cache, continued and updated where there is one.
            use_cache, output_attentions: taken as theirs are; a cache that comes is kept up, and there are no attentions.
            kwargs: `cu_seqlens` is used.
        """
        length, state = hidden_states.shape[1], None
        if past_key_values is not None:
            if self.layer_idx is None:
                raise ValueError(
                    "FlaShippo: `layer_idx` is None; expected the place in the stack, where the cache lies; pass it"
                )
            held = past_key_values[self.layer_idx] if len(past_key_values) > self.layer_idx else None
            if held is not None:
                conv, controller = held["conv_state"]
                state = ShippoState(conv, CellState(*held["recurrent_state"]), controller)
        mask = None if attention_mask is None else attention_mask[:, -length:]
        o, after = self.mixer(hidden_states, state, attention_mask=mask, cu_seqlens=kwargs.get("cu_seqlens"), output_state=True)
        if past_key_values is not None:
            windows, cell = (after.conv, after.controller), tuple(after.cell)
            past_key_values.update(recurrent_state=cell, conv_state=windows, layer_idx=self.layer_idx, offset=length)
        return o, None, past_key_values
