"""Streaming memories: the numbers of `evolve`, blocks and single samples, missing ones, and wrong use."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from shippo_ssm.projection import Fourier, LagT, LegS, LegT, ProjectionMemory, StreamingMemory, Transport

LENGTH = 300
MEASURES = [LegS(16), LegT(16, 2.0), LagT(12), Fourier(17, 2.0), Fourier(8, 1.0)]


def cross(rate):
    x, y, z = np.moveaxis(rate, -1, 0)
    zero = np.zeros_like(x)
    return np.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).reshape(*rate.shape[:-1], 3, 3)


@pytest.fixture(scope="module")
def stream():
    """Two sensors of a turning body at irregular times: dt [T], values [T, 6], rates [T, 3]."""
    rng = np.random.default_rng(0)
    return rng.uniform(0.005, 0.04, LENGTH), 0.2 * rng.normal(size=(LENGTH, 6)).cumsum(0), 8 * rng.normal(size=(LENGTH, 3))


@pytest.mark.parametrize("measure", MEASURES, ids=repr)
def test_has_the_numbers_of_evolve(measure, stream):
    dt, values, rates = stream
    times = np.cumsum(dt)
    memory = ProjectionMemory(measure, Transport(cross(rates), 3, times=times - dt))
    wanted = np.concatenate([memory.evolve(values[:, :3], times), memory.evolve(values[:, 3:], times)], -1)
    streaming = StreamingMemory(measure, 6)
    found = streaming.update(values, dt, rates * dt[:, None], return_all_states=True)
    assert np.abs(found - wanted).max() < 1e-10
    assert streaming.time == pytest.approx(times[-1])
    # What was seen, in present coordinates.
    ages = np.linspace(0.1, 0.9, 5)
    past = measure.basis(times[-1], times[-1] - ages) @ wanted[-1]
    assert np.abs(streaming.past(ages) - past).max() < 1e-9
    plain = StreamingMemory(measure, 6)
    plain.update(values, dt)
    assert np.abs(plain.state - ProjectionMemory(measure).evolve(values, times, keep="last")).max() < 1e-10


@pytest.mark.parametrize("measure", [LegS(9), LegT(9, 1.0)], ids=repr)
@pytest.mark.parametrize("irregular", [True, False])
def test_single_samples_batches_and_torch_are_the_block(measure, irregular, stream):
    dt, values, rates = (part[:80] for part in stream)
    dt = dt if irregular else np.full_like(dt, 0.02)
    turn = rates * dt[:, None]
    given = None if not irregular else dt
    whole = StreamingMemory(measure, 6, rate=50.0)
    states = whole.update(values, given, turn, return_all_states=True)
    single = StreamingMemory(measure, 6, rate=50.0)
    for index in range(len(dt)):
        found = single.update(values[index], None if given is None else dt[index], turn[index], return_all_states=True)
        assert np.abs(found - states[index]).max() < 1e-12
    # A second stream at other times beside it.
    batch = StreamingMemory(measure, 6, batch_size=2)
    batch.update(torch.tensor(np.stack([values, -values])), torch.tensor(np.stack([dt, 2 * dt])), np.stack([turn, turn]))
    other = StreamingMemory(measure, 6)
    other.update(-values, 2 * dt, turn)
    assert isinstance(batch.state, torch.Tensor)
    assert np.abs(batch.state.numpy() - np.stack([whole.state, other.state])).max() < 1e-12
    assert batch.past([0.1, 0.2]).shape == (2, 2, 6)
    # Saved in the middle, loaded elsewhere.
    half = StreamingMemory(measure, 6)
    half.update(values[:30], dt[:30], turn[:30])
    rest = StreamingMemory(measure, 6)
    rest.load(half.state, half.time, half.last)
    rest.update(values[30:], dt[30:], turn[30:])
    assert np.abs(rest.state - whole.state).max() < 1e-12
    rest.reset()
    assert not rest.state.any()
    assert rest.time == 0


@pytest.mark.parametrize("measure", [LegS(8), LegT(8, 0.5), LagT(8), Fourier(7, 0.5)], ids=repr)
@pytest.mark.parametrize("gap", [0.4, 0.7, 9.0, 300.0])
def test_a_gap_longer_than_the_memory(measure, gap, stream):
    """A long step is what many short ones along the same line are, also for `evolve`, and beside rows without one."""
    values, rates, dt = stream[1][:12, :3], stream[2][:12], np.full(12, 0.03)
    dt[8] = gap
    turn = rates * 0.03
    streaming = StreamingMemory(measure, 3)
    streaming.update(values, dt, turn)
    times = np.cumsum(dt)
    known = Transport(cross(turn / dt[:, None]), 3, times=times - dt)
    assert np.abs(streaming.state - ProjectionMemory(measure, known).evolve(values, times, keep="last")).max() < 1e-10
    if gap < 100:
        share = np.arange(1, 401)[:, None] / 400
        line = (1 - share) * values[7] + share * values[8]
        fine = StreamingMemory(measure, 3)
        fine.update(values[:8], dt[:8], turn[:8])
        fine.update(line, gap / 400, np.repeat(turn[8:9] / 400, 400, 0))
        fine.update(values[9:], dt[9:], turn[9:])
        assert np.abs(streaming.state - fine.state).max() < 1e-10
    batch = StreamingMemory(measure, 3, batch_size=2)
    missing = values.copy()
    missing[8] = np.nan
    states = batch.update(np.stack([values, missing]), np.stack([dt, dt[::-1]]), np.stack([turn, turn]), return_all_states=True)
    assert states.shape == (2, 12, measure.N, 3)
    assert np.abs(states[0, -1] - streaming.state).max() < 1e-11
    other = StreamingMemory(measure, 3)
    assert np.abs(other.update(missing, dt[::-1], turn, return_all_states=True) - states[1]).max() < 1e-11


def test_all_ways_to_give_a_turn_agree(stream):
    dt, values, rates = (part[:50] for part in stream)
    turn = rates * dt[:, None]
    wanted = StreamingMemory(LegT(8, 0.5), 6)
    wanted.update(values, dt, turn)
    matrix = StreamingMemory(LegT(8, 0.5), 6)
    matrix.update(values, dt, Rotation.from_rotvec(turn).as_matrix())
    generator = StreamingMemory(LegT(8, 0.5), 6, transport="generator")
    generator.update(values, dt, cross(rates))
    assert np.abs(matrix.state - wanted.state).max() < 1e-12
    assert np.abs(generator.state - wanted.state).max() < 1e-12
    # A frame that is known beforehand and no rotation: constant, and given step by step.
    leak = np.array([[-0.5, 2.0], [0.3, 0.1]])
    known = StreamingMemory(LagT(8), 4, transport=leak)
    known.update(values[:, :4], dt)
    steps = StreamingMemory(LagT(8), 4)
    steps.update(values[:, :4], dt, Transport(leak, 2).P(dt, np.zeros_like(dt)))
    assert np.abs(known.state - steps.state).max() < 1e-11


def test_a_still_world_is_remembered_by_a_turning_sensor():
    turn = np.array([0.05, -0.1, 0.2])
    memory = StreamingMemory(LegT(12, 1.0), 3, rate=100.0)
    world = np.array([1.0, 2.0, 3.0])
    for index in range(1, 201):
        seen = Rotation.from_rotvec(index * turn).inv().apply(world)
        memory.update(seen, turn=turn)
    assert np.abs(memory.past([0.0, 0.3, 0.8]) - seen).max() < 0.02
    assert not memory.past(1.5).any()


def test_missing_samples_advance_the_frame_and_write_nothing(stream):
    dt, values, rates = (part[:40] for part in stream)
    turn = rates * dt[:, None]
    gap = values.copy()
    gap[20:30, 4] = np.nan
    memory = StreamingMemory(LegT(8, 1.0), 6)
    states = memory.update(gap, dt, turn, return_all_states=True)
    whole = StreamingMemory(LegT(8, 1.0), 6).update(values, dt, turn, return_all_states=True)
    # One axis is missing, so the whole sensor is; the other sensor has all samples.
    assert np.abs(states[..., :3] - whole[..., :3]).max() < 1e-13
    flow = LegT(8, 1.0).flow(dt[20:30].sum(), 0.0)
    frame = np.linalg.multi_dot(list(Rotation.from_rotvec(turn[20:30]).as_matrix()))
    assert np.abs(states[29, :, 3:] - flow @ states[19, :, 3:] @ frame).max() < 1e-11
    held = StreamingMemory(LegT(8, 1.0), 6)
    held.load(states[29], dt[:30].sum())
    held.update(gap[30], dt[30], turn[30])
    assert np.abs(held.state[:, 3:] - states[30, :, 3:]).max() < 1e-12
    before = memory.state
    memory.update(None, 0.0)
    assert np.abs(memory.state - before).max() < 1e-15


@pytest.mark.parametrize("measure", [LegS(4), LegT(4, 1.0)], ids=repr)
def test_no_time_writes_nothing(measure):
    memory = StreamingMemory(measure, 1)
    memory.update([1.0], 0.0)
    assert not memory.state.any()
    memory.update([[1.0], [1.0]], [0.5, 0.0])
    assert memory.past(0.25) == pytest.approx(1.0, abs=0.1)
    # A block that begins with it, as differences of time stamps do; the rows of a batch begin one after another.
    values, dt = np.arange(8.0).reshape(2, 4, 1) ** 2, np.array([[0.0, 0.1, 0.2, 0.1], [0.0, 0.0, 0.3, 0.2]])
    together = StreamingMemory(measure, 1, batch_size=2).update(values, dt, return_all_states=True)
    for row in range(2):
        single = StreamingMemory(measure, 1)
        alone = [single.update(value, step, return_all_states=True) for value, step in zip(values[row], dt[row])]
        assert np.abs(together[row] - alone).max() < 1e-13


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0, 2.0],), "`sample` has shape"),
        (([np.inf, 0.0, 0.0],), "`sample` is infinite"),
        (([0.0] * 3, -0.1), "`dt` is negative"),
        (([0.0] * 3, np.nan), "`dt` is negative or not finite"),
        (([[0.0] * 3] * 4, [0.1] * 3), "`dt` has shape"),
        (([0.0] * 3,), "`dt` is missing"),
        (([0.0] * 3, 0.1, [1.0, 2.0]), "`turn` has shape"),
        (([0.0] * 3, 0.1, [1.0, 2.0, np.nan]), "`turn` is not finite"),
        (([0.0] * 3, 0.1, np.diag([1.0, 1.0, -1.0])), "without a real logarithm"),
        (([0.0] * 3, 0.1, np.eye(2)), "a multiple of 2"),
        ((torch.zeros(3, requires_grad=True), 0.1), "requires a gradient"),
    ],
)
def test_wrong_updates_are_refused(arguments, words):
    memory = StreamingMemory(LegT(4, 1.0), 3)
    with pytest.raises(ValueError, match=words):
        memory.update(*arguments)
    assert not memory.state.any()


def test_wrong_memories_are_refused():
    wrong: Any = (
        (("legt", 3), {}),
        ((LegS(4), 0), {}),
        ((LegS(4), 3, -1.0), {}),
        ((LegS(4), 3), {"transport": "turn"}),
        ((LegS(4), 3), {"transport": np.eye(2)}),
        ((LegS(4), 3), {"batch_size": 0}),
    )
    for arguments, options in wrong:
        with pytest.raises(ValueError, match="expected"):
            StreamingMemory(*arguments, **options)
    memory = StreamingMemory(LegS(4), 3, transport=np.zeros((3, 3)))
    with pytest.raises(ValueError, match="beside a transport"):
        memory.update([0.0] * 3, 0.1, [0.0] * 3)
    with pytest.raises(ValueError, match="`ages`"):
        memory.past(-1.0)
    with pytest.raises(ValueError, match="`state` has shape"):
        memory.load(np.zeros((3, 3)))
    with pytest.raises(ValueError, match="`time`"):
        memory.load(np.zeros((4, 3)), -1.0)
    for odd in ((np.full((4, 3), np.nan),), (np.full((4, 3), np.inf),), (np.zeros((4, 3)), 0.0, [np.inf, 0.0, 0.0])):
        with pytest.raises(ValueError, match="not finite"):
            memory.load(*odd)
