"""The audit of a model: hooks find the layers, measures have their documented values, nothing is left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shippo_ssm.actions import SplitFlow
from shippo_ssm.collapse import collapse_of_model
from shippo_ssm.layers import Mixer


class Still(Mixer[None]):
    """Gives its input back; its actions are what a test says."""

    def __init__(self, actions=None, d_model=9):
        super().__init__(d_model)
        self.actions = actions

    def run(self, u, state, segment):
        return u + 1.0, None

    def init_state(self, batch_size):
        return None

    def right_actions(self, u):
        return self.actions


class Layer(Still):
    """Two groups of width 3: one rotates and shears, one only scales."""

    def __init__(self):
        super().__init__()
        self.mix, self.scale = SplitFlow(3), SplitFlow(3, rotations=False, shears=False)

    def right_actions(self, u):
        parts = [self.mix.dense(u[..., :9], 1.0), self.scale.dense(u[..., :3], 1.0)]
        return torch.stack(parts, 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = Layer(), nn.Dropout(0.5), Layer()

    def forward(self, u, scale=1.0):
        return self.second(u=self.norm(self.first(u * scale)))


def test_one_row_per_layer_and_group():
    model = Model().train()
    rows = collapse_of_model(model, torch.randn(2, 15, 9, dtype=torch.float64))
    assert [(row.layer, row.group) for row in rows] == [("first", 0), ("first", 1), ("second", 0), ("second", 1)]
    assert all(row.num_actions == 30 for row in rows)
    mixing, scaling = rows[0], rows[1]
    assert mixing.status == "irreducible"
    assert mixing.blocks == (3,)
    assert scaling.status == "reducible"
    assert scaling.blocks == (1, 1, 1)
    assert scaling.commutator < 1e-12 < mixing.commutator
    assert 1.0 < scaling.effective_rank <= 3.0 < mixing.effective_rank <= 9.0
    assert model.training
    assert model.norm.training
    assert not model.first._forward_pre_hooks


def test_measures_have_their_documented_values():
    actions = torch.randn(12, 3, 3, dtype=torch.float64)
    (row,) = collapse_of_model(Still(actions[None, :, None]), torch.zeros(1, 12, 9))
    pairs = torch.einsum("sij,tjk->stik", actions, actions)
    brackets = pairs - pairs.transpose(0, 1)
    want = brackets.square().sum((-2, -1)).mean().sqrt().item()
    assert row.commutator == pytest.approx(want, rel=1e-10)
    moves = actions - torch.eye(3, dtype=torch.float64)
    size = moves.square().sum((-2, -1)).mean().item()
    assert row.relative_commutator == pytest.approx(want / size, rel=1e-10)
    shares = torch.linalg.svdvals(moves.flatten(1)).square()
    shares = shares / shares.sum()
    assert row.effective_rank == pytest.approx((-(shares * shares.log()).sum()).exp().item(), rel=1e-10)
    assert row.layer == "Still"


def test_identity_actions_have_rank_zero_and_scalar_blocks():
    (row,) = collapse_of_model(Still(torch.eye(2).expand(1, 5, 1, 2, 2)), (torch.zeros(1, 5, 9),))
    assert (row.effective_rank, row.commutator, row.relative_commutator, row.blocks) == (0.0, 0.0, 0.0, (1, 1))


def test_inputs_may_be_a_mapping():
    u = torch.randn(1, 6, 9)
    assert collapse_of_model(Model(), {"u": u, "scale": 0.5}) == collapse_of_model(Model(), (u * 0.5,))


def test_a_model_without_right_actions_is_refused():
    for model in (nn.Linear(9, 2), Still()):
        with pytest.raises(ValueError, match="without right actions; expected a Shippo layer"):
            collapse_of_model(model, torch.zeros(1, 2, 9))


def test_hooks_are_removed_when_the_model_fails():
    model = Model()
    with pytest.raises(ValueError, match="`u` is shape"):
        collapse_of_model(model, torch.zeros(1, 2, 10))
    assert not model.first._forward_pre_hooks
