"""The recipes of CONTRIBUTING.md, carried out with toys: each runs the tests that the built-in ones run."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shippo_lab import experiments
from shippo_lab.harness.experiment import Column, Experiment, Highlight, PaperTable, RowConfig, RowResult, Verdict
from shippo_lab.harness.progress import Display
from shippo_lab.harness.runner import run
from shippo_lab.harness.tables import as_markdown
from shippo_ssm import Shippo, dispatch
from shippo_ssm.actions import RightAction, Shear
from shippo_ssm.layers import Mixer
from shippo_ssm.scan import BACKENDS, reference, transport_scan
from shippo_ssm.scan.packing import scan_packed
from tests.shippo_lab.experiments.test_experiments import check_experiment
from tests.shippo_ssm.actions import test_families
from tests.shippo_ssm.layers.conftest import check_mixer
from tests.shippo_ssm.scan.conftest import REGIMES, VARIANTS, check_backend

RECIPES = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
FAMILY_BATTERY = [
    check
    for name, check in vars(test_families).items()
    if name.startswith("test_") and list(inspect.signature(check).parameters) == ["family"]
]


def test_every_recipe_is_here_and_names_what_is_there():
    root = Path(__file__).parents[1]
    for kind in ("backend", "right action", "mixer", "experiment"):
        assert f"## Add a{'n' if kind == 'experiment' else ''} {kind}" in RECIPES
    for path in re.findall(r"`((?:src|tests|docs)/[^`]*)`", RECIPES):
        assert (root / path).exists(), f"CONTRIBUTING.md names {path}, which is not there"


def in_segments(recurrence, initial_state=None, cu_seqlens=None):
    """Seven positions at a time, each segment from the state that the one before it left."""
    if cu_seqlens is not None:
        return scan_packed(in_segments, recurrence, initial_state, cu_seqlens)
    state, outputs = recurrence.zero_state() if initial_state is None else initial_state, []
    for start in range(0, recurrence.read.shape[1], 7):
        y, state = reference.run(recurrence.between(start, start + 7), state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def forgetful(recurrence, initial_state=None, cu_seqlens=None):
    """`in_segments` with a slip: the second segment starts from nothing."""
    first, _ = reference.run(recurrence.between(0, 7), initial_state)
    second, state = reference.run(recurrence.between(7, recurrence.read.shape[1]))
    return torch.cat([first, second], 1), state


def add_backend(monkeypatch, run):
    """Step 2 of the recipe, undone after the test."""
    monkeypatch.setitem(BACKENDS, run.__name__, run)
    monkeypatch.setattr(dispatch, "SCAN_BACKENDS", (*dispatch.SCAN_BACKENDS, run.__name__))


@pytest.mark.parametrize("case", [*({"regime": regime, "T": 30} for regime in REGIMES), *VARIANTS], ids=str)
def test_a_backend(monkeypatch, case):
    add_backend(monkeypatch, in_segments)
    check_backend("in_segments", **case)


def test_a_backend_on_packed_sequences(monkeypatch):
    add_backend(monkeypatch, in_segments)
    check_backend("in_segments", B=1, T=30, states=3, cu_seqlens=(0, 9, 9, 30))
    ones = torch.ones(1, 9, 1, 1)
    y, _ = transport_scan(ones, ones, ones, ones[..., 0], torch.zeros(1, 1), backend="in_segments")
    assert y.flatten().tolist() == list(range(1, 10))


def test_a_wrong_backend_is_found(monkeypatch):
    add_backend(monkeypatch, forgetful)
    with pytest.raises(AssertionError, match=r"y: .* > 1e-10"):
        check_backend("forgetful", T=30)


class OneShear(RightAction):
    """R = I + step eta e_0 e_1^T."""

    def __init__(self, width):
        super().__init__(width, ["eta"])

    def dense(self, coords, step):
        return Shear(self.width, 0, 1).dense((self.check(coords, step) * coords[..., 0]).to(coords.dtype))

    def generator(self, coords):
        return coords[..., None] * Shear(self.width, 0, 1).generator.to(coords)


class WrongWay(OneShear):
    """`OneShear` with the generator of its transpose."""

    def generator(self, coords):
        return super().generator(coords).mT


def test_the_battery_of_right_actions_is_there():
    assert len(FAMILY_BATTERY) >= 9


@pytest.mark.parametrize("check", FAMILY_BATTERY, ids=lambda check: check.__name__)
def test_a_right_action(check):
    check(OneShear(3))


def test_a_wrong_right_action_is_found():
    with pytest.raises(AssertionError):
        test_families.test_generator_is_the_derivative_at_step_zero(WrongWay(3))


def test_a_right_action_in_a_layer():
    check_mixer(Shippo(8, d_state=4, group_width=4, right=OneShear(4)).double())


class RunningMean(Mixer):
    """y_t = W (the mean of u_1 .. u_t); the state is their sum and number."""

    supports_masks = False

    def __init__(self, d_model):
        super().__init__(d_model)
        self.out_proj = torch.nn.Linear(d_model, d_model)

    def init_state(self, batch_size):
        return self.out_proj.weight.new_zeros(batch_size, self.d_model + 1)

    def run(self, u, state, segment):
        state = self.init_state(len(u)) if state is None else state
        sums = torch.cat([u, torch.ones_like(u[..., :1])], -1).cumsum(1) + state.unsqueeze(1)
        return self.out_proj(sums[..., :-1] / sums[..., -1:]), sums[:, -1]


def test_a_mixer():
    check_mixer(RunningMean(5).double())


def rows():
    return tuple(RowConfig(name=f"n{steps}", label=f"{steps} steps", steps=steps, num_seeds=2) for steps in (10, 20))


def train(config, seeds, session):
    session.report(config.steps, config.steps)
    return RowResult(metrics={"error": [1 / (config.steps + seed) for seed in seeds]})


def judge(result):
    return {name: Verdict(row.mean("error") < 0.06, "below 0.06") for name, row in result.rows.items()}


def test_an_experiment(monkeypatch, tmp_path):
    """A claim with two rows, of which one holds, from its line in the list to its table."""
    claim = ModuleType("shippo_lab.experiments.halves")
    vars(claim)["EXPERIMENT"] = Experiment(
        name="halves",
        title="Halves",
        claim="Twice the steps, half the error.",
        protocol="two rows, two seeds",
        tables=(PaperTable("tab:halves", "Halves", 2, {"n20": {"error": (0.05, None)}}),),
        wall_time="no time",
        presets={"full": rows, "smoke": rows},
        train=train,
        columns=(Column(key="error", label="Error"),),
        judge=judge,
        highlights=(Highlight("n20", "error", "error after twenty steps"),),
    )
    monkeypatch.setitem(sys.modules, claim.__name__, claim)
    monkeypatch.setitem(experiments._MODULES, "halves", "halves")
    experiment = experiments.get("halves")
    check_experiment(experiment)
    result = run(experiment, jobs=1, out=tmp_path, display=Display())
    assert experiment.result(tmp_path).rows == result.rows
    assert {name: verdict.holds for name, verdict in experiment.judge(result).items()} == {"n10": False, "n20": True}
    table = as_markdown(experiment, result)
    assert "| 20 steps | ours | 0.0488" in table
    assert "DOES NOT HOLD" in table
