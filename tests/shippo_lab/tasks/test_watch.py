"""The watch: windows of the recordings, another mounting, and features that it cannot change."""

from importlib.util import find_spec

import numpy as np
import pytest

from shippo_lab.tasks import watch

pytestmark = pytest.mark.skipif(find_spec("seglearn") is None, reason="pip install --no-deps seglearn")


@pytest.fixture(scope="module")
def some():
    return watch.windows(1500)


def test_windows_are_pieces_of_the_series(some):
    series, label, subject = watch.recordings()
    assert (len(series), set(label), set(subject)) == (140, set(range(7)), set(range(1, 11)))
    assert some.values.shape[1:] == (100, 6)
    index = int(np.flatnonzero(some.series == 17)[0])
    assert np.array_equal(some.values[index], series[17][:100])
    assert some.label[index] == label[17]
    assert len(watch.windows()) == 4
    assert len(watch.windows().values) == sum(len(values) // 100 for values in series)


def test_another_mounting_changes_statistics_and_no_invariant(some):
    turned = watch.turned(some, 3)
    assert np.abs(np.linalg.norm(turned.values[..., :3], axis=-1) - np.linalg.norm(some.values[..., :3], axis=-1)).max() < 1e-12
    assert np.abs(watch.statistics(turned.values) - watch.statistics(some.values)).max() > 1
    assert np.abs(watch.memories(turned.values, 4, True) - watch.memories(some.values, 4, True)).max() > 0.5
    assert np.abs(watch.gram(turned.values, 4) - watch.gram(some.values, 4)).max() < 1e-10
    found, signs = watch.invariants(some.values)
    assert np.abs(watch.invariants(turned.values)[0] - found).max() < 1e-6
    assert found.shape[-1] == len(signs)


def test_a_mirror_changes_the_signs_that_are_named(some):
    """The other arm: a reflection of the acceleration, and the rate, an axial vector, reflected and reversed."""
    mirror = np.diag([-1.0, 1.0, 1.0])
    other = np.concatenate([some.values[..., :3] @ mirror, -some.values[..., 3:] @ mirror], -1)
    found, signs = watch.invariants(some.values)
    assert np.abs(watch.invariants(other)[0] - found * signs).max() < 1e-6
    assert set(signs) == {-1.0, 1.0}
