"""MQAR: multi-query associative recall, as zoology defines it (Arora et al.; repository HazyResearch/zoology).

A sequence begins with key-value pairs, k_1 v_1 k_2 v_2 .. ; later every key stands once more, and there its value is asked:

    k_1 v_1 k_2 v_2 | .  .  k_2 .  .  .  k_1 .          target: v_2 below the second k_2, v_1 below the second k_1

Keys are 1 .. vocab_size/2 - 1, values vocab_size/2 .. vocab_size - 1, both without repetition. The places behind the pairs
count in steps of two; a query takes place n = 1, 2, .. with a chance proportional to n^(power - 1), without repetition, the
first key first, so that queries crowd behind the pairs. All other places hold random tokens, or 0 with `fill=False`.

Data path: `MQAR(length=T, num_pairs=k)` draws `Sequences` of tokens and target [B, T]; `task.evaluate(model)` scores any
callable from tokens [B, T] to logits [B, T, vocab_size].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shippo_ssm._expect import expect_size
from shippo_ssm.tasks.streams import NO_TARGET, SPLITS, Sequences, answers, check_choice, check_seed, choices, uniform


def without_repetition(draws: np.ndarray, num: int) -> np.ndarray:
    """k different numbers below `num` per row, [B, k], from uniform draws [B, k]: the beginning of a random shuffle."""
    deck = np.tile(np.arange(num), (len(draws), 1))
    rows = np.arange(len(draws))
    for place in range(draws.shape[1]):
        other = place + (draws[:, place] * (num - place)).astype(np.int64)
        deck[:, place], deck[rows, other] = deck[rows, other], deck[:, place].copy()
    return deck[:, : draws.shape[1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallScores:
    """How well the queries of an evaluation were answered."""

    num_queries: int
    accuracy: float
    """Fraction of queries with the right value."""
    whole: float
    """Fraction of sequences of which every query is right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MQAR:
    """Multi-query associative recall; the defaults are zoology's smallest setting.

    Example, small enough to read:
        >>> task = MQAR(vocab_size=20, length=12, num_pairs=2, fill=False)
        >>> recall = task.batch([0])
        >>> recall.tokens.shape, int(recall.asked.sum())
        (torch.Size([1, 12]), 2)

    A model is any callable from tokens [B, T] to logits [B, T, vocab_size]:
        >>> blind = lambda tokens: torch.zeros(*tokens.shape, task.vocab_size)
        >>> task.evaluate(blind, num_examples=8).accuracy
        0.0
    """

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
        """The sequences with these indices: tokens [B, T], target [B, T] with -100 where nothing is asked.

        Args:
            indices: B numbers below 2^64, for instance range(step * B, (step + 1) * B).
            split: "train" or "eval"; their random streams are disjoint.
        """
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
        self,
        model: Callable[[Tensor], Tensor],
        num_examples: int = 1000,
        batch_size: int = 50,
        *,
        device: str | torch.device = "cpu",
    ) -> RecallScores:
        """Scores of a model, ours or not, on the first `num_examples` sequences of the evaluation split.

        Args:
            model: tokens [B, T] -> logits [B, T, vocab_size]; called without gradients, in whatever mode it is.
            num_examples: sequences in all. batch_size: sequences per call.
            device: where the tokens are put.
        """
        asked = answers(partial(self.batch, split="eval"), model, num_examples, batch_size, self.vocab_size, device)
        counts = torch.cat([(choices(logits) == recall.target).sum(1) for recall, logits in asked])
        return RecallScores(
            num_queries=len(counts) * self.num_pairs,
            accuracy=float(counts.sum()) / (len(counts) * self.num_pairs),
            whole=float((counts == self.num_pairs).double().mean()),
        )
