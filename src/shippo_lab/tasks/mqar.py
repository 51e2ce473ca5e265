"""Transport-MQAR: multi-query associative recall where later operations act on everything already stored (paper, appendix E).

BIND(key, value) stores a value of F_31^4 under a key, OP(id) multiplies every stored value by an invertible matrix of
the library from the right, QUERY(key) asks for the present value of a key. With A_t the matrix of position t (the
identity unless the event is an OP), a key bound to v at position s and asked at position t has the answer

    target = v A_{s+1} .. A_t = (v V_s^{-1}) V_t  mod 31,       V_t = A_1 .. A_t.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shippo_lab.tasks.streams import NO_TARGET, SPLITS, answers, check_choice, check_indices, check_seed, choices
from shippo_ssm._expect import expect_size

MODULUS = 31
WIDTH = 4
PRIMITIVE_ROOT = 3
BIND, OP, QUERY = 0, 1, 2
LIBRARIES = ("nonreducible", "rotation")
# Lower edges of the bins in which answers are counted by the number of operations since the binding; the last bin is open.
OPERATION_BINS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 256)
# Uniform numbers per position: event, second choice of an event, key, operation, four value coordinates.
_DRAWS = 8


def operation_library(name: str) -> np.ndarray:
    """The 13 operations [13, 4, 4] of a library, as integer matrices that act on row vectors, v -> v A mod 31.

    nonreducible  the 12 transvections I + E_ij and diag(3, 1, 1, 1): together they generate GL(4, F_31)
    rotation      the 12 quarter turns of coordinate planes and the identity: a real right action can be exact
    """
    check_choice("TransportMQAR", "library", name, LIBRARIES)
    eye = np.eye(WIDTH, dtype=np.int64)
    operations = []
    for i, j in itertools.permutations(range(WIDTH), 2):
        to, back = np.outer(eye[i], eye[j]), np.outer(eye[j], eye[i])
        # A quarter turn: rows i and j of the identity change places, one of them with its sign turned.
        operations.append(eye + to if name == "nonreducible" else eye - np.diag(eye[i] + eye[j]) + to - back)
    operations.append(np.diag([PRIMITIVE_ROOT, 1, 1, 1]) if name == "nonreducible" else eye)
    return np.stack(operations) % MODULUS


@lru_cache
def inverse_library(name: str) -> np.ndarray:
    """The inverses of the operations of a library mod 31, [13, 4, 4]."""
    operations = operation_library(name)
    # M^{-1} = adj(M) / det(M); of these small integers floating point is exact after rounding.
    determinants = np.linalg.det(operations).round()
    adjugates = (np.linalg.inv(operations) * determinants[:, None, None]).round().astype(np.int64)
    reciprocals = np.array([pow(int(determinant), -1, MODULUS) for determinant in determinants])
    return adjugates * reciprocals[:, None, None] % MODULUS


class Events(NamedTuple):
    """B examples of T events; entries that an event does not have hold one more than the largest index."""

    kind: Tensor  # [B, T], 0 BIND, 1 OP, 2 QUERY
    key: Tensor  # [B, T], 0 .. num_keys - 1 at BIND and QUERY
    operation: Tensor  # [B, T], 0 .. 12 at OP
    value: Tensor  # [B, T, 4], 0 .. 30 at BIND
    target: Tensor  # [B, T, 4], 0 .. 30 at QUERY, -100 elsewhere
    operations_since: Tensor  # [B, T], number of OP events between the binding and the QUERY, -1 elsewhere
    untouched: Tensor  # [B, T, 4], whether at this QUERY no operation since the binding has changed the coordinate
    unmixed: Tensor  # [B, T, 4], whether it is the bound value or a multiple of it: no operation has added another coordinate

    @property
    def tokens(self) -> Tensor:
        """Input of a model: kind, key, operation and four value coordinates, [B, T, 7]."""
        return torch.cat([torch.stack([self.kind, self.key, self.operation], -1), self.value], -1)

    @property
    def asked(self) -> Tensor:
        """Positions of queries, [B, T]."""
        return self.kind == QUERY


@dataclass(kw_only=True, slots=True)
class Scores:
    """Accuracies over all queries of an evaluation, and over the queries of each bin of operations since the binding."""

    num_queries: int
    coordinate: float
    """Fraction of target coordinates that are right."""
    exact: float
    """Fraction of queries with all four coordinates right."""
    untouched_coordinate: float
    """Expected fraction for a predictor that knows untouched coordinates and guesses the others."""
    untouched_exact: float
    bins: list[dict[str, float]]
    """Per bin: `from_operations` (its lower edge), `num_queries` and the four accuracies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportMQAR:
    """The task: which events are drawn, and what they do."""

    library: str = "nonreducible"
    """Which 13 operations act on the stored values; see `operation_library`."""
    length: int = 512
    """Events T of one example."""
    num_keys: int = 256
    """Size of the key vocabulary."""
    num_active: int = 32
    """Keys that one example uses, drawn anew for each."""
    p_bind: float = 0.22
    p_op: float = 0.50
    p_query: float = 0.28
    rebind: bool = True
    """Whether a key may be bound again, which overwrites it. If not, bindings stop when all active keys are bound."""
    seed: int = 0
    """Examples are a function of (seed, split, index)."""

    def __post_init__(self) -> None:
        check_choice("TransportMQAR", "library", self.library, LIBRARIES)
        expect_size("TransportMQAR", "length", self.length, "at least one event")
        expect_size("TransportMQAR", "num_active", self.num_active, f"1 to num_keys = {self.num_keys}")
        if self.num_active > self.num_keys:
            raise ValueError(f"TransportMQAR: `num_active` is {self.num_active}; expected 1 to num_keys = {self.num_keys}")
        probabilities = (self.p_bind, self.p_op, self.p_query)
        if not (min(probabilities) >= 0 and abs(sum(probabilities) - 1) <= 1e-9 and self.p_query > 0):
            expected = "p_query > 0, none below 0, and a sum of 1"
            raise ValueError(f"TransportMQAR: `p_bind`, `p_op`, `p_query` are {probabilities}; expected {expected}")
        check_seed("TransportMQAR", self.seed)

    @property
    def operations(self) -> np.ndarray:
        """The matrices of the library, [13, 4, 4]."""
        return operation_library(self.library)

    @property
    def num_operations(self) -> int:
        """Size of the operation vocabulary."""
        return len(self.operations)

    def batch(self, indices: Iterable[int], split: str = "train") -> Events:
        """The examples with these indices, B numbers below 2^64; the splits "train" and "eval" are disjoint."""
        number = check_choice("TransportMQAR.batch", "split", split, SPLITS)
        rows = check_indices("TransportMQAR.batch", indices, 2**64, "integers from 0 below 2**64; count examples from 0")
        # Each example has its own 2^128 counter values of the Philox stream of the seed.
        streams = (np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, index, number])) for index in rows)
        draws = np.stack([stream.random(self.num_keys + self.length * _DRAWS) for stream in streams])
        picks, draws = draws[:, : self.num_keys], draws[:, self.num_keys :].reshape(len(draws), self.length, _DRAWS)
        kind = self._kinds(draws)
        operation = (draws[..., 3] * self.num_operations).astype(np.int64)
        value = (draws[..., 4:] * MODULUS).astype(np.int64)
        slot, bound_at = self._slots(kind, draws[..., 2])

        frame, inverse_frame = _frames(self.library, kind, operation)
        rows = np.arange(len(kind))[:, None]
        bound = value[rows, bound_at][..., None, :]
        target = (bound @ inverse_frame[rows, bound_at] % MODULUS @ frame % MODULUS)[..., 0, :]

        num_operations, asked = (kind == OP).cumsum(1), kind == QUERY
        known = [asked[..., None] & (last <= bound_at[..., None]) for last in _last_touches(self.operations, kind, operation)]
        active = np.argsort(picks, axis=1)[:, : self.num_active]
        return Events(
            kind=torch.from_numpy(kind),
            key=torch.from_numpy(np.where(kind == OP, self.num_keys, active[rows, slot])),
            operation=torch.from_numpy(np.where(kind == OP, operation, self.num_operations)),
            value=torch.from_numpy(np.where((kind == BIND)[..., None], value, MODULUS)),
            target=torch.from_numpy(np.where(asked[..., None], target, NO_TARGET)),
            operations_since=torch.from_numpy(np.where(asked, num_operations - num_operations[rows, bound_at], -1)),
            untouched=torch.from_numpy(known[0]),
            unmixed=torch.from_numpy(known[1]),
        )

    def evaluate(self, model: Callable[[Tensor], Tensor], num_examples: int = 640, batch_size: int = 16) -> Scores:
        """Score a model, tokens [B, T, 7] -> logits [B, T, 4, 31], on the first examples of the evaluation split."""
        counts = torch.zeros(len(OPERATION_BINS), 5, dtype=torch.float64)
        for events, logits in answers(partial(self.batch, split="eval"), model, num_examples, batch_size, MODULUS):
            counts += count_answers(choices(logits), events)
        total, rows = counts.sum(0), [(edge, row) for edge, row in zip(OPERATION_BINS, counts) if row[0] > 0]
        bins = [{"from_operations": edge, "num_queries": int(row[0]), **_accuracies(row)} for edge, row in rows]
        return Scores(num_queries=int(total[0]), bins=bins, **_accuracies(total))

    def _kinds(self, draws: np.ndarray) -> np.ndarray:
        """The event of each position, [B, T]; the first is a BIND, so that there is always something to ask."""
        choice = draws[..., 0]
        kind = np.where(choice < self.p_bind, BIND, np.where(choice < self.p_bind + self.p_op, OP, QUERY))
        kind[:, 0] = BIND
        if self.rebind:
            return kind
        instead = np.where(draws[..., 1] * (self.p_op + self.p_query) < self.p_op, OP, QUERY)
        return np.where((kind == BIND) & ((kind == BIND).cumsum(1) > self.num_active), instead, kind)

    def _slots(self, kind: np.ndarray, choice: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The active key of each BIND and QUERY, and the position of the latest binding of that key, both [B, T]."""
        (num_examples, length), is_bind = kind.shape, kind == BIND
        slot = (choice * self.num_active).astype(np.int64) if self.rebind else is_bind.cumsum(1) - 1
        slot = np.where(is_bind, slot, self.num_active)
        # latest[b, t, k]: the latest position up to t that binds k, or -1.
        latest = np.full((num_examples, length, self.num_active + 1), -1, dtype=np.int32)
        rows, times = np.ogrid[:num_examples, :length]
        latest[rows, times, slot] = times
        latest = np.maximum.accumulate(latest[..., :-1], axis=1)
        # A query takes the n-th key that was bound, n uniform below their number.
        is_bound = latest >= 0
        first = np.where(is_bound[:, -1], is_bound.argmax(1), length)
        rank = (choice * is_bound.sum(-1)).astype(np.int64)
        slot = np.where(is_bind, slot, np.argsort(first, axis=1)[rows, rank])
        return slot, latest[rows, times, slot].astype(np.int64)


def _frames(library: str, kind: np.ndarray, operation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V_t = A_1 .. A_t and V_t^{-1} mod 31, each [B, T, 4, 4]."""
    eye = np.eye(WIDTH, dtype=np.int32)
    moves = np.concatenate([operation_library(library), eye[None]])
    # Transposed, inverses are multiplied in the order of the frames: V_t^{-T} = V_{t-1}^{-T} A_t^{-T}.
    moves_back = np.concatenate([inverse_library(library), eye[None]]).swapaxes(1, 2)
    pairs = np.stack([moves, moves_back], 1).astype(np.int32)
    frames = pairs[np.where(kind == OP, operation, len(moves) - 1).T]
    for t in range(1, len(frames)):
        frames[t] = frames[t - 1] @ frames[t] % MODULUS
    return frames[:, :, 0].swapaxes(0, 1), frames[:, :, 1].swapaxes(0, 1).swapaxes(2, 3)


def _last_touches(operations: np.ndarray, kind: np.ndarray, operation: np.ndarray) -> list[np.ndarray]:
    """The latest positions up to t whose operation changes a coordinate, and mixes another one into it, [B, T, 4], or -1."""
    eye, times = np.eye(WIDTH, dtype=bool), np.arange(kind.shape[1])[None, :, None]
    found = []
    for touches in ((operations != eye).any(1), ((operations != 0) & ~eye).any(1)):
        touching = (kind == OP)[..., None] & touches[operation]
        found.append(np.maximum.accumulate(np.where(touching, times, -1), axis=1))
    return found


def expected_right(known: Tensor) -> Tensor:
    """The probability that a coordinate is right where it is known or guessed among 31, [.., 4]."""
    return known.double() + (~known).double() / MODULUS


def count_answers(answers: Tensor, events: Events) -> Tensor:
    """Sums over the queries of each bin, [bins, 5], of answers [B, T, 4]: queries, right coordinates / 4, exact answers, and
    the last two as expected of the untouched-coordinates predictor."""
    asked = events.asked
    right, known = (answers == events.target)[asked].double(), expected_right(events.untouched[asked])
    parts = right.mean(-1), right.prod(-1), known.mean(-1), known.prod(-1)
    columns = torch.stack([torch.ones_like(parts[0]), *parts], -1)
    edges = torch.tensor(OPERATION_BINS)
    bins = torch.bucketize(events.operations_since[asked], edges, right=True) - 1
    return torch.zeros(len(edges), 5, dtype=torch.float64).index_add_(0, bins, columns)


def _accuracies(counts: Tensor) -> dict[str, float]:
    """Accuracies from a row of sums [5] as `count_answers` gives them."""
    names = ("coordinate", "exact", "untouched_coordinate", "untouched_exact")
    return {name: float(part / counts[0].clamp_min(1)) for name, part in zip(names, counts[1:])}
