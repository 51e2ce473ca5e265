"""How the small models of state tracking are trained: a curriculum over lengths, and one schedule.

A layer first learns what single tokens do to short memories, then that long products of them must be exact.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_lab.harness.experiment import TrainConfig
from shippo_lab.tasks.words import WordTask
from shippo_ssm.models import SequenceConfig, SequenceModel

# (until this fraction of the steps, first number, second number): shortest and longest word, or what a task makes of them.
Stages = tuple[tuple[float, int, int], ...]
WARM_UP, WORD_TOKENS = 50, 512
# A smoothed target goes on asking for exact products when the answers are right.
SMOOTHING = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig(TrainConfig):
    """A row that trains small models with one layer, or a few, of some kind."""

    layer: dict[str, Any] = field(default_factory=dict)
    """Fields of `SequenceConfig` that differ from their defaults."""
    num_seeds: int = 3
    learning_rate: float = 3e-3
    weight_decay: float = 0.0

    def model(self, seed: int, **geometry: Any) -> SequenceModel:
        """The model of a seed; `geometry` holds what `layer` does not say."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return SequenceModel(SequenceConfig(**geometry | self.layer))

    def variants(self, layers: dict[str, tuple[str, dict[str, Any]]]) -> tuple[Self, ...]:
        """A row for each name: its label and layer."""
        return tuple(replace(self, name=name, label=label, layer=layer) for name, (label, layer) in layers.items())


def held_rate(steps: int, hold: float = 0.3, warm_up: int | None = None) -> Callable[[int], float]:
    """step -> factor of the learning rate: warm-up, one until the fraction `hold` of the steps, then a cosine to zero."""
    warm_up = warm_up or min(WARM_UP, max(1, steps // 10))

    def rate(step: int) -> float:
        late = max(0.0, ((step + 1) / steps - hold) / (1 - hold))
        return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * late))

    return rate


def stage(stages: Stages, step: int, steps: int) -> tuple[int, int]:
    """The two numbers of the stage that a step belongs to."""
    return next((first, second) for until, first, second in stages if step < until * steps)


def word_stages(longest: int, pairs: bool = False) -> Stages:
    """Words of 2 to 3, of 2 to 6, of every length, and at the end of the longer half only.

    With `pairs` words of two alone come first: while products of two are not known, a third element only adds noise.
    """
    first = ((0.2, 2, 2), (0.3, 2, 3)) if pairs else ((0.2, 2, 3),)
    return (*first, (0.4, 2, 6), (0.7, 2, longest), (1.0, longest // 2, longest))


def drawn_lengths(stages: Stages, seed: int, steps: int) -> list[int]:
    """A length per step, uniform in the range of its stage."""
    draws = torch.rand(steps, generator=torch.Generator().manual_seed(seed)).tolist()
    ranges = (stage(stages, step, steps) for step in range(steps))
    return [low + int(draw * (high - low + 1)) for draw, (low, high) in zip(draws, ranges)]


def word_loss(
    model: nn.Module, task: WordTask, steps: int, tokens: int = WORD_TOKENS, pairs: bool = False
) -> Callable[[int], tuple[Tensor, int]]:
    """step -> (cross-entropy of all prefix products, tokens in it), by the curriculum up to the length of the task."""
    lengths = drawn_lengths(word_stages(task.length, pairs), task.seed, steps)

    def loss_at(step: int) -> tuple[Tensor, int]:
        batch = tokens // lengths[step]
        words = task.batch(range(batch * step, batch * step + batch), length=lengths[step])
        logits = model(words.tokens).flatten(0, 1)
        return F.cross_entropy(logits, words.target.flatten(), label_smoothing=SMOOTHING), words.tokens.numel()

    return loss_at
