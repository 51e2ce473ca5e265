"""Control mixers beside SHiPPO, with its calls: a GRU, and a static encoder and decoder around a layer without right action."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shippo_ssm.layers import Shippo, ShippoState


class GRUMixer(nn.Module):
    """One `nn.GRU` layer of width d_model; its state is the hidden vector [B, d_model].

    Example:
        >>> import torch
        >>> from shippo_ssm.models import GRUMixer
        >>> GRUMixer(8)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.gru = nn.GRU(d_model, d_model, batch_first=True)

    def forward(self, u: Tensor, state: Tensor | None = None, *, output_state: bool = False) -> Any:
        """u [B, T, d_model]; returns y, or (y, hidden) with `output_state=True`."""
        y, hidden = self.gru(u, None if state is None else state.unsqueeze(0))
        return (y, hidden.squeeze(0)) if output_state else y

    def step(self, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token, u [B, d_model]."""
        y, hidden = self(u.unsqueeze(1), state, output_state=True)
        return y.squeeze(1), hidden

    def init_state(self, batch_size: int) -> Tensor:
        """Zeros [B, d_model]."""
        return next(self.gru.parameters()).new_zeros(batch_size, self.d_model)


class FreeMixer(nn.Module):
    """decoder(memory(encoder(u))): free static bases, d_model x d_model each, around a `Shippo` with right = "none".

    Args:
        d_model: width.
        options: further arguments of `Shippo`.
    """

    def __init__(self, d_model: int, **options: Any) -> None:
        super().__init__()
        self.encoder = nn.Linear(d_model, d_model, bias=False)
        self.memory = Shippo(d_model, right="none", **options)
        self.decoder = nn.Linear(d_model, d_model, bias=False)
        # Both bases start as the identity, so that the control starts as the layer it controls for.
        with torch.no_grad():
            nn.init.eye_(self.encoder.weight)
            nn.init.eye_(self.decoder.weight)

    def forward(self, u: Tensor, state: ShippoState | None = None, **call: Any) -> Any:
        """As `Shippo.forward`."""
        y = self.memory(self.encoder(u), state, **call)
        return (self.decoder(y[0]), y[1]) if call.get("output_state") else self.decoder(y)

    def step(self, u: Tensor, state: ShippoState) -> tuple[Tensor, ShippoState]:
        """As `Shippo.step`."""
        y, state = self.memory.step(self.encoder(u), state)
        return self.decoder(y), state

    def init_state(self, batch_size: int) -> ShippoState:
        """As `Shippo.init_state`."""
        return self.memory.init_state(batch_size)
