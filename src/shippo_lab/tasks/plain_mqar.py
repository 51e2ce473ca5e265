"""MQAR: multi-query associative recall, as zoology defines it (Arora et al.; repository HazyResearch/zoology).

    k_1 v_1 k_2 v_2 | .  .  k_2 .  .  .  k_1 .          target: v_2 below the second k_2, v_1 below the second k_1

Keys are 1 .. vocab_size/2 - 1, values vocab_size/2 .. vocab_size - 1, both without repetition. A query takes the n-th
of the even places after the pairs with probability proportional to n^(POWER - 1), without repetition. Other places hold
random tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from shippo_lab.tasks.streams import NO_TARGET, SPLITS, Sequences, TokenTask, check_choice, check_seed, uniform
from shippo_ssm._expect import expect_size

POWER = 0.01


def without_repetition(draws: np.ndarray, num: int) -> np.ndarray:
    """k different numbers below `num` per row, [B, k], from uniform draws [B, k]: the start of a random shuffle."""
    deck = np.tile(np.arange(num), (len(draws), 1))
    rows = np.arange(len(draws))
    for place in range(draws.shape[1]):
        other = place + (draws[:, place] * (num - place)).astype(np.int64)
        deck[:, place], deck[rows, other] = deck[rows, other], deck[:, place].copy()
    return deck[:, : draws.shape[1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MQAR(TokenTask):
    """Multi-query associative recall; the defaults are zoology's smallest setting."""

    vocab_size: int = 8192
    """Keys, values and 0; half of it are values."""
    length: int = 64
    """Tokens T of a sequence, even."""
    num_pairs: int = 4
    """Key-value pairs, each asked for once."""
    seed: int = 0
    """Sequences are a function of (seed, split, index)."""

    def __post_init__(self) -> None:
        for name in ("length", "num_pairs", "vocab_size"):
            expect_size("MQAR", name, getattr(self, name))
        came = f"`num_pairs` = {self.num_pairs}"
        if self.length % 2 or self.length < 4 * self.num_pairs:
            raise ValueError(f"MQAR: `length` is {self.length} with {came}; expected an even length of at least 4 num_pairs")
        if self.vocab_size % 2 or self.vocab_size // 2 <= self.num_pairs:
            least = f"at least 2 num_pairs + 2 = {2 * self.num_pairs + 2}"
            raise ValueError(f"MQAR: `vocab_size` is {self.vocab_size}; expected an even number of {least}")
        check_seed("MQAR", self.seed)

    def batch(self, indices: Iterable[int], split: str = "train") -> Sequences:
        """The sequences with these indices, tokens and target [B, T]; "train" and "eval" are disjoint."""
        pairs, half = self.num_pairs, self.vocab_size // 2
        places = self.length // 2 - pairs
        stream = check_choice("MQAR.batch", "split", split, SPLITS)
        draws = uniform(self.seed, stream, indices, 2 * pairs + places + self.length)
        key_draws, value_draws, place_draws, fill_draws = np.split(draws, [pairs, 2 * pairs, 2 * pairs + places], axis=1)
        keys = 1 + without_repetition(key_draws, half - 1)
        values = half + without_repetition(value_draws, half)
        # The smallest of exponential waiting times with these rates are a weighted choice without repetition, in order.
        rates = np.arange(1, places + 1) ** (POWER - 1.0)
        waiting = -np.log1p(-place_draws) / rates
        asked = 2 * (pairs + np.argsort(waiting, axis=1)[:, :pairs])
        tokens = (fill_draws * self.vocab_size).astype(np.int64)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        target = np.full(tokens.shape, NO_TARGET)
        np.put_along_axis(tokens, asked, keys, axis=1)
        np.put_along_axis(target, asked, values, axis=1)
        return Sequences(torch.from_numpy(tokens), torch.from_numpy(target))
