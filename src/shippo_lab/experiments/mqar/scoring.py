"""Training and scoring of recall models, shared by the Transport-MQAR experiments.

The examples of a training step are a function of the step alone; after the last step the model is scored at every
length on examples that training never saw.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shippo_lab.harness.experiment import RowResult, Session, TrainConfig
from shippo_lab.harness.training import Precision, Trainee, fit
from shippo_lab.tasks.mqar import OPERATION_BINS, Events, TransportMQAR

# Accuracies that are kept per length, and per bin of operations since the binding.
ACCURACIES = ("coordinate", "exact", "untouched_coordinate", "untouched_exact")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallConfig(TrainConfig, ABC):
    """Options of every recall experiment, and its tasks."""

    batch: int = 16
    learning_rate: float = 5e-4
    eval_every: int = 250
    curve_examples: int = 64
    """Examples of such an evaluation."""
    eval_lengths: tuple[int, ...] = (128, 512, 2048, 4096)
    """Lengths of the final evaluation, never looked at in training."""
    eval_examples: int = 640
    """Examples per length of the final evaluation."""
    eval_tokens: int = 8192
    """Tokens per call of the final evaluation."""
    right_rate: float = 1.0
    """Learning rate of right actions over that of the rest."""
    precision: Precision = "float32"
    """Of matrix products; "auto" takes bfloat16 where it is faster and right."""

    @abstractmethod
    def task(self, seed: int, length: int | None = None) -> TransportMQAR:
        """The task of the evaluation at a length, by default that at the end of training."""

    def task_at(self, seed: int, step: int) -> TransportMQAR:
        """The task of a training step; the same for every step where there is no curriculum."""
        return self.task(seed)


def query_loss(model: Any, examples: Any, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy where an answer is `asked` of a model that gives it there: head(features(tokens, asked))."""
    logits = model.head(model.features(examples.tokens, examples.asked))
    target = examples.target[examples.asked].flatten()
    return F.cross_entropy(logits.flatten(0, -2), target, label_smoothing=label_smoothing)


def scores_of_lengths(
    config: RecallConfig, seed: int, model: Callable[[Tensor], Tensor]
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Length -> the final score of a model, tokens [B, T, 7] -> logits [B, T, 4, 31]."""

    def score(length: int) -> dict[str, Any]:
        return asdict(config.task(seed, length).evaluate(model, config.eval_examples, max(1, config.eval_tokens // length)))

    return {str(length): partial(score, length) for length in config.eval_lengths}


def flatten_scores(known: dict[str, dict[str, Any]], prefix: str = "") -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Scores of one seed as metrics, `exact_512: [number]`, and profiles, `exact_512_by_operations: [[number or None], ..]`."""
    metrics, profiles = {}, {}
    for length, scores in known.items():
        found = {row["from_operations"]: row for row in scores["bins"]}
        for name in ACCURACIES:
            metrics[f"{prefix}{name}_{length}"] = [scores[name]]
            profiles[f"{prefix}{name}_{length}_by_operations"] = [[found.get(edge, {}).get(name)] for edge in OPERATION_BINS]
    return metrics, profiles


def add_scores(result: RowResult, scores: dict[str, Callable[[], dict[str, Any]]], prefix: str) -> None:
    """Measure a changed model (R -> I, say) and add its accuracies to a result, under names that start with `prefix`."""
    known = {length: score() for length, score in scores.items()}
    for kept, found in zip((result.metrics, result.curves), flatten_scores(known, prefix)):
        kept.update({name: numbers for name, numbers in found.items() if "untouched" not in name})


def train_recall(
    model: nn.Module,
    config: RecallConfig,
    seed: int,
    session: Session,
    loss_of: Callable[[Any, Events], Tensor] = query_loss,
    rate: Callable[[int], float] = lambda step: 1.0,
) -> RowResult:
    """Train a model in place, tokens -> logits, and score it at all lengths; `rate` as in `Trainee`."""

    def loss_at(step: int) -> tuple[Tensor, int]:
        events = config.task_at(seed, step).batch(range(step * config.batch, (step + 1) * config.batch))
        return loss_of(model, events), events.kind.numel()

    def evaluate() -> dict[str, float]:
        task = config.task(seed)
        scores = task.evaluate(model, config.curve_examples, max(1, config.eval_tokens // task.length))
        return {"coordinate": scores.coordinate, "exact": scores.exact}

    scores = scores_of_lengths(config, seed, model)
    trainee = Trainee(model, loss_at, scores, rate, evaluate, config.right_rate, config.precision)
    curves, known, notes = fit(config, session, trainee)
    metrics, profiles = flatten_scores(known)
    return RowResult(metrics, curves | profiles, notes | {"operation_bins": list(OPERATION_BINS)})
