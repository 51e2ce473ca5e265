"""The contract of a mixer, carried out on every mixer of the package: whatever is cut or stepped gives the same numbers."""

import pytest
import torch
from torch import nn

from shippo_ssm.layers import Block, Segment, Shippo, ShippoBackbone, ShippoSpec, identity_right, lift, mixer
from shippo_ssm.models import CausalAttention, FreeMixer, GRUMixer, LSTMMixer, transformer_block

WIDTH = 8
MIXERS = {
    "shippo": lambda: Shippo(WIDTH, d_state=4),
    "plain": lambda: Shippo(WIDTH, d_state=4, right="none"),
    "lift": lambda: lift("legs", "dense", d_model=WIDTH, d_state=4),
    "gru": lambda: GRUMixer(WIDTH),
    "lstm": lambda: LSTMMixer(WIDTH),
    "attention": lambda: CausalAttention(WIDTH, 2),
    "window": lambda: CausalAttention(WIDTH, 2, window=3),
    "free": lambda: FreeMixer(WIDTH, ShippoSpec(d_state=4)),
    "transformer block": lambda: transformer_block(WIDTH, 2),
    "block": lambda: Block(Shippo(WIDTH, d_state=4), mlp=nn.Linear(WIDTH, WIDTH)),
    "backbone": lambda: ShippoBackbone(WIDTH, 2, d_state=4),
}


@pytest.mark.parametrize("name", MIXERS)
def test_contract(tools, name):
    tools.check_mixer(MIXERS[name]().double())


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_layers_without_gaps_refuse_them(name):
    layer = MIXERS[name]()
    with pytest.raises(ValueError, match="`attention_mask` or `cu_seqlens` came; expected `None`"):
        layer(torch.randn(2, 3, WIDTH), attention_mask=torch.ones(2, 3, dtype=torch.bool))


def test_a_segment_is_checked_once_and_handed_on(monkeypatch):
    """A stack hands the record to its layers: one check for the call, none inside."""
    layer = ShippoBackbone(WIDTH, 2, d_state=4)
    checked, check = [], mixer.check_segment
    monkeypatch.setattr(
        mixer, "check_segment", lambda module, *args, **told: checked.append(module) or check(module, *args, **told)
    )
    mask = torch.tensor([[True, True, False], [False, True, True]])
    u = torch.randn(2, 3, WIDTH)
    assert torch.equal(layer(u, attention_mask=mask), layer(u, None, Segment(mask)))
    assert checked == [layer]


@pytest.mark.parametrize("name", ["attention", "window", "transformer block"])
def test_attention_ignores_padding_and_other_sequences(tools, name):
    """Padding anywhere, in several segments, gives what the real tokens alone give; so do sequences packed into a row."""
    layer, u = MIXERS[name]().double(), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    mask = torch.tensor([[0, 0, 1, 0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0, 1, 0, 1]]).bool()
    u[~mask] = torch.nan
    first, state = layer(u[:, :4], attention_mask=mask[:, :4], output_state=True)
    second, state = layer(u[:, 4:], state, attention_mask=mask[:, 4:], output_state=True)
    got, following = torch.cat([first, second], 1), torch.randn(2, WIDTH, dtype=torch.float64)
    last, _ = layer.step(following, state)
    rows = [u[row, mask[row]] for row in range(2)]
    packed, after = layer(torch.cat(rows)[None], cu_seqlens=torch.tensor([0, 5, 9]), output_state=True)
    assert tools.worst(layer.step(following, after)[0], last) < 1e-12
    for row, tokens in enumerate(rows):
        y, alone = layer(tokens[None], output_state=True)
        assert tools.worst(got[row, mask[row]], y[0]) < 1e-12
        assert tools.worst(packed[0, 5 * row : 5 + 4 * row], y[0]) < 1e-12
        assert tools.worst(layer.step(following[row : row + 1], alone)[0], last[row : row + 1]) < 1e-12
    u.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(u, attention_mask=mask).square().sum(), u)
    assert torch.isfinite(gradient).all()


def test_a_window_bounds_the_cache(tools):
    layer, u = MIXERS["window"]().double(), torch.randn(1, 9, WIDTH, dtype=torch.float64)
    whole, state = layer(u, output_state=True)
    assert state.keys.shape[2] == 2
    assert tools.worst(layer(u[:, 4:])[:, 2:], whole[:, 6:]) < 1e-12
    assert tools.worst(layer(u[:, 7:])[:, 1:], whole[:, 8:]) > 1e-3


@pytest.mark.parametrize("name", ["shippo", "free", "block", "backbone", "lift", "attention", "window"])
def test_few_positions_of_padded_packed_and_kept_segments(tools, name):
    """What a segment says besides is as true of the positions that it asks as of all."""
    layer, u, asked = MIXERS[name]().double(), torch.randn(2, 6, WIDTH, dtype=torch.float64), torch.tensor([1, 4, 5, 6, 11])
    mask = torch.tensor([[True, False, True, True, True, False], [False, True, True, False, True, True]])
    packed = Segment(cu_seqlens=torch.tensor([0, 3, 3, 12]))
    for inputs, segment in ((u, Segment(mask)), (u.view(1, 12, WIDTH), packed), (u, Segment(return_all_states=True))):
        with torch.set_grad_enabled(not segment.return_all_states):
            whole, final = layer(inputs, None, segment, output_state=True)
            y, state = layer(inputs, None, segment._replace(positions=asked), output_state=True)
        assert tools.worst(y, whole.flatten(0, 1)[asked]) < 1e-12
        assert tools.worst(state, final) < 1e-12
    state = layer(u, output_state=True)[1]
    with torch.no_grad():
        # One position each, of which the second alone is asked.
        y, after = layer(u[:, :1], state, Segment(positions=torch.tensor([1])), output_state=True)
        whole, final = layer(u[:, :1], state, output_state=True)
    assert tools.worst(y, whole[1]) < 1e-12
    assert tools.worst(after, final) < 1e-12


def test_nobody_asked(tools):
    """No position at all: no outputs, and the state of the whole segment."""
    layer, nobody = MIXERS["block"]().double(), Segment(positions=torch.zeros(0, dtype=torch.int64))
    for length in (3, 0):
        u = torch.randn(2, length, WIDTH, dtype=torch.float64)
        y, state = layer(u, None, nobody, output_state=True)
        assert y.shape == (0, WIDTH)
        assert tools.worst(state, layer(u, output_state=True)[1]) < 1e-12


def test_right_actions_and_their_absence():
    u = torch.randn(2, 3, WIDTH)
    for name, build in MIXERS.items():
        right = build().right_actions(u)
        if name in ("shippo", "lift"):
            assert right is not None
            assert right.shape == (2, 3, right.shape[2], 4, 4)
        else:
            assert right is None


def test_identity_right_reaches_every_mixer():
    u = torch.randn(2, 6, WIDTH)
    model = Block(lift("legs", "dense", d_model=WIDTH, d_state=4))
    with identity_right(model):
        assert model.mixer.right_actions(u) is None
    assert model.mixer.right_actions(u) is not None
