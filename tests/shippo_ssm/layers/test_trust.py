"""Hostile inputs: odd states in processes of their own, changes behind a cached plan, empty batches, negative views."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from shippo_ssm.actions import SplitFlow
from shippo_ssm.layers import CausalAttention, CellState, Shippo, shippo_cell
from shippo_ssm.layers.attention import AttentionCache
from shippo_ssm.layers.linear import Linear
from shippo_ssm.layers.rows import RMSNorm, ShortConv, scaled
from tests.shippo_ssm.layers.test_decode import make, ratio

MIXED = """
import torch
from shippo_ssm import Shippo
layer = Shippo(64, d_state=32).eval()
u = torch.randn(4, 64)
with torch.no_grad():
    _, state = layer.step(u, layer.init_state(4))
    cell = state.cell
    odd = [cell._replace(**{{name: getattr(cell, name).to({dtype}) for name in names}}) for names in {names}]
    for cell in odd:
        bad = state._replace(cell=cell)
        try:
            for _ in range(200):
                _, bad = layer.step(u, bad, in_place=True)
        except ValueError as error:
            assert "of `state` is" in str(error), error
        else:
            raise SystemExit("taken")
"""


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.int8", "torch.float64"])
def test_a_state_of_mixed_dtypes_is_refused(dtype):
    """In a process of its own: it fails on any signal."""
    script = MIXED.format(dtype=dtype, names=[("write", "value"), ("value",), ("memory",)])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:], done.stdout)


class Doubled(nn.Linear):
    """A linear layer with another forward."""

    def forward(self, input):
        return 2 * super().forward(input)


class Halved(SplitFlow):  # pyright: ignore[reportGeneralTypeIssues]
    """A family with another forward."""

    def forward(self, *arguments):
        return 0.5 * super().forward(*arguments)


class Owning(nn.Linear):
    """A linear layer whose forward is torch's, on another weight."""

    @property
    def weight(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        weight = self._parameters["weight"]
        assert weight is not None
        return 2 * weight


def as_attribute(module, weight):
    del module.weight
    module.weight = weight


def restride(tensor, shape, strides):
    tensor.data = tensor.data.as_strided(shape, strides)


CHANGES: dict[str, Any] = {
    "transposed": lambda layer: restride(layer.out_proj.weight, (10, 20), (1, 10)),
    "one row for all": lambda layer: restride(layer.in_proj.weight, tuple(layer.in_proj.weight.shape), (0, 1)),
    "one tap for all": lambda layer: restride(layer.conv.weight, tuple(layer.conv.weight.shape), (0, 1)),
    "expanded": lambda layer: restride(layer.controller.scalar_bias, (4, 5), (0, 1)),
    "bias": lambda layer: restride(layer.out_proj.bias, (10,), (0,)),
    "negative": lambda layer: setattr(layer.skip, "data", torch._neg_view(layer.skip.data)),
    "class": lambda layer: setattr(layer.out_proj, "__class__", Doubled),
    "class of the family": lambda layer: setattr(layer.right, "__class__", Halved),
    "eps": lambda layer: setattr(layer.read_norm, "eps", 0.5),
    "class with a weight of its own": lambda layer: setattr(layer.out_proj, "__class__", Owning),
    "a norm without a weight": lambda layer: setattr(layer.read_norm, "weight", None),
    "a weight that is no parameter": lambda layer: as_attribute(layer.out_proj, 2 * layer.out_proj.weight),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_a_first_step_are_seen(name):
    layer, u = make("split", bias=True), torch.randn(2, 10)
    _, state = layer.step(u)
    before = layer.step(u, state)[0]
    CHANGES[name](layer)
    with torch.enable_grad():
        expected, after = layer.step(u, state)
    y, ours = layer.step(u, state)
    assert ratio(before, expected) > 1e-3, "the change makes no difference"
    assert ratio(y, expected) < 1e-5
    assert ratio(ours.cell.memory, after.cell.memory) < 1e-5


def test_a_bound_is_fixed_at_construction():
    """A kernel has it built in, so that it cannot be flipped behind the back of a plan."""
    with pytest.raises(AttributeError):
        make("split").right.bounded = False  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
@pytest.mark.parametrize("change", ["transposed", "one row for all", "class"])
def test_changes_of_a_head_are_seen(change):
    """A linear layer by itself, as models use it, has no plan that could be stale."""
    head: Any = Linear(10, 10)
    u = torch.randn(2, 10)
    head(u)
    if change == "class":
        head.__class__ = Doubled
        expected = 2 * torch.nn.functional.linear(u, head.weight, head.bias)
    else:
        restride(head.weight, (10, 10), (1, 10) if change == "transposed" else (0, 1))
        expected = torch.nn.functional.linear(u, head.weight, head.bias)
    assert torch.allclose(head(u), expected, atol=1e-6)


@torch.no_grad()
def test_global_hooks_and_patched_classes_are_seen(monkeypatch):
    layer, u, head = make(), torch.randn(2, 10), Linear(10, 8)
    before, heard = layer.step(u)[0], []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *rest: heard.append(type(module).__name__))
    try:
        layer.step(u)
    finally:
        handle.remove()
    assert {"Linear", "ShortConv", "Controller", "NoDecayNorm"} <= set(heard)
    assert torch.equal(layer.step(u)[0], before)
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 0 * forward(self, x))
    assert not layer.step(u)[0].any()
    assert not head(u).any()


@torch.no_grad()
def test_parts_of_a_quantised_weight_may_be_replaced():
    quantization = pytest.importorskip("torchao.quantization")
    layer: Any = Shippo(32, d_state=8).eval()
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    u = torch.randn(1, 32)
    first, weight = layer.step(u)[0], layer.out_proj.weight
    if not hasattr(weight, "qdata"):
        pytest.skip("a torchao without Int8Tensor")
    setattr(weight, "qdata", torch.zeros_like(getattr(weight, "qdata")))  # noqa: B009, B010
    assert first.any()
    assert not layer.step(u)[0].any()


@torch.no_grad()
@pytest.mark.parametrize("change", ["one scale", "scales apart", "float numbers", "scaled inputs"])
def test_a_quantised_weight_is_looked_at_before_every_step(change):
    quantization = pytest.importorskip("torchao.quantization")
    layer: Any = Shippo(32, d_state=8).eval()
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    u, weight = torch.randn(1, 32), layer.out_proj.weight
    if not hasattr(weight, "act_pre_scale"):
        pytest.skip("a torchao without Int8Tensor")
    before, scale = layer.step(u)[0], weight.scale
    if change == "one scale":
        weight.scale = torch.ones(1, 1)
    elif change == "scales apart":
        weight.scale = torch.stack([2 * scale[:, 0], torch.zeros(32)], 1)[:, :1]
    elif change == "float numbers":
        weight.qdata = weight.qdata.float() + 20
    else:
        weight.act_pre_scale = torch.tensor(2.0)
    with torch.enable_grad():
        expected = layer.step(u)[0]
    assert ratio(before, expected) > 1e-3, "the change makes no difference"
    assert ratio(layer.step(u)[0], expected) < 1e-5


DEFAULT_DEVICE = """
import torch
from shippo_ssm import Shippo
from shippo_ssm.layers.linear import Linear
layer, head, u = Shippo(16, d_state=8).eval(), Linear(16, 16), torch.randn(2, 16)
with torch.no_grad():
    y, state = layer.step(u)
    expected = [y, layer.step(u, state)[0], head(u), layer(u.unsqueeze(1), output_state=True)[0]]
    torch.set_default_device("meta")
    answers = [layer.step(u)[0], layer.step(u, state)[0], head(u), layer(u.unsqueeze(1), output_state=True)[0]]
assert all(map(torch.equal, answers, expected))
torch.utils.checkpoint.checkpoint(layer, u.unsqueeze(1), use_reentrant=False).sum().backward()
"""


def test_a_default_device_is_not_that_of_the_operands():
    """In a process of its own: addresses on another device end it."""
    done = subprocess.run([sys.executable, "-c", DEFAULT_DEVICE], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])


@pytest.mark.parametrize("grad", [False, True])
def test_training_kernels_look_at_their_weights(grad):
    """Weights of other strides give torch's numbers, those of other sizes its errors."""
    with torch.set_grad_enabled(grad):
        u, norm = torch.randn(3, 16), RMSNorm(16, eps=1e-5)
        for strides in ((2,), (0,)):
            restride(norm.weight, (16,), (1,))
            norm.weight.data = torch.randn(32).as_strided((16,), strides)
            assert torch.allclose(norm(u), nn.functional.rms_norm(u, (16,), norm.weight, 1e-5), atol=1e-6)
        with pytest.raises(RuntimeError, match="shape"):
            norm(torch.randn(3, 32))
        conv = ShortConv(16, 4)
        for size in (15, 32):
            conv.weight.data = torch.randn(4, size)
            with pytest.raises(RuntimeError, match="size"):
                conv(u.unsqueeze(1), torch.zeros(3, 3, 16))


def test_caches_of_attention_are_checked():
    layer, u = CausalAttention(16, 2), torch.randn(2, 5, 16)
    _, cache = layer(u, output_state=True)
    keys, values, positions = cache
    odd: list[Any] = [tuple(cache), cache._replace(keys=keys.tolist()), AttentionCache(keys[:1], values[:1], positions[:1])]
    odd += [cache._replace(positions=wrong) for wrong in (positions[:1], positions.float())]
    odd += [cache._replace(keys=wrong) for wrong in (keys.to("meta"), keys.to(torch.int8), keys[:, :, 1:], keys[..., 1:])]
    for state in odd:
        with pytest.raises(ValueError, match="CausalAttention: `state`"):
            layer.step(u[:, 0], state)


@pytest.mark.parametrize("grad", [False, True])
def test_an_empty_batch_gives_empty_tensors(grad):
    with torch.set_grad_enabled(grad):
        cases: list[dict[str, Any]] = [{}, {"write_rank": 2}, {"controller_conv": 3}, {"right": "none"}, {"right": "split"}]
        for options in cases:
            layer: Any = Shippo(16, d_state=4, **options)
            u = torch.randn(0, 5, 16, requires_grad=grad)
            y, state = layer(u, output_state=True)
            assert y.shape == (0, 5, 16)
            y_t, after = layer.step(u[:, 0], state)
            assert y_t.shape == (0, 16)
            assert after.cell.memory.shape == (0, 8, 4, 4)
            assert layer.step(u[:, 0])[0].shape == (0, 16)
            if grad:
                (y.sum() + y_t.sum()).backward()
                assert u.grad is not None
                assert u.grad.shape == u.shape
                assert layer.in_proj.weight.grad is not None
                assert not layer.in_proj.weight.grad.any()


def test_an_empty_batch_of_the_cell():
    sizes = [(0, 3, 2, 4), (0, 3, 2, 5), (0, 3, 2, 5), (0, 3, 2), (0, 3, 2), (2, 5), (0, 3, 2, 4, 4)]
    operands = [torch.randn(size, requires_grad=True) for size in sizes]
    for backend in ("auto", "reference", "chunked", "associative"):
        y, state = shippo_cell(*operands, output_final_state=True, backend=backend)
        assert y.shape == (0, 3, 2, 4)
        assert isinstance(state, CellState)
        assert [tuple(tensor.shape) for tensor in state] == [(0, 2, 5, 4), (0, 2, 5), (0, 2, 4)]
        gradients = torch.autograd.grad(y.sum() + state.memory.sum(), operands)
        assert [gradient.shape for gradient in gradients] == [operand.shape for operand in operands]


@torch.no_grad()
def test_negative_views_are_numbers():
    x, weight = torch.randn(6, 4), torch.randn(6)
    assert torch.equal(scaled(torch._neg_view(x), weight)[0], scaled(-x, weight)[0])
    assert torch.equal(scaled(x, torch._neg_view(weight))[0], scaled(x, -weight)[0])
    layer, u = make(), torch.randn(2, 10)
    _, state = layer.step(u)
    negative = state._replace(conv=torch._neg_view(-state.conv), cell=CellState(*(torch._neg_view(-t) for t in state.cell)))
    expected = layer.step(u, state)[0]
    assert torch.equal(layer.step(u, negative)[0], expected)
    assert torch.allclose(layer.step(torch._neg_view(-u), negative)[0], expected, atol=1e-6)
    head = Linear(10, 8)
    assert torch.allclose(head(torch._neg_view(-u)), head(u), atol=1e-6)
