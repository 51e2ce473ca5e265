"""`fit`: a training that diverges ends, is scored as it was before, and is stored."""

from torch import nn

from shippo_lab.harness.experiment import Column, Experiment, FinishedRow, RowResult, Session, TrainConfig
from shippo_lab.harness.progress import Display
from shippo_lab.harness.runner import run
from shippo_lab.harness.tables import as_markdown, our_number
from shippo_lab.harness.training import Trainee, fit


def train(config, seeds, session):
    """A single number that is pulled to 3; seed 1 meets a loss that is not finite in its fourth step."""
    (seed,) = seeds
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)

    def loss_at(step):
        loss = (model.weight - 3).square().sum()
        return (loss * float("inf") if seed == 1 and step == 3 else loss), 1

    def score():
        return {"weight": float(model.weight.detach())}

    fitted = fit(config, session, Trainee(model, loss_at, {"end": score}))
    return RowResult(metrics={"weight": [fitted.scores["end"]["weight"]]}, curves=fitted.curves, notes=fitted.notes)


def test_a_diverged_training_is_stored_and_said(tmp_path):
    row = TrainConfig(name="plain", label="Plain", steps=9, num_seeds=3, learning_rate=0.1, weight_decay=0.0, eval_every=100)
    experiment = Experiment(
        name="toy", title="A toy", claim="", protocol="", tables=(), wall_time="", presets={"full": lambda: (row,)},
        train=train, columns=(Column(key="weight", label="Weight"),), judge=lambda result: {}, stack=1,
    )  # fmt: skip
    result = run(experiment, out=tmp_path, jobs=1, display=Display())
    first, second, third = result.rows["plain"].metrics["weight"]
    # Three of nine steps of AdamW, each of about the learning rate.
    assert first == third > 0.8
    assert 0.2 < second < 0.4
    assert "Plain (diverged: seed 1: step 3)" in as_markdown(experiment, result)


def test_a_diverged_training_stays_so_when_resumed(tmp_path):
    row = TrainConfig(steps=9, learning_rate=0.1, weight_decay=0.0, eval_every=100)
    session = Session(checkpoint=tmp_path / "unit.pt")
    once, again = train(row, (1,), session), train(row, (1,), session)
    assert once.notes["diverged_at"] == again.notes["diverged_at"] == "step 3"
    assert once.metrics == again.metrics


def test_numbers_that_are_not_finite_are_printed(toy):
    row = FinishedRow("plain", "Plain", {}, [0, 1], {"nmse": [0.1, float("nan")]}, {"step": []}, {}, 1.0)
    assert our_number(row, toy.columns[0]) == "nan ± nan"
