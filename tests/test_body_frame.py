"""A memory in the body frame: the signs, the limit, the committed figures."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from benchmarks import body_frame as benchmark
from docs.fill import body_rows
from examples import body_frame as example
from shippo_ssm.projection import Transport

ROOT = Path(__file__).parents[1]
RATE, STEPS = 100.0, 150
needs_recordings = pytest.mark.skipif(example.files() is None, reason="pip install --no-deps 'scikit-kinematics<0.12'")


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


def test_the_gyroscope_reaches_the_limit(made):
    """With a perfect gyroscope the lifted memory is that of the world's history, and the fixed one is not."""
    states = example.memories(made, made.field, 12, 1.0)
    # Straight lines between samples are drawn in body coordinates by one and in the world's by the other.
    assert np.allclose(states["lifted"], states["limit"], atol=1e-3)
    now, back = np.array([STEPS - 1]), np.arange(5, 95)
    wanted = example.truth(made, made.field, now, back)
    error = {
        name: example.relative(example.recall(found[now], back / RATE, 1.0) - wanted, wanted) for name, found in states.items()
    }
    assert error["lifted"] < 2e-3 < 0.5 < error["fixed"]


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


def test_the_targets_hold():
    """Half of ordinary HiPPO's error, within 1.3 of the limit: turning, both sensors, from 16 coefficients a second on."""
    result = json.loads((ROOT / benchmark.RESULT).read_text())
    for name in result["recordings"]:
        rows = body_rows(result, name, stretch="turning", sensor="both")
        assert rows
        for row in rows:
            if row["N"] >= 16 * row["theta"]:
                assert row["lifted"] <= 0.5 * row["fixed"]
                assert row["lifted"] <= 1.3 * row["limit"]


@needs_recordings
def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["body_frame.py", "--smoke"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    fixed, lifted, limit = map(float, lines[3].split()[-3:])
    assert lines[3].split()[2] == "field"
    assert limit <= lifted < 0.1 * fixed
    assert "driven by the gyroscope" in lines[-1]
