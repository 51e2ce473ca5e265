"""Train one model with AdamW and score it; a kill costs at most a minute and changes no number.

`loss_at(step)` depends on the step alone, so a killed run repeats the steps since its last checkpoint. A loss or
gradient that is not finite ends training: the parameters before that step are scored, and `notes["diverged_at"]` names
the step.

Matrix products are in float32, or in bfloat16 (`torch.autocast`: residual stream, memory, parameters and moments stay
float32). Some processors emulate bfloat16 and some crash on it, so "auto" measures it in a separate process.
"""

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shippo_lab.harness.experiment import Progress, RowResult, Session, TrainConfig
from shippo_ssm.layers import weight_decay_groups

SAVE_SECONDS = 60.0
Precision = Literal["float32", "bfloat16", "auto"]
# A product in bfloat16 must take at most this fraction of the time in float32.
MAX_TIME_RATIO = 0.8

_PROBE = """
import timeit, torch
torch.set_num_threads(1)
a, b = torch.randn(512, 256), torch.randn(256, 256)
half_a, half_b = a.bfloat16(), b.bfloat16()
half, full = (sorted(timeit.repeat(product, number=1, repeat=7))[1] for product in (lambda: half_a @ half_b, lambda: a @ b))
print(float((half_a @ half_b - a @ b).norm() / (a @ b).norm()), half / full)
"""


@functools.cache
def bfloat16_pays() -> bool:
    """Whether products in bfloat16 are correct and faster here."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
    except subprocess.SubprocessError:
        return False
    error, ratio = map(float, done.stdout.split())
    return error < 1e-2 and ratio < MAX_TIME_RATIO


def resolve_precision(precision: Precision) -> Precision:
    """Resolve "auto": "bfloat16" where that is faster, else "float32"."""
    return precision if precision != "auto" else "bfloat16" if bfloat16_pays() else "float32"


def products_in(precision: Precision) -> AbstractContextManager:
    """A context in which linear layers multiply in this precision; "auto" is resolved."""
    return torch.autocast("cpu", torch.bfloat16) if resolve_precision(precision) == "bfloat16" else nullcontext()


class Fitted(NamedTuple):
    """Learning curves, scores by part, and `notes` for a `RowResult`."""

    curves: dict[str, list[Any]]
    scores: dict[str, dict[str, Any]]
    notes: dict[str, Any]


class Trainee(NamedTuple):
    """A model with what trains it: its loss and scores, each a function of the step or of nothing else."""

    model: nn.Module
    loss_at: Callable[[int], tuple[Tensor, int]]
    """step -> (loss, number of tokens in it)."""
    scores: Mapping[str, Callable[[], dict[str, Any]]]
    """Name -> one part of what is measured after the last step, as JSON-able numbers."""
    rate: Callable[[int], float] = lambda step: 1.0
    """step -> factor of the learning rate; `right_rate` is that of the right actions' parameters besides."""
    evaluate: Callable[[], dict[str, float]] = dict
    """The numbers of the learning curves, every `eval_every` steps and at the end."""
    right_rate: float = 1.0
    precision: Precision = "float32"
    """Of matrix products; a resumed run keeps the precision it began with."""


def fit(config: TrainConfig, session: Session, trainee: Trainee) -> Fitted:
    """Train a model by AdamW and measure its scores; one seed."""
    model, loss_at, scores, rate, evaluate, right_rate, precision = trainee
    groups = weight_decay_groups(model, config.weight_decay, right_rate * config.learning_rate)
    optimiser = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
    rates = [group["lr"] for group in optimiser.param_groups]
    restored = session.restore()
    if restored is None:
        meta: dict[str, Any] = {"step": 0, "curves": {"step": []}, "scores": {}, "precision": resolve_precision(precision)}
        meta |= {"seconds": 0.0, "tokens": 0, "train_seconds": 0.0}
    else:
        meta = restored[1]
        model.load_state_dict(restored[0]["model"])
        optimiser.load_state_dict(restored[0]["optimiser"])
    begun, earlier, total = time.monotonic(), meta["seconds"], config.steps + len(scores)
    shown: dict[str, float] = {}

    def save() -> None:
        meta["seconds"] = earlier + time.monotonic() - begun
        session.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, meta)

    saved = reported = begun
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
        meta |= {"step": step + 1, "tokens": meta["tokens"] + num_tokens}
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
        if evaluated or now - reported > 0.5:
            reported = now
            session.report(step + 1, total, **(shown or {"loss": float(loss.detach())}))

    with products_in(meta["precision"]):
        for done, (name, measure) in enumerate(scores.items(), start=1):
            if name not in meta["scores"]:
                meta["scores"][name] = measure()
                save()
            session.report(config.steps + done, total, **shown)
    notes = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_second": meta["tokens"] / max(meta["train_seconds"], 1e-9),
        "train_seconds": earlier + time.monotonic() - begun,
    }
    notes |= {name: meta[name] for name in ("precision", "diverged_at") if name in meta}
    return Fitted(meta["curves"], meta["scores"], notes)


def fit_each(
    config: TrainConfig, seed: int, session: Session, budget: dict[str, int], make: Callable[[str, int], Trainee]
) -> RowResult:
    """Train small models one after another, each with its own checkpoint, and join their scores; one seed.

    `budget` is name -> training steps, whose sum is `config.steps`; `make(name, steps)` gives a model with its loss and scores.
    """
    result, places, before = RowResult(metrics={}), [], 0
    files = {} if session.checkpoint is None else {n: session.checkpoint.with_suffix(f".{n}.pt") for n in budget}
    for name, steps in budget.items():
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            trainee = make(name, steps)

        def notify(progress: Progress, before: int = before) -> None:
            session.report(min(config.steps, before + progress.step), config.steps, **progress.metrics)

        own = Session(session.unit, files.get(name), notify)
        _, scores, notes = fit(replace(config, steps=steps, eval_every=steps), own, trainee)
        result.metrics |= {key: [number] for part in scores.values() for key, number in part.items()}
        result.notes[f"{name}_seconds"] = notes["train_seconds"]
        if "diverged_at" in notes:
            places.append(f"{name}, {notes['diverged_at']}")
        before += steps
    for file in files.values():
        file.unlink(missing_ok=True)
    if places:
        result.notes["diverged_at"] = " and ".join(places)
    return result
