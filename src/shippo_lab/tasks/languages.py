"""Formal languages: read a sentence, give one answer at its end (the suite of SLiCE and PD-SSM, with its token formats).

    parity           a b b a               1 if the number of b is even, else 2;  a, b = 1, 2
    even-pairs       a b b a               1 if the first token equals the last, else 2
    cycle            stay, +1, -1          4 + (sum mod 5);  stay, +1, -1 = 1, 2, 3
    arithmetic       3 - 2 * 4 + 1 =       5 + (value mod 5), * binds first;  + - * = are 1 .. 4, digits 5 .. 9

Token 0 is padding. Lengths are uniform in a range; an odd length of `arithmetic` takes one token more.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from shippo_lab.tasks.streams import NO_TARGET, SPLITS, Sequences, TokenTask, check_choice, check_seed, uniform
from shippo_ssm._expect import expect_size

MODULUS = 5
LANGUAGES = ("parity", "even-pairs", "cycle", "arithmetic")
VOCAB_SIZES = {"parity": 3, "even-pairs": 3, "cycle": 9, "arithmetic": 10}
PAD = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageTask(TokenTask):
    """Sentences of a language, with the answer at the last token."""

    name: str = "parity"
    """One of `LANGUAGES`."""
    min_length: int = 3
    max_length: int = 40
    """Lengths are uniform in min_length .. max_length."""
    every: bool = False
    """Whether an answer is asked at every token that ends a sentence of its own, instead of the last one only: at each token,
    or at each digit and the '=' of `arithmetic`."""
    seed: int = 0
    """Sentences are a function of (seed, split, index)."""

    def __post_init__(self) -> None:
        check_choice("LanguageTask", "name", self.name, LANGUAGES)
        for name in ("min_length", "max_length"):
            expect_size("LanguageTask", name, getattr(self, name))
        shortest = 2 if self.name == "arithmetic" else 1
        if not shortest <= self.min_length <= self.max_length:
            came = f"`min_length` is {self.min_length} and `max_length` is {self.max_length}"
            raise ValueError(f"LanguageTask: {came}; expected {shortest} <= min_length <= max_length")
        check_seed("LanguageTask", self.seed)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, with the padding and the answers."""
        return VOCAB_SIZES[self.name]

    @property
    def width(self) -> int:
        """Tokens T of a batch: those of the longest sentence."""
        return int(self._num_tokens(np.array(self.max_length)))

    def batch(self, indices: Iterable[int], split: str = "train") -> Sequences:
        """The sentences with these indices, tokens [B, T] padded with 0 and target [B, T]; "train" and "eval" are disjoint."""
        stream = check_choice("LanguageTask.batch", "split", split, SPLITS)
        draws = uniform(self.seed, stream, indices, 1 + self.width)
        lengths = self.min_length + (draws[:, 0] * (self.max_length - self.min_length + 1)).astype(np.int64)
        lengths, draws = self._num_tokens(lengths), draws[:, 1:]
        if self.name == "arithmetic":
            tokens, target = _arithmetic(draws, lengths)
        elif self.name == "cycle":
            tokens = 1 + (draws * 3).astype(np.int64)
            target = 4 + np.array([0, 0, 1, -1])[tokens].cumsum(1) % MODULUS
        else:
            tokens = 1 + (draws * 2).astype(np.int64)
            odd = (tokens == 2).cumsum(1) % 2 if self.name == "parity" else tokens != tokens[:, :1]
            target = 1 + odd.astype(np.int64)
        place = np.arange(self.width)
        inside = place < lengths[:, None]
        asked = inside if self.every else place == lengths[:, None] - 1
        tokens, target = np.where(inside, tokens, PAD), np.where(asked, target, NO_TARGET)
        return Sequences(torch.from_numpy(tokens), torch.from_numpy(target))

    def _num_tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens of sentences of the drawn lengths."""
        return lengths + lengths % 2 if self.name == "arithmetic" else lengths


def _arithmetic(draws: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Digits at even places, operators between, '=' at the end; the value so far at each digit and at the '='."""
    tokens = 1 + (draws * 3).astype(np.int64)
    digits = (draws[:, ::2] * MODULUS).astype(np.int64)
    tokens[:, ::2] = MODULUS + digits
    rows = np.arange(len(tokens))
    target = np.full(tokens.shape, NO_TARGET)
    done, term = np.zeros(len(tokens), dtype=np.int64), digits[:, 0]
    target[:, 0] = MODULUS + term
    for t in range(1, digits.shape[1]):
        operator, digit = tokens[:, 2 * t - 1], digits[:, t]
        done = np.where(operator == 3, done, done + term) % MODULUS
        term = np.where(operator == 3, term * digit, np.where(operator == 2, -digit, digit)) % MODULUS
        target[:, 2 * t] = MODULUS + (done + term) % MODULUS
    tokens[rows, lengths - 1] = 4
    target[rows, lengths - 1] = target[rows, lengths - 2]
    return tokens, target
