"""The precision of matrix products: measured in a process of its own, kept by a run that is continued."""

import subprocess

import pytest
import torch
from torch import nn

from shippo_lab.harness import training as precision
from shippo_lab.harness.experiment import Session, TrainConfig
from shippo_lab.harness.training import Trainee, fit


@pytest.mark.parametrize(
    ("outcome", "pays"), [("1e-3 0.4", True), ("1e-3 0.9", False), ("nan 0.4", False), ("0.5 0.4", False), (-4, False)]
)
def test_bfloat16_must_be_right_and_faster(monkeypatch, outcome, pays):
    """A probe that dies of an illegal instruction says no; so does one that is slow, or wrong."""

    def run(command, **options):
        if isinstance(outcome, int):
            raise subprocess.CalledProcessError(outcome, command)
        return subprocess.CompletedProcess(command, 0, outcome)

    monkeypatch.setattr(precision.subprocess, "run", run)
    precision.bfloat16_pays.cache_clear()
    assert precision.bfloat16_pays() is pays
    assert precision.resolve_precision("auto") == ("bfloat16" if pays else "float32")
    assert precision.resolve_precision("float32") == "float32"
    precision.bfloat16_pays.cache_clear()


def test_the_probe_runs():
    """On this machine, whatever it is."""
    precision.bfloat16_pays.cache_clear()
    assert precision.bfloat16_pays() in (True, False)


def test_a_run_keeps_the_precision_it_began_with(tmp_path, monkeypatch):
    session = Session(checkpoint=tmp_path / "unit.pt")
    row = TrainConfig(steps=2, learning_rate=0.1, weight_decay=0.0, eval_every=100)
    seen = []

    def loss_at(step):
        seen.append(torch.is_autocast_enabled("cpu"))
        return model.weight.square().sum(), 1

    for pays in (True, False):
        monkeypatch.setattr(precision, "bfloat16_pays", lambda pays=pays: pays)
        model = nn.Linear(1, 1)
        fitted = fit(row, session, Trainee(model, loss_at, {}, precision="auto"))
        assert fitted.notes["precision"] == "bfloat16"
    assert seen == [True, True]
