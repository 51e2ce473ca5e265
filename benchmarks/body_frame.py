"""The figures of the page "A memory in the body frame": real recordings, three memories of equal size.

They go to `results/body-frame.json`:

    python -m benchmarks.body_frame            # errors and accuracies, a minute
    python -m benchmarks.body_frame --cost     # microseconds per sample, added to the same file

The memories are those of `examples/body_frame.py`. A stretch counts as turning where the mean speed over the remembered time
is above `TURNING` degrees per second. "both" are the six channels of accelerometer and magnetometer together, one unit being
one g and the mean field.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.spatial.transform import Rotation

from benchmarks.machine import describe, machine_line
from examples import body_frame as example
from shippo_ssm.layers import StreamingLayer
from shippo_ssm.projection import LegS, LegT, StreamingMemory

RESULT = Path("results", "body-frame.json")
TURNING = 60.0
ORDERS, WINDOWS = (4, 8, 16, 32), (1.0, 2.0)
SPEEDS = (0, 10, 30, 60, 120, 240, 480)
SENSORS = ("acceleration", "field")
Gaps = dict[str, np.ndarray]


def grid(recording: example.Recording, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Samples at which the past is read, about 16 per second, and how far back it is read, about 48 ages."""
    rate = recording.rate
    now = np.arange(int(theta * rate) + 1, len(recording.gyroscope), max(1, int(rate // 16)))
    return now, np.arange(0, int(theta * rate) - 1, max(1, int(theta * rate) // 48))


def gaps(recording: example.Recording, order: int, theta: float) -> tuple[Gaps, np.ndarray]:
    """What each memory gets wrong [M, A, 6] and what was to be remembered [M, A, 6]: accelerometer, then magnetometer."""
    now, back = grid(recording, theta)
    found: dict[str, list[np.ndarray]] = {}
    wanted = []
    for sensor in SENSORS:
        values = getattr(recording, sensor)
        wanted.append(example.truth(recording, values, now, back))
        for name, states in example.memories(recording, values, order, theta).items():
            past = example.recall(states[now], back / recording.rate, theta)
            found.setdefault(name, []).append(past - wanted[-1])
    return {name: np.concatenate(parts, -1) for name, parts in found.items()}, np.concatenate(wanted, -1)


def errors(found: Gaps, wanted: np.ndarray, keep: Any) -> dict[str, float]:
    """Relative error of each memory over the part `keep`."""
    return {name: example.relative(gap, wanted, keep) for name, gap in found.items()}


def by_order(recording: example.Recording) -> list[dict[str, Any]]:
    """Errors for every window and order, on turning and on calm stretches, per sensor and together."""
    rows = []
    for theta in WINDOWS:
        turning = example.speeds(recording, grid(recording, theta)[0], theta) > TURNING
        for order in ORDERS:
            found, wanted = gaps(recording, order, theta)
            for stretch, keep in (("turning", turning), ("calm", ~turning)):
                for sensor, part in (("acceleration", slice(0, 3)), ("field", slice(3, 6)), ("both", slice(0, 6))):
                    row: dict[str, Any] = {"theta": theta, "N": order, "stretch": stretch, "sensor": sensor}
                    rows.append(row | errors(found, wanted, np.ix_(keep, np.ones(wanted.shape[1], bool), np.arange(6)[part])))
    return rows


def by_age_and_speed(recording: example.Recording, order: int = 16) -> dict[str, Any]:
    """Errors of both sensors over the age of what is remembered (two seconds) and over turning speed (one second)."""
    now, back = grid(recording, 2.0)
    found, wanted = gaps(recording, order, 2.0)
    turning = example.speeds(recording, now, 2.0) > TURNING
    ages = [
        {"age": float(back[index] / recording.rate)} | errors(found, wanted, (turning, index)) for index in range(len(back))
    ]
    speed = example.speeds(recording, grid(recording, 1.0)[0], 1.0)
    found, wanted = gaps(recording, order, 1.0)
    bins = []
    for low, high in pairwise(SPEEDS):
        keep = (speed >= low) & (speed < high)
        if keep.sum() >= 10:
            bins.append({"from": low, "to": high, "share": float(keep.mean())} | errors(found, wanted, keep))
    return {"N": order, "ages": ages, "speeds": bins}


def direction(recording: example.Recording, order: int = 16, theta: float = 2.0) -> dict[str, dict[str, float]]:
    """Degrees between what the accelerometer felt a second ago and what is remembered of it, on turning stretches."""
    now, _ = grid(recording, theta)
    now = now[example.speeds(recording, now, theta) > TURNING]
    wanted = example.truth(recording, recording.acceleration, now, np.array([int(recording.rate)]))[:, 0]
    found = {}
    for name, states in example.memories(recording, recording.acceleration, order, theta).items():
        past = example.recall(states[now], np.array([1.0]), theta)[:, 0]
        cosine = (past * wanted).sum(-1) / np.linalg.norm(past, axis=-1) / np.linalg.norm(wanted, axis=-1)
        degrees = np.rad2deg(np.arccos(np.clip(cosine, -1, 1)))
        found[name] = {"median": float(np.median(degrees)), "p90": float(np.quantile(degrees, 0.9))}
    return found


def drift(recording: example.Recording) -> list[dict[str, Any]]:
    """The field over longer and longer windows, 16 coefficients per second, and with a gyroscope that is off by 5 degrees/s."""
    rows = []
    values = recording.field
    for theta, order in ((1.0, 16), (2.0, 32), (4.0, 64), (8.0, 128)):
        now, back = grid(recording, theta)
        wanted = example.truth(recording, values, now, back)
        states = example.memories(recording, values, order, theta)
        bias = np.deg2rad(5.0) / np.sqrt(3)
        off = (recording.gyroscope + bias) / recording.rate
        states["off by 5 degrees/s"] = example.remember(values, off, order, theta, recording.rate)
        row: dict[str, Any] = {"theta": theta, "N": order}
        for name, found in states.items():
            row[name] = example.relative(example.recall(found[now], back / recording.rate, theta) - wanted, wanted)
        rows.append(row)
    return rows


def trace(recording: example.Recording, theta: float = 2.0, order: int = 16) -> dict[str, Any]:
    """One moment of fast turning for the picture: the last two seconds of the field's first axis, as each memory has it."""
    now, back = grid(recording, theta)
    speed = example.speeds(recording, now, theta)
    at = now[[int(np.argsort(speed)[int(0.9 * len(speed))])]]
    ages = back / recording.rate
    lines = {
        "measured": recording.field[at[0] - back, 0],
        "wanted": example.truth(recording, recording.field, at, back)[0, :, 0],
    }
    for name, states in example.memories(recording, recording.field, order, theta).items():
        lines[name] = example.recall(states[at], ages, theta)[0, :, 0]
    return {"ages": ages.round(4).tolist(), "lines": {name: line.round(4).tolist() for name, line in lines.items()}}


def cost(order: int = 16, theta: float = 2.0, count: int = 1000) -> dict[str, float]:
    """Microseconds of CPU time per sample of two sensors with three axes: the best of many runs."""
    recording = example.load("x-IMU")
    values = np.concatenate([recording.acceleration, recording.field], -1)[:count]
    rate, turn = recording.rate, recording.gyroscope[:count] / recording.rate
    dt = np.random.default_rng(0).uniform(0.5, 1.5, count) / rate
    right = Rotation.from_rotvec(turn).as_matrix()
    held = np.zeros((int(theta * rate), 2, 3))
    window, whole = (StreamingMemory(measure, 6, rate) for measure in (LegT(order, theta), LegS(order)))
    layer, u, v = StreamingLayer(LegT(order, theta), 6, rate), torch.tensor(values)[None], torch.tensor(turn)[None]

    def buffer() -> None:
        """What one would do without: keep every sample and turn all of them, each time."""
        rows = held
        for value, matrix in zip(values, right):
            rows = np.concatenate([rows[1:], value.reshape(1, 2, 3)]) @ matrix

    def single(memory: StreamingMemory, irregular: bool) -> None:
        for index in range(200):
            memory.update(values[index], dt[index] if irregular else None, turn[index])

    runs = {
        "LegT, blocks of 1,000 samples": (lambda: window.update(values, turn=turn), count),
        "LegT, one sample at a time": (lambda: single(window, False), 200),
        "LegT, irregular times, blocks of 1,000": (lambda: window.update(values, dt, turn), count),
        "LegT, irregular times, one at a time": (lambda: single(window, True), 200),
        "LegS, blocks of 1,000 samples": (lambda: whole.update(values, turn=turn), count),
        "LegS, one sample at a time": (lambda: single(whole, False), 200),
        "buffer turned at every sample": (buffer, count),
        "PyTorch layer, 1,000 samples": (lambda: layer(u, turn=v), count),
    }
    found = {}
    for name, (run, samples) in runs.items():
        run()
        times = []
        for _ in range(5 if samples == count and name.startswith(("buffer", "PyTorch")) else 50):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        found[name] = 1e6 * min(times) / samples
    return found


def measure(root: Path, seeds: int = 3) -> dict[str, Any]:
    """All but the cost."""
    result: dict[str, Any] = {"turning": TURNING, "recordings": {}}
    for name in example.RECORDINGS:
        recording = example.load(name)
        speed = np.rad2deg(np.linalg.norm(recording.gyroscope, axis=1))
        result["recordings"][name] = {
            "seconds": len(speed) / recording.rate,
            "rate": recording.rate,
            "mean speed": float(speed.mean()),
            "top speed": float(speed.max()),
            "errors": by_order(recording),
            "direction": direction(recording),
            **by_age_and_speed(recording),
        }
    recording = example.load("x-IMU")
    result["drift"], result["trace"] = drift(recording), trace(recording)
    found = [example.classify(recording, 400, seed) for seed in range(seeds)]
    result["classifier"] = {name: [run[name] for run in found] for name in found[0]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cost", action="store_true", help="measure the cost per sample instead")
    root = Path(__file__).resolve().parents[1]
    path = root / RESULT
    result = json.loads(path.read_text()) if path.exists() else {}
    if parser.parse_args().cost:
        result["cost"] = {"N": 16, "theta": 2.0, "microseconds": cost(), "machine": machine_line(describe())}
    else:
        result |= measure(root)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
