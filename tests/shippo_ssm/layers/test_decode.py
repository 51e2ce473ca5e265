"""The decode step: equal to the forward pass, whatever is cut, carried, written over, hooked, offloaded or traced."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shippo_ssm.actions import Lie
from shippo_ssm.layers import Shippo, ShippoBackbone, decode, linear, states
from shippo_ssm.layers.mixer import ALL_STATES

# One geometry for all, so that a kernel is compiled once; 5 groups are no whole number of lanes, 6 slots no whole vector.
SIZES: dict[str, Any] = {"d_model": 10, "d_state": 6, "group_width": 4}


def make(right="orthogonal", dtype=torch.float32, **options):
    """A layer far from its start: every parameter matters."""
    torch.manual_seed(0)
    chosen: dict[str, Any] = SIZES | {"right": right} | options
    layer = Shippo(**chosen)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.to(dtype)


def ratio(ours, theirs):
    return float((ours - theirs).double().norm() / theirs.double().norm()) if theirs.numel() else 0.0


def steps(layer, u, state, **options):
    outputs = []
    for position in u.unbind(1):
        y, state = layer.step(position, state, **options)
        outputs.append(y)
    return torch.stack(outputs, 1), state


@pytest.fixture
def counted(monkeypatch):
    """Counts the calls of the compiled cell."""
    calls = []
    run = decode._run_cell
    monkeypatch.setattr(decode, "_run_cell", lambda *arguments: (calls.append(1), run(*arguments))[1])
    return calls


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"right": "orthogonal"},
        {"right": "split", "write_rank": 2, "read_norm": False},
        {"right": "orthogonal", "controller_conv": 3, "d_conv": 1},
        {"right": Lie(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)) / 4), "conv_bias": False},
    ],
    ids=str,
)
def test_steps_are_the_forward_pass_after_any_cut(options, counted):
    layer = make(**options)
    u, tolerance = torch.randn(3, 7, 10), 1e-5
    whole, last = layer(u, output_state=True)
    for cut in (0, 1, 4, 7):
        y, state = layer(u[:, :cut], output_state=True)
        before = states.clone(state)
        later, after = steps(layer, u[:, cut:], state) if cut < 7 else (u[:, :0], state)
        assert ratio(torch.cat([y, later], 1), whole) < tolerance
        for (name, ours), (_, theirs) in zip(states.named_tensors(after), states.named_tensors(last), strict=True):
            assert ratio(ours, theirs) < tolerance, name
        # What was given is left alone, unless it is the caller's.
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(states.named_tensors(state), states.named_tensors(before)))
    # A first segment of one token is a step as well.
    assert len(counted) == 7 + (1 + 6) + 3
    again, owned = steps(layer, u, layer.init_state(3), in_place=True)
    fresh, _ = steps(layer, u, None)
    assert torch.equal(again, fresh)
    assert ratio(again, whole) < tolerance
    kept = owned.cell.memory
    assert layer.step(u[:, 0], owned, in_place=True)[1].cell.memory is kept


@torch.no_grad()
@pytest.mark.parametrize("right", ["structured", "dissipative"])
def test_other_exponentials_agree(right, counted):
    layer, u = make(right), torch.randn(2, 5, 10)
    assert ratio(steps(layer, u, None)[0], layer(u)) < 1e-5
    assert counted


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("right", ["split", "dense", "none"])
def test_ten_thousand_steps_are_the_forward_pass(right, dtype, tolerance):
    layer = make(right, dtype)
    u = torch.randn(1, 10_000, 10, dtype=dtype)
    whole, last = layer(u, output_state=True)
    y, state = steps(layer, u, layer.init_state(1), in_place=True)
    assert ratio(y, whole) < tolerance
    assert ratio(y[:, -100:], whole[:, -100:]) < tolerance
    assert ratio(state.cell.memory, last.cell.memory) < tolerance


@torch.no_grad()
@pytest.mark.parametrize("controller_conv", [0, 2])
def test_the_state_after_every_position(controller_conv):
    layer, u = make(controller_conv=controller_conv), torch.randn(2, 5, 10)
    before = layer(u[:, :2], output_state=True)[1]
    y, every = layer(u[:, 2:], before, ALL_STATES, output_state=True)
    assert ratio(y, layer(u)[:, 2:]) < 1e-5
    state = before
    for t in range(3):
        _, state = layer.step(u[:, 2 + t], state)
        for (name, ours), (_, theirs) in zip(states.named_tensors(states.at(every, t)), states.named_tensors(state)):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), (t, name)


@torch.no_grad()
def test_bfloat16_steps(counted):
    layer, u = make(dtype=torch.bfloat16), torch.randn(2, 6, 10)
    exact = make()(u)
    y, state = steps(layer, u.bfloat16(), None)
    assert counted
    assert y.dtype == torch.bfloat16
    assert state is not None
    assert state.cell.memory.dtype == torch.float32
    assert ratio(y, exact) < 0.05


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 4e-3)], ids=str
)
def test_a_product_is_the_linear_layers(dtype, tolerance):
    """Any number of tokens, rows that are no whole blocks, columns that are no whole vectors, with and without bias."""
    for tokens, rows, columns in ((1, 8, 5), (1, 13, 70), (2, 20, 40), (9, 21, 7), (linear.MAX_TOKENS, 8, 33)):
        linears = [linear.Linear(columns, rows + i, bias=i % 2 == 0).to(dtype) for i in range(4)]
        x = torch.randn(tokens, columns, dtype=dtype)
        expected = torch.cat([layer.double()(x.double()) for layer in copy.deepcopy(linears)], 1)
        weights = linear.weights_of(linears)
        assert weights is not None
        assert ratio(linear.product(weights, x), expected) < tolerance, (tokens, rows, columns)
        assert torch.equal(linears[0](x.unsqueeze(0))[0], linear.product(weights, x)[:, :rows])
    assert linear.weights_of([linear.Linear(5, 7)]) is None


def test_a_linear_layer_is_torchs_where_it_must_be(monkeypatch):
    """Gradients, other dtypes, autocast and many tokens; and its errors are torch's."""
    monkeypatch.setattr(linear, "product", lambda *arguments: pytest.fail("ours"))
    head, x = linear.Linear(16, 8), torch.randn(3, 16, requires_grad=True)
    head(x).sum().backward()
    assert head.weight.grad is not None
    with torch.no_grad():
        head(torch.randn(linear.MAX_TOKENS + 1, 16))
        assert head(torch.randn(0, 16)).shape == (0, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert head(x).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="shapes"):
            head(torch.randn(3, 15))
        with pytest.raises(RuntimeError, match="dtype"):
            head(torch.randn(3, 16, dtype=torch.float64))


@torch.no_grad()
def test_whatever_becomes_of_the_weights_is_seen():
    """What is remembered between tokens is given up when a weight is replaced, moved, loaded or switched off."""
    layer, u = make(), torch.randn(2, 10)
    first = layer.step(u)[0]
    assert decode.cached_plan(layer) is decode.cached_plan(layer)
    assert torch.equal(layer.step(u)[0], first)
    other = copy.deepcopy(layer)
    assert torch.equal(other.step(u)[0], first)
    other.controller.read_proj.weight = nn.Parameter(torch.zeros_like(layer.controller.read_proj.weight))
    assert not torch.equal(other.step(u)[0], first)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(other.step(u)[0], first)
    other.controller.write_proj.weight.mul_(2)
    assert torch.equal(layer.step(u)[0], other.step(u)[0])
    assert not torch.equal(layer.step(u)[0], first)
    other.add_module("out_proj", nn.Sequential(other.out_proj, nn.Identity()))
    assert ratio(other.step(u)[0], layer.step(u)[0]) < 1e-6
    assert ratio(layer.double().step(u.double())[0], other.step(u)[0]) < 1e-5
    again = layer.float().step(u)[0]
    layer.use_right = False
    assert not torch.equal(layer.step(u)[0], again)
    # What is remembered keeps no layer alive.
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
    with torch.inference_mode():
        make().step(u)
    with torch.enable_grad():
        fresh = make()
        with torch.inference_mode():
            fresh.step(u)
        fresh(u.unsqueeze(1)).sum().backward()
        assert fresh.controller.write_proj.weight.grad is not None


@torch.no_grad()
def test_nobody_who_listens_is_passed_over(counted):
    u = torch.randn(2, 10)
    for name in ("in_proj", "conv", "controller", "controller.read_proj", "right", "read_norm", "out_proj"):
        layer, heard = make(), []
        expected = layer.step(u)[0]
        layer.get_submodule(name).register_forward_hook(lambda *arguments, heard=heard: heard.append(1))
        assert ratio(layer.step(u)[0], expected) < 1e-5
        assert heard, name
    # The root of a model that is stepped is called as well: FSDP2 gathers its weights there.
    model, heard = ShippoBackbone(10, 1, d_state=6), []
    model.register_forward_pre_hook(lambda *arguments: heard.append(1))
    model.step(u)
    assert heard


def test_offloaded_weights_step():
    accelerate = pytest.importorskip("accelerate")
    u = torch.randn(2, 10)
    with torch.no_grad():
        torch.manual_seed(0)
        model = ShippoBackbone(10, 2, d_state=6)
        expected, after = model.step(u, model.init_state(2))
        accelerate.cpu_offload(model, execution_device="cpu")
        assert model.get_parameter("layers.0.mixer.drift_log").is_meta
        y, state = model.step(u, model.init_state(2))
        assert ratio(y, expected) < 1e-5
        assert ratio(model.step(u, state)[0], model.step(u, after)[0]) < 1e-5


@torch.no_grad()
def test_compiled_step():
    layer, u = make(), torch.randn(2, 10)
    state = layer.init_state(2)
    expected, after = layer.step(u, state)
    compiled = torch.compile(lambda u, state: layer.step(u, state), backend="aot_eager", fullgraph=True)
    y, ours = compiled(u, state)
    assert torch.allclose(y, expected, atol=1e-6)
    assert torch.allclose(ours.cell.memory, after.cell.memory, atol=1e-6)
    assert torch.equal(state.cell.memory, layer.init_state(2).cell.memory)


def test_gradients_take_the_differentiable_path(counted):
    layer, u = make(), torch.randn(2, 10, requires_grad=True)
    layer.step(u)[0].sum().backward()
    assert u.grad is not None
    assert not counted
