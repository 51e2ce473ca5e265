"""A memory in the body frame: the signs, the layer and the loop, the committed figures and their page."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from benchmarks import body_frame as benchmark
from docs import turning as page
from examples import body_frame as example
from shippo_ssm.projection import LegT, ProjectionMemory, Transport

ROOT = Path(__file__).parents[1]
RATE, STEPS = 100.0, 150
needs_recordings = pytest.mark.skipif(example.files() is None, reason="pip install --no-deps scikit-kinematics")


@pytest.fixture(scope="module")
def made():
    """A body that turns about a changing axis and sees a slowly changing vector of the world: exact, by construction."""
    times = np.arange(1, STEPS + 1) / RATE
    gyroscope = np.stack([3 * np.sin(4 * times), 2 * np.cos(3 * times), 5 + 0 * times], -1)
    frames, frame = [], Rotation.identity()
    for rate in gyroscope:
        frame = frame * Rotation.from_rotvec(rate / RATE)  # Q' = Q [w]x, body to world
        frames.append(frame.as_matrix())
    orientation = np.array(frames)
    world = np.stack([np.cos(times), np.sin(2 * times), 1 + 0 * times], -1)
    seen = np.einsum("ti,tij->tj", world, orientation)
    return example.Recording(RATE, gyroscope, seen, seen, orientation)


def cross(rate):
    x, y, z = rate
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])


def test_the_transport_of_the_rate_turns_then_into_now(made):
    """P(t, tau)^T = Q(t)^T Q(tau) for A_R = [w]x, and it is not so for the other sign."""
    times = np.arange(STEPS) / RATE
    for sign, holds in ((1, True), (-1, False)):
        transport = Transport(np.stack([cross(sign * rate) for rate in made.gyroscope]), 3, times=times)
        turned = transport.P(times[120] + 1 / RATE, times[20] + 1 / RATE).T
        assert np.allclose(turned, made.orientation[120].T @ made.orientation[20], atol=1e-10) == holds
    right = example.turns(made.gyroscope, RATE)
    assert np.allclose(right[7], made.orientation[6].T @ made.orientation[7])


def test_the_gyroscope_reaches_the_limit(made):
    """With a perfect gyroscope the lifted memory is that of the world's history, and the fixed one is not."""
    states = example.memories(made, made.field, 12, 1.0)
    assert np.allclose(states["lifted"], states["limit"], atol=1e-12)
    now, back = np.array([STEPS - 1]), np.arange(5, 95)
    wanted = example.truth(made, made.field, now, back)
    error = {
        name: example.relative(example.recall(found[now], back / RATE, 1.0, RATE) - wanted, wanted)
        for name, found in states.items()
    }
    assert error["lifted"] < 2e-3 < 0.5 < error["fixed"]


def test_the_loop_is_the_projection_memory(made):
    """`ProjectionMemory` integrates between samples: the two are apart by what a held sample costs, falling with the step."""
    apart = []
    for every in (1, 2):
        times = np.arange(1, STEPS // every + 1) * every / RATE
        frames = made.orientation[every - 1 :: every]
        turned = Rotation.from_matrix(np.swapaxes(np.concatenate([np.eye(3)[None], frames[:-1]]), 1, 2) @ frames)
        rates = turned.as_rotvec() * RATE / every
        states = example.remember(made.field[every - 1 :: every], example.turns(rates, RATE / every), 6, 0.5, RATE / every)
        transport = Transport(np.stack([cross(rate) for rate in rates]), 3, times=times - every / RATE)
        memory = ProjectionMemory(LegT(6, 0.5), transport)
        exact = memory.evolve(made.field[every - 1 :: every], times, keep="last")
        ages = np.linspace(0.05, 0.45, 9)
        now = LegT(6, 0.5).basis(times[-1], times[-1] - ages) @ exact
        apart.append(np.abs(example.recall(states[-1], ages, 0.5, RATE / every) - now).max())
    assert apart[0] < 5e-3
    assert apart[0] < 0.6 * apart[1]


def test_the_layer_has_the_numbers_of_the_loop(made):
    """The states of the PyTorch layer, all at once and sample by sample, for two sensors at a time."""
    layer = example.gyroscope_memory(8, 1.0, RATE, sensors=2).double()
    u = torch.tensor(np.concatenate([2 * made.field, made.field[:, ::-1], made.gyroscope], -1))[None]
    _, state = layer(u, output_state=True)
    right = example.turns(made.gyroscope, RATE)
    for group, values in enumerate((2 * made.field, made.field[:, ::-1])):
        wanted = example.remember(values, right, 8, 1.0, RATE)[-1]
        assert np.abs(state.memory[0, group].detach().numpy() - wanted).max() < 1e-6
    walked = layer.init_state(1)
    with torch.inference_mode():
        for t in range(STEPS):
            _, walked = layer.step(u[:, t], walked)
    assert torch.allclose(walked.memory, state.memory, atol=1e-12)
    # The turning is given, the reading is learned.
    assert {name for name, weight in layer.named_parameters() if weight.requires_grad} == {"read", "skip"}


@needs_recordings
def test_the_committed_figures_are_those_of_the_recordings():
    recording = example.load("Xsens")
    committed = json.loads((ROOT / benchmark.RESULT).read_text())["recordings"]["Xsens"]
    found, wanted = benchmark.gaps(recording, 8, 1.0)
    turning = example.speeds(recording, benchmark.grid(recording, 1.0)[0], 1.0) > benchmark.TURNING
    again = benchmark.errors(found, wanted, turning)
    (row,) = (r for r in committed["errors"] if (r["theta"], r["N"], r["stretch"], r["sensor"]) == (1.0, 8, "turning", "both"))
    assert again == pytest.approx({name: row[name] for name in again}, rel=1e-6)
    assert benchmark.direction(recording) == {name: pytest.approx(value) for name, value in committed["direction"].items()}


def test_the_bars_hold_and_the_page_shows_them(tmp_path):
    """Half of ordinary HiPPO's error, within 1.3 of the limit: turning, both sensors, from 16 coefficients a second on."""
    result = json.loads((ROOT / page.RESULT).read_text())
    for name in result["recordings"]:
        for row in page.rows(result, name, stretch="turning", sensor="both"):
            if row["N"] >= 16 * row["theta"]:
                assert row["lifted"] <= 0.5 * row["fixed"]
                assert row["lifted"] <= 1.3 * row["limit"]
    assert (ROOT / page.PAGE).read_text(encoding="utf-8") == page.page(ROOT)
    result["recordings"]["Xsens"]["direction"]["lifted"]["median"] = 77.0
    (tmp_path / "results").mkdir()
    (tmp_path / page.RESULT).write_text(json.dumps(result))
    assert "77°" in page.page(tmp_path)


@needs_recordings
def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["body_frame.py", "--smoke"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    fixed, lifted, limit = map(float, lines[3].split()[-3:])
    assert lines[3].split()[2] == "field"
    assert limit <= lifted < 0.1 * fixed
    assert "driven by the gyroscope" in lines[-1]
