"""What the token tasks share: sequences with answers, random numbers by counter, and how a model is asked.

A token task draws `Sequences`, tokens [B, T] and target [B, T], and asks any callable from tokens [B, T] to logits
[B, T, vocab_size]. Example `index` of a split is a function of (seed, split, index) alone: `uniform` is the
counter-based generator Philox4x32-10 (Salmon et al., 2011) with the seed as its key and (position, index, split) as its
counter, worked out for a whole batch at once. Two splits never read the same counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

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
    """B token sequences with their answers.

    Attributes:
        tokens: [B, T], integers from 0.
        target: [B, T], the answer after reading the token at this position; -100 where nothing is asked.
    """

    tokens: Tensor
    target: Tensor

    @property
    def asked(self) -> Tensor:
        """Where an answer is asked, [B, T]."""
        return self.target != NO_TARGET


def philox(counter: tuple[np.ndarray, ...], key: int) -> np.ndarray:
    """Philox4x32-10: 32-bit words [4, ..] from four 32-bit counters (as uint64 arrays of one shape) and a 64-bit key."""
    a, b, c, d = counter
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        first, second = a * _FACTORS[0], c * _FACTORS[1]
        a, b, c, d = (
            (second >> _SHIFT) ^ b ^ np.uint64(low),
            second & _LOW,
            (first >> _SHIFT) ^ d ^ np.uint64(high),
            first & _LOW,
        )
        low, high = (low + _WEYL[0]) & 0xFFFFFFFF, (high + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([a, b, c, d])


def uniform(seed: int, stream: int, indices: Iterable[int], num: int) -> np.ndarray:
    """Uniform numbers in [0, 1), [B, num]: row b depends on (seed, stream, indices[b]) alone, and starts as a longer row does.

    Example:
        >>> whole = uniform(7, 0, range(100), 16)
        >>> bool((uniform(7, 0, [3], 9) == whole[3, :9]).all())
        True
    """
    rows = list(indices)
    if not rows or min(rows) < 0 or max(rows) >= 2**64:
        came = "empty" if not rows else f"from {min(rows)} to {max(rows)}"
        raise ValueError(f"batch: `indices` is {came}; expected integers from 0 below 2**64; count examples from 0")
    index = np.array(rows, dtype=np.uint64)[:, None]
    block = np.arange(-(-num // 4), dtype=np.uint64)[None]
    shape = np.zeros((len(rows), block.shape[1]), dtype=np.uint64)
    words = philox((block + shape, (index & _LOW) + shape, (index >> _SHIFT) + shape, np.uint64(stream) + shape), seed)
    return words.transpose(1, 2, 0).reshape(len(rows), -1)[:, :num] * 2.0**-32


def check_choice(op: str, name: str, came: str, choices: tuple[str, ...]) -> int:
    """The place of what came among the choices."""
    if came not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{op}: `{name}` is {came!r}; expected one of {listed}; choose one of them")
    return choices.index(came)


def check_seed(op: str, seed: int) -> None:
    """A seed is the 64-bit key of the random stream."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"{op}: `seed` is {seed}; expected 0 to 2**64 - 1; choose seeds from 0 upwards")


def answers(
    draw: Callable[[range], Examples],
    model: Callable[[Tensor], Tensor],
    num_examples: int,
    batch_size: int,
    num_classes: int,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[Examples, Tensor]]:
    """The examples of an evaluation, batch by batch, each with the logits [*target.shape, num_classes] of a model, on the CPU.

    The model is asked without gradients and stays in whatever mode it is.

    Args:
        draw: indices -> examples, which have `tokens` and `target`. Indices are 0 .. num_examples - 1.
        model: tokens -> logits.
        batch_size: most examples per call.
        device: where the tokens are put.
    """
    if num_examples < 1 or batch_size < 1:
        raise ValueError(
            f"evaluate: `num_examples` is {num_examples} and `batch_size` is {batch_size}; expected at least 1 of each; "
            "ask for more examples"
        )
    for start in range(0, num_examples, batch_size):
        examples = draw(range(start, min(start + batch_size, num_examples)))
        with torch.no_grad():
            logits = model(examples.tokens.to(device))
        expected = (*examples.target.shape, num_classes)
        if logits.shape != expected:
            raise ValueError(
                f"evaluate: `model` returned logits of shape {tuple(logits.shape)}; expected {expected}, one score per class "
                "wherever an answer may be asked; give its head as many outputs"
            )
        yield examples, logits.cpu()
