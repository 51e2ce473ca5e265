"""The layer: every way of running it gives the same numbers; its parameters, its starts, its refusals."""

import copy
import io
import time
from typing import Any, cast

import pytest
import torch
from torch import nn

from shippo_ssm.actions import DenseExp, SplitFlow
from shippo_ssm.layers import (
    PAPER_GEOMETRY,
    PAPER_START,
    Block,
    Controller,
    Shippo,
    ShippoBackbone,
    ShippoSpec,
    weight_decay_groups,
    zero_right_suffix,
)
from shippo_ssm.layers.states import detach, select
from shippo_ssm.scan import BACKENDS

RIGHTS = ("orthogonal", "dissipative", "split", "dense", "none")
VARIANTS = [
    {},
    {"write_rank": 2, "controller_conv": 3, "learnable_initial_state": False, "num_bc_groups": 2, "low_rank_right": True},
]


@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("options", VARIANTS)
def test_all_ways_agree(tools, right, options):
    """forward == step by step == split anywhere == left-padded == padded anywhere == packed; outputs, states and gradients."""
    layer = tools.make_layer(right, **options)
    batch, length = 2, 7
    u = torch.randn(batch, length, 12, dtype=torch.float64)
    whole, final = layer(u, output_state=True)
    expected = tools.gradients(layer, u, layer)

    padding = torch.randn(batch, 4, 12, dtype=torch.float64)
    left_mask = torch.cat([torch.zeros(batch, 4, dtype=torch.int64), torch.ones(batch, length, dtype=torch.int64)], 1)
    places = torch.tensor([[0, 2, 3, 4, 7, 9, 10], [1, 2, 5, 6, 7, 8, 9]])
    holes = torch.zeros(batch, 11, dtype=torch.bool).scatter(1, places, True)

    def left_padded(u):
        y, state = layer(torch.cat([padding, u], 1), attention_mask=left_mask, output_state=True)
        return y[:, 4:], state

    def right_padded(u):
        y, state = layer(torch.cat([u, padding], 1), attention_mask=left_mask.flip(1), output_state=True)
        return y[:, :length], state

    def scattered(u):
        wide = torch.randn(batch, 11, 12, dtype=torch.float64).scatter(1, places.unsqueeze(-1).expand(-1, -1, 12), u)
        y, state = layer(wide, attention_mask=holes, output_state=True)
        assert not y[~holes].any()
        return y[holes].view(batch, length, 12), state

    def packed(u):
        bounds = torch.tensor([0, length, batch * length])
        y, state = layer(u.reshape(1, -1, 12), cu_seqlens=bounds, output_state=True)
        return y.view(batch, length, 12), state

    ways = {f"split at {place}": (lambda u, place=place: tools.run_split(layer, u, place)) for place in range(length + 1)}
    ways |= {"steps": lambda u: tools.run_steps(layer, u), "left": left_padded, "right": right_padded}
    ways |= {"holes": scattered, "packed": packed}
    for name, way in ways.items():
        y, state = way(u)
        assert tools.worst(y, whole) < 1e-9, name
        assert tools.worst(state, final) < 1e-9, name
        if name in ("split at 3", "steps", "left", "holes", "packed"):
            got = tools.gradients(layer, u, lambda u, way=way: way(u)[0])
            assert tools.worst(got, expected) < 1e-9, name


@pytest.mark.parametrize("right", RIGHTS)
def test_prefill_then_decode_long(right):
    """4,096 tokens at once and 256 steps equal the full forward."""
    layer = Shippo(8, d_state=8, right=right, dtype=torch.float64)
    u = torch.randn(1, 4096 + 256, 8, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(u)
        y, state = layer(u[:, :4096], output_state=True)
        assert (y - whole[:, :4096]).abs().max() < 1e-9
        for t in range(4096, 4096 + 256):
            y, state = layer.step(u[:, t], state)
            assert (y - whole[:, t]).abs().max() < 1e-9


def test_decoding_does_not_grow_with_context():
    layer = ShippoBackbone(16, 2, d_state=8)

    def median_step(states):
        u, times = torch.randn(1, 16), []
        for _ in range(60):
            start = time.perf_counter()
            _, states = layer.step(u, states)
            times.append(time.perf_counter() - start)
        return sorted(times)[30], states

    def size(states):
        return sum(part.numel() for state in states for part in (state.conv, *state.cell))

    with torch.no_grad():
        _, short = layer(torch.randn(1, 4, 16), output_state=True)
        _, long = layer(torch.randn(1, 4096, 16), output_state=True)
        median_step(short)
        early, after_short = median_step(short)
        late, after_long = median_step(long)
    assert size(short) == size(long) == size(after_short) == size(after_long)
    assert late < 3 * early


def test_switched_off_is_the_layer_without_right(tools):
    layer, plain = tools.make_layer("split"), tools.make_layer("none")
    shared = {name: tensor for name, tensor in layer.state_dict().items() if "right" not in name}
    plain.load_state_dict(shared)
    layer.use_right = False
    u = torch.randn(2, 9, 12, dtype=torch.float64)
    assert torch.equal(layer(u), plain(u))


def test_r_equal_to_i_is_the_one_sided_layer(tools):
    """exp(0) = I goes through the whole transported path and changes nothing, not even a rounding."""
    layer, plain = tools.make_layer("dense", backend="reference"), tools.make_layer("none", backend="reference")
    plain.load_state_dict({name: tensor for name, tensor in layer.state_dict().items() if "right" not in name})
    u = torch.randn(2, 9, 12, dtype=torch.float64)
    with zero_right_suffix(layer):
        assert torch.equal(layer.right_actions(u), torch.eye(4, dtype=torch.float64).expand(2, 9, 6, 4, 4))
        assert torch.equal(layer(u), plain(u))
    assert not torch.allclose(layer(u), plain(u))


def test_family_objects():
    torch.manual_seed(1)
    by_name = Shippo(8, d_state=8, right="dense")
    torch.manual_seed(1)
    by_object = Shippo(8, d_state=8, right=DenseExp(4, bounded=True))
    u = torch.randn(1, 5, 8)
    assert torch.equal(by_name(u), by_object(u))
    learnable = Shippo(8, d_state=8, right=SplitFlow(4, rank=1))
    learnable(u).sum().backward()
    assert learnable.right.p.grad is not None
    with pytest.raises(ValueError, match="width"):
        Shippo(8, d_state=8, right=DenseExp(3))


@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("options", VARIANTS)
def test_every_parameter_gets_a_finite_gradient(right, options):
    layer = Block(Shippo(16, d_state=8, right=right, **options))
    layer(torch.randn(2, 10, 16)).pow(2).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("right", ["orthogonal", "dissipative", "dense", "structured", "split"])
def test_right_actions_start_at_the_identity(right):
    """Exactly, but for the diagonal of the paper's generator, which only comes close; a little around it by default."""
    u = torch.randn(2, 20, 64)

    def distance(**options) -> torch.Tensor:
        actions = Shippo(64, **options | {"right": right}).right_actions(u)
        assert actions is not None
        assert actions.shape == (2, 20, 32, 4, 4)
        return (actions - torch.eye(4)).abs()

    assert distance(right_std=0.0).max() <= (0.01 if right in ("split", "structured") else 0.0)
    assert 0.01 < distance().square().mean().sqrt() < 0.3
    assert distance(**PAPER_START).max() < 0.1


def test_starts():
    layer = Shippo(64, d_state=6, memory_length=1000.0)
    torch.testing.assert_close(layer.drift, -torch.logspace(-3, 0, 6).expand(32, 6))
    emission, _ = layer.controller(torch.zeros(1, 1, 128))
    torch.testing.assert_close(emission.step, torch.ones(1, 1, 32))
    x = torch.randn(2, 5, 128)
    assert torch.equal(layer.conv(x)[0], x)
    shifted = Shippo(64, write_rank=2, d_conv=2, conv_init="staggered").conv
    seen = shifted(torch.cat([x, x], -1))[0]
    assert torch.equal(seen[..., :64], x[..., :64])
    assert torch.equal(seen[:, 1:, 64:128], x[:, :-1, 64:])
    assert torch.equal(seen[..., :128], seen[..., 128:])
    assert torch.equal(layer.in_proj.weight[:128], torch.eye(64).repeat(2, 1))
    assert torch.equal(layer.controller.read_proj.weight, layer.controller.write_proj.weight)
    # A key reads what was written when it was the token before.
    later = Shippo(64, d_state=6, conv_init="staggered", read_init="next").controller
    assert torch.equal(later.read_proj.weight[:, :64], later.write_proj.weight[:, 64:])
    assert torch.equal(later.read_proj.weight[:, 64:], later.write_proj.weight[:, :64])
    value = layer.in_proj.weight[:128]
    torch.testing.assert_close(layer.out_proj.weight, value.mT * (layer.out_proj.weight.std() / value.std()))
    assert layer.out_proj.weight.std().item() == pytest.approx((3 * 128) ** -0.5, rel=1e-4)


def test_the_previous_start():
    options: dict[str, Any] = PAPER_START | {"dt_min": 0.002, "dt_max": 0.05}
    layer = Shippo(64, d_state=6, **options)
    assert torch.allclose(layer.drift, -torch.arange(1.0, 7.0).expand(32, 6))
    emission, _ = layer.controller(torch.zeros(1, 1, 128))
    assert emission.step.min() >= 0.002 * 0.999
    assert emission.step.max() <= 0.05 * 1.001
    assert emission.step.max() > 4 * emission.step.min()
    assert layer.read_norm is None
    assert layer.initial_memory is None


@pytest.mark.parametrize("scale", [0.03, 1.0, 1e3])
def test_what_is_read_has_one_scale(scale):
    """Whatever the memory holds, what is read out of it enters the gate with unit spread."""
    layer = Shippo(32, d_state=8, read_norm=True)
    seen = []
    assert layer.read_norm is not None
    assert layer.initial_memory is not None
    layer.read_norm.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        layer.initial_memory.mul_(scale)
        layer.controller.write_proj.weight.mul_(scale)
        layer(torch.randn(2, 10, 32))
    assert seen[0].square().mean().sqrt().item() == pytest.approx(1.0, rel=0.02)


def test_a_learnable_start_is_read_from_the_first_token():
    layer = Shippo(8, d_state=8, learnable_initial_state=True)
    plain = copy.deepcopy(layer)
    assert layer.initial_memory is not None
    assert plain.initial_memory is not None
    nn.init.zeros_(plain.initial_memory)
    u = torch.randn(1, 1, 8)
    assert not torch.allclose(layer(u), plain(u))
    assert torch.equal(layer.init_state(3).cell.memory[2], layer.initial_memory)


def test_exempt_parameters_stay_float32_and_take_no_decay():
    layer = Shippo(16, d_state=8, read_norm=True)
    names = {"drift_log", "skip", "initial_memory", "read_norm.weight", "controller.scalar_bias", "controller.right_bias"}
    before = layer.drift_log.detach().clone()
    for half in (layer.bfloat16(), Shippo(16, d_state=8, read_norm=True, dtype=torch.bfloat16)):
        kept = {name for name, parameter in half.named_parameters() if parameter.dtype == torch.float32}
        assert kept == names
        assert {name for name, parameter in half.named_parameters() if getattr(parameter, "_no_weight_decay", False)} == names
    assert torch.equal(layer.drift_log, before)
    y, state = layer(torch.randn(2, 5, 16, dtype=torch.bfloat16), output_state=True)
    assert y.dtype == torch.bfloat16
    assert state.cell.memory.dtype == torch.float32
    assert layer.double().drift_log.dtype == torch.float64
    decayed, exempt = weight_decay_groups(copy.deepcopy(layer), 0.1)
    assert len(exempt["params"]) == len(names)
    assert len(decayed["params"]) == len(list(layer.parameters())) - len(names)
    *_, right, right_spared = weight_decay_groups(layer, 0.1, right_lr=1e-4)
    weight, bias = layer.controller.right_parameters()
    assert right == {"params": [weight], "weight_decay": 0.1, "lr": 1e-4}
    assert right_spared == {"params": [bias], "weight_decay": 0.0, "lr": 1e-4}
    # Whatever replaces a parameter is marked again.
    assigned = Shippo(16, d_state=8, read_norm=True, device="meta")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    pickled = io.BytesIO()
    torch.save(layer, pickled)
    pickled.seek(0)
    for other in (assigned, copy.deepcopy(layer), torch.load(pickled, weights_only=False)):
        assert {name for name, parameter in other.named_parameters() if getattr(parameter, "_no_weight_decay", False)} == names


def test_autocast_keeps_the_recurrence_in_float32():
    layer, u = Shippo(16, d_state=8), torch.randn(2, 50, 16)
    exact = layer(u)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(u, output_state=True)
    assert [part.dtype for part in state.cell] == [torch.float32] * 3
    assert (y - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("dtype", "as_it_is"), [(torch.bfloat16, True), (torch.float16, False)])
def test_what_autocast_projects_goes_to_the_kernels_as_it_is(monkeypatch, dtype, as_it_is):
    """Writes and reads, by far the most of a scan's operands, are not cast on their way; the kernels know no float16."""
    layer, u, met = Shippo(16, d_state=8), torch.randn(1, 50, 16), []
    run = BACKENDS["fused"]

    def look(recurrence, *others):
        met.append((recurrence.write.dtype, recurrence.read.dtype, recurrence.value.dtype))
        return run(recurrence, *others)

    monkeypatch.setitem(BACKENDS, "fused", look)
    mask = torch.arange(50).ge(7).unsqueeze(0)
    for options in ({}, {"attention_mask": mask}, {"cu_seqlens": torch.tensor([0, 20, 50])}):
        weight = layer.controller.read_proj.weight
        (exact,) = torch.autograd.grad(layer(u, **options).square().sum(), [weight])
        met.clear()
        with torch.autocast("cpu", dtype):
            y, state = layer(u, **options, output_state=True)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), [weight])
        lowered = dtype if as_it_is else torch.float32
        assert met == [(torch.float32 if "attention_mask" in options else lowered, lowered, torch.float32)]
        assert [part.dtype for part in state.cell] == [torch.float32] * 3
        assert (gradient - exact).norm() < 0.05 * exact.norm()


def test_state_tools(tools):
    layer = tools.make_layer("split", controller_conv=3)
    u = torch.randn(3, 5, 12, dtype=torch.float64)
    _, state = layer(u, output_state=True)
    picked = state.reorder(torch.tensor([2, 0, 0, 1]))
    assert picked.batch_size == 4
    nxt = torch.randn(4, 12, dtype=torch.float64)
    y, _ = layer.step(nxt, picked)
    alone, _ = layer.step(nxt[2:3], state.reorder(torch.tensor([0])))
    assert torch.allclose(y[2], alone[0])
    assert state.cell.memory.requires_grad
    assert not any(part.requires_grad for part in (state.detach().conv, *state.detach().cell))
    assert tools.worst(state.to("cpu"), state) == 0
    model = ShippoBackbone(12, 2, d_state=8)
    _, states = model(torch.randn(3, 4, 12), output_state=True)
    moved = select(detach(states), torch.tensor([1]))
    assert [state.batch_size for state in moved] == [1, 1]


def test_backbone_ways_agree_and_checkpointing_is_exact(tools):
    model = ShippoBackbone(12, 2, d_state=8, dtype=torch.float64)
    u = torch.randn(2, 6, 12, dtype=torch.float64)
    whole, _ = model(u, output_state=True)
    y, _ = tools.run_steps(model, u)
    assert tools.worst(y, whole) < 1e-9
    y, _ = tools.run_split(model, u, 2)
    assert tools.worst(y, whole) < 1e-9
    expected = tools.gradients(model, u, model)
    model.layers.recompute = True
    assert tools.worst(tools.gradients(model, u, model), expected) == 0


def test_the_controller_never_sees_the_memory(tools):
    """Controller compatibility: what is emitted, hence R, does not change with the memory."""
    layer = tools.make_layer("split")
    u = torch.randn(1, 4, 12, dtype=torch.float64)
    _, state = layer(u, output_state=True)
    other = state._replace(cell=state.cell._replace(memory=torch.randn_like(state.cell.memory)))
    assert torch.equal(layer.right_actions(u, state), layer.right_actions(u, other))
    assert not torch.equal(layer(u, state), layer(u, other))
    assert not torch.equal(layer.right_actions(u, state), layer.right_actions(u))


def test_causality(tools):
    layer = tools.make_layer("dense", controller_conv=3)
    u = torch.randn(1, 8, 12, dtype=torch.float64)
    changed = u.clone()
    changed[:, 5:] += 1
    y, z = layer(u), layer(changed)
    assert torch.equal(y[:, :5], z[:, :5])
    assert not torch.allclose(y[:, 5], z[:, 5])


def test_the_economical_layer():
    """One set of write and read vectors, scalars of a bottleneck: at most 2.2 times the weights of a Mamba layer (438 k)."""
    count = {
        name: sum(p.numel() for p in Shippo(256, device="meta", **options).parameters())
        for name, options in {"default": {}, "language": {"preset": "language"}, "paper": PAPER_GEOMETRY}.items()
    }
    assert count["default"] < 2.2 * 438_000
    assert count["language"] < 1.7 * 438_000
    assert count["paper"] == 5_268_224
    layer = Shippo(16, preset="language", right="dense", d_state=4)
    assert (layer.spec.right, layer.spec.conv_init, layer.spec.d_state) == ("dense", "staggered", 4)
    (block,) = ShippoBackbone(16, 1, preset="tracking").layers
    assert isinstance(block.mixer, Shippo)
    assert block.mixer.spec == ShippoSpec()
    assert Shippo(16, 4, preset="language").spec.d_state == 4


@pytest.mark.parametrize(("low_rank_right", "tolerance"), [(False, 0.1), (True, 0.25)])
def test_right_actions_start_with_the_same_spread_behind_a_bottleneck(low_rank_right, tolerance):
    layer = Shippo(64, low_rank_right=low_rank_right, controller_rank=32)
    coords = layer.controller(torch.randn(4, 64, 128))[0].coords
    assert coords.std().item() == pytest.approx(0.02 * 128**0.5, rel=tolerance)


def test_groups_that_share_vectors_are_groups_with_equal_ones(tools):
    """Q sets are the layer of the paper with the projections of each set repeated."""
    shared, paper = tools.make_layer("dense", num_bc_groups=2), tools.make_layer("dense", num_bc_groups=None)
    weights = shared.state_dict()
    for name in ("controller.write_proj.weight", "controller.read_proj.weight"):
        weights[name] = weights[name].unflatten(0, (2, 8)).repeat_interleave(3, 0).flatten(0, 1)
    paper.load_state_dict(weights)
    u = torch.randn(2, 9, 12, dtype=torch.float64)
    assert tools.worst(shared(u), paper(u)) < 1e-12


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("dropout", "Shippo: `dropout` is not an option; the layer has none inside; use Block"),
        ("bidirectional", "use Bidirectional"),
        ("lengths", "attention_mask="),
        ("input_size", "the width is `d_model`"),
        ("dt", "layer\\(u, dt=...\\)"),
        ("d_stat", "did you mean 'd_state'"),
        ("colour", "Shippo: `colour` is not an option; expected one of d_state, d_conv, "),
    ],
)
def test_unknown_options_say_what_to_do(option, message):
    options: dict[str, Any] = {option: 1}
    for kind in (TypeError, ValueError):
        with pytest.raises(kind, match=message):
            Shippo(8, **options)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("lengths", "Shippo: `lengths` is not an option; call the layer with attention_mask="),
        ("h0", "layer\\(u, state\\)"),
        ("cu_seqlen", "did you mean 'cu_seqlens'"),
        ("colour", "expected one of state, output_state, attention_mask, "),
    ],
)
def test_a_call_with_an_unknown_option_says_what_to_do(option, message):
    options: dict[str, Any] = {option: 1}
    with pytest.raises(TypeError, match=message):
        Shippo(8, d_state=2)(torch.zeros(1, 2, 8), **options)


def test_packed_and_nested_tensors_are_refused_in_words():
    rows = [torch.zeros(3, 8), torch.zeros(2, 8)]
    for u, kind in (
        (torch.nn.utils.rnn.pack_sequence(rows), "PackedSequence"),
        (torch.nested.nested_tensor(rows, layout=torch.jagged), "nested tensor"),
    ):
        with pytest.raises(ValueError, match=f"`u` is a {kind}; expected .* pad it and pass `attention_mask`"):
            Shippo(8, d_state=2)(cast(Any, u))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 8, "num_bc_groups": 3}, "`num_bc_groups` is 3 with 4 transport groups; expected a divisor of 4"),
        ({"d_model": 8, "controller_rank": 0}, "`controller_rank` is 0"),
        ({"d_model": 8, "controller_rank": None, "low_rank_right": True}, "`low_rank_right` is True without"),
        ({"d_model": 8, "preset": "text"}, "`preset` is 'text'; expected one of 'tracking', 'language'"),
        ({"d_model": 9, "expand": 1, "group_width": 4}, "`group_width` is 4 with d_model \\* expand = 9"),
        ({"d_model": 8, "group_width": 0}, "`group_width` is 0"),
        ({"d_model": 8, "expand": 0.3}, "`expand` is 0.3"),
        ({"d_model": 0}, "`d_model` is 0"),
        ({"d_model": 8, "d_state": -1}, "`d_state` is -1"),
        ({"d_model": 8, "right": "spilt"}, "`right` is .spilt."),
        ({"d_model": 8, "drift_init": "random"}, "`drift_init` is 'random'"),
        ({"d_model": 8, "dt_min": 0.1, "dt_max": 0.01}, "0 < dt_min <= dt_max"),
        ({"d_model": 8, "write_rank": 0}, "`write_rank` is 0"),
        ({"d_model": 8, "conv_init": "zeros"}, "`conv_init` is 'zeros'; expected 'identity' or 'staggered' or 'random'"),
        ({"d_model": 8, "memory_length": 0.5}, "`memory_length` is 0.5"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Shippo(**options)


def test_bad_calls():
    layer, other = Shippo(8, d_state=8), Shippo(8, d_state=9)
    u = torch.randn(2, 6, 8)
    cases = [
        ({"u": torch.randn(2, 6, 9)}, "`u` is shape \\(2, 6, 9\\)"),
        ({"u": torch.zeros(2, 6, 8, dtype=torch.int64)}, "embed token ids"),
        ({"u": u, "attention_mask": torch.ones(2, 6)}, "`attention_mask` has dtype torch.float32"),
        ({"u": u, "attention_mask": torch.ones(2, 5, dtype=torch.int64)}, "expected \\[B, T\\] = \\(2, 6\\)"),
        ({"u": u, "attention_mask": torch.full((2, 6), 2)}, "entries other than 0 and 1"),
        ({"u": u, "cu_seqlens": torch.tensor([0, 6])}, "B = 2; expected B = 1"),
        ({"u": u[:1], "cu_seqlens": torch.tensor([0, 5])}, "boundaries from 0 to T = 6"),
        ({"u": u[:1], "cu_seqlens": torch.tensor([0, 6]), "attention_mask": torch.ones(1, 6).bool()}, "came with `cu_seqlens`"),
        ({"u": u, "state": other.init_state(2)}, "`memory` of `state` has shape .* another model"),
        ({"u": u, "state": layer.init_state(3)}, "another model or batch"),
        ({"u": u, "state": layer.init_state(2).cell}, "expected a ShippoState"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            layer(**arguments)
    with pytest.raises(ValueError, match="`u` is shape"):
        layer.step(u, layer.init_state(2))
    with pytest.raises(ValueError, match="another model"):
        layer.step(u[:, 0], other.init_state(2))
    with pytest.raises(ValueError, match="`states` has 1 entries; expected 2"):
        ShippoBackbone(8, 2, d_state=8)(u, [layer.init_state(2)])
    with pytest.raises(ValueError, match="`spec` came with right"):
        Shippo(8, spec=ShippoSpec(), right="none")


def test_the_right_suffix_is_found_by_name():
    layer = Shippo(128, right="split")
    suffix = [name for name, _ in layer.named_parameters() if ".right_" in name]
    assert suffix == ["controller.right_bias", "controller.right_proj.weight"]
    assert layer.controller.right_proj is not None
    assert layer.controller.right_proj.out_features == 1024
    assert isinstance(layer.controller, Controller)
    assert not [name for name, _ in Shippo(128, right="none").named_parameters() if "right" in name]
