"""Context managers for any model with SHiPPO layers: replace R by I, zero the right suffix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from shippo_ssm.layers.controller import Controller
from shippo_ssm.layers.mixer import Mixer


@contextlib.contextmanager
def identity_right(model: nn.Module) -> Iterator[nn.Module]:
    """R -> I: every mixer inside `model` runs without its right action while the context lasts.

    Example:
        >>> import torch
        >>> from shippo_ssm.layers import Shippo, identity_right
        >>> layer, u = Shippo(16, d_state=8, backend="reference"), torch.randn(1, 5, 16)
        >>> with identity_right(layer):
        ...     y = layer(u)
        >>> torch.equal(y, layer(u))
        False
    """
    yield from _switch(model, Mixer, "use_right", False)


@contextlib.contextmanager
def zero_right_suffix(model: nn.Module) -> Iterator[nn.Module]:
    """Every controller inside `model` emits zero right coordinates while the context lasts; no weight is changed.

    For the split family zero coordinates are not the identity: its diagonal factors forget at rate softplus(0) = 0.69.
    `identity_right` is the intervention R -> I.
    """
    yield from _switch(model, Controller, "zero_suffix", True)


def _switch(model: nn.Module, kind: type[nn.Module], name: str, setting: bool) -> Iterator[nn.Module]:
    found = [module for module in model.modules() if isinstance(module, kind)]
    if not found:
        raise ValueError(f"`model` is a {type(model).__name__} without a {kind.__name__}; expected a model with SHiPPO layers")
    before = [getattr(module, name) for module in found]
    try:
        for module in found:
            setattr(module, name, setting)
        yield model
    finally:
        for module, value in zip(found, before):
            setattr(module, name, value)
