"""The paired task: its algebra, its answers, its random streams."""

import pytest
import torch

from shippo_lab.tasks.paired import PairedTask, stream


def test_the_commutator_is_the_papers():
    task = PairedTask()
    first, second = task.generators
    expected = torch.zeros(4, 4)
    expected[0, 2] = 1.0
    assert torch.equal(first @ second - second @ first, expected)


def test_answers_are_products_of_exponentials():
    task = PairedTask(width=5)
    examples = task.draw(stream(3, 0), 200)
    right = torch.linalg.matrix_exp(examples.coef.double()[..., None, None] * task.generators.double()[examples.generator])
    expected = (examples.value.double()[:, None] @ right[:, 0] @ right[:, 1])[:, 0]
    torch.testing.assert_close(task.answer(examples).double(), expected, rtol=0, atol=1e-6)


def test_a_pair_differs_by_the_commutator_alone():
    task = PairedTask()
    pairs = task.draw_pairs(stream(0, 1), 500)
    difference = task.answer(pairs) - task.answer(pairs.swapped())
    expected = torch.zeros_like(difference)
    expected[:, 2] = pairs.coef.prod(-1) * pairs.value[:, 0]
    torch.testing.assert_close(difference, expected, rtol=0, atol=1e-6)
    assert torch.equal(pairs.swapped().swapped().coef, pairs.coef)


def test_order_averaged_bound_has_its_closed_form():
    # Half of the examples mix a and b; their answers lie alpha beta v_1 / 2 away from the average: 1/2 * (1/12)^2 / 4 / 4.
    task = PairedTask()
    examples = task.draw(stream(0, 2), 400_000)
    answer = task.answer(examples)
    error = (answer - task.order_averaged(examples)).square().sum(-1).mean()
    assert error.item() == pytest.approx(0.5 / 144 / 16, rel=0.03)
    assert (error / answer.square().sum(-1).mean()).item() == pytest.approx(2.08e-4, rel=0.05)


def test_samples_have_the_papers_distribution():
    examples = PairedTask().draw(stream(1, 0), 100_000)
    assert examples.value.square().sum(-1).mean().item() == pytest.approx(1.0, rel=0.02)
    assert examples.coef.abs().max() <= 0.5
    assert examples.coef.square().mean().item() == pytest.approx(1 / 12, rel=0.02)
    combined = (examples.generator * torch.tensor([2, 1])).sum(-1).bincount(minlength=4) / 100_000
    torch.testing.assert_close(combined, torch.full((4,), 0.25), rtol=0, atol=0.01)


def test_streams_depend_on_their_key_alone():
    def draw(*key):
        return torch.rand(4, generator=stream(*key))

    assert torch.equal(draw(0, 1, 2), draw(0, 1, 2))
    others = [draw(1, 1, 2), draw(0, 2, 1), draw(0, 1, 3), draw(0, 1)]
    assert not any(torch.equal(draw(0, 1, 2), other) for other in others)
    with pytest.raises(ValueError, match="nonnegative"):
        stream(-1)


def test_two_channels_are_too_few():
    with pytest.raises(ValueError, match="`width` is 2; expected 3 or more"):
        PairedTask(width=2)
