"""Controller-suffix counterfactual.

Claim: A trained StructGen-Split uses its right-action coordinates: zeroing them costs accuracy at every length.
Protocol: weights of `shippo run mqar`, 640 examples per length; as trained, suffix zeroed, R -> I
Time: 23 minutes on one CPU core, after `mqar`

Paper: tab:app-zero-extra-controller-head. The suffix is the 1024 numbers per token that the controllers emit for the
right action. `docs/results/suffix.md` says why R -> I is the cleaner intervention.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from shippo_lab.experiments.mqar import experiment as mqar
from shippo_lab.experiments.mqar.model import MqarConfig, build_model, load_model, weights_folder
from shippo_lab.experiments.mqar.scoring import flatten_scores, scores_of_lengths, train_recall
from shippo_lab.harness import experiment as lab
from shippo_lab.harness.training import products_in
from shippo_ssm.layers import identity_right, zero_right_suffix

ROW = "struct-split"
INTERVENTIONS: dict[str, tuple[str, Callable[[nn.Module], AbstractContextManager[Any]]]] = {
    "normal": ("As trained", contextlib.nullcontext),
    "zeroed": ("Suffix zeroed", zero_right_suffix),
    "identity": ("R -> I", identity_right),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig(MqarConfig):
    """A row: the configuration that the weights were trained with; its name is that of the intervention."""

    preset: str = "paper"
    """The preset of `mqar` whose weights are used."""


def rows(preset: str) -> tuple[SuffixConfig, ...]:
    """The three interventions on the StructGen-Split of a preset of `mqar`."""
    trained = next(row for row in mqar.EXPERIMENT.rows(preset) if row.name == ROW)
    return tuple(
        replace(trained.shared(SuffixConfig), name=name, label=label, preset=preset)
        for name, (label, _) in INTERVENTIONS.items()
    )


def trained_model(config: SuffixConfig, seed: int) -> nn.Module:
    """The model of a seed with the weights of `shippo run mqar`; the smoke preset, a matter of seconds, is trained here."""
    folder = weights_folder(mqar.EXPERIMENT.folder(config.preset), ROW, seed)
    if folder.exists():
        return load_model(folder, config, seed)
    if config.preset != "smoke":
        command = f"shippo run mqar --preset {config.preset} --row {ROW}"
        raise ValueError(f"no trained weights in {folder}; make them with `{command}`")
    model = build_model(config, seed)
    train_recall(model, config, seed, lab.Session())
    return model


def train(config: SuffixConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Score one seed under an intervention; only the smoke preset trains."""
    (seed,) = seeds
    model = trained_model(config, seed)
    parts, known = scores_of_lengths(config, seed, model), {}
    with INTERVENTIONS[config.name][1](model), products_in(config.precision):
        for length, score in parts.items():
            known[length] = score()
            session.report(len(known), len(parts))
    metrics, profiles = flatten_scores(known)
    return lab.RowResult(metrics, {"step": [], **profiles})


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict | None:
    """Zeroing costs accuracy at every length."""
    normal = result.rows.get("normal")
    if row.name == "normal" or normal is None:
        return None
    coordinate, exact = (
        [row.mean(f"{metric}_{n}") - normal.mean(f"{metric}_{n}") for n in row.config["eval_lengths"]]
        for metric in ("coordinate", "exact")
    )
    change = ", ".join(f"{fall:+.4f}" for fall in exact)
    return lab.Verdict(max(coordinate + exact) < 0, f"coordinate and exact below as trained at every length (exact {change})")


EXPERIMENT = lab.Experiment(
    name="suffix",
    **lab.described(__doc__),
    presets={preset: partial(rows, preset) for preset in mqar.EXPERIMENT.presets},
    train=train,
    columns=mqar.EXPERIMENT.columns,
    judge=judge,
    tables=lab.paper_tables("suffix"),
    main=mqar.EXPERIMENT.main,
    highlights=(lab.Highlight("zeroed", "exact_4096", "the same weights, right coordinates zeroed: exact"),),
)
