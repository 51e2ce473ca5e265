"""Train one model with AdamW and score it, so that a kill at any moment costs a minute and no number.

Data path of `fit`: `loss_at(step)` gives the loss of a step, a function of the step alone; `evaluate()` the numbers of a
learning curve; `scores` what is measured at the end, part by part. One checkpoint holds everything that a run needs to
continue: parameters, AdamW moments, the step, the curves, and the scores that are there already. A run that was killed repeats
the steps since its last checkpoint and ends with the same numbers. A loss or a gradient that is not finite ends the training of
a run, not the run: the parameters stay as they were before that step, are scored, and `notes["diverged_at"]` names the step.
`fit_each` trains several small models one after another, each with a checkpoint of its own, as one unit of an experiment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shippo_ssm.lab.experiment import Progress, RowResult, Session, TrainConfig
from shippo_ssm.lab.precision import Precision, products_in, resolve_precision
from shippo_ssm.layers import weight_decay_groups

SAVE_SECONDS = 60.0


class Score(NamedTuple):
    """One part of what is measured after training."""

    name: str
    cost: float
    """Time that it takes, in any unit that the parts share."""
    measure: Callable[[Callable[[float], None]], dict[str, Any]]
    """Gives JSON-able numbers; calls its argument with the fraction that is done."""


def measure(
    scores: Iterable[Score],
    known: dict[str, dict[str, Any]] | None = None,
    *,
    on_part: Callable[[], None] = lambda: None,
    on_cost: Callable[[float], None] = lambda cost: None,
) -> dict[str, dict[str, Any]]:
    """Measure every part that `known` does not have yet, put it there, and return `known`.

    Args:
        scores: the parts.
        known: numbers by the name of the part.
        on_part: called when a part is done.
        on_cost: called with the cost of what is done so far.
    """
    known, before = {} if known is None else known, 0.0
    for part in scores:
        if part.name not in known:
            known[part.name] = part.measure(lambda share, part=part, before=before: on_cost(before + share * part.cost))
            on_part()
        before += part.cost
    return known


class Fitted(NamedTuple):
    """What `fit` gives: learning curves, scores by part, and `notes` for a `RowResult`."""

    curves: dict[str, list[Any]]
    scores: dict[str, dict[str, Any]]
    notes: dict[str, Any]


def fit(
    model: nn.Module,
    config: TrainConfig,
    session: Session,
    *,
    loss_at: Callable[[int], tuple[Tensor, int]],
    evaluate: Callable[[], dict[str, float]],
    scores: tuple[Score, ...],
    score_steps: int,
    rate: Callable[[int], float] = lambda step: 1.0,
    precision: Precision = "float32",
    right_rate: float = 1.0,
) -> Fitted:
    """Train a model by AdamW and measure its scores; one seed.

    Args:
        model: its parameters are as they start.
        loss_at: step -> (what is minimised, the number of tokens in it).
        evaluate: the numbers of the learning curves, every `config.eval_every` steps and at the end.
        scores: what is measured after the last step.
        score_steps: how many training steps take as long as that, for the estimate of the end.
        rate: step -> factor of the learning rate.
        precision: of matrix products (`lab/precision.py`); a run that is continued keeps what it began with.
        right_rate: factor of the learning rate of what makes right actions.

    Returns:
        Curves, scores, and as notes the parameter count, the training speed, the time, and where training diverged, if it did.
    """
    groups = weight_decay_groups(model, config.weight_decay, right_rate * config.learning_rate)
    optimiser = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
    rates = [group["lr"] for group in optimiser.param_groups]
    meta: dict[str, Any] = {"step": 0, "curves": {"step": []}, "scores": {}, "seconds": 0.0, "tokens": 0, "train_seconds": 0.0}
    restored = session.restore()
    if restored is None:
        meta["precision"] = resolve_precision(precision)
    else:
        # A checkpoint of before there was a choice has none.
        meta = {"precision": "float32"} | restored[1]
        _put_back(model, optimiser, restored[0], meta["step"])
    begun, earlier = time.monotonic(), meta["seconds"]
    total, all_costs = config.steps + score_steps, sum(part.cost for part in scores)
    shown: dict[str, float] = {}

    def save() -> None:
        meta["seconds"] = earlier + time.monotonic() - begun
        session.save(_pack(model, optimiser), meta)

    saved = told = begun
    for step in range(meta["step"], config.steps if "diverged_at" not in meta else 0):
        started = time.monotonic()
        for group, full in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = full * rate(step)
        with products_in(meta["precision"]):
            loss, num_tokens = loss_at(step)
        optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        if not torch.isfinite(norm + loss.detach()):
            meta["diverged_at"] = f"step {step}"
            save()
            break
        optimiser.step()
        now = time.monotonic()
        meta["step"] = step + 1
        meta["tokens"] += num_tokens
        meta["train_seconds"] += now - started
        evaluated = (step + 1) % config.eval_every == 0 or step + 1 == config.steps
        if evaluated:
            with products_in(meta["precision"]):
                shown = {"loss": float(loss.detach()), **evaluate()}
            meta["curves"]["step"].append(step + 1)
            for name, number in shown.items():
                meta["curves"].setdefault(name, []).append([number])
        if evaluated or now - saved > SAVE_SECONDS:
            saved = now
            save()
        if evaluated or now - told > 0.5:
            told = now
            session.report(step + 1, total, **(shown or {"loss": float(loss.detach())}))

    def on_cost(cost: float) -> None:
        session.report(config.steps + int(score_steps * cost / all_costs), total, **shown)

    with products_in(meta["precision"]):
        measure(scores, meta["scores"], on_part=save, on_cost=on_cost)
    notes = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_second": meta["tokens"] / max(meta["train_seconds"], 1e-9),
        "train_seconds": earlier + time.monotonic() - begun,
        "precision": meta["precision"],
    }
    if "diverged_at" in meta:
        notes["diverged_at"] = meta["diverged_at"]
    return Fitted(meta["curves"], meta["scores"], notes)


class Trainee(NamedTuple):
    """A model with what its training asks for, one of several that make a row."""

    model: nn.Module
    loss_at: Callable[[int], tuple[Tensor, int]]
    """step -> (what is minimised, tokens in it)."""
    score: Callable[[], dict[str, float]]
    rate: Callable[[int], float] = lambda step: 1.0
    """step -> factor of the learning rate."""


def fit_each(
    config: TrainConfig, seed: int, session: Session, budget: dict[str, int], make: Callable[[str, int], Trainee]
) -> RowResult:
    """Train a model per name, one after another, and join their scores; one seed.

    Args:
        config: its `steps` are those of all models together.
        seed: every model starts from it.
        budget: name -> training steps.
        make: (name, steps) -> a model with its loss and its scores.
    """
    metrics: dict[str, list[float]] = {}
    notes: dict[str, Any] = {}
    places: list[str] = []
    files = {} if session.checkpoint is None else {n: session.checkpoint.with_suffix(f".{n}.safetensors") for n in budget}
    before = 0
    for name, steps in budget.items():
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            trainee = make(name, steps)

        def notify(progress: Progress, before: int = before) -> None:
            session.report(min(config.steps, before + progress.step), config.steps, **progress.metrics)

        fitted = fit(
            trainee.model,
            replace(config, steps=steps, eval_every=steps),
            Session(session.unit, files.get(name), notify),
            loss_at=trainee.loss_at,
            evaluate=dict,
            scores=(Score(name, 1.0, lambda report, trainee=trainee: trainee.score()),),
            score_steps=1,
            rate=trainee.rate,
        )
        metrics |= {key: [number] for key, number in fitted.scores[name].items()}
        notes[f"{name}_seconds"] = fitted.notes["train_seconds"]
        if "diverged_at" in fitted.notes:
            places.append(f"{name}, {fitted.notes['diverged_at']}")
        before += steps
    for file in files.values():
        file.unlink(missing_ok=True)
    if places:
        notes["diverged_at"] = " and ".join(places)
    return RowResult(metrics=metrics, notes=notes)


MOMENTS = ("exp_avg", "exp_avg_sq")


def _pack(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter
        state = optimiser.state.get(parameter, {})
        tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS if moment in state}
    return tensors


@torch.no_grad()
def _put_back(model: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[f"model.{name}"])
        if f"exp_avg.{name}" in tensors:
            moments = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS}
            optimiser.state[parameter] = {"step": torch.tensor(float(step)), **moments}
