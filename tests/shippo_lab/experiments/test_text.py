"""Experiment `text`: equal sizes, a rate chosen once per row, verdicts that can fail, a figure from the result alone."""

import importlib.util

import pytest
import torch

from shippo_lab.experiments import text
from shippo_lab.harness.experiment import FinishedRow, Result, Session

HAS_MAMBA = importlib.util.find_spec("mambapy") is not None


@pytest.mark.parametrize("config", [row for row in text.rows() if row.name.endswith("-small")], ids=lambda row: row.name)
def test_rows_have_equal_sizes(config):
    if "mamba" in config.name and not HAS_MAMBA:
        with pytest.raises(ValueError, match="expected mambapy, which is in the extra `bench`"):
            text.width_of(config)
        return
    with torch.device("meta"):
        size = text.inner_parameters(text.make_model(config, text.width_of(config)))
    assert abs(size / config.size - 1) < 0.05


def test_a_row_is_trained_with_the_best_of_its_rates(tmp_path):
    config = text.smoke()[2]
    (tmp_path / "rates").mkdir()
    for rate, bits in zip(config.rates, (3.0, 1.0, 2.0)):
        (tmp_path / "rates" / f"{config.name}.{rate:g}.json").write_text(f'{{"bits": {bits}}}')
    result = text.train(config, (0,), Session(checkpoint=tmp_path / "checkpoints" / "unit.pt"))
    assert result.notes["learning_rate"] == config.rates[1]
    assert len(result.notes["digest"]) == 64
    assert {len(values) for values in result.metrics.values()} == {1}
    assert set(result.metrics) == {column.key for column in text.EXPERIMENT.columns}
    assert 7 < result.metrics["bits_1"][0] < 9
    assert len(result.curves["bits"]) == len(result.curves["step"]) == 1


@torch.no_grad()
def test_segments_with_a_carried_state_have_the_bits_of_whole_windows():
    for config in text.smoke():
        model = text.make_model(config, 16)
        task = text.TextTask(length=4 * config.length, corpus="library")
        whole = task.evaluate(model, config.test_bytes // task.length, split="test").bits_per_token
        assert text.streamed_bits(model, config, 4)["bits_4"] == pytest.approx(whole, abs=1e-4)


def finished(name, bits, training, longest=1.0):
    metrics = {"bits_1": [bits], "bits_16": [bits * longest], "training": [training]}
    curves = {"step": [1, 2], "bits": [[bits + 1], [bits]]}
    return FinishedRow(name, name, {"batch": 8, "length": 256}, [0], metrics, curves, {}, 1.0)


def make_result(**changes):
    rows = {"default": (2.0, 4000.0), "none": (2.1, 4000.0), "mamba": (2.2, 500.0), "transformer": (2.3, 5000.0)}
    found = [finished(f"{name}-small", *numbers) for name, numbers in (rows | changes).items()]
    return Result("text", "full", {row.name: row for row in found}, {}, 1.0)


def test_verdicts_can_fail():
    assert all(verdict.holds for verdict in text.judge(make_result()).values())
    assert len(text.judge(make_result())) == 4
    for row, numbers in (
        ("default", (2.25, 4000.0)),
        ("default", (2.0, 4000.0, 1.05)),
        ("none", (1.9, 4000.0)),
        ("mamba", (2.2, 1500.0)),
        ("transformer", (2.3, 9000.0)),
    ):
        assert not text.judge(make_result(**{row: numbers}))[f"{row}-small"].holds


def test_the_figure_needs_the_result_alone(tmp_path):
    pytest.importorskip("matplotlib")
    text.figure(make_result(), tmp_path / "text.svg")
    assert "million bytes read" in (tmp_path / "text.svg").read_text()
