"""The experiment `watch`: every row runs, invariants do not see the mounting, and the verdict can fail."""

from importlib.util import find_spec

import pytest

from shippo_lab.experiments import watch
from shippo_lab.harness.experiment import FinishedRow, Result, Session

pytestmark = pytest.mark.skipif(find_spec("seglearn") is None, reason="pip install --no-deps seglearn")
pytest.importorskip("sklearn")


@pytest.mark.parametrize("config", watch.rows(watch.SMOKE), ids=lambda config: config.name)
def test_a_row_is_trained_and_tested(config):
    found = watch.train(config, (0,), Session())
    assert set(found.metrics) == {"recorded", "turned"}
    if config.name in watch.OURS:
        assert found.metrics["recorded"] == found.metrics["turned"]
    assert found.notes["parameters"] <= 100_000


def test_the_verdict_can_fail():
    def row(name, recorded, turned):
        return FinishedRow(name, name, {}, [0], {"recorded": [recorded], "turned": [turned]}, {}, {}, 1.0)

    for recorded, turned, holds in ((0.85, 0.85, True), (0.85, 0.81, False), (0.82, 0.85, False)):
        rows = {r.name: r for r in (row("cnn", 0.86, 0.3), row("invariants", recorded, turned))}
        assert watch.judge(Result("watch", "full", rows, {}, 1.0))["invariants"].holds == holds
