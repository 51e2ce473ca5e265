"""Carried values and the projection model: against dense exponentials and the library's recurrence."""

from dataclasses import replace

import pytest
import torch

from shippo_ssm.actions import expm
from shippo_ssm.experiments.carry import carry, carry_exactly
from shippo_ssm.experiments.projection import EVAL, Projection, ProjectionConfig
from shippo_ssm.scan import block_affine_scan
from shippo_ssm.tasks.paired import stream


def dense(value, generator, degree=None):
    """z_t by matrix products, with exp (or its Taylor polynomial of `degree`) in double precision."""
    eye = torch.eye(value.shape[-1], dtype=torch.float64).expand(value.shape[0], -1, -1)
    frame, moved = eye, []
    for t in range(value.shape[1] - 1, -1, -1):
        moved.append(value[:, t] @ frame)
        step = generator[:, t]
        right = torch.linalg.matrix_exp(step)
        if degree == 2:
            right = eye + step + step @ step / 2
        frame = right @ frame
    return torch.stack(moved[::-1], 1)


@pytest.fixture
def inputs():
    rng = torch.Generator().manual_seed(0)
    value = torch.randn(3, 9, 4, 16, generator=rng)
    return value, torch.randn(3, 9, 5, generator=rng), torch.randn(5, 16, 16, generator=rng) * 0.02


def combine(coef, generators):
    return torch.einsum("ntk,kpq->ntpq", coef, generators)


def test_values_and_gradients(inputs):
    value, coef, generators = inputs
    ours = [value.clone().requires_grad_(), generators.clone().requires_grad_()]
    exact = [value.double().requires_grad_(), generators.double().requires_grad_()]
    moved = carry(ours[0], coef, ours[1])
    expected = dense(exact[0], combine(coef.double(), exact[1]), degree=2)
    torch.testing.assert_close(moved.double(), expected, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(moved.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(moved, ours, cotangent)
    wanted = torch.autograd.grad(expected, exact, cotangent.double())
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("rank", [1, 4, 8])
def test_exact_values_are_carried_by_exponentials(inputs, keep, rank):
    _, coef, generators = inputs
    value = torch.randn(3, 9, rank, 16)
    small = generators * 0.1
    steps = combine(coef.double(), small.double())
    moved, frame = carry_exactly(value, coef, small, keep=keep)
    torch.testing.assert_close(moved.double(), dense(value.double(), steps), rtol=0, atol=1e-5)
    assert frame.numel() == (3 * 9 * 256 if keep else 0)
    if keep:
        eye = torch.eye(16, dtype=torch.float64).expand(3, 9, 16, 16)
        torch.testing.assert_close(frame.double(), dense(eye, steps), rtol=0, atol=1e-5)


def test_bad_arguments_are_named(inputs):
    value, coef, generators = inputs
    with pytest.raises(ValueError, match=r"expected \[n, T, r, d\]"):
        carry(value[..., :8], coef, generators)
    with pytest.raises(ValueError, match="float32"):
        carry(value.double(), coef, generators)
    with pytest.raises(ValueError, match="multiple of 4"):
        carry(value[:, :, :1], coef, generators)
    with pytest.raises(ValueError, match="divisible"):
        carry(value[:, :, :3], coef, generators)


@pytest.mark.parametrize("right", ["none", "learned", "oracle"])
def test_prediction_is_a_readout_of_the_recurrence(right):
    config = replace(ProjectionConfig(), length=24, batch=4, eval_batches=1, right=right)
    model = Projection(config, (0,))
    parameters = model.layout.split(model.layout.join([model.init(0)]))
    batch = model.held_out[0]
    value = (batch.signal @ parameters["front"][0]).unflatten(-1, (4, 16))
    update = torch.einsum("nr,mtrd->mtnd", parameters["write"][0], value) / 2
    chosen = None
    if right == "learned":
        chosen = expm(combine(batch.coef, config.epsilon**0.5 * parameters["generators"][0]))
    elif right == "oracle":
        chosen = expm(model.task.generator(model.task.draw(stream(0, EVAL), 4)))
    left = model.task.left.float().expand(4, 24, 16, 16)
    state = block_affine_scan(left, chosen, update, backend="reference")[:, -1]
    expected = (state.flatten(1) @ parameters["readout"][0]).unflatten(-1, (16, 16))
    torch.testing.assert_close(model.predict(parameters, 0, batch), expected, rtol=1e-3, atol=2e-4)
    with torch.no_grad():
        torch.testing.assert_close(model.predict(parameters, 0, batch), expected, rtol=1e-4, atol=1e-5)


def test_targets_are_the_tasks_answers():
    model = Projection(ProjectionConfig(length=64, batch=4, eval_batches=1), (0,))
    sequences = model.task.draw(stream(5, 0), 4)
    torch.testing.assert_close(model.prepare(sequences).target, model.task.answer(sequences), rtol=0, atol=2e-6)
