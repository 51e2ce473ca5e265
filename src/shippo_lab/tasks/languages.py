"""Formal languages: read a sentence, give one answer at its end (the suite of SLiCE and PD-SSM, with its token formats).

    parity           a b b a               1 if the number of b is even, else 2;  a, b = 1, 2
    even-pairs       a b b a               1 if the first token equals the last, else 2
    cycle            stay, +1, -1          4 + (sum mod 5);  stay, +1, -1 = 1, 2, 3
    arithmetic       3 - 2 * 4 + 1 =       5 + (value mod 5), * binds first;  + - * = are 1 .. 4, digits 5 .. 9
    brackets         ((2-(-3))*4)=         1 + (value mod 5);  digits 1 .. 5, + - * ( ) = are 6 .. 11
    majority         7 3 7 9               the most frequent token, of equals the first;  tokens 1 .. 63

Token 0 is padding. Lengths are uniform in a range; an odd length of `arithmetic` takes one token more, and `brackets` puts its
'=' after an expression of the drawn length and takes a product twice as often as a sum or a difference, as the published
generators do. `task.automaton` is the smallest machine that gives the answers, and `task.needs` says from its letters which
part of the cell does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shippo_lab.tasks.streams import NO_TARGET, SPLITS, Sequences, answers, check_choice, check_seed, choices, uniform
from shippo_lab.tasks.words import Group
from shippo_ssm._expect import expect_size

MODULUS = 5
LANGUAGES = ("parity", "even-pairs", "cycle", "arithmetic", "brackets", "majority")
VOCAB_SIZES = {"parity": 3, "even-pairs": 3, "cycle": 9, "arithmetic": 10, "brackets": 12, "majority": 64}
PAD = 0
# Random numbers per position of `brackets`: where an expression divides, its operator, its digit.
_BRACKET_DRAWS = 3

State = TypeVar("State", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Automaton:
    """A machine that reads letters and answers from its state: the smallest one for its answers."""

    letters: tuple[str, ...]
    table: np.ndarray
    """[letters, states]: the state after a letter. State 0 is the first."""
    answers: tuple[Hashable, ...]
    """What each state answers."""

    @property
    def num_states(self) -> int:
        """States of the machine."""
        return self.table.shape[1]

    @property
    def invertible(self) -> tuple[str, ...]:
        """Letters that permute the states: a right action can do their work."""
        return tuple(letter for letter, row in zip(self.letters, self.table) if len(set(row.tolist())) == len(row))

    @property
    def forgetting(self) -> tuple[str, ...]:
        """Letters that send different states to one: something has to be forgotten."""
        return tuple(letter for letter in self.letters if letter not in self.invertible)

    def group(self) -> Group | None:
        """The group of permutations that the invertible letters generate, or None without such a letter."""
        rows = [row.tolist() for letter, row in zip(self.letters, self.table) if letter in self.invertible]
        return Group.generate("letters", rows) if rows else None


def minimal_automaton(
    start: State,
    letters: Sequence[str],
    step: Callable[[State, int], State],
    answer: Callable[[State], Hashable],
) -> Automaton:
    """The smallest machine with the answers of a given one: reachable states, merged while no word tells them apart.

    `step` maps (state, number of a letter) to the next state, `answer` a state to its answer.
    """
    places: dict[State, int] = {start: 0}
    states = [start]
    rows = []
    for state in states:
        after = [step(state, letter) for letter in range(len(letters))]
        for reached in after:
            if reached not in places:
                places[reached] = len(states)
                states.append(reached)
        rows.append([places[reached] for reached in after])
    table = np.array(rows)
    # Moore's refinement: states stay together while their answers and their successors do.
    kinds = _numbered([answer(state) for state in states])
    while True:
        finer = _numbered([(kind, *after) for kind, after in zip(kinds.tolist(), kinds[table].tolist())])
        if finer.max() == kinds.max():
            break
        kinds = finer
    first = [int(np.flatnonzero(kinds == kind)[0]) for kind in range(kinds.max() + 1)]
    return Automaton(tuple(letters), kinds[table[first]].T, tuple(answer(states[place]) for place in first))


def _numbered(labels: Sequence[Hashable]) -> np.ndarray:
    """Labels as numbers from 0 in the order in which they first occur."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels])


@lru_cache
def automaton_of(name: str) -> Automaton | None:
    """The smallest automaton of a language, or None where no finite one answers sentences of every length.

    A letter of `arithmetic` is an operator with the digit after it, so that every word is a sentence.
    """
    if name == "parity":
        return minimal_automaton(0, ("a", "b"), lambda odd, letter: (odd + letter) % 2, lambda odd: odd)
    if name == "even-pairs":

        def read(ends: tuple[int, int], letter: int) -> tuple[int, int]:
            """First and last letter; before the first one, neither."""
            return (letter if ends == (-1, -1) else ends[0], letter)

        return minimal_automaton((-1, -1), ("a", "b"), read, lambda ends: ends[0] == ends[1])
    if name == "cycle":
        moves = (0, 1, -1)
        return minimal_automaton(
            0,
            ("stay", "+1", "-1"),
            lambda place, letter: (place + moves[letter]) % MODULUS,
            lambda place: place,
        )
    if name == "arithmetic":
        letters = [f"{operator}{digit}" for operator in "+-*" for digit in range(MODULUS)]

        def step(state, letter):
            (done, term), operator, digit = state, letter // MODULUS, letter % MODULUS
            if operator == 2:
                return done, term * digit % MODULUS
            return (done + term) % MODULUS, (digit if operator == 0 else -digit) % MODULUS

        return minimal_automaton((0, 0), letters, step, lambda state: sum(state) % MODULUS)
    return None


# What the computed numbers mean for the cell H_t = L_t H_{t-1} R_t + U_t.
_WORK = {
    "parity": "One right action does all the work: each b turns the plane by pi, each a leaves it.",
    "even-pairs": "Nothing is multiplied: the first token is written once and kept (left factor 1, no later write over it) "
    "and compared with the present token, which the read, a skip or the next layer sees.",
    "cycle": "One right action does all the work: +1 and -1 turn the plane by 2 pi / 5 forwards and backwards.",
    "arithmetic": "A right action multiplies the running term; + and - close the term, and *0 resets it: both forget, which is "
    "work for the left factor (and the finished sum for a second group or layer).",
    "brackets": "A right action multiplies inside one bracket, but each open bracket waits with a value of its own: slots "
    "along the memory axis, addressed by depth, with left factors that forget them, or several layers.",
    "majority": "Only the source works: each token adds to its own slot of the memory, with left factor 1; the read compares.",
}
_NO_AUTOMATON = {
    "brackets": "No finite automaton: the number of open brackets has no bound.",
    "majority": "No finite automaton: the counts have no bound.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageScores:
    """Accuracies of an evaluation."""

    num_sentences: int
    accuracy: float
    """Fraction of all answers asked that are right."""
    last: float
    """Fraction of sentences whose last answer is right."""
    by_length: dict[int, float]
    """The fraction of right last answers for each number of tokens that occurred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageTask:
    """Sentences of a language, with the answer at the last token."""

    name: str = "parity"
    """One of `LANGUAGES`."""
    min_length: int = 3
    max_length: int = 40
    """Lengths are uniform in min_length .. max_length."""
    every: bool = False
    """Whether an answer is asked at every token that ends a sentence of its own, instead of the last one only: at each token
    of `parity`, `even-pairs`, `cycle` and `majority`, at each digit and at the '=' of `arithmetic`; `brackets` has none."""
    seed: int = 0
    """Sentences are a function of (seed, split, index)."""

    def __post_init__(self) -> None:
        check_choice("LanguageTask", "name", self.name, LANGUAGES)
        for name in ("min_length", "max_length"):
            expect_size("LanguageTask", name, getattr(self, name))
        shortest = 2 if self.name == "arithmetic" else 1
        if not shortest <= self.min_length <= self.max_length:
            raise ValueError(
                f"LanguageTask: `min_length` is {self.min_length} and `max_length` is {self.max_length}; expected "
                f"{shortest} <= min_length <= max_length; choose a range of lengths"
            )
        if self.every and self.name == "brackets":
            raise ValueError(
                "LanguageTask: `every` is True with name 'brackets'; expected False, since the beginning of an expression "
                "with brackets is no expression; ask at the last token"
            )
        check_seed("LanguageTask", self.seed)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, with the padding and the answers."""
        return VOCAB_SIZES[self.name]

    @property
    def width(self) -> int:
        """Tokens T of a batch: those of the longest sentence."""
        return int(self._num_tokens(np.array(self.max_length)))

    @property
    def automaton(self) -> Automaton | None:
        """The smallest automaton that gives the answers, or None where no finite one does."""
        return automaton_of(self.name)

    @property
    def needs(self) -> str:
        """Which part of the cell does the work; the numbers are computed from the smallest automaton."""
        machine = self.automaton
        if machine is None:
            return f"{_NO_AUTOMATON[self.name]} {_WORK[self.name]}"
        text = f"{machine.num_states} states; {len(machine.invertible)} of {len(machine.letters)} letters permute them, "
        text += f"{len(machine.forgetting)} forget."
        group = machine.group()
        if group is not None:
            text += f" The permutations are a group of order {group.order}, which needs a right action of width "
            text += f"{group.faithful().width}."
        return f"{text} {_WORK[self.name]}"

    def batch(self, indices: Iterable[int], split: str = "train") -> Sequences:
        """The sentences with these indices, tokens [B, T] padded with 0 and target [B, T]; "train" and "eval" are disjoint."""
        per_token = _BRACKET_DRAWS if self.name == "brackets" else 1
        stream = check_choice("LanguageTask.batch", "split", split, SPLITS)
        draws = uniform(self.seed, stream, indices, 1 + self.width * per_token)
        lengths = self.min_length + (draws[:, 0] * (self.max_length - self.min_length + 1)).astype(np.int64)
        lengths = self._num_tokens(lengths)
        draws = draws[:, 1:]
        if self.name == "brackets":
            tokens, target = _brackets(draws.reshape(len(draws), self.width, _BRACKET_DRAWS), lengths)
        elif self.name == "arithmetic":
            tokens, target = _arithmetic(draws, lengths)
        elif self.name == "majority":
            tokens = 1 + (draws * (VOCAB_SIZES["majority"] - 1)).astype(np.int64)
            target = _majority(tokens)
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
        tokens = np.where(inside, tokens, PAD)
        target = np.where(asked, target, NO_TARGET)
        return Sequences(torch.from_numpy(tokens), torch.from_numpy(target))

    def evaluate(
        self, model: Callable[[Tensor], Tensor], num_examples: int = 1024, batch_size: int = 256, *, device: Any = "cpu"
    ) -> LanguageScores:
        """Score a model, tokens [B, T] -> logits [B, T, vocab_size], on the first examples of the evaluation split."""
        right, asked, lengths, lasts = 0, 0, [], []
        draw = partial(self.batch, split="eval")
        for sentences, logits in answers(draw, model, num_examples, batch_size, self.vocab_size, device):
            good = choices(logits) == sentences.target
            right += int(good.sum())
            asked += int(sentences.asked.sum())
            length = (sentences.tokens != PAD).sum(1)
            lengths.append(length)
            lasts.append(good.gather(1, length[:, None] - 1)[:, 0])
        length, last = torch.cat(lengths), torch.cat(lasts).double()
        by_length = {int(size): float(last[length == size].mean()) for size in length.unique()}
        return LanguageScores(num_sentences=len(last), accuracy=right / asked, last=float(last.mean()), by_length=by_length)

    def picture(self, index: int, split: str = "eval") -> str:
        """One sentence as text, with the token numbers of the answers after their '?'."""
        sentences = self.batch([index], split)
        words = []
        for token, target in zip(sentences.tokens[0].tolist(), sentences.target[0].tolist()):
            words += [_spell(self.name, token)] * (token != PAD) + [f"? {target}"] * (target != NO_TARGET)
        return " ".join(words)

    def _num_tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens of sentences of the drawn lengths."""
        if self.name == "arithmetic":
            return lengths + lengths % 2
        return lengths + 1 if self.name == "brackets" else lengths


def _spell(name: str, token: int) -> str:
    if name == "majority":
        return str(token)
    alphabet = {"cycle": ["stay", "+1", "-1"], "arithmetic": list("+-*=01234"), "brackets": list("01234+-*()=")}
    return alphabet.get(name, ["a", "b"])[token - 1]


def _majority(tokens: np.ndarray) -> np.ndarray:
    """The most frequent token of each beginning, [B, T]; of equally frequent ones the one that came first."""
    rows, length = tokens.shape
    best, best_count, best_first = np.zeros((3, rows), dtype=np.int64)
    counts = np.zeros((rows, VOCAB_SIZES["majority"]), dtype=np.int64)
    first = np.full(counts.shape, length)
    row = np.arange(rows)
    answer = np.empty_like(tokens)
    # Only the token just read can overtake.
    for t in range(length):
        token = tokens[:, t]
        counts[row, token] += 1
        first[row, token] = np.minimum(first[row, token], t)
        count, since = counts[row, token], first[row, token]
        wins = (count > best_count) | ((count == best_count) & (since < best_first))
        best, best_count, best_first = (
            np.where(wins, new, old) for new, old in ((token, best), (count, best_count), (since, best_first))
        )
        answer[:, t] = best
    return answer


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


def _brackets(draws: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """d, -d, (d), (-d) for expressions of 1 to 4 tokens, (left operator right) for longer ones; all rows at once.

    An expression of `size` tokens reads the draws of its first place, where no other one starts, and keeps its value there.
    """
    plus, minus, times, opening, closing, equals = range(MODULUS + 1, MODULUS + 7)
    tokens = np.full(draws.shape[:2], PAD)
    value = np.zeros(draws.shape[:2], dtype=np.int64)
    row, start, size = np.arange(len(draws)), np.zeros(len(draws), dtype=np.int64), lengths - 1
    rounds = []
    while len(row):
        framed = size >= 3
        tokens[row[framed], start[framed]] = opening
        tokens[row[framed], (start + size - 1)[framed]] = closing
        leaf = size < 5
        at, begin, room = row[leaf], start[leaf], size[leaf]
        digit = (draws[at, begin, 2] * MODULUS).astype(np.int64)
        negative = room % 2 == 0
        place = begin + (room >= 3)
        tokens[at[negative], place[negative]] = minus
        tokens[at, place + negative] = 1 + digit
        value[at, begin] = np.where(negative, -digit, digit) % MODULUS
        row, start, size = row[~leaf], start[~leaf], size[~leaf]
        left = 1 + (draws[row, start, 0] * (size - 4)).astype(np.int64)
        operator = np.array([plus, minus, times, times])[(draws[row, start, 1] * 4).astype(np.int64)]
        middle = start + 1 + left
        tokens[row, middle] = operator
        rounds.append((row, start, middle + 1, operator))
        row, start, size = np.tile(row, 2), np.concatenate([start + 1, middle + 1]), np.concatenate([left, size - left - 3])
    for row, start, second, operator in reversed(rounds):
        a, b = value[row, start + 1], value[row, second]
        value[row, start] = np.select([operator == plus, operator == minus], [a + b, a - b], a * b) % MODULUS
    rows = np.arange(len(draws))
    tokens[rows, lengths - 1] = equals
    target = np.full(tokens.shape, NO_TARGET)
    target[rows, lengths - 1] = 1 + value[:, 0]
    return tokens, target
