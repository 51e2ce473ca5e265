"""What the layer tests share: a layer whose controller really moves things, and operands for the cell."""

import pytest
import torch
from torch import nn

from shippo_ssm.layers import Shippo


def make_layer(right="split", **options) -> Shippo:
    """A small float64 layer with steps near one and right actions far from the identity, so that a slip would show."""
    settings = {"d_model": 12, "d_state": 8, "dt_min": 0.1, "dt_max": 1.0, "dtype": torch.float64} | options
    layer = Shippo(right=right, **settings)
    nn.init.normal_(layer.controller.scalar_proj.weight, std=0.5)
    if layer.controller.right_proj is not None:
        nn.init.normal_(layer.controller.right_proj.weight, std=0.3)
    return layer


def worst(first, second) -> float:
    """The largest difference between two states or tensors."""
    if isinstance(first, torch.Tensor):
        return (first - second).abs().max().item() if first.numel() else 0.0
    return max((worst(a, b) for a, b in zip(first, second, strict=True) if a is not None), default=0.0)


def gradients(layer, u, run) -> list[torch.Tensor]:
    """Gradients of a fixed functional of `run(u)` with respect to `u` and all parameters."""
    u = u.clone().requires_grad_()
    y = run(u)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=y.dtype)
    return list(torch.autograd.grad((y * weights).sum(), [u, *layer.parameters()]))


@pytest.fixture
def tools():
    class Tools:
        pass

    Tools.make_layer, Tools.worst, Tools.gradients = staticmethod(make_layer), staticmethod(worst), staticmethod(gradients)
    return Tools
