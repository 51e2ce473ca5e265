"""States as values: for one layer, for the list of a model, for other mixers."""

import os

import pytest
import torch
from safetensors.torch import save_file

from shippo_ssm.layers import CausalAttention, Shippo, ShippoBackbone, lift, states
from shippo_ssm.models import GRUMixer


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ShippoBackbone(8, 2, d_state=4, backend="reference")


@pytest.fixture
def state(model):
    with torch.no_grad():
        return model(torch.randn(3, 5, 8), output_state=True)[1]


def equal(ours, theirs):
    pairs = zip(states.named_tensors(ours), states.named_tensors(theirs), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@torch.no_grad()
def test_rows_can_be_picked_repeated_and_joined(model, state):
    u = torch.randn(3, 8)
    y, _ = model.step(u, state)
    picked = states.select(state, [2, 0, 2])
    assert torch.allclose(model.step(u[[2, 0, 2]], picked)[0], y[[2, 0, 2]], atol=1e-6)
    assert equal(states.select(state, -1), states.select(state, torch.tensor([2])))
    assert equal(states.concatenate([states.select(state, row) for row in range(3)]), state)
    assert equal(states.select(states.repeat(state, 2), [0, 2, 4]), state)
    assert states.batch_size(states.repeat(state, 4)) == 12
    assert states.num_bytes(states.repeat(state, 2)) == 2 * states.num_bytes(state)


def test_copies_are_their_own(state):
    copied = states.clone(state)
    state[0].cell.memory.zero_()
    assert copied[0].cell.memory.any()
    assert states.to(copied, torch.float64)[1].cell.memory.dtype == torch.float64
    assert copied[0].clone().select([0]).repeat(2).to("cpu").batch_size == 2


def test_a_file_gives_the_state_back(model, state, tmp_path):
    path = states.save(state, tmp_path / "state.safetensors")
    assert equal(states.load(path, like=model.init_state(1)), state)
    gru = GRUMixer(8)
    hidden = gru(torch.randn(2, 3, 8), output_state=True)[1].detach()
    assert torch.equal(states.load(states.save(hidden, tmp_path / "gru"), like=gru.init_state(1)), hidden)
    with pytest.raises(ValueError, match=r"load: the file has .* expected .* from the model that the state came of"):
        states.load(path, like=Shippo(8, d_state=4).init_state(1))
    with pytest.raises(ValueError, match=r"load: `0.cell.memory` of a state is .* expected .* another model"):
        states.load(path, like=ShippoBackbone(8, 2, d_state=5).init_state(1))


def test_a_damaged_file_is_named(model, state, tmp_path):
    path = states.save(state, tmp_path / "state.safetensors")
    whole = path.read_bytes()
    for damaged in (b"", whole[:40], whole[:-9], b"\xff" * 64, b"not a file of tensors"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"load: .*state\.safetensors.* is damaged"):
            states.load(path, like=model.init_state(1))


def test_repr_prints_shapes(state):
    assert repr(state[0].cell) == "CellState(memory=(3, 4, 4, 4) float32, write=(3, 1, 4) float32, value=(3, 4, 4) float32)"
    assert repr(state[0]).startswith("ShippoState(conv=(3, 3, 16) float32, cell=CellState(memory=")
    assert repr(state[0]).endswith("controller=None)")
    assert repr(lift("legs", d_model=8, d_state=4).init_state(1)) == "LiftState(memory=(1, 2, 4, 4) float32, time=(1,) float64)"
    assert repr(CausalAttention(8, 2).init_state(1)).startswith("AttentionCache(keys=(1, 2, 0, 4) float32, values=")


def test_what_does_not_fit_is_refused(model, state):
    with pytest.raises(ValueError, match=r"select: `rows` is .* expected numbers below 3"):
        states.select(state, [3])
    with pytest.raises(ValueError, match=r"concatenate: a state has .* different models"):
        states.concatenate([state, state[:1]])
    with pytest.raises(ValueError, match="concatenate: `parts` is empty"):
        states.concatenate([])
    with pytest.raises(ValueError, match="is a str; expected tensors"):
        states.clone(["memory"])


def test_a_file_of_another_kind_or_of_several_batches_is_refused(model, state, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(ValueError, match="is a folder, pipe or device"):
            states.load(path, like=model.init_state(1))
    tensors = {name: tensor.contiguous() for name, tensor in states.named_tensors(state)}
    save_file({name: t[:1] if name == "0.conv" else t for name, t in tensors.items()}, tmp_path / "rows")
    with pytest.raises(ValueError, match=r"tensors of \[1, 3\] sequences"):
        states.load(tmp_path / "rows", like=model.init_state(1))
    for dtype in (torch.int64, torch.float64, torch.complex64):
        save_file({name: t.to(dtype) for name, t in tensors.items()}, tmp_path / "odd")
        with pytest.raises(ValueError, match=r"`0.conv` of a state is .* expected .* float32"):
            states.load(tmp_path / "odd", like=model.init_state(1))
