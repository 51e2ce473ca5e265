"""The projection model against dense exponentials and the library's recurrence."""

from dataclasses import replace

import pytest
import torch

from shippo_lab.experiments.projection import EVAL, TRAIN, Projection, ProjectionConfig, final_state
from shippo_lab.harness.stacked import nmse
from shippo_lab.tasks.paired import stream
from shippo_ssm.actions import expm
from shippo_ssm.scan import block_affine_scan
from tests.shippo_lab.tasks.test_projection import answer


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("moving", [True, False])
def test_final_states_and_gradients_are_those_of_a_loop(rank, moving):
    rng = torch.Generator().manual_seed(0)
    shapes = (3, 9, rank, 16), (9, rank, 12), (3, 9, 16, 16)
    inputs = [torch.randn(shape, generator=rng) for shape in shapes[: 2 + moving]]
    if moving:
        inputs[2] = expm(0.05 * inputs[2])
    ours, exact = ([part.to(dtype).requires_grad_() for part in inputs] for dtype in (torch.float32, torch.float64))
    state = final_state(ours[0], ours[1], ours[2] if moving else None)
    expected = torch.zeros(3, 12, 16, dtype=torch.float64)
    for t in range(9):
        expected = (expected @ exact[2][:, t] if moving else expected) + exact[1][t].mT @ exact[0][:, t]
    torch.testing.assert_close(state.double(), expected, rtol=1e-5, atol=1e-4)
    cotangent = torch.randn(state.shape, generator=rng)
    grads, wanted = torch.autograd.grad(state, ours, cotangent), torch.autograd.grad(expected, exact, cotangent.double())
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize("right", ["none", "learned", "oracle"])
def test_prediction_is_a_readout_of_the_recurrence(right):
    config = replace(ProjectionConfig(), length=24, batch=4, eval_batches=1, right=right)
    model = Projection(config, (0,))
    parameters = model.init(0)
    batch = model.held_out[0]
    value = (batch.sequences.signal @ parameters["front"]).unflatten(-1, (4, 16))
    update = torch.einsum("nr,mtrd->mtnd", parameters["write"], value) / 2
    chosen = None
    if right == "learned":
        chosen = expm(torch.einsum("ntk,kpq->ntpq", batch.sequences.coef, model.task.epsilon**0.5 * parameters["generators"]))
    elif right == "oracle":
        chosen = expm(model.task.generator(model.task.draw(stream(0, EVAL), 4)))
    left = model.task.left.float().expand(4, 24, 16, 16)
    state = block_affine_scan(left, chosen, update, backend="reference")[:, -1]
    expected = (state.flatten(1) @ parameters["readout"]).unflatten(-1, (16, 16))
    torch.testing.assert_close(model.predict(parameters, batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("right", ["none", "learned", "oracle"])
def test_loss_has_the_gradient_of_each_seed(right):
    model = Projection(ProjectionConfig(length=12, batch=4, eval_batches=1, right=right), (3, 5))
    flat = model.layout.join([model.init(3), model.init(5)]).requires_grad_()
    weights = torch.tensor([1.0, 2.0])
    loss = model.loss(model.layout.split(flat), model.block(7), 0)
    (found,) = torch.autograd.grad(loss @ weights, flat)
    for s, seed in enumerate((3, 5)):
        batch = model.prepare(model.task.draw(stream(seed, TRAIN, 7), 4))
        alone = flat[s : s + 1].detach().requires_grad_()
        own = {name: parameter[0] for name, parameter in model.layout.split(alone).items()}
        expected = nmse(model.predict(own, batch)[None], batch.target[None])
        torch.testing.assert_close(loss[s], expected[0])
        (grad,) = torch.autograd.grad(expected.sum(), alone)
        torch.testing.assert_close(found[s], weights[s] * grad[0])


@pytest.mark.parametrize("length", [64, 256])
def test_targets_are_the_tasks_answers(length):
    model = Projection(ProjectionConfig(length=length, batch=4, eval_batches=1), (0,))
    sequences = model.task.draw(stream(5, 0), 4)
    torch.testing.assert_close(model.prepare(sequences).target, answer(model.task, sequences).float(), rtol=0, atol=2e-6)
