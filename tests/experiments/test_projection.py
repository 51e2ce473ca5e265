"""Carried values and the projection model: against dense exponentials and the library's recurrence."""

from dataclasses import replace

import pytest
import torch

from shippo_ssm.actions import expm
from shippo_ssm.experiments.projection.carry import Motion, carry, carry_exactly, new_frame, num_dense, turn
from shippo_ssm.experiments.projection.model import EVAL, TRAIN, Projection, ProjectionConfig
from shippo_ssm.lab.stacked import nmse
from shippo_ssm.scan import block_affine_scan
from shippo_ssm.tasks.paired import stream


def dense(signal, front, write, generator, degree=None, near=None):
    """H_T and the frames by matrix products, with exp in double precision.

    With `degree` exp is its Taylor polynomial, of one degree less before the last `near` positions.
    """
    length = signal.shape[1]
    eye = torch.eye(signal.shape[-1], dtype=torch.float64).expand(signal.shape[0], -1, -1)
    value = (signal @ front).unflatten(-1, (-1, signal.shape[-1]))
    state, frames = torch.zeros(1, dtype=torch.float64), [eye]
    for t in range(signal.shape[1] - 1, -1, -1):
        state = state + write[:, t] @ value[:, t] @ frames[-1]
        step = generator[:, t]
        right = torch.linalg.matrix_exp(step) if degree is None else eye
        for power in range(0 if degree is None else degree - (near is not None and t < length - near), 0, -1):
            right = eye + step @ right / power
        frames.append(right @ frames[-1])
    return state, torch.stack(frames[-2::-1], 1)


def combine(coef, generators):
    return torch.einsum("ntk,kpq->ntpq", coef, generators)


def inputs(length=9, rank=4):
    """signal, front, write, coef, generators; lengths below, at and above a block of positions, K no multiple of four."""
    rng = torch.Generator().manual_seed(0)
    shapes = (3, length, 16), (16, rank * 16), (12, length, rank), (3, length, 5), (5, 16, 16)
    return [torch.randn(shape, generator=rng) * scale for shape, scale in zip(shapes, (1.0, 0.25, 1.0, 1.0, 0.02))]


def assert_state_and_gradients(ours, exact, state, expected):
    torch.testing.assert_close(state.double(), expected, rtol=1e-5, atol=1e-4)
    cotangent = torch.randn(state.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(state, ours, cotangent)
    # A single position is moved by nothing: its generators have no part in the reference.
    wanted = torch.autograd.grad(expected, exact, cotangent.double(), materialize_grads=True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize(("length", "near"), [(1, None), (9, None), (16, 5), (35, None), (35, 18), (35, 0)])
def test_learned_states_and_gradients(length, near):
    signal, front, write, coef, generators = inputs(length)
    ours = [tensor.clone().requires_grad_() for tensor in (front, write, generators)]
    exact = [tensor.double().requires_grad_() for tensor in (front, write, generators)]
    state = carry(signal, ours[0], ours[1], Motion(coef, ours[2], near), frame=new_frame(signal).fill_(torch.nan))
    expected, _ = dense(signal.double(), exact[0], exact[1], combine(coef.double(), exact[2]), degree=2, near=near)
    assert_state_and_gradients(ours, exact, state, expected)


def test_given_frames_states_and_gradients():
    signal, front, write, coef, generators = inputs(20)
    frame = new_frame(signal).fill_(torch.nan)
    carry_exactly(signal, write, Motion(coef, generators * 0.1), front=front, frame=frame)
    ours = [tensor.clone().requires_grad_() for tensor in (front, write)]
    exact = [tensor.double().requires_grad_() for tensor in (front, write)]
    state = turn(signal, ours[0], ours[1], frame)
    expected, frames = dense(signal.double(), exact[0], exact[1], combine(coef.double(), generators.double() * 0.1))
    torch.testing.assert_close(frame.double(), frames, rtol=0, atol=1e-5)
    assert_state_and_gradients(ours, exact, state, expected)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("rank", [1, 4])
def test_exact_states_are_carried_by_exponentials(keep, rank):
    signal, front, write, coef, generators = inputs(9, rank)
    # The last two have one entry and none, and are added as entries.
    generators[3:] = 0
    generators[3, 2, 7] = 1.0
    assert num_dense(generators) == 3
    small = generators * 0.1
    frame = new_frame(signal).fill_(torch.nan) if keep else None
    chosen = torch.eye(16) if rank == 1 else front
    state = carry_exactly(signal, write, Motion(coef, small), front=None if rank == 1 else front, frame=frame)
    expected, frames = dense(signal.double(), chosen.double(), write.double(), combine(coef.double(), small.double()))
    torch.testing.assert_close(state.double(), expected, rtol=1e-5, atol=5e-5)
    if frame is not None:
        torch.testing.assert_close(frame.double(), frames, rtol=0, atol=1e-5)


def test_bad_arguments_are_named():
    signal, front, write, coef, generators = inputs()
    motion = Motion(coef, generators)
    with pytest.raises(ValueError, match=r"expected signal \[n, T, d\]"):
        carry(signal[..., :8], front, write, motion)
    with pytest.raises(ValueError, match="float32"):
        carry(signal.double(), front, write, motion)
    with pytest.raises(ValueError, match="expected multiples of 8 and 4"):
        carry(signal, front[:, :48], write[..., :3], motion)
    with pytest.raises(ValueError, match="contiguous"):
        turn(signal, front, write, new_frame(signal).mT)
    with pytest.raises(ValueError, match=r"`write` \(12, 8, 4\)"):
        carry(signal, front, write[:, 1:], motion)


@pytest.mark.parametrize("right", ["none", "learned", "oracle"])
def test_prediction_is_a_readout_of_the_recurrence(right):
    config = replace(ProjectionConfig(), length=24, batch=4, eval_batches=1, right=right)
    model = Projection(config, (0,))
    parameters = model.init(0)
    batch = model.held_out[0]
    value = (batch.signal @ parameters["front"]).unflatten(-1, (4, 16))
    update = torch.einsum("nr,mtrd->mtnd", parameters["write"], value) / 2
    chosen = None
    if right == "learned":
        chosen = expm(combine(batch.coef, config.epsilon**0.5 * parameters["generators"]))
    elif right == "oracle":
        chosen = expm(model.task.generator(model.task.draw(stream(0, EVAL), 4)))
    left = model.task.left.float().expand(4, 24, 16, 16)
    state = block_affine_scan(left, chosen, update, backend="reference")[:, -1]
    expected = (state.flatten(1) @ parameters["readout"]).unflatten(-1, (16, 16))
    torch.testing.assert_close(model.predict(parameters, batch), expected, rtol=1e-3, atol=2e-4)
    with torch.no_grad():
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


def test_far_positions_of_exact_states_have_one_degree_less():
    signal, front, write, coef, generators = inputs(20)
    frame = new_frame(signal).fill_(torch.nan)
    state = carry_exactly(signal, write, Motion(coef, generators, 7), front=front, frame=frame)
    steps = combine(coef.double(), generators.double())
    expected, frames = dense(signal.double(), front.double(), write.double(), steps, degree=3, near=7)
    torch.testing.assert_close(frame.double(), frames, rtol=0, atol=1e-5)
    torch.testing.assert_close(state.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("length", [64, 256])
def test_targets_are_the_tasks_answers(length):
    model = Projection(ProjectionConfig(length=length, batch=4, eval_batches=1), (0,))
    # The long sequences reach beyond what the left operator keeps.
    assert (model.near < length) == (length == 256)
    sequences = model.task.draw(stream(5, 0), 4)
    torch.testing.assert_close(model.prepare(sequences).target, model.task.answer(sequences), rtol=0, atol=2e-6)
