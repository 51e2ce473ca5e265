"""Shared by the token tasks: sequences with answers, random numbers by counter, and the evaluation of a model.

Example `index` of a split is a function of (seed, split, index) alone: `uniform` is the counter-based generator
Philox4x32-10 (Salmon et al., 2011) with the seed as its key and (position, index, split) as its counter.
"""

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from shippo_ssm._expect import expect_size

# Tokens -> logits.
Model = Callable[[Tensor], Tensor]
SPLITS = ("train", "eval")
# Where no answer is asked, the target is what `cross_entropy` ignores.
NO_TARGET = -100

# Examples of a task: they have `tokens` and `target`.
Examples = TypeVar("Examples", bound=Any)

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_FACTORS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Sequences(NamedTuple):
    """B token sequences with their answers."""

    tokens: Tensor  # [B, T], integers from 0
    target: Tensor  # [B, T], the answer after the token at this position; -100 where there is none

    @property
    def asked(self) -> Tensor:
        """Positions that have an answer, [B, T]."""
        return self.target != NO_TARGET


def philox(counter: tuple[np.ndarray, ...], key: int) -> np.ndarray:
    """Philox4x32-10: 32-bit words [4, ..] from four 32-bit counters (as uint64 arrays of one shape) and a 64-bit key."""
    a, b, c, d = counter
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        first, second = a * _FACTORS[0], c * _FACTORS[1]
        a, c = (second >> _SHIFT) ^ b ^ np.uint64(low), (first >> _SHIFT) ^ d ^ np.uint64(high)
        b, d = second & _LOW, first & _LOW
        low, high = (low + _WEYL[0]) & 0xFFFFFFFF, (high + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([a, b, c, d])


def uniform(seed: int, stream: int, indices: Iterable[int], num: int) -> np.ndarray:
    """Uniform numbers in [0, 1), [B, num]: row b depends on (seed, stream, indices[b]) alone, and continues in a longer row."""
    rows = check_indices("batch", indices, 2**64, "integers from 0 below 2**64; count examples from 0")
    index = np.array(rows, dtype=np.uint64)[:, None]
    block = np.arange(-(-num // 4), dtype=np.uint64)[None]
    shape = np.zeros((len(rows), block.shape[1]), dtype=np.uint64)
    words = philox((block + shape, (index & _LOW) + shape, (index >> _SHIFT) + shape, np.uint64(stream) + shape), seed)
    return words.transpose(1, 2, 0).reshape(len(rows), -1)[:, :num] * 2.0**-32


def check_indices(op: str, indices: Any, stop: int, expected: str) -> list[int]:
    """Return indices as a list of integers from 0 below `stop`, at least one; raise otherwise."""
    came = list(indices) if isinstance(indices, Iterable) else [indices]
    real = [isinstance(index, numbers.Integral) and not isinstance(index, bool) for index in came]
    if not isinstance(indices, Iterable) or not came or not all(real) or min(came) < 0 or max(came) >= stop:
        shown = "empty" if not came else repr(indices if len(came) > 4 or not isinstance(indices, Iterable) else came)
        raise ValueError(f"{op}: `indices` is {shown:.80}; expected {expected}")
    return [int(index) for index in came]


def check_choice(op: str, name: str, came: str, choices: tuple[str, ...]) -> int:
    """Return the place of `came` among the choices; raise if it is none of them."""
    if not isinstance(came, str) or came not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{op}: `{name}` is {came!r}; expected one of {listed}; choose one of them")
    return choices.index(came)


def check_seed(op: str, seed: int) -> None:
    """Raise unless a seed is a 64-bit integer from 0."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**64:
        raise ValueError(f"{op}: `seed` is {seed!r}; expected an integer from 0 to 2**64 - 1; choose seeds from 0 upwards")


def choices(logits: Tensor) -> Tensor:
    """The class with the highest score [..]; -1, which is never right, where a score is NaN."""
    return torch.where(logits.isnan().any(-1), -1, logits.argmax(-1))


def answers(
    draw: Callable[[range], Examples], model: Model, num_examples: int, batch_size: int, num_classes: int
) -> Iterator[tuple[Examples, Tensor]]:
    """Examples of an evaluation (`draw` of 0 .. num_examples - 1), batch by batch, each with the logits of a model.

    The model is called without gradients and keeps its mode; it has to give [*target.shape, num_classes].
    """
    for name, number in (("num_examples", num_examples), ("batch_size", batch_size)):
        expect_size("evaluate", name, number, "at least 1; ask for more examples")
    for start in range(0, num_examples, batch_size):
        examples = draw(range(start, min(start + batch_size, num_examples)))
        with torch.no_grad():
            logits = model(examples.tokens)
        expected = (*examples.target.shape, num_classes)
        if not isinstance(logits, Tensor) or logits.shape != expected:
            came = f"logits of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(f"evaluate: `model` returned {came}; expected {expected}; give its head as many outputs")
        yield examples, logits


class TokenTask(ABC):
    """Sequences whose answers are right or wrong; a task says how they are drawn."""

    __slots__ = ()

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens."""

    @abstractmethod
    def batch(self, indices: Iterable[int], split: str = "train") -> Sequences:
        """The sequences with these indices, tokens and target [B, T]; the splits "train" and "eval" are disjoint."""

    def evaluate(self, model: Model, num_examples: int = 1000, batch_size: int = 50) -> float:
        """The fraction of right answers of a model, tokens [B, T] -> logits [B, T, vocab_size], on the evaluation split."""
        right = asked = 0
        draw = partial(self.batch, split="eval")
        for examples, logits in answers(draw, model, num_examples, batch_size, self.vocab_size):
            right += int((choices(logits) == examples.target).sum())
            asked += int(examples.asked.sum())
        return right / asked
