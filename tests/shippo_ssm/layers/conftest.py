"""What the layer tests share: a layer whose controller really moves things, and operands for the cell."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shippo_ssm.layers import Segment, Shippo


def make_layer(right="split", **options) -> Shippo:
    """A small float64 layer with steps near one, a convolution and right actions far from the identity: a slip would show."""
    settings = {"d_model": 12, "d_state": 8, "dt_min": 0.1, "dt_max": 1.0, "conv_init": "random", "dtype": torch.float64}
    settings |= options
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


def run_steps(layer, u):
    """The layer token by token, from `init_state`."""
    state, outputs = layer.init_state(u.shape[0]), []
    for t in range(u.shape[1]):
        y, state = layer.step(u[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def run_split(layer, u, place):
    """The layer in two segments."""
    first, state = layer(u[:, :place], output_state=True)
    second, state = layer(u[:, place:], state, output_state=True)
    return torch.cat([first, second], 1), state


def check_mixer(layer, batch=2, length=6) -> None:
    """What every mixer keeps: steps and segments give the whole; it is causal; every parameter gets a finite gradient; asked at
    few positions it gives the same outputs there, the same state and the same gradients."""
    u = torch.randn(batch, length, layer.d_model, dtype=torch.float64)
    whole, final = layer(u, output_state=True)
    assert torch.equal(layer(u), whole)
    for y, state in (run_steps(layer, u), run_split(layer, u, 1), run_split(layer, u, length - 2)):
        assert worst(y, whole) < 1e-9
        assert worst(state, final) < 1e-9
    later = u.clone()
    later[:, length // 2 :] += 1
    assert worst(layer(later)[:, : length // 2], whole[:, : length // 2]) < 1e-12
    for gradient in gradients(layer, u, layer):
        assert torch.isfinite(gradient).all()
    asked = torch.tensor([0, 2, length - 1, length, batch * length - 2])
    few = Segment(positions=asked)
    y, state = layer(u, None, few, output_state=True)
    assert worst(y, whole.flatten(0, 1)[asked]) < 1e-12
    assert worst(state, final) < 1e-12
    for found, expected in zip(
        gradients(layer, u, lambda u: layer(u, None, few)),
        gradients(layer, u, lambda u: layer(u).flatten(0, 1)[asked]),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=r"`u` is shape .*; expected \[B, T, d_model\]"):
        layer(torch.randn(batch, length, layer.d_model + 1, dtype=torch.float64))


@pytest.fixture
def tools():
    shared = (make_layer, worst, gradients, run_steps, run_split, check_mixer)
    return SimpleNamespace(**{function.__name__: function for function in shared})
