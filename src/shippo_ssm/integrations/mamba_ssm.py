"""The `Shippo` layer with the calls of `mamba_ssm.Mamba`, for stacks that take a mixer class."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shippo_ssm.layers import CellState, Shippo, ShippoState


class MambaShippo(nn.Module):
    """Shippo with the calls of `mamba_ssm.Mamba`: `forward(u, inference_params)`, `step`, `allocate_inference_cache`.

    The two tensors of its cache are written in place: `conv_state` [B, D, d_conv - 1] is the window of the convolution,
    `ssm_state` [B, ..] holds the memory and the last source of a row.

    Args:
        d_model: width of input and output.
        use_fast_path: `False` selects the reference loop.
        dt_rank, dt_init, dt_scale, dt_init_floor: ignored; the controller projects to steps directly.
        layer_idx: index in the stack, required with a cache.
        options: the fields of `ShippoSpec`; d_state, d_conv, expand, dt_min, dt_max, conv_bias and bias are among them.

    Example:
        >>> import torch
        >>> from shippo_ssm.integrations.mamba_ssm import MambaShippo
        >>> layer = MambaShippo(16, d_state=8, dt_rank="auto", layer_idx=0)
        >>> u, cache = torch.randn(2, 3, 16), layer.allocate_inference_cache(2, max_seqlen=3)
        >>> with torch.no_grad():
        ...     steps = [layer.step(u[:, t : t + 1], *cache)[0] for t in range(3)]
        >>> torch.allclose(torch.cat(steps, 1), layer(u), atol=1e-5)
        True
    """

    def __init__(
        self, d_model: int, *, use_fast_path: bool = True, dt_rank: int | str = "auto", dt_init: str = "random",
        dt_scale: float = 1.0, dt_init_floor: float = 1e-4, layer_idx: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if options.get("controller_conv"):
            raise ValueError("MambaShippo: `controller_conv` is set; expected 0, since the cache has one window; leave it out")
        options = options if use_fast_path else options | {"backend": "reference"}
        self.d_model, self.layer_idx = d_model, layer_idx
        self.mixer = Shippo(d_model, layer_idx=layer_idx, **options)

    def forward(self, hidden_states: Tensor, inference_params: Any = None, **kwargs: Any) -> Tensor:
        """y [B, T, d_model]; with `inference_params`, create the layer's cache or continue from it (`seqlen_offset` > 0).

        `kwargs` are those of `Shippo.forward`, such as `dt` [B, T].
        """
        if inference_params is None:
            return self.mixer(hidden_states, **kwargs)
        if self.layer_idx is None:
            raise ValueError("MambaShippo: `layer_idx` is None; expected an index in the stack with a cache; pass it")
        caches = inference_params.key_value_memory_dict
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(hidden_states.shape[0], 0)
        conv_state, ssm_state = caches[self.layer_idx]
        state = self._load(conv_state, ssm_state) if inference_params.seqlen_offset > 0 else None
        return self._run(hidden_states, state, conv_state, ssm_state, **kwargs)

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor, dt: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One position [B, 1, d_model], `dt` [B, 1]; y [B, 1, d_model] and the two cache tensors, updated in place."""
        state = self._load(conv_state, ssm_state)
        return self._run(hidden_states, state, conv_state, ssm_state, dt=dt), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The cache before the first position; its size does not depend on `max_seqlen`. `dtype` is that of the window."""
        state = self.mixer.init_state(batch_size)
        conv_state = state.conv.mT if dtype is None else state.conv.mT.to(dtype)
        return conv_state.detach().clone(), self._pack(state.cell)

    def _run(self, u: Tensor, state: ShippoState | None, conv_state: Tensor, ssm_state: Tensor, **kwargs: Any) -> Tensor:
        y, after = self.mixer(u, state, output_state=True, **kwargs)
        conv_state.copy_(after.conv.detach().mT)
        ssm_state.copy_(self._pack(after.cell))
        return y

    @staticmethod
    def _pack(cell: CellState) -> Tensor:
        return torch.cat([part.detach().flatten(1) for part in cell], dim=-1)

    def _load(self, conv_state: Tensor, ssm_state: Tensor) -> ShippoState:
        # Copies: the cache is overwritten later, while a graph may still need what was read.
        shapes = [self.mixer.state_shapes[name] for name in CellState._fields]
        parts = ssm_state.clone().split([math.prod(shape) for shape in shapes], dim=-1)
        cell = CellState(*(part.unflatten(-1, shape) for part, shape in zip(parts, shapes)))
        return ShippoState(conv_state.mT.clone(), cell)
