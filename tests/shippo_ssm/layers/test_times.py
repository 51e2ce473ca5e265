"""Times between samples: a factor of every step, the same in every way of running."""

from typing import Any

import numpy as np
import pytest
import torch

from shippo_ssm.layers import Bidirectional, Block, Shippo, ShippoBackbone, decode, lift, states
from shippo_ssm.layers.mixer import Segment
from shippo_ssm.models import GRUMixer, LSTMMixer, SequenceConfig, SequenceModel

LIFTS = ["legs", "legt", "s4d"]


def signal(times, width=12):
    """A smooth signal [1, T, width] at `times`."""
    rates = torch.linspace(0.5, 3.0, width, dtype=torch.float64)
    return torch.sin(times[:, None] * rates + rates).unsqueeze(0)


def irregular(batch, length, seed=0):
    return torch.rand(batch, length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2


def smooth_layer(right="dense"):
    """A layer that sees single samples, so that its memory has a limit in continuous time."""
    torch.manual_seed(3)
    layer = Shippo(12, d_state=8, d_conv=1, right=right, dt_min=0.3, dt_max=1.0, dtype=torch.float64)
    torch.nn.init.normal_(layer.controller.scalar_proj.weight, std=0.5)
    if layer.controller.right_proj is not None:
        torch.nn.init.normal_(layer.controller.right_proj.weight, std=0.3)
    return layer


@pytest.mark.parametrize("right", ["orthogonal", "dissipative", "split", "structured", "dense", "none"])
def test_a_fine_grid_and_a_random_part_of_it_give_the_same_memory(right):
    """The cell is of order one where the controller varies: halving the gaps halves the difference."""
    layer, span, count = smooth_layer(right), 4.0, 4096
    fine = torch.linspace(0, span, count + 1, dtype=torch.float64)
    generator, errors = np.random.default_rng(0), []

    @torch.no_grad()
    def memory(times):
        dt = torch.diff(times, prepend=times[:1]).unsqueeze(0)
        return layer(signal(times), dt=dt, output_state=True)[1].cell.memory

    limit = memory(fine)
    for every in (32, 16, 8):
        kept = np.sort(generator.choice(np.arange(1, count), count // every - 1, replace=False))
        part = memory(fine[[0, *kept, count]])
        errors.append(float((part - limit).norm() / limit.norm()))
    assert errors[-1] < 0.01
    assert errors[0] / errors[2] > 2.5, errors


@pytest.mark.parametrize("measure", LIFTS)
def test_a_lift_is_exact_for_held_inputs(measure):
    """The input is held over a step, so a step in two parts with the same input is one step, whatever the parts."""
    layer = lift(measure, "none", d_model=8, d_state=6).double()
    u, dt = torch.randn(2, 9, 8, dtype=torch.float64), irregular(2, 9) + 0.1
    share = irregular(2, 9, seed=1) / 2
    twice = torch.stack([dt * share, dt * (1 - share)], 2).flatten(1)
    y, state = layer(u, dt=dt, output_state=True)
    z, other = layer(u.repeat_interleave(2, 1), dt=twice, output_state=True)
    torch.testing.assert_close(z[:, 1::2], y, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(other.memory, state.memory, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(layer(u, dt=torch.ones(2, 9, dtype=torch.float64)), layer(u), rtol=1e-12, atol=1e-12)


MIXERS = {
    "shippo": lambda: smooth_layer("split"),
    "backbone": lambda: ShippoBackbone(12, 2, d_state=8, dtype=torch.float64),
    "lift": lambda: lift("legs", "dense", d_model=12, d_state=6).double(),
}


@pytest.mark.parametrize("name", MIXERS)
def test_all_ways_agree(tools, name):
    """Steps, segments, padding with NaN times, and packing; and a zero time leaves the memory alone."""
    layer, u, dt = MIXERS[name](), torch.randn(2, 7, 12, dtype=torch.float64), irregular(2, 7)
    whole, final = layer(u, dt=dt, output_state=True)
    assert tools.worst(layer(u), whole) > 1e-3
    assert tools.worst(layer(u, dt=torch.ones_like(dt)), layer(u)) < 1e-12
    state = None
    for t in range(7):
        y, state = layer.step(u[:, t], state, dt=dt[:, t])
        assert tools.worst(y, whole[:, t]) < 1e-9
    assert tools.worst(state, final) < 1e-9
    _, state = layer(u[:, :3], dt=dt[:, :3], output_state=True)
    assert tools.worst(layer(u[:, 3:], state, dt=dt[:, 3:]), whole[:, 3:]) < 1e-9
    places = torch.tensor([[0, 2, 3, 4, 7, 9, 10], [1, 2, 5, 6, 7, 8, 9]])
    mask = torch.zeros(2, 11, dtype=torch.bool).scatter(1, places, True)
    times = torch.full((2, 11), torch.nan, dtype=torch.float64).scatter(1, places, dt)
    wide = torch.randn(2, 11, 12, dtype=torch.float64).scatter(1, places.unsqueeze(-1).expand(-1, -1, 12), u)
    y, state = layer(wide.requires_grad_(), attention_mask=mask, dt=times, output_state=True)
    assert tools.worst(y[mask].view(2, 7, 12), whole) < 1e-9
    assert tools.worst(state, final) < 1e-9
    assert torch.isfinite(torch.autograd.grad(y.sum(), [wide, *layer.parameters()], allow_unused=True)[0]).all()
    y, state = layer(u.reshape(1, 14, 12), cu_seqlens=torch.tensor([0, 7, 14]), dt=dt.reshape(1, 14), output_state=True)
    assert tools.worst(y.view(2, 7, 12), whole) < 1e-9
    assert tools.worst(state, final) < 1e-9
    _, after = layer.step(u[:, 0], state, dt=torch.zeros(2, dtype=torch.float64))
    before = dict(states.named_tensors(state))
    kept = [name for name in before if name.endswith("memory")]
    assert kept
    assert all(tools.worst(tensor, before[name]) < 1e-14 for name, tensor in states.named_tensors(after) if name in kept)


def test_gradients_of_times():
    layer, u = smooth_layer("dense"), torch.randn(1, 4, 12, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda dt: layer(u, dt=dt), irregular(1, 4).requires_grad_(), fast_mode=True)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"right": "dense"}, {"low_rank_right": True, "num_bc_groups": None}], ids=str)
def test_the_decode_kernels_take_times(options, monkeypatch):
    calls, run = [], decode._run_cell
    monkeypatch.setattr(decode, "_run_cell", lambda *arguments: (calls.append(1), run(*arguments))[1])
    layer, u, dt = Shippo(16, d_state=8, **options), torch.randn(3, 5, 16), irregular(3, 5).float()
    whole, state = layer(u, dt=dt, output_state=True)[0], None
    for t in range(5):
        y, state = layer.step(u[:, t], state, dt=dt[:, t], in_place=True)
        assert (y - whole[:, t]).norm() < 1e-5 * whole.norm()
    assert len(calls) == 5
    assert state is not None
    _, every = layer(u, None, Segment(return_all_states=True, dt=dt), output_state=True)
    assert len(calls) == 6
    torch.testing.assert_close(every.cell.memory[-1], state.cell.memory, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["associative", "chunked", "fused"])
def test_all_backends_take_times(tools, backend):
    layers = [Shippo(16, d_state=8, backend=name, dtype=torch.float64) for name in (backend, "reference")]
    layers[0].load_state_dict(layers[1].state_dict())
    u, dt = torch.randn(2, 21, 16, dtype=torch.float64), irregular(2, 21)
    dt[:, 5] = 0
    times = [dt.clone().requires_grad_() for _ in layers]
    found, wanted = (layer(u, dt=time) for layer, time in zip(layers, times))
    assert tools.worst(found, wanted) < 1e-9
    gradients = [torch.autograd.grad(y.sin().sum(), time)[0] for y, time in zip((found, wanted), times)]
    assert tools.worst(*gradients) < 1e-9


def test_a_sequence_model_takes_times():
    """Whole, in steps and padded; the last position of a pooled model; and one without time refuses them."""
    options: dict[str, Any] = {"d_model": 12, "n_layers": 2, "d_state": 8, "vocab_size": 11}
    model = SequenceModel(SequenceConfig(**options)).double()
    ids, dt = torch.randint(11, (2, 6)), irregular(2, 6)
    whole, states = model(ids, dt=dt), None
    assert (whole - model(ids)).abs().max() > 1e-3
    for t in range(6):
        y, states = model.step(ids[:, t], states, dt=dt[:, t])
        torch.testing.assert_close(y, whole[:, t], rtol=1e-9, atol=1e-9)
    mask, times = torch.ones(2, 8).long(), torch.full((2, 8), torch.nan, dtype=torch.float64)
    mask[:, :2], times[:, 2:] = 0, dt
    padded = model(torch.nn.functional.pad(ids, (2, 0)), attention_mask=mask, dt=times)
    torch.testing.assert_close(padded[:, 2:], whole, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="`dt` is a float"):
        model.step(ids[:, 0], dt=1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="this layer has no time"):
        SequenceModel(SequenceConfig(**options, mixer="gru"))(ids, dt=dt.float())


def test_export_with_times():
    layer = Shippo(16, d_state=8, backend="reference").eval()
    u, dt = torch.randn(2, 6, 16), irregular(2, 6).float()
    exported = torch.export.export(layer, (u,), {"dt": dt}).module()
    torch.testing.assert_close(exported(u, dt=dt + 0.5), layer(u, dt=dt + 0.5), rtol=1e-5, atol=1e-6)


def test_layers_without_time_and_bad_times():
    u, dt = torch.randn(2, 3, 8), torch.ones(2, 3)
    for layer in (GRUMixer(8), LSTMMixer(8), Block(GRUMixer(8))):
        with pytest.raises(ValueError, match="`dt` came; expected `None`, this layer has no time"):
            layer(u, dt=dt)
    layer = Shippo(8, d_state=4)
    for bad, message in (
        (dt[:, :2], r"`dt` is shape \(2, 2\) and dtype torch.float32; expected floating \[B, T\] = \(2, 3\)"),
        (dt.long(), "dtype torch.int64"),
        (1.0, "`dt` is a float"),
        (-dt, "negative, infinite or NaN entries"),
        (dt * torch.nan, "negative, infinite or NaN entries"),
        (dt * torch.inf, "negative, infinite or NaN entries"),
        (1e300 * dt.double(), "negative, infinite or NaN entries"),
        (dt.to("meta"), "`dt` is on meta"),
        (dt.to_sparse(), "`dt` has layout torch.sparse_coo"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(u, dt=bad)


@pytest.mark.parametrize("name", ["shippo", "lift"])
def test_both_directions(tools, name):
    """The backward mixer sees every sequence reversed, with the times between the same samples; padding and packing agree."""
    torch.manual_seed(0)
    layer, u, dt = Bidirectional(MIXERS[name](), MIXERS[name]()), torch.randn(2, 6, 12, dtype=torch.float64), irregular(2, 6)
    times = torch.cat([dt[:, :1], dt[:, 1:].flip(1)], 1)
    whole = layer(u, dt=dt)
    alone = layer.forward_mixer(u, dt=dt) + layer.backward_mixer(u.flip(1), dt=times).flip(1)
    assert tools.worst(whole, alone) < 1e-12
    assert tools.worst(layer(u), layer.forward_mixer(u) + layer.backward_mixer(u.flip(1)).flip(1)) < 1e-12
    bounds = torch.tensor([0, 6, 6, 12])
    assert tools.worst(layer(u.view(1, 12, 12), cu_seqlens=bounds, dt=dt.view(1, 12)).view(2, 6, 12), whole) < 1e-9
    places = torch.tensor([[0, 2, 3, 4, 7, 8], [1, 2, 5, 6, 7, 9]])
    mask = torch.zeros(2, 10, dtype=torch.bool).scatter(1, places, True)
    wide = torch.zeros(2, 10, 12, dtype=torch.float64).scatter(1, places.unsqueeze(-1).expand(-1, -1, 12), u)
    y = layer(wide, attention_mask=mask, dt=torch.zeros(2, 10, dtype=torch.float64).scatter(1, places, dt))
    assert tools.worst(y[mask].view(2, 6, 12), whole) < 1e-9
    assert not y[~mask].any()
    assert Block(layer).double()(u).shape == u.shape
    with pytest.raises(ValueError, match="expected whole sequences"):
        layer.step(u[:, 0])
    with pytest.raises(ValueError, match="make one per direction"):
        Bidirectional(layer.forward_mixer, layer.forward_mixer)
