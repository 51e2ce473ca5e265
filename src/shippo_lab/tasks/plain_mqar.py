"""MQAR: multi-query associative recall, as zoology defines it (Arora et al.; repository HazyResearch/zoology).

A sequence begins with key-value pairs, k_1 v_1 k_2 v_2 .. ; later every key occurs once more, and its value is the answer:

    k_1 v_1 k_2 v_2 | .  .  k_2 .  .  .  k_1 .          target: v_2 below the second k_2, v_1 below the second k_1

Keys are 1 .. vocab_size/2 - 1, values vocab_size/2 .. vocab_size - 1, both without repetition. A query takes the n-th of the
even places after the pairs, n = 1, 2, .., with probability proportional to n^(power - 1), without repetition, so that queries
crowd behind the pairs. All other places hold random tokens, or 0 with `fill=False`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shippo_lab.tasks.streams import NO_TARGET, SPLITS, Sequences, answers, check_choice, check_seed, choices, uniform
from shippo_ssm._expect import expect_size


def without_repetition(draws: np.ndarray, num: int) -> np.ndarray:
    """k different numbers below `num` per row, [B, k], from uniform draws [B, k]: the start of a random shuffle."""
    deck = np.tile(np.arange(num), (len(draws), 1))
    rows = np.arange(len(draws))
    for place in range(draws.shape[1]):
        other = place + (draws[:, place] * (num - place)).astype(np.int64)
        deck[:, place], deck[rows, other] = deck[rows, other], deck[:, place].copy()
    return deck[:, : draws.shape[1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallScores:
    """Accuracies of an evaluation."""

    num_queries: int
    accuracy: float
    """Fraction of queries with the right value."""
    whole: float
    """Fraction of sequences of which every query is right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MQAR:
    """Multi-query associative recall; the defaults are zoology's smallest setting."""

    vocab_size: int = 8192
    """Keys, values and 0; half of it are values."""
    length: int = 64
    """Tokens T of a sequence, even."""
    num_pairs: int = 4
    """Key-value pairs, each asked for once."""
    power: float = 0.01
    """How far queries spread: the chance of the n-th place is proportional to n^(power - 1)."""
    fill: bool = True
    """Whether random tokens stand where there is neither a pair nor a query."""
    seed: int = 0
    """Sequences are a function of (seed, split, index)."""

    def __post_init__(self) -> None:
        for name in ("length", "num_pairs", "vocab_size"):
            expect_size("MQAR", name, getattr(self, name))
        if self.length % 2 or self.length < 4 * self.num_pairs:
            raise ValueError(
                f"MQAR: `length` is {self.length} with `num_pairs` = {self.num_pairs}; expected an even length of at least "
                "4 num_pairs; choose a longer sequence or fewer pairs"
            )
        if self.vocab_size % 2 or self.vocab_size // 2 <= self.num_pairs:
            raise ValueError(
                f"MQAR: `vocab_size` is {self.vocab_size}; expected an even number of at least 2 num_pairs + 2 = "
                f"{2 * self.num_pairs + 2}; choose a larger vocabulary"
            )
        if not isinstance(self.power, int | float) or not 0 < self.power <= 1:
            raise ValueError(f"MQAR: `power` is {self.power}; expected above 0, at most 1; 1 spreads queries evenly")
        check_seed("MQAR", self.seed)

    def batch(self, indices: Iterable[int], split: str = "train") -> Sequences:
        """The sequences with these indices, tokens and target [B, T]; the splits "train" and "eval" are disjoint."""
        pairs, half = self.num_pairs, self.vocab_size // 2
        places = self.length // 2 - pairs
        stream = check_choice("MQAR.batch", "split", split, SPLITS)
        draws = uniform(self.seed, stream, indices, 2 * pairs + places + self.length)
        key_draws, value_draws, place_draws, fill_draws = np.split(draws, [pairs, 2 * pairs, 2 * pairs + places], axis=1)
        keys = 1 + without_repetition(key_draws, half - 1)
        values = half + without_repetition(value_draws, half)
        # The smallest of exponential waiting times with these rates are a weighted choice without repetition, in order.
        rates = np.arange(1, places + 1) ** (self.power - 1.0)
        waiting = -np.log1p(-place_draws) / rates
        asked = 2 * (pairs + np.argsort(waiting, axis=1)[:, :pairs])

        tokens = (fill_draws * self.vocab_size).astype(np.int64) if self.fill else np.zeros(fill_draws.shape, dtype=np.int64)
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values
        target = np.full(tokens.shape, NO_TARGET)
        np.put_along_axis(tokens, asked, keys, axis=1)
        np.put_along_axis(target, asked, values, axis=1)
        return Sequences(torch.from_numpy(tokens), torch.from_numpy(target))

    def evaluate(
        self, model: Callable[[Tensor], Tensor], num_examples: int = 1000, batch_size: int = 50, *, device: Any = "cpu"
    ) -> RecallScores:
        """Score a model, tokens [B, T] -> logits [B, T, vocab_size], on the first examples of the evaluation split."""
        asked = answers(partial(self.batch, split="eval"), model, num_examples, batch_size, self.vocab_size, device)
        counts = torch.cat([(choices(logits) == recall.target).sum(1) for recall, logits in asked])
        return RecallScores(
            num_queries=len(counts) * self.num_pairs,
            accuracy=float(counts.sum()) / (len(counts) * self.num_pairs),
            whole=float((counts == self.num_pairs).double().mean()),
        )
