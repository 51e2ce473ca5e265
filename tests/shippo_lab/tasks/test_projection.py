"""The transported projection task: its operators, its generators, and what ignoring the transport costs."""

import torch

from shippo_lab.tasks.paired import stream
from shippo_lab.tasks.projection import ProjectionTask
from shippo_ssm.projection import LegS
from shippo_ssm.scan import block_affine_scan


def nmse(a, b):
    return ((a - b).square().sum() / b.square().sum()).item()


def answer(task, sequences):
    """C_T [M, N, d] by the recurrence, step by step in double precision."""
    right = torch.linalg.matrix_exp(task.generator(sequences).double())
    update = task.write[:, None] * sequences.signal.double().unsqueeze(-2)
    left = task.left.expand(*right.shape[:2], -1, -1)
    return block_affine_scan(left, right, update, backend="reference")[:, -1]


def test_legs_is_dissipative_by_its_write_vector():
    task = ProjectionTask(epsilon=1.0)
    generator = torch.from_numpy(LegS(16).A(1.0))
    assert torch.equal(task.left, torch.linalg.matrix_exp(generator))
    expected = -torch.outer(task.write, task.write) - torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(generator + generator.mT, expected)


def test_generators_are_half_skew_and_half_elementary():
    task = ProjectionTask()
    skew, nilpotent = task.generators[:8], task.generators[8:]
    torch.testing.assert_close(skew, -skew.mT)
    torch.testing.assert_close(task.generators.flatten(1).norm(dim=1), torch.ones(16, dtype=torch.float64))
    assert torch.equal(nilpotent @ nilpotent, torch.zeros_like(nilpotent))
    assert (nilpotent != 0).flatten(1).sum(1).tolist() == [1] * 8
    assert len({tuple(g.nonzero()[0].tolist()) for g in nilpotent}) == 8
    assert torch.equal(task.generators, ProjectionTask().generators)
    assert not torch.equal(task.generators, ProjectionTask(generator_seed=322).generators)


def test_ignoring_the_transport_is_wrong_by_what_the_paper_reports_for_no_right():
    task = ProjectionTask()
    sequences = task.draw(stream(0, 1), 64)
    still = sequences._replace(coef=torch.zeros_like(sequences.coef))
    assert 0.9e-3 < nmse(answer(task, still), answer(task, sequences)) < 1.5e-3
