"""Carried values and the projection model: against dense exponentials and the library's recurrence."""

from dataclasses import replace

import pytest
import torch

from shippo_ssm.actions import expm
from shippo_ssm.experiments.carry import carry, frames
from shippo_ssm.experiments.projection import Projection, ProjectionConfig
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
    return value, torch.randn(3, 9, 16, 16, generator=rng) * 0.05


def test_values_and_gradients(inputs):
    value, generator = (part.clone().requires_grad_() for part in inputs)
    exact = [part.detach().double().requires_grad_() for part in inputs]
    moved, expected = carry(value, generator), dense(*exact, degree=2)
    torch.testing.assert_close(moved.double(), expected, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(moved.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(moved, (value, generator), cotangent)
    theirs = torch.autograd.grad(expected, exact, cotangent.double())
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_frames_are_products_of_exponentials(inputs):
    _, generator = inputs
    generator = generator * 0.2
    eye = torch.eye(16).expand(3, 9, 16, 16)
    expected = dense(eye.double(), generator.double())
    torch.testing.assert_close(frames(generator).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", [(3, 9, 4, 8), (3, 8, 4, 16), (3, 9, 3, 16)])
def test_bad_shapes_are_named(inputs, shape):
    with pytest.raises(ValueError, match="carry"):
        carry(torch.zeros(shape), inputs[1])


@pytest.mark.parametrize("right", ["none", "learned", "oracle"])
def test_prediction_is_a_readout_of_the_recurrence(right):
    config = replace(ProjectionConfig(), length=24, batch=4, eval_batches=1, right=right)
    model = Projection(config, (0,))
    parameters = model.layout.split(model.layout.join([model.init(0)]))
    batch = model.held_out[0]
    value = (batch.signal @ parameters["front"][0]).unflatten(-1, (4, 16))
    update = torch.einsum("nr,mtrd->mtnd", parameters["write"][0], value) / 2
    chosen = {
        "none": None,
        "learned": expm(
            config.epsilon**0.5 * torch.einsum("mtk,kpq->mtpq", batch.coef, parameters["generators"][0].unflatten(-1, (16, 16)))
        )
        if right == "learned"
        else None,
        "oracle": expm(model.task.generator(model.task.draw(stream(0, 2), 4))),
    }[right]
    left = model.task.left.float().expand(4, 24, 16, 16)
    state = block_affine_scan(left, chosen, update, backend="reference")[:, -1]
    expected = (state.flatten(1) @ parameters["readout"][0]).unflatten(-1, (16, 16))
    torch.testing.assert_close(model.predict(parameters, 0, batch), expected, rtol=1e-3, atol=2e-4)


def test_targets_are_the_tasks_answers():
    model = Projection(ProjectionConfig(length=64, batch=4, eval_batches=1), (0,))
    sequences = model.task.draw(stream(5, 0), 4)
    torch.testing.assert_close(model.prepare(sequences).target, model.task.answer(sequences), rtol=0, atol=2e-6)
