"""How the layer starts: every probe trains, a row resumes to the same numbers, verdicts can fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from shippo_lab.experiments import start
from shippo_lab.experiments.start import PROBES
from shippo_lab.experiments.tracking.curriculum import held_rate, stage, word_stages
from shippo_lab.harness.experiment import FinishedRow, Result, Session
from shippo_ssm.layers import PAPER_GEOMETRY

SHORT = dataclasses.replace(start.SMOKE, name="new", budget={"words": 3, "text": 2}, steps=5)


@pytest.mark.parametrize("probe", PROBES)
def test_every_probe_trains_and_scores(probe):
    torch.manual_seed(0)
    trainee = PROBES[probe](dataclasses.replace(start.SMOKE, layer={"d_state": 4}), 0, 4)
    loss, num_tokens = trainee.loss_at(0)
    loss.backward()
    gradients = [parameter.grad for parameter in trainee.model.parameters()]
    assert num_tokens > 100
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    scores = trainee.scores["end"]()
    assert all(0 <= score < (12 if name == "text" else 0.3) for name, score in scores.items())


def test_a_row_is_resumed_to_the_same_numbers(tmp_path):
    session = Session(checkpoint=tmp_path / "unit.pt")
    alone = start.train(SHORT, (1,), Session())
    seen: list[int] = []

    def kill(progress: Any) -> None:
        seen.append(progress.step)
        if progress.step >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start.train(SHORT, (1,), Session(checkpoint=session.checkpoint, notify=kill))
    again = start.train(SHORT, (1,), session)
    assert again.metrics == alone.metrics
    assert set(alone.metrics) == {"words_6", "text"}
    assert seen[-1] >= 4
    assert not list(tmp_path.iterdir())


def test_rows_change_what_they_say():
    found = {row.name: row for row in start.rows()}
    # The geometry that the committed numbers were trained with, in every row; only the start differs.
    assert found["new"].layer == found["words"].layer == found["turns"].layer == PAPER_GEOMETRY
    assert found["no-identity-in"].layer == PAPER_GEOMETRY | {"in_init": "random"}
    assert all(PAPER_GEOMETRY.items() <= row.layer.items() for row in found.values())
    assert found["previous"].layer["conv_init"] == "random"
    assert found["words"].budget == {"words": 4500}
    assert len(found) == 11
    assert {row.name for row in start.EXPERIMENT.rows("smoke")} == set(found) - {"words", "turns"}


def test_stages_and_rate():
    assert [stage(word_stages(16), step, 100) for step in (0, 20, 40, 99)] == [(2, 3), (2, 6), (2, 16), (8, 16)]
    assert held_rate(1000)(0) == pytest.approx(1 / 50)
    assert held_rate(1000)(200) == 1.0
    assert held_rate(1000)(999) == pytest.approx(0.0, abs=1e-5)


def test_verdicts_can_fail():
    def row(name: str, **metrics: float) -> FinishedRow:
        return FinishedRow(name, name, {}, [0, 1], {key: [number] * 2 for key, number in metrics.items()}, {}, {}, 1.0)

    def judged(*rows: FinishedRow) -> dict[str, bool]:
        result = Result("start", "full", {row.name: row for row in rows}, {}, 1.0)
        return {name: verdict.holds for name, verdict in start.judge(result).items()}

    good = {"recall": 0.5, "turns_coordinate_24": 0.5, "words_6": 0.5, "text": 3.0}
    assert judged(row("new", **good), row("previous", **good | {"text": 3.1})) == {"new": True}
    assert judged(row("new", **good), row("previous", **good | {"text": 2.9})) == {"new": False}
    assert judged(row("words", words_16=1.0, words_256=0.94)) == {"words": False}
    assert judged(row("turns", turns_24=0.91)) == {"turns": True}
