"""Four small problems that a start is judged by, each a model, a loss per step, and a score.

    recall  plain MQAR, 32 tokens, 4 pairs of 31 keys and 32 values: two layers of width 64
    turns   recall through quarter turns (the `rotation` library of Transport-MQAR), 24 events, 3 keys: one layer of width 128
    words   products of elements of A5, lengths up to 16 by a curriculum: one layer of width 64
    text    the next byte of Python's own documentation, 128 at a time: two layers of width 64

A model is a `SequenceModel` as it comes; in `recall` and `text`, where neighbours matter, with `LANGUAGE_START`. For `turns`
values and answers are aligned: half of the channels hold the four coordinates of a value, side by side, so that one group holds
one number of each of them, and one classifier serves the four. Training is the same for all: AdamW 3e-3 without weight decay,
warm-up, a constant rate, then a cosine to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm.experiments.tracking.training import WORD_TOKENS, held_rate, stage, word_loss
from shippo_ssm.lab.training import Trainee
from shippo_ssm.layers import LANGUAGE_START
from shippo_ssm.models import SequenceConfig, SequenceModel
from shippo_ssm.tasks.mqar import MODULUS, WIDTH, TransportMQAR
from shippo_ssm.tasks.recall import MQAR
from shippo_ssm.tasks.streams import NO_TARGET
from shippo_ssm.tasks.text import TextTask
from shippo_ssm.tasks.words import WordTask

# Keys of the quarter turns.
NUM_KEYS = 256
# (until this fraction of the steps, events, active keys).
TURN_STAGES = ((0.15, 8, 1), (0.3, 12, 2), (1.0, 24, 3))
TURN_BATCH = 64


def batch_of(step: int, size: int, share: float) -> range:
    """The examples of a step, of which a probe takes `size`, or a `share` of it."""
    count = int(share * size)
    return range(count * step, count * (step + 1))


def recall(layer: dict[str, Any], seed: int, steps: int, lengths: tuple[int, ...], share: float = 1.0) -> Trainee:
    """Plain associative recall."""
    task = MQAR(vocab_size=64, length=32, num_pairs=4, seed=seed)
    model = SequenceModel(SequenceConfig(d_model=64, n_layers=2, vocab_size=task.vocab_size, **LANGUAGE_START | layer))

    def loss_at(step: int) -> tuple[Tensor, int]:
        tokens, target = task.batch(batch_of(step, 32, share))
        return F.cross_entropy(model(tokens).flatten(0, 1), target.flatten(), ignore_index=NO_TARGET), tokens.numel()

    return Trainee(model, loss_at, lambda: {"recall": task.evaluate(model, 256, 64).accuracy}, held_rate(steps))


def words(layer: dict[str, Any], seed: int, steps: int, lengths: tuple[int, ...], share: float = 1.0) -> Trainee:
    """Products of elements of A5, asked for at every position."""
    task = WordTask(group="A5", length=16, seed=seed)
    model = SequenceModel(SequenceConfig(d_model=64, n_layers=1, vocab_size=task.vocab_size, **layer))

    def score() -> dict[str, float]:
        return {f"words_{n}": task.evaluate(model, max(32, 8192 // n), 32, length=n).prefix for n in lengths}

    return Trainee(model, word_loss(model, task, steps, int(share * WORD_TOKENS)), score, held_rate(steps))


def text(layer: dict[str, Any], seed: int, steps: int, lengths: tuple[int, ...], share: float = 1.0) -> Trainee:
    """The next byte."""
    task = TextTask(length=128, seed=seed)
    model = SequenceModel(SequenceConfig(d_model=64, n_layers=2, vocab_size=task.vocab_size, **LANGUAGE_START | layer))

    def loss_at(step: int) -> tuple[Tensor, int]:
        tokens, target = task.batch(batch_of(step, 16, share))
        return F.cross_entropy(model(tokens).flatten(0, 1), target.flatten()), tokens.numel()

    return Trainee(
        model, loss_at, lambda: {"text": task.evaluate(model, 64, split="test").bits_per_character}, held_rate(steps)
    )


class TurnEmbedding(nn.Module):
    """tokens [.., 7] -> [.., d_model]: a value's coordinates side by side in one half; type, key and operation in the other."""

    def __init__(self, num_operations: int, d_model: int) -> None:
        super().__init__()
        half = d_model // 2
        self.value = nn.Embedding(MODULUS + 1, half // WIDTH, padding_idx=MODULUS)
        self.kind = nn.Embedding(3, half)
        self.key = nn.Embedding(NUM_KEYS + 1, half, padding_idx=NUM_KEYS)
        self.operation = nn.Embedding(num_operations + 1, half, padding_idx=num_operations)

    def forward(self, tokens: Tensor) -> Tensor:
        kind, key, operation, value = tokens[..., 0], tokens[..., 1], tokens[..., 2], tokens[..., 3:]
        rest = self.kind(kind) + self.key(key) + self.operation(operation)
        return torch.cat([self.value(value).mT.flatten(-2), rest], -1)


class TurnHead(nn.Module):
    """[.., d_model] -> [.., 4, 31]: one classifier on the channels of every coordinate."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.width = d_model // 2
        self.proj = nn.Linear(self.width // WIDTH, MODULUS)

    def forward(self, features: Tensor) -> Tensor:
        return self.proj(features[..., : self.width].unflatten(-1, (-1, WIDTH)).mT)


def turns(layer: dict[str, Any], seed: int, steps: int, lengths: tuple[int, ...], share: float = 1.0) -> Trainee:
    """Recall of values that quarter turns have moved, by the general layer."""

    def task(length: int, num_active: int) -> TransportMQAR:
        return TransportMQAR(
            library="rotation", length=length, num_keys=NUM_KEYS, num_active=num_active, rebind=False, seed=seed
        )

    geometry = SequenceConfig(d_model=128, n_layers=1, expand=1, **layer)
    embedding = TurnEmbedding(task(8, 1).num_operations, geometry.d_model)
    model = SequenceModel(geometry, embedding=embedding, head=TurnHead(geometry.d_model))

    def loss_at(step: int) -> tuple[Tensor, int]:
        events = task(*stage(TURN_STAGES, step, steps)).batch(batch_of(step, TURN_BATCH, share))
        logits = model.head(model.features(events.tokens, events.asked))
        return F.cross_entropy(logits.flatten(0, 1), events.target[events.asked].flatten()), events.kind.numel()

    def score() -> dict[str, float]:
        found: dict[str, float] = {}
        for n in lengths:
            scores = task(n, TURN_STAGES[-1][2]).evaluate(model, max(64, 16384 // n), 32)
            found |= {f"turns_{n}": scores.exact, f"turns_coordinate_{n}": scores.coordinate}
        return found

    return Trainee(model, loss_at, score, held_rate(steps, 0.5))


PROBES: dict[str, Callable[[dict[str, Any], int, int, tuple[int, ...], float], Trainee]] = {
    "recall": recall,
    "turns": turns,
    "words": words,
    "text": text,
}
