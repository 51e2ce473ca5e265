"""A toy experiment, small enough to be read at once: what the lab needs to know of any."""

import pytest

from shippo_lab.harness.experiment import Column, Experiment, FinishedRow, PaperTable, Result, RowConfig, RowResult, Verdict


def rows():
    return (RowConfig(name="plain", label="Plain_one", steps=5, num_seeds=2), RowConfig(name="right", label="Right", steps=5))


def train(config, seeds, session):
    session.report(config.steps, config.steps)
    return RowResult(metrics={"nmse": [0.25 / (1 + seed) for seed in seeds]})


def judge(result):
    return {name: Verdict(name == "right", "falls -> 0") for name in result.rows}


@pytest.fixture
def toy():
    return Experiment(
        name="toy",
        title="A toy",
        claim="It runs.",
        protocol="nothing is trained",
        tables=(PaperTable("tab:toy", "A toy", 3, {"right": {"nmse": (2.44e-7, 4.61e-7), "r2": (1.0, None)}}),),
        wall_time="a moment",
        presets={"full": rows, "smoke": rows},
        train=train,
        columns=(Column(key="nmse", label="NMSE"), Column(key="r2", label="R^2", better="higher")),
        judge=judge,
    )


def finished(name, label, seeds=2, **metrics):
    return FinishedRow(name, label, {"steps": 5}, list(range(seeds)), metrics, {"step": []}, {}, 1.0)


@pytest.fixture
def toy_result():
    """Two rows of the toy, one with a number that the other lacks."""
    table = [finished("plain", "Plain_one", nmse=[2e-4, 4e-4]), finished("right", "Right", nmse=[1e-7, 2e-7], r2=[1.0, 1.0])]
    return Result("toy", "full", {row.name: row for row in table}, {"torch": "2.0"}, 60.0, "here")
