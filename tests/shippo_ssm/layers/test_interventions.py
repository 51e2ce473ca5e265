"""R -> I, the zeroed suffix, and the search for the first NaN."""

import pytest
import torch
from torch import nn

from shippo_ssm.layers import Shippo, ShippoBackbone, debug_nans, identity_right, zero_right_suffix


def test_identity_right_and_back(tools):
    layer = tools.make_layer("split")
    u = torch.randn(2, 7, 12, dtype=torch.float64)
    before = layer(u)
    with identity_right(layer):
        without = layer(u)
        y, _ = layer.step(u[:, 0], layer.init_state(2))
        assert torch.allclose(y, without[:, 0])
    assert torch.equal(layer(u), before)
    assert not torch.allclose(without, before)


def test_zero_suffix_is_zeroing_the_named_parameters(tools):
    layer = tools.make_layer("split")
    u = torch.randn(2, 7, 12, dtype=torch.float64)
    with zero_right_suffix(layer):
        zeroed = layer(u)
    assert not torch.allclose(zeroed, layer(u))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if ".right_" in name:
                parameter.zero_()
    assert torch.equal(layer(u), zeroed)


def test_switches_are_put_back_after_an_error(tools):
    layer = tools.make_layer("split")
    with pytest.raises(RuntimeError), identity_right(layer), zero_right_suffix(layer):
        raise RuntimeError
    assert layer.use_right
    assert not layer.controller.zero_suffix
    with pytest.raises(ValueError, match="without a Mixer"), identity_right(nn.Linear(2, 2)):
        pass


def test_debug_nans_names_the_first_layer():
    model = ShippoBackbone(8, 3, d_state=8)
    u = torch.randn(1, 4, 8)
    with debug_nans(model):
        model(u)
        with pytest.raises(FloatingPointError, match=r"input of `layers\.0\.norm`"):
            model(torch.full_like(u, float("nan")))
    mixer = list(model.layers)[1].mixer
    assert isinstance(mixer, Shippo)
    with torch.no_grad():
        mixer.in_proj.weight[0, 0] = float("inf")
    with debug_nans(model), pytest.raises(FloatingPointError, match=r"output of `layers\.1\.mixer\.in_proj` \(Linear\)"):
        model(u)
    assert not mixer.in_proj._forward_hooks
