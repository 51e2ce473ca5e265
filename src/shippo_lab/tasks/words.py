"""Group words: read elements g_1, g_2, .. of a finite group, answer with the product g_1 .. g_t after each (Merrill et al.).

An element acts from the right on everything before it: H_t = H_{t-1} R_t with R_t = R(g_t) and R a representation, R(a)
R(b) = R(ab). So a memory with right actions solves the task exactly if its width P allows a faithful real
representation of positive determinants: 3 for A5, and 5 for S5, whose swaps are reflections in four dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from shippo_lab.tasks.streams import SPLITS, Model, Sequences, answers, check_choice, check_seed, choices, uniform
from shippo_ssm._expect import expect_size

# Irreducible representations come from a dense eigenproblem of the size of the group.
LARGEST_ORDER = 1024


def all_products(maps: Sequence[Sequence[int]], limit: int) -> set[tuple[int, ...]]:
    """All products of maps of 0 .. n - 1, with the empty one; ends early once there are more than `limit`."""
    found = {tuple(range(len(maps[0])))}
    fresh = found
    while fresh and len(found) <= limit:
        fresh = {tuple(step[point] for point in word) for word in fresh for step in maps} - found
        found = found | fresh
    return found


@dataclass(frozen=True, eq=False)
class Group:
    """A finite group of permutations; element 0 is the identity, and ab is first a, then b."""

    name: str
    permutations: np.ndarray
    """[order, degree], sorted: row g holds the image of each point."""
    table: np.ndarray
    """[order, order]: table[a, b] is the number of the product ab."""

    @staticmethod
    def generate(name: str, generators: Sequence[Sequence[int]]) -> Group:
        """The group of all products of some permutations, each given as the images of 0 .. degree - 1."""
        steps = [tuple(int(point) for point in generator) for generator in generators]
        if not steps or not steps[0] or any(sorted(step) != list(range(len(steps[0]))) for step in steps):
            raise ValueError(
                f"Group: `generators` is {steps}; expected permutations of 0 .. n - 1, at least one, of one degree"
            )
        found = all_products(steps, LARGEST_ORDER)
        if len(found) > LARGEST_ORDER:
            raise ValueError(f"Group: `generators` give more than {LARGEST_ORDER} elements; choose a smaller group")
        images = sorted(found)
        place = {image: number for number, image in enumerate(images)}
        table = [[place[tuple(second[point] for point in first)] for second in images] for first in images]
        return Group(name, np.array(images), np.array(table))

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.permutations)

    @cached_property
    def inverses(self) -> np.ndarray:
        """[order]: the number of each inverse."""
        return (self.table == 0).argmax(1)

    def generated_by(self, elements: Iterable[int]) -> int:
        """Order of the subgroup that some elements generate."""
        return len(all_products(self.permutations[list(elements)].tolist(), self.order))

    @cached_property
    def irreps(self) -> tuple[np.ndarray, ...]:
        """All irreducible real representations [order, d, d], orthogonal, one of each kind, small ones first.

        The commutant of the regular representation e_x -> e_gx is spanned by right multiplications. A random symmetric element,
        S[x, y] = c(x^{-1} y) with c(g) = c(g^{-1}), has one irreducible representation per eigenspace.
        """
        weight = np.random.default_rng(0).standard_normal(self.order)
        values, vectors = np.linalg.eigh((weight + weight[self.inverses])[self.table[self.inverses]])
        cuts = np.flatnonzero(np.diff(values) > 1e-8 * np.abs(values).max()) + 1
        back = self.table[self.inverses]
        points = np.arange(self.order)
        kinds: dict[tuple[float, ...], np.ndarray] = {}
        for space in np.split(vectors, cuts, axis=1):
            character = (space @ space.T)[points, back].sum(1).round(6) + 0.0
            kinds.setdefault(tuple(character.tolist()), space)
        ordered = sorted(kinds, key=lambda character: (character[0], [-value for value in character]))
        found = tuple(np.einsum("yi,gyj->gij", kinds[key], kinds[key][back], optimize=True) for key in ordered)
        # Over the reals <chi, chi> is 1, 2 or 4, and d^2 / <chi, chi> adds up to the order.
        squares = [d[0] ** 2 / np.mean(np.square(d)) for d in ordered]
        assert abs(sum(squares) - self.order) < 1e-3
        return found

    @cached_property
    def classes(self) -> tuple[np.ndarray, ...]:
        """Conjugacy classes, each the numbers of its elements, in the order of their first element."""
        conjugates = self.table[self.table, self.inverses[:, None]]
        return tuple(np.array(own) for own in sorted({tuple(np.unique(column).tolist()) for column in conjugates.T}))

    @cached_property
    def characters(self) -> np.ndarray:
        """[irreps, classes]: the trace of each irreducible real representation on each class."""
        firsts = [own[0] for own in self.classes]
        return np.stack([np.trace(irrep[firsts], axis1=1, axis2=2) for irrep in self.irreps])


def _cycle(degree: int, *points: int) -> tuple[int, ...]:
    moves = dict(zip(points, points[1:] + points[:1]))
    return tuple(moves.get(point, point) for point in range(degree))


# Generators of the groups that are built in.
GROUPS = {
    "A5": [_cycle(5, 0, 1, 2), _cycle(5, 0, 1, 2, 3, 4)],
    "S5": [_cycle(5, 0, 1), _cycle(5, 0, 1, 2, 3, 4)],
    "S4": [_cycle(4, 0, 1), _cycle(4, 0, 1, 2, 3)],
    "S3": [_cycle(3, 0, 1), _cycle(3, 0, 1, 2)],
    "Z60": [_cycle(12, 0, 1, 2), _cycle(12, 3, 4, 5, 6), _cycle(12, 7, 8, 9, 10, 11)],
    "A4xZ5": [_cycle(9, 0, 1, 2), _cycle(9, 1, 2, 3), _cycle(9, 4, 5, 6, 7, 8)],
}


@lru_cache
def named_group(name: str) -> Group:
    """One of the `GROUPS`."""
    if name not in GROUPS:
        known = ", ".join(map(repr, GROUPS))
        raise ValueError(f"WordTask: `group` is {name!r}; expected one of {known}, or a Group made by Group.generate")
    return Group.generate(name, GROUPS[name])


@lru_cache(maxsize=64)
def _generating_elements(group: Group, elements: int | str) -> np.ndarray:
    """Numbers of the elements that words are made of, sorted."""
    if elements == "all":
        return np.arange(group.order)
    if not isinstance(elements, int) or not 1 <= elements < group.order:
        raise ValueError(f"WordTask: `elements` is {elements!r}; expected 'all' or a number from 1 to {group.order - 1}")
    rng = np.random.default_rng(elements)
    for _ in range(1000):
        chosen = np.sort(1 + rng.permutation(group.order - 1)[:elements])
        if group.generated_by(chosen) == group.order:
            return chosen
    raise ValueError(f"WordTask: no {elements} elements were found that generate {group.name}; choose more `elements`")


class WordScores(NamedTuple):
    """Accuracies of an evaluation."""

    prefix: float
    """Fraction of all prefix products that are right."""
    by_position: tuple[float, ...]
    """Fraction of words that are right after 1, 2, .. T elements."""

    def horizon(self, accuracy: float) -> int:
        """The tracking horizon: the longest length up to which no position is right less often than `accuracy`; at most T."""
        return next((t for t, right in enumerate(self.by_position) if right < accuracy), len(self.by_position))


@dataclass(frozen=True, kw_only=True, slots=True)
class WordTask:
    """Words over a finite group; the answer after each element is the product so far."""

    group: str | Group = "A5"
    """A name of `GROUPS`, or a `Group`."""
    length: int = 16
    """Elements T of a word, unless `batch` or `evaluate` is told another length."""
    elements: int | str = "all"
    """What words are made of: "all" elements, or so many elements that together generate the group (always the same ones for a
    group and a number; never the identity). Tokens are element numbers in each case."""
    seed: int = 0
    """Words are a function of (seed, split, index)."""

    def __post_init__(self) -> None:
        self._check_length(self.length)
        check_seed("WordTask", self.seed)
        _generating_elements(self.structure, self.elements)

    @property
    def structure(self) -> Group:
        """The group itself."""
        return self.group if isinstance(self.group, Group) else named_group(self.group)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, one per element."""
        return self.structure.order

    @property
    def alphabet(self) -> np.ndarray:
        """Numbers of the elements that words are made of, sorted."""
        return _generating_elements(self.structure, self.elements)

    def batch(self, indices: Iterable[int], split: str = "train", length: int | None = None) -> Sequences:
        """The words with these indices, tokens and target [B, T]; `length` as in the task.

        A shorter word is a prefix of a longer one. The streams of the splits are disjoint; very short words occur in both.
        """
        length = self._check_length(self.length if length is None else length)
        draws = uniform(self.seed, check_choice("WordTask.batch", "split", split, SPLITS), indices, length)
        tokens = self.alphabet[(draws * len(self.alphabet)).astype(np.int64)]
        target, table = np.empty_like(tokens), self.structure.table
        product = np.zeros(len(tokens), dtype=np.int64)
        for t in range(length):
            target[:, t] = product = table[product, tokens[:, t]]
        return Sequences(torch.from_numpy(tokens), torch.from_numpy(target))

    def evaluate(self, model: Model, num_examples: int = 256, batch_size: int = 64, length: int | None = None) -> WordScores:
        """Score a model, tokens [B, T] -> logits [B, T, vocab_size], on the first examples of the evaluation split."""
        draw = partial(self.batch, split="eval", length=length)
        asked = answers(draw, model, num_examples, batch_size, self.vocab_size)
        table = torch.cat([choices(logits) == words.target for words, logits in asked]).double()
        return WordScores(float(table.mean()), tuple(table.mean(0).tolist()))

    def _check_length(self, length: int) -> int:
        expect_size("WordTask", "length", length, "at least 1; choose how many elements a word has")
        return length
