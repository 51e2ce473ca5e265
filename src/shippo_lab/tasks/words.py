"""Group words: read elements g_1, g_2, .. of a finite group, answer with the product g_1 .. g_t after each (Merrill et al.).

    h_0 = identity,     h_t = h_{t-1} g_t,     target_t = h_t

An element acts from the right on everything before it: H_t = H_{t-1} R_t with R_t = R(g_t) and R a representation,
R(a) R(b) = R(ab). So a memory with right actions solves the task exactly if its width P allows a faithful real representation
that its right actions reach. An exponential has a positive determinant, so the representation has to lie in GL+(P); a finite
group there is conjugate to one in SO(P).

`Group.generate(name, generators)` closes permutations to a group with its multiplication table [order, order]; `group.irreps`
are its irreducible real representations, found numerically; `group.faithful()` is the smallest faithful sum of them with
positive determinants. `WordTask(group=..., length=T)` draws tokens and target [B, T] of element numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from shippo_lab.tasks.streams import NO_TARGET, SPLITS, Sequences, answers, check_choice, check_seed, choices, uniform
from shippo_ssm._expect import expect_size

GROUPS = ("A5", "S5", "S4", "S3", "Z60", "A4xZ5")
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
class Representation:
    """A real orthogonal representation of a group: R(a) R(b) = R(ab)."""

    matrices: Tensor
    """R [order, P, P], float64, block diagonal."""
    blocks: tuple[int, ...]

    @property
    def width(self) -> int:
        """P."""
        return self.matrices.shape[-1]

    @property
    def collapses(self) -> bool:
        """Whether a fixed change of coordinates splits it into independent banks."""
        return len(self.blocks) > 1

    @property
    def banks_reflect(self) -> bool:
        """Whether some block has a negative determinant for some element, so that only all blocks together are proper."""
        ends = np.cumsum(self.blocks)
        parts = [self.matrices[:, end - size : end, end - size : end] for size, end in zip(self.blocks, ends)]
        return any(bool((torch.linalg.det(part) < 0).any()) for part in parts)


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
        degree = len(steps[0]) if steps else 0
        for step in steps:
            if degree == 0 or sorted(step) != list(range(degree)):
                raise ValueError(
                    f"Group: `generators` holds {step}; expected permutations of 0 .. {degree - 1}, all of one degree; "
                    "write the image of each point"
                )
        if not steps:
            raise ValueError("Group: `generators` is empty; expected at least one permutation; (0,) gives the trivial group")
        found = all_products(steps, LARGEST_ORDER)
        if len(found) > LARGEST_ORDER:
            raise ValueError(
                f"Group: `generators` give more than {LARGEST_ORDER} elements; expected at most that many; "
                "choose a smaller group"
            )
        permutations = np.array(sorted(found))
        # Products are recognised by a random linear form of their images, modulo 2^64.
        form = np.random.default_rng(0).integers(1, 2**62, degree)
        marks = permutations @ form
        ranks = np.argsort(marks)
        assert len(np.unique(marks)) == len(marks)
        # products[b, a, i] = b(a(i)).
        products = permutations[:, permutations]
        table = ranks[np.searchsorted(marks[ranks], products @ form)].T
        return Group(name, permutations, np.ascontiguousarray(table))

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.permutations)

    @cached_property
    def inverses(self) -> np.ndarray:
        """[order]: the number of each inverse."""
        return (self.table == 0).argmax(1)

    @property
    def commutative(self) -> bool:
        """Whether the order of a word does not matter."""
        return bool((self.table == self.table.T).all())

    @property
    def swaps(self) -> np.ndarray:
        """Numbers of the elements that exchange two points and keep all others."""
        return np.flatnonzero((self.permutations != np.arange(self.permutations.shape[1])).sum(1) == 2)

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

    def faithful(self, connected: bool = True) -> Representation:
        """The smallest real representation in which different elements have different matrices, with the fewest blocks.

        `connected` allows only representations in SO(P), which exponentials reach; otherwise reflections count as well.
        """
        return _faithful(self, connected)


def _sums(sizes: Sequence[int], total: int, first: int = 0) -> Iterator[tuple[int, ...]]:
    """Every multiset of places of `sizes` whose sizes add up to `total`."""
    if total == 0:
        yield ()
    for place in range(first, len(sizes)):
        if sizes[place] <= total:
            yield from ((place, *rest) for rest in _sums(sizes, total - sizes[place], place))


@lru_cache(maxsize=64)
def _faithful(group: Group, connected: bool) -> Representation:
    irreps = group.irreps
    # The trivial representation, the first, tells nothing apart.
    useful = irreps[1:] if group.order > 1 else irreps
    sizes = [irrep.shape[-1] for irrep in useful]
    kernels = [np.trace(irrep, axis1=1, axis2=2) > size - 1e-6 for irrep, size in zip(useful, sizes)]
    signs = [np.linalg.det(irrep).round() for irrep in useful]
    for width in itertools.count(1):
        for places in sorted(_sums(sizes, width), key=len):
            kernel = np.logical_and.reduce([kernels[place] for place in places])
            proper = (np.multiply.reduce([signs[place] for place in places]) > 0).all()
            if kernel.sum() == 1 and (proper or not connected):
                blocks = sorted((useful[place] for place in places), key=lambda irrep: -irrep.shape[-1])
                matrices = [torch.block_diag(*(torch.from_numpy(block[g]) for block in blocks)) for g in range(group.order)]
                return Representation(torch.stack(matrices), tuple(block.shape[-1] for block in blocks))
    raise AssertionError("the regular representation, taken twice, is faithful and proper")


def _cycle(degree: int, *points: int) -> tuple[int, ...]:
    image = list(range(degree))
    for here, there in zip(points, points[1:] + points[:1]):
        image[here] = there
    return tuple(image)


@lru_cache
def named_group(name: str) -> Group:
    """One of the groups that are built in: A5, S5, S4, S3, Z60, A4xZ5."""
    generators = {
        "A5": [_cycle(5, 0, 1, 2), _cycle(5, 0, 1, 2, 3, 4)],
        "S5": [_cycle(5, 0, 1), _cycle(5, 0, 1, 2, 3, 4)],
        "S4": [_cycle(4, 0, 1), _cycle(4, 0, 1, 2, 3)],
        "S3": [_cycle(3, 0, 1), _cycle(3, 0, 1, 2)],
        "Z60": [_cycle(12, 0, 1, 2), _cycle(12, 3, 4, 5, 6), _cycle(12, 7, 8, 9, 10, 11)],
        "A4xZ5": [_cycle(9, 0, 1, 2), _cycle(9, 1, 2, 3), _cycle(9, 4, 5, 6, 7, 8)],
    }
    if name not in generators:
        choices = ", ".join(repr(choice) for choice in GROUPS)
        raise ValueError(
            f"WordTask: `group` is {name!r}; expected one of {choices} or a Group; make your own with Group.generate"
        )
    return Group.generate(name, generators[name])


@lru_cache(maxsize=64)
def _generating_elements(group: Group, elements: int | str) -> np.ndarray:
    """Numbers of the elements that words are made of, sorted."""
    if elements == "all":
        return np.arange(group.order)
    if elements == "swaps":
        if len(group.swaps) == 0 or group.generated_by(group.swaps) < group.order:
            raise ValueError(
                f"WordTask: `elements` is 'swaps', and the swaps of {group.name} do not generate it; expected a group that "
                "they generate; choose 'all' or a number of elements"
            )
        return group.swaps
    if not isinstance(elements, int) or not 1 <= elements < group.order:
        raise ValueError(
            f"WordTask: `elements` is {elements!r}; expected 'all', 'swaps' or a number from 1 to {group.order - 1}; "
            "choose how many elements words are made of"
        )
    rng = np.random.default_rng(elements)
    for _ in range(1000):
        chosen = np.sort(1 + rng.permutation(group.order - 1)[:elements])
        if group.generated_by(chosen) == group.order:
            return chosen
    raise ValueError(
        f"WordTask: `elements` is {elements}, and no {elements} elements were found that generate {group.name}; expected a "
        "generating set; choose more elements"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WordScores:
    """Accuracies of an evaluation."""

    num_words: int
    prefix: float
    """Fraction of all prefix products that are right."""
    last: float
    """Fraction of words whose last product is right."""
    whole: float
    """Fraction of words of which every prefix product is right."""
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
    """What words are made of: "all" elements, "swaps" only, or so many elements that together generate the group (always the
    same ones for a group and a number; never the identity). Tokens are element numbers in each case."""
    start: bool = False
    """Whether a start token, number `order`, comes before the elements; nothing is asked there."""
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
        """Number of tokens: one per element, and the start token if there is one."""
        return self.structure.order + self.start

    @property
    def alphabet(self) -> np.ndarray:
        """Numbers of the elements that words are made of, sorted."""
        return _generating_elements(self.structure, self.elements)

    @property
    def representation(self) -> Tensor:
        """The smallest faithful representation that exponentials reach, R [order, P, P] in SO(P), float64."""
        return self.structure.faithful().matrices

    @property
    def needs(self) -> str:
        """What a right action needs to solve the task, computed from the group."""
        group = self.structure
        inside, free = group.faithful(), group.faithful(connected=False)
        blocks = " + ".join(str(block) for block in inside.blocks)
        form = "it collapses to independent banks" if inside.collapses else "it does not collapse"
        form += ", which alone would have to reflect" if inside.banks_reflect else ""
        order = "; its elements commute" if group.commutative else ""
        text = f"{group.name}, {group.order} elements, needs a group width P of {inside.width} or more "
        text += f"(SO({inside.width}), blocks {blocks}): {form}{order}."
        return text + (f" With reflections P = {free.width} would do." if free.width < inside.width else "")

    def batch(self, indices: Iterable[int], split: str = "train", length: int | None = None) -> Sequences:
        """The words with these indices, tokens and target [B, T], or [B, T + 1] with a start token; `length` as in the task.

        A shorter word is a prefix of a longer one. The streams of the splits are disjoint; very short words occur in both.
        """
        length = self._check_length(self.length if length is None else length)
        draws = uniform(self.seed, check_choice("WordTask.batch", "split", split, SPLITS), indices, length)
        tokens = self.alphabet[(draws * len(self.alphabet)).astype(np.int64)]
        target = np.empty_like(tokens)
        table = self.structure.table
        product = np.zeros(len(tokens), dtype=np.int64)
        for t in range(length):
            target[:, t] = product = table[product, tokens[:, t]]
        if self.start:
            tokens = np.pad(tokens, ((0, 0), (1, 0)), constant_values=self.structure.order)
            target = np.pad(target, ((0, 0), (1, 0)), constant_values=NO_TARGET)
        return Sequences(torch.from_numpy(tokens), torch.from_numpy(target))

    def evaluate(
        self,
        model: Callable[[Tensor], Tensor],
        num_examples: int = 256,
        batch_size: int = 64,
        *,
        length: int | None = None,
        device: str | torch.device = "cpu",
    ) -> WordScores:
        """Score a model, tokens [B, T] -> logits [B, T, vocab_size], on the first examples of the evaluation split."""
        asked = answers(
            lambda indices: self.batch(indices, "eval", length), model, num_examples, batch_size, self.vocab_size, device
        )
        right = [(choices(logits) == words.target)[:, int(self.start) :] for words, logits in asked]
        table = torch.cat(right).double()
        return WordScores(
            num_words=len(table),
            prefix=float(table.mean()),
            last=float(table[:, -1].mean()),
            whole=float(table.prod(1).mean()),
            by_position=tuple(table.mean(0).tolist()),
        )

    def _check_length(self, length: int) -> int:
        expect_size("WordTask", "length", length, "at least 1; choose how many elements a word has")
        return length
