"""The controlled family: the training shortcut against the token-by-token recurrence, and what each row can see."""

from dataclasses import replace

import pytest
import torch

from shippo_lab.experiments.paired.experiment import rows, solve
from shippo_lab.experiments.paired.matrix_state import MatrixState, PairedBatch, PairedConfig
from shippo_lab.harness.stacked import nmse
from shippo_lab.tasks.paired import Examples

BASE = PairedConfig(batch=24, eval_batches=3, num_seeds=2)
TRAINED = [row for row in rows(BASE) if row.right != "solver"]


def problem(row):
    """A row with parameters that are not at their start: every part of the model matters."""
    model = MatrixState(row, (0, 1))
    flat = model.layout.join([model.init(seed) for seed in (0, 1)])
    return model, model.layout.split(flat + 0.2 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("row", [*TRAINED, replace(TRAINED[-1], name="g2", group_width=2)], ids=lambda row: row.name)
def test_training_loss_is_that_of_the_recurrence(row):
    model, parameters = problem(row)
    block = model.block(0)
    fast = model.loss(parameters, block, 5)
    size = row.batch
    rng_free = PairedBatch(*(part[:, 5] for part in block))
    # Rebuild the examples from the features, then run them token by token.
    hot, coef = rng_free.features.chunk(2, -1)
    examples = Examples(rng_free.value, hot.argmax(-1), coef.sum(-1))
    ordinary = Examples(*(part[:, :size] for part in examples))
    model.pairs = Examples(*(part[:, size:] for part in examples))
    answer = model.answer(parameters, ordinary, model.right(parameters, ordinary))
    difference = model.difference(parameters, model.right(parameters, model.pairs))
    truth = model.task.answer(model.pairs) - model.task.answer(model.pairs.swapped())
    slow = nmse(answer, model.task.answer(ordinary)) + row.pair_weight * nmse(difference, truth)
    torch.testing.assert_close(fast, slow, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 8])
def test_without_a_right_action_no_parameters_see_the_order(rank):
    model, parameters = problem(replace(BASE, rank=rank))
    metrics = model.evaluate(parameters)
    assert metrics["pair_nmse"] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert "identity_pair_nmse" not in metrics


@pytest.mark.parametrize("row", TRAINED[4:], ids=lambda row: row.name)
def test_with_a_right_action_they_do_until_it_is_replaced(row):
    model, parameters = problem(row)
    metrics = model.evaluate(parameters)
    assert all(abs(value - 1) > 1e-3 for value in metrics["pair_nmse"])
    assert metrics["identity_pair_nmse"] == pytest.approx([1.0, 1.0], abs=1e-5)


def test_oracle_in_half_groups_is_blind_and_its_off_block_ratio_is_the_papers():
    model, parameters = problem(replace(BASE, right="oracle", group_width=2, audit_examples=2000))
    assert model.evaluate(parameters)["pair_nmse"] == pytest.approx([1.0, 1.0], abs=1e-5)
    # Half of the tokens are shears across the blocks, of mean square 1/12, in matrices of squared norm 4 + 1/12.
    expected = ((1 / 24) / (4 + 1 / 12)) ** 0.5
    assert model.off_block_ratio(parameters) == pytest.approx([expected] * 2, rel=0.03)
    whole, parameters = problem(replace(BASE, right="oracle", audit_examples=512))
    assert whole.off_block_ratio(parameters) == [0.0, 0.0]


def test_the_solver_is_exact():
    metrics = solve(rows(BASE)[0], (0, 1)).metrics
    assert max(metrics["nmse"]) < 1e-12
    assert max(metrics["pair_nmse"]) < 1e-10


def test_rows_of_one_seed_share_what_their_configuration_does_not_change():
    one, two = (MatrixState(replace(BASE, rank=rank), (0,)).init(0) for rank in (1, 2))
    assert torch.equal(one["readout"], two["readout"])
    assert torch.equal(one["left"], two["left"])
    assert not torch.equal(one["readout"], MatrixState(BASE, (1,)).init(1)["readout"])


def test_order_averaged_bound_bounds_what_training_finds_near_two_in_ten_thousand():
    bound = MatrixState(replace(BASE, eval_batches=100), (0,)).order_averaged_bound()
    assert bound[0] == pytest.approx(2.1e-4, rel=0.1)


def test_groups_must_divide_the_width():
    with pytest.raises(ValueError, match="expected a divisor"):
        PairedConfig(group_width=3)
