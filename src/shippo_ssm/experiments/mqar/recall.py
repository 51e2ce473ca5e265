"""Training and scoring of recall models, shared by the Transport-MQAR experiments.

Data path: `events(step)` gives the examples of a training step, a function of the step alone; the model turns their tokens
[B, T, 7] into features, and its head is called at the queries only; the loss is the mean cross-entropy over queries and
coordinates. `fit` trains and keeps everything that a run needs to continue in one checkpoint: parameters, AdamW moments, the
step, the curves, and the final scores that are there already. A run that was killed repeats the steps since its last
checkpoint and ends with the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm.experiments.core import RowConfig, RowResult, Session
from shippo_ssm.layers import weight_decay_groups
from shippo_ssm.tasks.mqar import OPERATION_BINS, Events, TransportMQAR

SAVE_SECONDS = 60.0
# Accuracies that are kept per length, and per bin of operations since the binding.
ACCURACIES = ("coordinate", "exact", "untouched_coordinate", "untouched_exact")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallConfig(RowConfig):
    """What every recall experiment has: the optimiser, the batch, and the lengths of the final evaluation."""

    batch: int = 16
    """Examples of a training step."""
    learning_rate: float = 5e-4
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of the gradient."""
    eval_every: int = 250
    """Steps between evaluations at the training length."""
    curve_examples: int = 64
    """Examples of such an evaluation."""
    eval_lengths: tuple[int, ...] = (128, 512, 2048, 4096)
    """Lengths of the final evaluation, never looked at in training."""
    eval_examples: int = 640
    """Examples per length of the final evaluation."""
    eval_tokens: int = 8192
    """Tokens per call of the final evaluation."""


def query_loss(model: nn.Module, events: Events) -> Tensor:
    """Mean cross-entropy over queries and coordinates; a model with `features` and `head` is asked at the queries only."""
    asked = events.asked
    if hasattr(model, "features"):
        logits = model.head(model.features(events.tokens)[asked])  # pyright: ignore[reportCallIssue]
    else:
        logits = model(events.tokens)[asked]
    return F.cross_entropy(logits.flatten(0, 1), events.target[asked].flatten())


def score_lengths(
    config: RecallConfig,
    task_of: Callable[[int], TransportMQAR],
    model: Callable[[Tensor], Tensor],
    known: dict[str, dict[str, Any]],
    *,
    on_length: Callable[[], None] = lambda: None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Score a model at every length of the configuration that `known` does not have yet, and put the scores there.

    Args:
        task_of: length -> task.
        model: tokens [B, T, 7] -> logits [B, T, 4, 31].
        known: scores by length, as strings and plain data so that a checkpoint can hold them.
        on_length: called when a length is done.
        on_tokens: called with the number of tokens scored by this call so far.
    """
    before = 0
    for length in config.eval_lengths:

        def on_batch(done: int, before: int = before, length: int = length) -> None:
            on_tokens(before + done * length)

        if str(length) not in known:
            size = max(1, config.eval_tokens // length)
            known[str(length)] = asdict(task_of(length).evaluate(model, config.eval_examples, size, on_batch=on_batch))
            on_length()
        before += config.eval_examples * length


def flatten_scores(known: dict[str, dict[str, Any]], prefix: str = "") -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Scores of one seed as metrics, `exact_512: [number]`, and profiles, `exact_512_by_operations: [[number or None], ..]`.

    A profile has the form of a curve, with bins of operations since the binding in the place of evaluations.
    """
    metrics: dict[str, list[float]] = {}
    profiles: dict[str, list[Any]] = {}
    for length, scores in known.items():
        found = {row["from_operations"]: row for row in scores["bins"]}
        for name in ACCURACIES:
            metrics[f"{prefix}{name}_{length}"] = [scores[name]]
            profiles[f"{prefix}{name}_{length}_by_operations"] = [[found.get(edge, {}).get(name)] for edge in OPERATION_BINS]
    return metrics, profiles


def fit(
    model: nn.Module,
    config: RecallConfig,
    session: Session,
    *,
    events: Callable[[int], Events],
    task_of: Callable[[int], TransportMQAR],
    train_length: int,
    rate: Callable[[int], float] = lambda step: 1.0,
    loss_of: Callable[[Any, Events], Tensor] = query_loss,
) -> RowResult:
    """Train a model by AdamW and score it at all lengths; one seed.

    Args:
        model: has `forward` from tokens to logits; its parameters are as they start.
        events: step -> the examples of that step.
        task_of: length -> the task of the evaluation.
        train_length: length of the evaluations along the way.
        rate: step -> factor of the learning rate.
        loss_of: (model, events) -> what is minimised.

    Returns:
        Metrics and profiles per length, learning curves, and as notes the parameter count and the training speed.
    """
    groups = weight_decay_groups(model, config.weight_decay)
    optimiser = torch.optim.AdamW(groups, lr=config.learning_rate)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    meta: dict[str, Any] = {"step": 0, "curves": {"step": []}, "scores": {}, "seconds": 0.0, "tokens": 0, "train_seconds": 0.0}
    restored = session.restore()
    if restored is not None:
        meta = restored[1]
        _put_back(model, optimiser, names, restored[0], meta["step"])

    begun, earlier = time.monotonic(), meta["seconds"]
    final_tokens = config.eval_examples * sum(config.eval_lengths)
    # A forward pass is about a third of a training step: the final evaluation in units of steps, for the estimate of the end.
    final_steps = max(1, round(final_tokens / (3 * config.batch * train_length)))
    shown: dict[str, float] = {}

    def save() -> None:
        meta["seconds"] = earlier + time.monotonic() - begun
        session.save(_pack(model, optimiser, names), meta)

    saved = told = begun
    for step in range(meta["step"], config.steps):
        started = time.monotonic()
        for group in optimiser.param_groups:
            group["lr"] = config.learning_rate * rate(step)
        batch = events(step)
        loss = loss_of(model, batch)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimiser.step()
        now = time.monotonic()
        meta["step"] = step + 1
        meta["tokens"] += batch.kind.numel()
        meta["train_seconds"] += now - started
        evaluated = (step + 1) % config.eval_every == 0 or step + 1 == config.steps
        if evaluated:
            size = max(1, config.eval_tokens // train_length)
            scores = task_of(train_length).evaluate(model, config.curve_examples, size)
            shown = {"loss": float(loss.detach()), "coordinate": scores.coordinate, "exact": scores.exact}
            meta["curves"]["step"].append(step + 1)
            for name, number in shown.items():
                meta["curves"].setdefault(name, []).append([number])
        if evaluated or now - saved > SAVE_SECONDS:
            saved = now
            save()
        if evaluated or now - told > 0.5:
            told = now
            session.report(step + 1, config.steps + final_steps, **(shown or {"loss": float(loss.detach())}))

    score_lengths(
        config,
        task_of,
        model,
        meta["scores"],
        on_length=save,
        on_tokens=lambda tokens: session.report(
            config.steps + int(final_steps * tokens / final_tokens), config.steps + final_steps, **shown
        ),
    )
    metrics, profiles = flatten_scores(meta["scores"])
    notes = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_second": meta["tokens"] / max(meta["train_seconds"], 1e-9),
        "operation_bins": list(OPERATION_BINS),
        "train_seconds": earlier + time.monotonic() - begun,
    }
    return RowResult(metrics=metrics, curves=meta["curves"] | profiles, notes=notes)


def _pack(model: nn.Module, optimiser: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            state = optimiser.state.get(parameter, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in state:
                    tensors[f"{moment}.{names[id(parameter)]}"] = state[moment]
    return tensors


def _put_back(
    model: nn.Module, optimiser: torch.optim.Optimizer, names: dict[int, str], tensors: dict[str, Tensor], step: int
) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"model.{name}"])
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if f"exp_avg.{name}" in tensors:
                moments = {moment: tensors[f"{moment}.{name}"] for moment in ("exp_avg", "exp_avg_sq")}
                optimiser.state[parameter] = {"step": torch.tensor(float(step)), **moments}
