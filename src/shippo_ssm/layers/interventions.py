"""Context managers for any model with SHiPPO layers: replace R by I, zero the right suffix, find the first NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shippo_ssm._private import tree_leaves
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


@contextlib.contextmanager
def debug_nans(model: nn.Module) -> Iterator[nn.Module]:
    """Raise a `FloatingPointError` that names the first module inside `model` that receives or gives a NaN or infinity.

    Example:
        >>> import torch
        >>> from shippo_ssm.layers import Shippo, debug_nans
        >>> layer = Shippo(16, d_state=8, backend="reference")
        >>> with debug_nans(layer):
        ...     layer(torch.full((1, 3, 16), float("nan")))
        Traceback (most recent call last):
        ...
        FloatingPointError: NaN or infinity in the input of `in_proj` (Linear), 48 of 48 entries, shape (1, 3, 16)
    """
    handles, names = [], {module: name or type(model).__name__ for name, module in model.named_modules()}

    def check(module: nn.Module, where: str, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            bad = int((~torch.isfinite(tensor)).sum()) if isinstance(tensor, Tensor) and tensor.is_floating_point() else 0
            if bad:
                raise FloatingPointError(
                    f"NaN or infinity in the {where} of `{names[module]}` ({type(module).__name__}), {bad} of {tensor.numel()} "
                    f"entries, shape {tuple(tensor.shape)}"
                )

    def check_input(module: nn.Module, args: Any, kwargs: Any) -> None:
        # The input is looked at where it is used first, in a leaf: a container would only repeat it.
        if not list(module.children()):
            check(module, "input", (args, kwargs))

    try:
        for module in names:
            handles.append(module.register_forward_pre_hook(check_input, with_kwargs=True))
            handles.append(module.register_forward_hook(lambda module, args, output: check(module, "output", output)))
        yield model
    finally:
        for handle in handles:
            handle.remove()
