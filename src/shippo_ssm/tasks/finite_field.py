"""Linear algebra over F_q for small prime q, batched: elimination, inverses, and the finest block form of a set of matrices.

Data path: matrices are integer arrays [.., P, P] with entries 0 .. q - 1 that act on row vectors, v -> v M. `reduce_rows`
brings a batch to reduced row echelon form; ranks, inverses, null spaces and spans follow from it. `decompose` answers the
question of the collapse criterion (paper section 3.3) over F_q: which block diagonal form do all matrices M_k of a set share?
Its answer comes from the commutant {X : X M_k = M_k X}, as over the reals. By Fitting's lemma an element X of it splits F_q^P
into ker X^P and im X^P, and both are invariant; a piece cannot be split further when every element of its commutant is
nilpotent or invertible.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np

# Elements of a commutant that are tried before a piece counts as indecomposable. The rarest splitting elements, those of two
# blocks of width 2 without eigenvalues, are 2 in q^2: at q = 31 the chance to miss all of them is below 1e-7.
NUM_TRIED = 8192


class FieldReduction(NamedTuple):
    """The finest block diagonal form shared by a set of matrices over F_q.

    Attributes:
        basis: [P, P], rows are the new basis vectors: basis M basis^{-1} is block diagonal for every M of the set.
        blocks: the widths of the blocks, largest first.
        irreducible: whether no proper subspace at all is invariant, with or without a complement.
        commutant_dim: the dimension of {X : X M = M X for all M}.
        algebra_dim: the dimension of the algebra that the set generates; P^2 means irreducible over every extension of F_q.
    """

    basis: np.ndarray
    blocks: tuple[int, ...]
    irreducible: bool
    commutant_dim: int
    algebra_dim: int


@lru_cache
def _reciprocals(modulus: int) -> np.ndarray:
    """1/x at index x, and 0 at index 0."""
    if modulus < 2 or any(modulus % d == 0 for d in range(2, int(modulus**0.5) + 1)):
        raise ValueError(f"modulus is {modulus}; expected a prime, for every number but 0 must have a reciprocal")
    return np.array([0] + [pow(x, -1, modulus) for x in range(1, modulus)], dtype=np.int64)


def reduce_rows(matrices: np.ndarray, modulus: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduced row echelon form over F_q and the rank of every matrix of a batch.

    Args:
        matrices: [.., R, C] integers.
        modulus: the prime q.

    Returns:
        The echelon forms [.., R, C], nonzero rows first, and the ranks [..].

    Example:
        >>> form, rank = reduce_rows(np.array([[2, 4], [1, 2]]), 31)
        >>> form.tolist(), int(rank)
        ([[1, 2], [0, 0]], 1)
    """
    reciprocals = _reciprocals(modulus)
    num_rows, num_columns = matrices.shape[-2:]
    form = np.remainder(matrices, modulus).astype(np.int64).reshape(-1, num_rows, num_columns)
    batch, rows = np.arange(len(form)), np.arange(num_rows)
    rank = np.zeros(len(form), dtype=np.int64)
    for column in range(num_columns):
        candidates = (form[:, :, column] != 0) & (rows >= rank[:, None])
        found = candidates.any(-1)
        place, pivot = np.minimum(rank, num_rows - 1), candidates.argmax(-1)
        pivot = np.where(found, pivot, place)
        form[batch, place], form[batch, pivot] = form[batch, pivot], form[batch, place]
        leading = form[batch, place] * reciprocals[form[batch, place, column]][:, None] % modulus
        cleared = (form - form[:, :, column, None] * leading[:, None]) % modulus
        cleared[batch, place] = leading
        form = np.where(found[:, None, None], cleared, form)
        rank = rank + found
    return form.reshape(matrices.shape), rank.reshape(matrices.shape[:-2])


def inverse(matrices: np.ndarray, modulus: int) -> np.ndarray:
    """M^{-1} over F_q for a batch [.., P, P].

    Example:
        >>> inverse(np.array([[1, 1], [0, 1]]), 31).tolist()
        [[1, 30], [0, 1]]
    """
    width = matrices.shape[-1]
    eye = np.broadcast_to(np.eye(width, dtype=np.int64), matrices.shape)
    form, _ = reduce_rows(np.concatenate([matrices, eye], -1), modulus)
    if not (form[..., :width] == eye).all():
        raise ValueError(f"matrices has a member that is singular over F_{modulus}; every operation must be invertible")
    return form[..., width:]


def null_space(matrix: np.ndarray, modulus: int) -> np.ndarray:
    """A basis [K, R] of the row vectors x with x matrix = 0 over F_q, for a matrix [R, C]."""
    num_rows, num_columns = matrix.shape
    form, _ = reduce_rows(np.concatenate([matrix, np.eye(num_rows, dtype=np.int64)], -1), modulus)
    return form[(form[:, :num_columns] == 0).all(-1), num_columns:]


def commutant(matrices: np.ndarray, modulus: int) -> np.ndarray:
    """A basis [K, P, P] of the matrices X with X M_k = M_k X for all k, for matrices M [num, P, P]."""
    width = matrices.shape[-1]
    units = np.eye(width * width, dtype=np.int64).reshape(-1, 1, width, width)
    brackets = (units @ matrices - matrices @ units) % modulus
    return null_space(brackets.reshape(width * width, -1), modulus).reshape(-1, width, width)


def algebra(matrices: np.ndarray, modulus: int) -> np.ndarray:
    """A basis [K, P, P] of the algebra generated by the identity and M [num, P, P]: the identity, spun until it is closed."""
    width = matrices.shape[-1]
    basis = np.eye(width, dtype=np.int64)[None]
    while True:
        products = (basis[:, None] @ matrices) % modulus
        words = np.concatenate([basis, products.reshape(-1, width, width)]).reshape(-1, width * width)
        form, rank = reduce_rows(words, modulus)
        if rank == len(basis):
            return basis
        basis = form[:rank].reshape(-1, width, width)


def is_irreducible(matrices: np.ndarray, modulus: int) -> bool:
    """Whether no proper nonzero subspace of F_q^P is invariant: every vector, up to a factor, spins to the whole space.

    All (q^P - 1) / (q - 1) of them are tried; Burnside's count, an algebra of dimension P^2, shortens the usual case.
    """
    width = matrices.shape[-1]
    words = algebra(matrices, modulus)
    if len(words) == width * width:
        return True
    for lead in range(width):
        # Each vector once up to a factor: zeros, a leading one, then anything.
        tails = list(itertools.product(range(modulus), repeat=width - lead - 1))
        vectors = np.array([(0,) * lead + (1,) + tail for tail in tails], dtype=np.int64)
        spans = np.moveaxis(vectors @ words % modulus, 0, 1)
        if (reduce_rows(spans, modulus)[1] < width).any():
            return False
    return True


def decompose(matrices: np.ndarray, modulus: int) -> FieldReduction:
    """The finest block diagonal form over F_q that all matrices share, computed from their commutant.

    Args:
        matrices: [num, P, P] integers, acting on row vectors.
        modulus: the prime q.

    Example:
        >>> quarter_turn = np.array([[0, 1], [-1, 0]])
        >>> decompose(quarter_turn[None], 31).blocks, decompose(quarter_turn[None], 29).blocks
        ((2,), (1, 1))
    """
    if matrices.ndim != 3 or matrices.shape[-1] != matrices.shape[-2]:
        raise ValueError(f"matrices has shape {matrices.shape}; expected [num, P, P]; add a first axis for a single matrix")
    matrices = np.remainder(matrices, modulus)
    width = matrices.shape[-1]
    done, pieces = [], [np.eye(width, dtype=np.int64)]
    while pieces:
        piece = pieces.pop()
        parts = _split(_restrict(matrices, piece, modulus), modulus)
        if parts is None:
            done.append(piece)
        else:
            pieces += [part @ piece % modulus for part in parts]
    done.sort(key=len, reverse=True)
    return FieldReduction(
        basis=np.concatenate(done),
        blocks=tuple(len(piece) for piece in done),
        irreducible=is_irreducible(matrices, modulus),
        commutant_dim=len(commutant(matrices, modulus)),
        algebra_dim=len(algebra(matrices, modulus)),
    )


def _restrict(matrices: np.ndarray, piece: np.ndarray, modulus: int) -> np.ndarray:
    """The matrices [num, K, K] on the invariant subspace with basis `piece` [K, P]: coordinates X with X piece = piece M."""
    form, _ = reduce_rows(np.concatenate([piece, np.eye(len(piece), dtype=np.int64)], -1), modulus)
    echelon, change = form[:, : piece.shape[-1]], form[:, piece.shape[-1] :]
    # An echelon basis reads coordinates off its pivot columns.
    pivots = (echelon != 0).argmax(-1)
    return (piece @ matrices % modulus)[..., pivots] @ change % modulus


def _split(matrices: np.ndarray, modulus: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Bases of ker X^P and im X^P of a commuting X that is neither nilpotent nor invertible, or `None` if there is none."""
    width = matrices.shape[-1]
    basis = commutant(matrices, modulus)
    weights = np.random.default_rng(0).integers(0, modulus, (NUM_TRIED, len(basis)))
    tried = (weights @ basis.reshape(len(basis), -1) % modulus).reshape(-1, width, width)
    power = tried
    for _ in range(width - 1):
        power = power @ tried % modulus
    form, rank = reduce_rows(power, modulus)
    splitting = np.flatnonzero((rank > 0) & (rank < width))
    if not len(splitting):
        return None
    chosen = splitting[0]
    return null_space(power[chosen], modulus), form[chosen, : rank[chosen]]
