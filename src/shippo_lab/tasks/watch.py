"""A watch on a wrist: 7 shoulder exercises of 10 subjects, acceleration and gyroscope at 50 Hz, from the wheel of `seglearn`.

Another mounting Q changes vectors and coefficients C to C Q, so inner products C C^T and determinants stay.
"""

from functools import lru_cache
from importlib import metadata
from typing import NamedTuple

import numpy as np
from scipy.spatial.transform import Rotation

from shippo_ssm.projection import LegS, StreamingMemory

RATE, LENGTH, CLASSES = 50.0, 100, 7
# One unit of angular rate, in radians per second, weighs as much as this many g.
GYROSCOPE_SCALE = 0.4
Array = np.ndarray


class Windows(NamedTuple):
    """Windows of all series: values [M, 100, 6] (acceleration in g, rate in radians per second), and whose they are."""

    values: Array
    label: Array
    subject: Array
    series: Array


@lru_cache(maxsize=1)
def recordings() -> tuple[list[Array], Array, Array]:
    """The series [T, 6], their exercises and their subjects, from the installed package; nothing of it is copied."""
    try:
        path = metadata.distribution("seglearn").locate_file("seglearn/data/watch_dataset.npy")
    except metadata.PackageNotFoundError:
        raise ValueError("watch: the recordings are not here; install the extra: pip install 'shippo-ssm[imu]'") from None
    # A dictionary, pickled by the package itself.
    found = np.load(str(path), allow_pickle=True).item()
    return [np.asarray(series, float) for series in found["X"]], found["y"].astype(int), found["subject"].astype(int)


def windows(hop: int = LENGTH) -> Windows:
    """Windows of 2 s, one every `hop` samples."""
    series, label, subject = recordings()
    cuts = [np.lib.stride_tricks.sliding_window_view(values, LENGTH, axis=0)[::hop].swapaxes(1, 2) for values in series]
    which = np.repeat(np.arange(len(series)), [len(cut) for cut in cuts])
    return Windows(np.concatenate(cuts), label[which], subject[which], which)


def turned(data: Windows, seed: int) -> Windows:
    """The same, each series mounted by a random rotation of its own."""
    mounting = Rotation.random(int(data.series.max()) + 1, rng=np.random.default_rng(seed)).as_matrix()[data.series]
    values = data.values.reshape(*data.values.shape[:2], 2, 3) @ mounting[:, None]
    return data._replace(values=values.reshape(data.values.shape))


def statistics(values: Array) -> Array:
    """Mean, spread, extremes, median, shape and roughness of each channel: [M, 54]."""
    mean = values.mean(1, keepdims=True)
    spread = values.std(1, keepdims=True) + 1e-9
    unit = (values - mean) / spread
    change = np.diff(values, axis=1)
    parts = [mean[:, 0], spread[:, 0], values.min(1), values.max(1), np.median(values, 1), (unit**3).mean(1), (unit**4).mean(1)]
    return np.concatenate([*parts, np.abs(change).mean(1), (np.diff(np.sign(unit), axis=1) != 0).mean(1)], axis=1)


def memories(values: Array, order: int, turning: bool) -> Array:
    """Coefficients [M, N, 2, 3] of whole windows: LegS of acceleration and gyroscope, in body coordinates or turned along."""
    memory = StreamingMemory(LegS(order), 6, RATE, batch_size=len(values))
    memory.update(values * np.repeat([1.0, GYROSCOPE_SCALE], 3), turn=values[..., 3:] / RATE if turning else None)
    return memory.state.reshape(len(values), order, 2, 3)


def gram(values: Array, order: int) -> Array:
    """C C^T [M, F] of both memories stacked, `order` coefficients of each sensor in each: cross terms included."""
    both = [memories(values, order, turning).reshape(len(values), -1, 3) for turning in (False, True)]
    stacked = np.concatenate(both, axis=1)
    i, j = np.triu_indices(stacked.shape[1])
    return np.einsum("mfc,mfc->mf", stacked[:, i], stacked[:, j])


def invariants(values: Array) -> tuple[Array, Array]:
    """Invariants [M, T, F] of samples and of both memories, and their signs [F] in a mirror.

    Six vectors per sample, in its own coordinates: acceleration, rate, their derivatives, the mean acceleration of the memory
    in the body frame, and the direction of that of the memory driven by the gyroscope (gravity, mostly), turned back to the
    sample. Invariants are inner products and determinants, compressed by sign(x) log(1 + 2 |x|).
    """
    samples = (values * np.repeat([1.0, GYROSCOPE_SCALE], 3)).reshape(*values.shape[:2], 2, 3)
    acceleration, rate = np.moveaxis(samples, 2, 0)
    changes = 5 * np.gradient(samples, axis=1)
    body = np.broadcast_to(memories(values, 1, False)[:, None, 0, 0], acceleration.shape)
    gravity = np.empty_like(acceleration)
    moving = memories(values, 1, True)[:, 0, 0]
    moving = moving / np.linalg.norm(moving, axis=-1, keepdims=True).clip(1e-9)
    turn = Rotation.from_rotvec(values[..., 3:].reshape(-1, 3) / RATE).as_matrix().reshape(*values.shape[:2], 3, 3)
    for t in range(values.shape[1] - 1, -1, -1):
        gravity[:, t] = moving
        moving = np.einsum("mij,mj->mi", turn[:, t], moving)
    vectors = [acceleration, rate, gravity, changes[:, :, 0], changes[:, :, 1], body]
    # A rate of rotation is an axial vector: a mirror turns it the other way round.
    polar = np.array([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    found, signs = [], []
    for i, j in zip(*np.triu_indices(len(vectors))):
        inner = np.einsum("mtc,mtc->mt", vectors[i], vectors[j])
        found.append(np.sqrt(inner) if i == j else inner)
        signs.append(polar[i] * polar[j])
    for i, j, k in ((0, 1, 2), (1, 4, 2), (0, 3, 2), (2, 5, 1), (2, 5, 0), (0, 1, 5)):
        found.append(np.einsum("mtc,mtc->mt", np.cross(vectors[i], vectors[j]), vectors[k]))
        # A determinant of three polar vectors changes its sign; each axial one changes it once more.
        signs.append(-polar[i] * polar[j] * polar[k])
    for i in range(2):
        found.append(np.linalg.norm(np.cross(vectors[i], gravity), axis=-1))
        signs.append(1.0)
    stacked = np.stack(found, axis=-1)
    return np.sign(stacked) * np.log1p(2 * np.abs(stacked)), np.array(signs)
