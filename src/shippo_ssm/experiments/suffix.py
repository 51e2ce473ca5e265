"""Controller-suffix counterfactual (paper: tab:app-zero-extra-controller-head).

Claim. A trained StructGen-Split depends on the 1024 numbers per token that its controllers emit for the right action: with
this suffix set to zero at evaluation, all weights as they are, accuracy falls at every length.

Protocol. The weights that `shippo run mqar` leaves in its folder, scored on the evaluation examples of `mqar` as they are,
with the suffix zeroed, and with R -> I. Zero coordinates are not the identity: the diagonal factors of the split flow then
forget at the rate softplus(0) = 0.69 per unit step; R -> I is the cleaner of the two.

Expected (paper, length 4096, exact): 0.0329 as trained, 0.0176 zeroed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from shippo_ssm.experiments.mqar import claim as mqar
from shippo_ssm.experiments.mqar.model import MqarConfig, build_model, load_model, weights_folder
from shippo_ssm.experiments.mqar.recall import flatten_scores, scores_of_lengths
from shippo_ssm.experiments.paper import paper_tables
from shippo_ssm.lab.experiment import Experiment, FinishedRow, Highlight, Result, RowResult, Session, Verdict, by_row
from shippo_ssm.lab.precision import products_in, resolve_precision
from shippo_ssm.lab.training import measure
from shippo_ssm.layers import identity_right, zero_right_suffix

ROW = "struct-split"
LABELS = {"normal": "As trained", "zeroed": "Suffix zeroed", "identity": "R -> I"}
CONTEXTS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "normal": contextlib.nullcontext,
    "zeroed": zero_right_suffix,
    "identity": identity_right,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig(MqarConfig):
    """A row: the configuration that the weights were trained with, and what is done to the model."""

    intervention: Literal["normal", "zeroed", "identity"] = "normal"
    preset: str = "quick"
    """The preset of `mqar` whose weights are taken."""


def rows(preset: str) -> tuple[SuffixConfig, ...]:
    """The three interventions on the StructGen-Split of a preset of `mqar`."""
    trained = next(row for row in mqar.EXPERIMENT.rows(preset) if row.name == ROW)
    return tuple(
        replace(trained.shared(SuffixConfig), name=name, label=label, intervention=name, preset=preset)
        for name, label in LABELS.items()
    )


def trained_model(config: SuffixConfig, seed: int) -> nn.Module:
    """The model of a seed with its trained weights; the smoke preset, a matter of seconds, is trained here and now.

    Raises:
        ValueError: the run of `mqar` is not there; the message names the command that makes it.
    """
    folder = weights_folder(mqar.EXPERIMENT.folder(config.preset), ROW, seed)
    if folder.exists():
        return load_model(folder, config, seed)
    if config.preset != "smoke":
        command = f"shippo run mqar --preset {config.preset} --row {ROW}"
        raise ValueError(f"no trained weights in {folder}; make them with `{command}`")
    model = build_model(config, seed)
    mqar.train_model(model, config, seed, Session())
    return model


def train(config: SuffixConfig, seeds: tuple[int, ...], session: Session) -> RowResult:
    """Score one seed under an intervention; nothing is trained but in the smoke preset."""
    (seed,) = seeds
    model = trained_model(config, seed)
    total = config.eval_examples * sum(config.eval_lengths)
    parts = scores_of_lengths(config, lambda length: config.task(seed, length), model)
    with CONTEXTS[config.intervention](model), products_in(resolve_precision(config.precision)):
        known = measure(parts, on_cost=lambda tokens: session.report(int(tokens), total))
    metrics, profiles = flatten_scores(known)
    return RowResult(metrics=metrics, curves={"step": [], **profiles})


@by_row
def judge(row: FinishedRow, result: Result) -> Verdict | None:
    """Zeroing costs accuracy at every length."""
    normal = result.rows.get("normal")
    if row.name == "normal" or normal is None:
        return None
    coordinate, exact = (
        [row.mean(f"{metric}_{n}") - normal.mean(f"{metric}_{n}") for n in row.config["eval_lengths"]]
        for metric in ("coordinate", "exact")
    )
    change = ", ".join(f"{fall:+.4f}" for fall in exact)
    text = f"coordinate and exact below as trained at every length (exact {change})"
    return Verdict(max(coordinate + exact) < 0, text)


EXPERIMENT = Experiment(
    name="suffix",
    title="Controller-suffix counterfactual",
    claim="A trained StructGen-Split uses its right-action coordinates: zeroing them costs accuracy at every length.",
    protocol="weights of `shippo run mqar`, 640 examples per length; as trained, suffix zeroed, R -> I",
    tables=paper_tables("suffix"),
    wall_time="paper: 23 minutes on one busy core, after `mqar --preset paper`",
    presets={preset: partial(rows, preset) for preset in mqar.EXPERIMENT.presets},
    train=train,
    columns=mqar.COLUMNS,
    judge=judge,
    main=("coordinate_4096", "exact_128", "exact_4096"),
    stack=1,
    highlights=(Highlight("zeroed", "exact_4096", "the same weights, right coordinates zeroed: exact"),),
)
