"""Text: the language topics of Python's own documentation (`pydoc_data.topics`), for a model of the next byte or character.

The text is what `help("topics")` shows, about half a million characters that every Python brings along; it differs a little
between versions of Python, so numbers belong to one version. Topics that share a paragraph (the page on compound statements
repeats that on `for`) are one family; families, never parts of them, go to train, validation and test, about 8 : 1 : 1.

Data path: `TextTask(length=T)` draws `Sequences`: tokens [B, T], and the token that follows each as target [B, T]. Training
windows start anywhere, as a function of (seed, index); window `index` of validation and test is the index-th piece, so that
`task.evaluate(model)` foretells every token once, but the first and a rest shorter than a window. It gives bits per character,
for bytes as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from shippo_ssm._expect import expect_size
from shippo_ssm.tasks.streams import Sequences, answers, check_choice, check_indices, check_seed, choices, uniform

SPLITS = ("train", "validation", "test")
SHARES = (0.8, 0.1, 0.1)
UNITS = ("byte", "character")
# Shorter paragraphs (headings, phrases) may stand in two topics by chance.
SHARED_CHARACTERS = 60


def _families(topics: dict[str, str]) -> list[list[str]]:
    """Names of topics, those together that share a paragraph; each family sorted, in the order of first names."""
    family = {name: [name] for name in sorted(topics)}
    seen: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) < SHARED_CHARACTERS:
                continue
            mine, other = family[name], family[seen.setdefault(words, name)]
            if mine is not other:
                other.extend(mine)
                family.update(dict.fromkeys(mine, other))
    unique = {id(names): sorted(names) for names in family.values()}
    return sorted(unique.values())


@lru_cache(maxsize=1)
def topic_splits() -> dict[str, tuple[str, ...]]:
    """Names of the topics of each split: families from the longest down, each to the split that lacks most.

    Example:
        >>> splits = topic_splits()
        >>> sorted(splits), len(set(splits["train"]) & set(splits["test"]))
        (['test', 'train', 'validation'], 0)
    """
    from pydoc_data.topics import topics

    size = {name: len(text) for name, text in topics.items()}
    missing = {split: share * sum(size.values()) for split, share in zip(SPLITS, SHARES)}
    out: dict[str, list[str]] = {split: [] for split in SPLITS}
    for names in sorted(_families(topics), key=lambda names: -sum(size[name] for name in names)):
        split = max(missing, key=lambda split: missing[split])
        out[split] += names
        missing[split] -= sum(size[name] for name in names)
    return {split: tuple(sorted(names)) for split, names in out.items()}


@lru_cache(maxsize=1)
def characters() -> str:
    """Every character of the topics, sorted: the vocabulary of `unit="character"`."""
    from pydoc_data.topics import topics

    return "".join(sorted(set("".join(topics.values()))))


@lru_cache
def _ids(split: str, unit: str) -> np.ndarray:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in topic_splits()[split])
    if unit == "byte":
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    codes = np.array([ord(letter) for letter in characters()])
    return np.searchsorted(codes, np.array([ord(letter) for letter in text]))


def bits(logits: Tensor, target: Tensor) -> Tensor:
    """-log2 of the probability that logits [.., V] give to each target [..].

    Example, where every byte is equally likely:
        >>> bits(torch.zeros(4, 256), torch.tensor([1, 2, 3, 4])).tolist()
        [8.0, 8.0, 8.0, 8.0]
    """
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, -2).double(), target.flatten(), reduction="none")
    return nats.view(target.shape) / math.log(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextScores:
    """How well the text was foretold."""

    num_characters: int
    bits_per_character: float
    bits_per_token: float
    """The same for `unit="character"`; a little less for bytes, of which a few characters have two or three."""
    accuracy: float
    """Fraction of tokens whose likeliest successor came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTask:
    """The next byte or character of Python's documentation.

    Example:
        >>> task = TextTask(length=64, unit="byte")
        >>> text = task.batch(range(8), split="train")
        >>> text.tokens.shape, bool((text.tokens[:, 1:] == text.target[:, :-1]).all())
        (torch.Size([8, 64]), True)

    A model is any callable from tokens [B, T] to logits [B, T, vocab_size]:
        >>> flat = lambda tokens: torch.zeros(*tokens.shape, 256)
        >>> round(task.evaluate(flat, num_examples=4).bits_per_token, 6)
        8.0
    """

    length: int = 256
    """Tokens T of a window."""
    unit: str = "byte"
    """What a token is: a "byte" of UTF-8 (256 tokens), or a "character" that occurs in the text."""
    seed: int = 0
    """Training windows are a function of (seed, index)."""

    def __post_init__(self) -> None:
        check_choice("TextTask", "unit", self.unit, UNITS)
        longest = min(len(_ids(split, self.unit)) for split in SPLITS) - 1
        expect_size("TextTask", "length", self.length, f"1 to {longest}, the length of the shortest split")
        if self.length > longest:
            raise ValueError(
                f"TextTask: `length` is {self.length}; expected 1 to {longest}, the length of the shortest split; "
                "choose a shorter window"
            )
        check_seed("TextTask", self.seed)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return 256 if self.unit == "byte" else len(characters())

    def num_tokens(self, split: str) -> int:
        """Tokens of a split."""
        check_choice("TextTask.num_tokens", "split", split, SPLITS)
        return len(_ids(split, self.unit))

    def num_windows(self, split: str) -> int:
        """Whole windows of a split that follow one another."""
        return (self.num_tokens(split) - 1) // self.length

    def batch(self, indices: Iterable[int], split: str = "train") -> Sequences:
        """Windows of a split, tokens [B, T], with the next token of each position as target [B, T].

        Args:
            indices: B numbers below 2^64 for "train", where windows are random; below num_windows(split) otherwise.
            split: "train", "validation" or "test".
        """
        stream = check_choice("TextTask.batch", "split", split, SPLITS)
        ids = _ids(split, self.unit)
        if split == "train":
            draws = uniform(self.seed, stream, indices, 1)[:, 0]
            begin = (draws * (len(ids) - self.length)).astype(np.int64)
        else:
            windows = self.num_windows(split)
            expected = f"0 to {windows - 1}, the windows of {split!r}; ask for windows that are there"
            rows = check_indices("TextTask.batch", indices, windows, expected)
            begin = np.array(rows) * self.length
        windows = ids[begin[:, None] + np.arange(self.length + 1)]
        return Sequences(torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy()))

    def text(self, tokens: Tensor) -> str:
        """Tokens [T] as text; bytes that are cut apart show as a replacement mark.

        Example:
            >>> task = TextTask(length=16, unit="character")
            >>> len(task.text(task.batch([0], "test").tokens[0]))
            16
        """
        if self.unit == "byte":
            return bytes(tokens.tolist()).decode(errors="replace")
        return "".join(characters()[token] for token in tokens.tolist())

    def evaluate(
        self,
        model: Callable[[Tensor], Tensor],
        num_examples: int | None = None,
        batch_size: int = 32,
        *,
        split: str = "validation",
        device: str | torch.device = "cpu",
    ) -> TextScores:
        """Bits per character of a model, ours or not, on the first `num_examples` windows of a split, default all.

        Args:
            model: tokens [B, T] -> logits [B, T, vocab_size]; called without gradients, in whatever mode it is.
            num_examples: windows in all. batch_size: windows per call.
            split: "validation" or "test" (or "train": random windows, of which `num_examples` defaults to as many).
            device: where the tokens are put.
        """
        total, right, num_tokens, num_characters = 0.0, 0, 0, 0
        count = self.num_windows(split) if num_examples is None else num_examples
        for text, logits in answers(partial(self.batch, split=split), model, count, batch_size, self.vocab_size, device):
            total += float(bits(logits, text.target).sum())
            right += int((choices(logits) == text.target).sum())
            num_tokens += text.target.numel()
            # A character is a byte that does not continue one: 10xxxxxx.
            begins = text.target >> 6 != 2 if self.unit == "byte" else torch.ones_like(text.target)
            num_characters += int(begins.sum())
        return TextScores(
            num_characters=num_characters,
            bits_per_character=total / num_characters,
            bits_per_token=total / num_tokens,
            accuracy=right / num_tokens,
        )
