"""Lifts: without transport the ordinary layer of the measure, with transport the same calls in every way of running."""

import numpy as np
import pytest
import torch

from shippo_ssm.layers import OnlineMemory, identity_right, lift, online_memory
from shippo_ssm.projection import LagT, LegS, LegT

MEASURES = ["legs", "legt", "s4d", LegS(6), LegT(6, 20.0), LagT(6)]
names = [str(measure) for measure in MEASURES]


def ordinary(layer, u):
    """C_k = left C_{k-1} + gain f_k^T and y = Re(read^T C) + skip f, channel by channel, in numpy."""
    left, gain = layer.memory.steps(np.arange(1, u.shape[1] + 1), 1.0 if layer.memory.scaled else layer.interval)
    read = layer.read.detach().numpy()
    read = (read[0] + 1j * read[1] if len(read) == 2 else read[0]).transpose(0, 2, 1).reshape(u.shape[-1], -1)
    memory = np.zeros((u.shape[0], layer.memory.order, u.shape[-1]), dtype=left.dtype)
    outputs = []
    for t in range(u.shape[1]):
        memory = left[t][:, None] * memory if layer.memory.diagonal else left[t] @ memory
        memory = memory + gain[t][:, None] * u[:, t].numpy()[:, None]
        outputs.append(np.einsum("dn,bnd->bd", read, memory).real + layer.skip.detach().numpy() * u[:, t].numpy())
    return torch.from_numpy(np.stack(outputs, 1))


@pytest.mark.parametrize("measure", MEASURES, ids=names)
def test_no_transport_is_the_ordinary_layer(measure):
    u = torch.randn(2, 25, 8, dtype=torch.float64)
    layer = lift(measure, "none", d_model=8, d_state=6).double()
    torch.testing.assert_close(layer(u), ordinary(layer, u), rtol=1e-14, atol=1e-14)
    moved = lift(measure, "dense", d_model=8, d_state=6).double()
    assert moved.right_proj is not None
    torch.nn.init.normal_(moved.right_proj.weight, std=0.2)
    with identity_right(moved):
        torch.testing.assert_close(moved(u), ordinary(moved, u), rtol=1e-14, atol=1e-14)
    assert not torch.allclose(moved(u), ordinary(moved, u))


@pytest.mark.parametrize("measure", ["legs", "legt", "s4d"])
@pytest.mark.parametrize("right", ["split", "dense", "none"])
def test_all_ways_agree(tools, measure, right):
    layer = lift(measure, right, d_model=8, d_state=6).double()
    if layer.right_proj is not None:
        torch.nn.init.normal_(layer.right_proj.weight, std=0.1)
    u = torch.randn(2, 9, 8, dtype=torch.float64)
    whole, final = layer(u, output_state=True)
    expected = tools.gradients(layer, u, layer)
    mask = torch.tensor([[0] * 4 + [1] * 9] * 2)

    def steps(u):
        state, outputs = layer.init_state(2), []
        for t in range(9):
            y, state = layer.step(u[:, t], state)
            outputs.append(y)
        return torch.stack(outputs, 1), state

    def split(u):
        first, state = layer(u[:, :4], output_state=True)
        none, state = layer(u[:, 4:4], state, output_state=True)
        second, state = layer(u[:, 4:], state, output_state=True)
        return torch.cat([first, none, second], 1), state

    def padded(u):
        y, state = layer(torch.cat([torch.ones_like(u[:, :4]), u], 1), attention_mask=mask, output_state=True)
        return y[:, 4:], state

    def packed(u):
        y, state = layer(u.reshape(1, 18, 8), cu_seqlens=torch.tensor([0, 9, 18]), output_state=True)
        return y.view(2, 9, 8), state

    for way in (steps, split, padded, packed):
        y, state = way(u)
        assert tools.worst(y, whole) < 1e-9, way
        assert tools.worst(state.memory, final.memory) < 1e-9, way
        assert torch.equal(state.time, final.time)
        assert tools.worst(tools.gradients(layer, u, lambda u, way=way: way(u)[0]), expected) < 1e-9, way


def test_names_and_measures_agree():
    positions = np.arange(1, 40)
    for name, measure in (("legs", LegS(12)), ("legt", LegT(12, 20.0))):
        ours, theirs = online_memory(name, 12, theta=20.0), online_memory(measure)
        for got, expected in zip(ours.steps(positions), theirs.steps(positions)):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


def test_legs_remembers_the_mean():
    """The first LegS coefficient is the mean of the past, exactly, for inputs held over a step."""
    left, gain = online_memory("legs", 8).steps(np.arange(1, 51))
    f, memory = np.random.default_rng(0).normal(size=50), np.zeros(8)
    for k in range(50):
        memory = left[k] @ memory + gain[k] * f[k]
        assert memory[0] == pytest.approx(f[: k + 1].mean(), abs=1e-12)


def test_steps_of_a_plain_generator():
    A = np.array([[-1.0, 0.5], [0.0, -2.0]])
    left, gain = OnlineMemory(A, np.ones(2)).steps([1], 0.1)
    fine = np.zeros(2)
    for _ in range(10000):
        fine = fine + 1e-5 * (A @ fine + np.ones(2))
    np.testing.assert_allclose(gain[0], fine, rtol=1e-4)
    np.testing.assert_allclose(left[0], np.linalg.matrix_power(np.eye(2) + 1e-5 * A, 10000), rtol=1e-4, atol=1e-12)


def test_bad_measures():
    for measure in ("legz", object()):
        with pytest.raises(ValueError, match="expected 'legs', 'legt', 's4d', a measure or an OnlineMemory"):
            lift(measure, d_model=8)
    with pytest.raises(ValueError, match="`group_width` is 3"):
        lift("legs", d_model=8, group_width=3)
    with pytest.raises(ValueError, match="`step` is 0"):
        lift("s4d", d_model=8, step=0)
    with pytest.raises(ValueError, match="`theta` is -1"):
        lift("legt", d_model=8, theta=-1)
    layer = lift("legs", d_model=8)
    with pytest.raises(ValueError, match="another model"):
        layer(torch.randn(2, 3, 8), layer.init_state(3))
