"""Text for a model of the next byte: Python's own documentation ("topics"), or the source of its standard library ("library").

Both differ a little between versions of Python; `digest` says which text it was. Of the topics (`pydoc_data.topics`),
those that share a paragraph are one family, and families go to train, validation and test. The library is the `.py`
files without tests, split by package. Training windows start anywhere; window `index` of validation and test is the
index-th piece.
"""

import hashlib
import math
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shippo_lab.tasks.streams import Model, Sequences, answers, check_choice, check_indices, check_seed, uniform
from shippo_ssm._expect import expect_size

SPLITS = ("train", "validation", "test")
SHARES = {"topics": (0.8, 0.1, 0.1), "library": (0.9, 0.05, 0.05)}
# Shorter paragraphs (headings, phrases) may stand in two topics by chance.
SHARED_CHARACTERS = 60
# Folders of the standard library that are not its own source, or not text to learn from.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "pydoc_data"}


def _families(topics: dict[str, str]) -> list[list[str]]:
    """Names of topics, grouped where they share a paragraph; each family sorted, in the order of first names."""
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


@lru_cache
def _documents(corpus: str) -> dict[str, list[bytes]]:
    """Topic or package of the standard library -> its files."""
    if corpus == "topics":
        from pydoc_data.topics import topics

        return {name: [text.encode()] for name, text in topics.items()}
    root = Path(sysconfig.get_paths()["stdlib"])
    packages: dict[str, list[bytes]] = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if not LEFT_OUT & set(parts):
            packages.setdefault(parts[0].removesuffix(".py"), []).append(file.read_bytes())
    return packages


@lru_cache
def splits(corpus: str) -> dict[str, tuple[str, ...]]:
    """Names of the topics or packages of each split: families from the longest down, each to the split that lacks most."""
    documents = _documents(corpus)
    if corpus == "topics":
        texts = {name: file.decode() for name, (file,) in documents.items()}
        size, families = {name: len(text) for name, text in texts.items()}, _families(texts)
    else:
        size = {name: sum(map(len, files)) for name, files in documents.items()}
        families = [[name] for name in sorted(documents)]
    missing = {split: share * sum(size.values()) for split, share in zip(SPLITS, SHARES[corpus])}
    out: dict[str, list[str]] = {split: [] for split in SPLITS}
    for names in sorted(families, key=lambda names: -sum(size[name] for name in names)):
        split = max(missing, key=lambda split: missing[split])
        out[split] += names
        missing[split] -= sum(size[name] for name in names)
    return {split: tuple(sorted(names)) for split, names in out.items()}


@lru_cache
def _ids(corpus: str, split: str) -> np.ndarray:
    """The bytes of a split, uint8."""
    files = (file for name in splits(corpus)[split] for file in _documents(corpus)[name])
    return np.frombuffer(b"\n".join(files), dtype=np.uint8)


@lru_cache
def digest(corpus: str) -> str:
    """SHA-256 of the three splits, which says what was learned and what was asked."""
    found = hashlib.sha256()
    for split in SPLITS:
        found.update(split.encode() + b"\0" + _ids(corpus, split).tobytes())
    return found.hexdigest()


def bits(logits: Tensor, target: Tensor) -> Tensor:
    """-log2 of the probability that logits [.., V] give to each target [..]."""
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, -2).double(), target.flatten(), reduction="none")
    return nats.view(target.shape) / math.log(2)


class TextScores(NamedTuple):
    """Scores of an evaluation; a token is a byte, and a few characters have two or three."""

    bits_per_character: float
    bits_per_token: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTask:
    """The next byte of Python's documentation or source."""

    length: int = 256
    """Tokens T of a window."""
    corpus: str = "topics"
    """"topics" (small) or "library" (twenty times larger)."""
    seed: int = 0
    """Training windows are a function of (seed, index)."""

    def __post_init__(self) -> None:
        check_choice("TextTask", "corpus", self.corpus, tuple(SHARES))
        longest = min(map(self.num_tokens, SPLITS)) - 1
        expect_size("TextTask", "length", self.length, f"1 to {longest}, the length of the shortest split")
        if self.length > longest:
            raise ValueError(f"TextTask: `length` is {self.length}; expected 1 to {longest}, the length of the shortest split")
        check_seed("TextTask", self.seed)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return 256

    def num_tokens(self, split: str) -> int:
        """Tokens of a split."""
        check_choice("TextTask.num_tokens", "split", split, SPLITS)
        return len(_ids(self.corpus, split))

    def num_windows(self, split: str) -> int:
        """Consecutive whole windows of a split."""
        return (self.num_tokens(split) - 1) // self.length

    def batch(self, indices: Iterable[int], split: str = "train") -> Sequences:
        """Windows of a split, tokens [B, T], with the next token of each position as target [B, T].

        Indices are below 2^64 for "train", where windows are random, and below num_windows(split) otherwise.
        """
        stream = check_choice("TextTask.batch", "split", split, SPLITS)
        ids = _ids(self.corpus, split)
        if split == "train":
            draws = uniform(self.seed, stream, indices, 1)[:, 0]
            begin = (draws * (len(ids) - self.length)).astype(np.int64)
        else:
            windows = self.num_windows(split)
            rows = check_indices("TextTask.batch", indices, windows, f"0 to {windows - 1}, the windows of {split!r}")
            begin = np.array(rows) * self.length
        windows = torch.from_numpy(ids[begin[:, None] + np.arange(self.length + 1)].astype(np.int64))
        return Sequences(windows[:, :-1].clone(), windows[:, 1:].clone())

    def text(self, tokens: Tensor) -> str:
        """Tokens [T] as text; bytes cut from a character show as a replacement mark."""
        return bytes(tokens.tolist()).decode(errors="replace")

    def evaluate(
        self, model: Model, num_examples: int | None = None, batch_size: int = 32, *, split: str = "validation"
    ) -> TextScores:
        """Score a model, tokens [B, T] -> logits [B, T, vocab_size], on the first windows of a split, default all."""
        total, num_tokens, num_characters = 0.0, 0, 0
        count = self.num_windows(split) if num_examples is None else num_examples
        for text, logits in answers(partial(self.batch, split=split), model, count, batch_size, self.vocab_size):
            total += float(bits(logits, text.target).sum())
            num_tokens += text.target.numel()
            # A character is a byte that does not continue one: 10xxxxxx.
            num_characters += int((text.target >> 6 != 2).sum())
        return TextScores(total / num_characters, total / num_tokens)
