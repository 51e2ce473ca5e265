"""Collapse: the finest simultaneous block-diagonal form of a family of generators, over the reals.

Splitting. The commutant {X : X G_m = G_m X for all m} is the null space of a linear map on R^{P x P}. R^P is a sum of smaller
invariant subspaces exactly when the commutant is not a local ring. A finite dimensional real algebra is local exactly when the
form (X, Y) -> tr(X Y) has one positive eigenvalue: nilpotents (shears alone) are its null space, and the rest is R, C or H with
signature (1, 0), (1, 1), (1, 3). A second positive direction is a traceless X with tr(X^2) > 0, whose eigenvalues differ in
their real parts; R^P splits along its generalised eigenspaces, grouped by real part, and each part is split again. A badly
conditioned basis hides the commutant, so a change of basis first brings the norm of the family near its minimum (`balance`).

Tolerance. `tol` is the noise in the generators relative to their norm. It moves a singular value of the commutator map by at
most 2 tol, in units where the traceless family has norm one; values up to that are zero. In the balanced basis the noise may
have grown to `level`; between 2 tol and 2 level the widest gap decides, if it is a factor of 30 and no value remains between
it and 2 level. A positive value of tr(X Y) must exceed the effect of the noise on the commutant. A split is accepted only if
the generators are block diagonal in the new basis. Otherwise the answer is "cannot decide", after one more attempt with the
family taken as exact: noise would not leave two generators with a common form that holds to the last digits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shippo_ssm.actions.base import not_finite

# How far above the noise a value must lie to count as nonzero.
MARGIN = 30.0
# Singular values of the commutator map below this are candidates for the null space and are recomputed without squaring.
CANDIDATE = 0.03
# Real parts closer than this share of their range are split by the recursion.
CLUSTER_GAP = 0.02
# An element known less well than this cannot be called nilpotent.
LARGEST_BLUR = 0.05
# Upper bound of tr(X^2) of a nilpotent element of unit norm, over the blur, for noise of a tenth of `tol`.
NILPOTENT = 0.03
# The relative error of a family without noise.
EXACT = 1e-13
# A split that leaves more than this outside its blocks is refused.
LARGEST_RESIDUAL = 1e-4
# A tolerance of at least this would make anything zero.
LARGEST_TOL = 1e-2
# Random elements of the commutant tried per block.
TRIES = 8
# Balancing stops when a step keeps more than this share of the squared norm, or lifts the noise above this share of the norm.
GAIN = 0.95
NOISE_CEILING = 1e-4

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A block-diagonal form: with Q = `basis`, every Q^{-1} G_m Q has diagonal blocks of sizes `blocks`, up to `residual`."""

    basis: Tensor
    """Q [P, P], float64; the columns of one block are orthonormal."""
    blocks: tuple[int, ...]
    """Sizes of the diagonal blocks, largest first; they add up to P."""
    residual: float
    """Largest Frobenius norm of Q^{-1} G_m Q outside the blocks, over the largest norm of a Q^{-1} G_m Q."""
    irreducible: bool
    """Decided, and there is one block: the family couples all channels in every basis."""
    decided: bool
    """False if there is no clear gap: `blocks` is then valid, but a finer form is not excluded."""

    @property
    def status(self) -> str:
        """ "irreducible", "reducible" or "cannot decide"."""
        if not self.decided:
            return "cannot decide"
        return "irreducible" if self.irreducible else "reducible"

    @property
    def slices(self) -> tuple[slice, ...]:
        """The columns of `basis` that belong to each block."""
        ends = np.cumsum(self.blocks)
        return tuple(slice(int(end) - size, int(end)) for size, end in zip(self.blocks, ends))


class Commutant(NamedTuple):
    """Orthonormal basis [d, P, P] of the traceless commutant, and whether its dimension is certain."""

    elements: Array
    residual: float
    """Largest norm of the commutators of an element with the family."""
    blur: float
    """Estimated distance of the elements from those of the family without noise."""
    decided: bool


def traceless(matrices: Array) -> Array:
    """The matrices without their multiples of the identity."""
    width = matrices.shape[-1]
    return matrices - np.trace(matrices, axis1=-2, axis2=-1)[:, None, None] / width * np.eye(width)


def compress(matrices: Array) -> Array:
    """At most P^2 matrices with the same sum of G (x) G, which determines the commutant."""
    width = matrices.shape[-1]
    triangle: Any = np.linalg.qr(matrices.reshape(len(matrices), -1), mode="r") if len(matrices) > width**2 else matrices
    return triangle.reshape(-1, width, width)


def products(matrices: Array) -> tuple[Array, Array]:
    """sum G G^T and sum G^T G."""
    width = matrices.shape[-1]
    rows, columns = matrices.transpose(1, 0, 2).reshape(width, -1), matrices.reshape(-1, width)
    return rows @ rows.T, columns.T @ columns


def carry(matrices: Array, basis: Array) -> Array:
    """Q^{-1} G_m Q."""
    return np.linalg.inv(basis) @ matrices @ basis


def symmetric_power(matrix: Array, exponent: float) -> Array:
    """matrix^exponent of a symmetric positive matrix."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, 1e-12 * values[-1]) ** exponent) @ vectors.T


def balance(matrices: Array, noise: float) -> tuple[Array, float]:
    """S [P, P] that makes the norm of S^{-1} G_m S small, and the noise relative to that norm.

    The norm is smallest where A = sum G G^T equals B = sum G^T G. A step moves S S^T to the geometric mean of A and B^{-1};
    steps stop when they gain little or would raise the noise above NOISE_CEILING.
    """
    width = matrices.shape[-1]
    frame, size = np.eye(width), (matrices**2).sum()
    level = noise / np.sqrt(size)
    shares = [1.0, 0.5, 0.25]
    while shares:
        left, right = products(matrices)
        # A floor keeps the step finite for a nilpotent family, which has no balanced form.
        floor = 1e-3 * size / width * np.eye(width)
        root, inverse = symmetric_power(right + floor, 0.5), symmetric_power(right + floor, -0.5)
        mean = inverse @ symmetric_power(root @ (left + floor) @ root, 0.5) @ inverse
        move = symmetric_power(0.5 * (mean + mean.T), 0.5 * shares[0])
        moved = carry(matrices, move)
        total, moved_size = frame @ move, (moved**2).sum()
        spread = np.linalg.norm(total) * np.linalg.norm(np.linalg.inv(total)) / width
        moved_level = noise * spread / np.sqrt(moved_size)
        if moved_size < GAIN * size and moved_level <= NOISE_CEILING:
            frame, matrices, size, level = total, moved, moved_size, moved_level
        else:
            shares.pop(0)
    return frame, float(level)


def commutator_gram(matrices: Array) -> Array:
    """K^T K [P^2, P^2] of the map K: X -> (F X - X F)_F, X in row-major order."""
    width = matrices.shape[-1]
    flat = matrices.reshape(len(matrices), -1)
    outer = (flat.T @ flat).reshape(width, width, width, width)  # sum F_ij F_ab as [i, j, a, b]
    right, left = products(matrices)
    product = outer.transpose(0, 2, 1, 3).reshape(width**2, width**2)  # sum F (x) F
    eye = np.eye(width)
    return np.kron(left, eye) + np.kron(eye, right) - product - product.T


def commutant(matrices: Array, floor: float, ceiling: float) -> Commutant:
    """The traceless matrices that commute with a traceless family of unit norm, for relative noise `floor` as given and
    `ceiling` in the balanced basis."""
    from scipy.linalg import eigh

    width = matrices.shape[-1]
    gram = commutator_gram(matrices)
    # The identity always commutes: move it out of the null space.
    eye = np.eye(width).reshape(-1) / np.sqrt(width)
    gram += np.outer(eye, eye) * 4.0
    _, candidates = eigh(gram, subset_by_value=(-np.inf, CANDIDATE**2), driver="evr")
    basis = candidates.T.reshape(-1, width, width)
    triangle = np.zeros((0, len(basis)))
    for start in range(0, len(matrices) if len(basis) else 0, 32):
        some = matrices[start : start + 32, None]
        image = (some @ basis - basis @ some).transpose(0, 2, 3, 1).reshape(-1, len(basis))
        triangle = np.linalg.qr(np.concatenate([triangle, image]), mode="r")
    _, values, mix = np.linalg.svd(triangle)
    edge, decided = widest_gap(values, 2.0 * floor, 2.0 * ceiling)
    null = values <= edge
    above = min([CANDIDATE, *values[~null]])
    residual = float(max([1e-14, *values[null]]))
    return Commutant(np.tensordot(mix[null], basis, 1), residual, float(max(residual, 2.0 * ceiling) / above), decided)


def widest_gap(values: Array, floor: float, ceiling: float) -> tuple[float, bool]:
    """The largest singular value that counts as zero, and whether a clear gap is above it: values up to `floor` are zero,
    above `ceiling` they are not, between them the widest gap decides, as a ratio."""
    steps = [floor, *sorted(value for value in values if value > floor), max(CANDIDATE, MARGIN * ceiling)]
    ratio, edge = max((high / low, low) for low, high in itertools.pairwise(steps) if low <= ceiling)
    return edge, bool(ratio >= MARGIN and not any(edge < value <= ceiling for value in steps))


def invariant_subspaces(element: Array, widest: bool) -> list[Array]:
    """Orthonormal bases of the generalised eigenspaces of `element`, grouped by real part: at clear gaps or the `widest`."""
    from scipy.linalg import get_lapack_funcs, schur

    schur_form: Any = schur(element, output="real")
    triangle, frame = schur_form
    reorder: Any = get_lapack_funcs("trsen", (triangle,))
    # LAPACK's 2 x 2 blocks of a complex pair have equal diagonal entries: the diagonal holds the real parts.
    real = np.diag(triangle)
    order = np.sort(real)
    gaps = np.diff(order)
    cuts = [int(gaps.argmax())] if widest else np.flatnonzero(gaps > CLUSTER_GAP * (order[-1] - order[0])).tolist()
    edges = [-np.inf, *[0.5 * (order[cut] + order[cut + 1]) for cut in cuts], np.inf]
    parts = []
    for low, high in itertools.pairwise(edges):
        select = (real > low) & (real < high)
        reordered = reorder(select.astype(np.int32), triangle, frame, job="N")
        parts.append(np.asarray(reordered[1])[:, : int(select.sum())])
    return parts


def off_block(matrices: Array, basis: Array, sizes: Sequence[int]) -> float:
    """Largest norm of a Q^{-1} G_m Q outside the blocks, over the largest norm of a Q^{-1} G_m Q."""
    carried, block = carry(matrices, basis), np.repeat(np.arange(len(sizes)), sizes)
    mask = block[:, None] != block
    whole = np.sqrt((carried**2).sum((-2, -1)).max())
    outside = np.sqrt(((carried * mask) ** 2).sum((-2, -1)).max())
    return float(outside / whole) if whole > 0 else 0.0


def split(matrices: Array, noise: float) -> tuple[list[Array], bool]:
    """Bases of a first decomposition of R^P under a traceless family, one if there is none; and whether that is certain."""
    width, norm = matrices.shape[-1], np.sqrt((matrices**2).sum())
    whole = [np.eye(width)]
    if width == 1:
        return whole, True
    if norm <= MARGIN * noise:
        # Multiples of the identity up to noise: every basis is valid.
        return (np.split(np.eye(width), width, 1), True) if norm <= 2.0 * noise else (whole, False)
    frame, level = balance(matrices, noise)
    family = carry(matrices, frame)
    ring = commutant(family / np.sqrt((family**2).sum()), min(noise / norm, level), level)
    values, vectors = np.linalg.eigh(np.einsum("aij,bji->ab", ring.elements, ring.elements))
    directions = vectors[:, values > 2.0 * ring.blur].T
    if len(directions) == 0:
        nilpotent = len(values) == 0 or (ring.blur < LARGEST_BLUR and values[-1] <= NILPOTENT * ring.blur)
        return whole, bool(ring.decided and nilpotent)
    random = np.random.default_rng(width).standard_normal((TRIES, len(directions)))
    for weights in [*random, np.eye(len(directions))[-1]]:
        element = np.tensordot(weights @ directions, ring.elements, 1)
        for widest in (False, True):
            parts = [np.linalg.qr(frame @ part)[0] for part in invariant_subspaces(element, widest)]
            basis = np.concatenate(parts, 1)
            limit = min(LARGEST_RESIDUAL, 1e3 * ring.residual * np.linalg.cond(basis))
            if len(parts) > 1 and off_block(matrices, basis, [part.shape[1] for part in parts]) <= limit:
                return parts, ring.decided
    return whole, False


def decompose(matrices: Array, noise: float) -> tuple[list[Array], bool]:
    """Bases of the finest decomposition of R^P under a family, and whether it is certainly the finest."""
    parts, decided = split(traceless(matrices), noise)
    if len(parts) == 1:
        return parts, decided
    dual = np.linalg.inv(np.concatenate(parts, 1))
    out, ends = [], np.cumsum([part.shape[1] for part in parts])
    for part, rows in zip(parts, np.split(dual, ends[:-1])):
        finer, certain = decompose(rows @ matrices @ part, noise * float(np.linalg.norm(rows, 2)))
        out += [np.linalg.qr(part @ basis)[0] for basis in finer]
        decided = decided and certain
    return out, decided


def as_family(generators: Tensor | Array) -> tuple[Array, float | None]:
    """Generators as float64 [M, P, P] and the default tolerance of their dtype; `None` for half precision."""
    default = 1e-7
    if isinstance(generators, Tensor):
        if generators.dtype in (torch.float32, torch.float16, torch.bfloat16):
            default = 32.0 * torch.finfo(generators.dtype).eps
        # NumPy has no bfloat16.
        generators = generators.detach().cpu() if generators.is_complex() else generators.detach().cpu().double()
    try:
        given = np.asarray(generators)
        given = given.astype(np.float64, casting="unsafe" if given.dtype == object else "same_kind")
    except (TypeError, ValueError):
        raise ValueError(f"collapse: `generators` is {generators!r:.60}; expected real matrices [M, P, P], stacked") from None
    if given.ndim != 3 or given.shape[1] != given.shape[2] or 0 in given.shape:
        raise ValueError(f"collapse: `generators` has shape {given.shape}; expected square matrices [M, P, P] with M, P >= 1")
    if not np.isfinite(given).all():
        raise not_finite("collapse", "generators")
    return given, default if default < LARGEST_TOL else None


def collapse(generators: Tensor | Array, tol: float | None = None) -> Reduction:
    """The finest basis Q in which all Q^{-1} G_m Q are block diagonal with the same blocks, over the reals.

    One block means that no fixed change of channel coordinates gives independent banks. An invariant subspace without an
    invariant complement (shears alone) is not a collapse. A plane that is only rotated is one block of size two.

    Args:
        generators: G [M, P, P]; realised actions R_t serve as well as generators.
        tol: noise in the generators, relative to their norm; default 1e-7 for float64, 32 machine epsilons for float32.

    Returns:
        Reduction(basis, blocks, residual, irreducible, decided).

    Example:
        >>> import torch
        >>> from shippo_ssm.collapse import collapse
        >>> swap = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
        >>> collapse(swap).blocks, collapse(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])).irreducible
        ((1, 1), True)
    """
    family, default = as_family(generators)
    if tol is None and default is None:
        expected = f"float32 or float64; pass `tol` below {LARGEST_TOL} if they are that exact"
        raise ValueError(f"collapse: `generators` are in half precision, whose rounding hides blocks; expected {expected}")
    tol = default if tol is None else tol
    if not isinstance(tol, int | float) or not 0.0 < tol < LARGEST_TOL:
        raise ValueError(f"collapse: `tol` is {tol!r}; expected a number between 0 and {LARGEST_TOL}, relative to the norm")
    # Normalise: squares of 1e155 or 1e-200 overflow or underflow.
    largest = np.abs(family).max()
    if largest > 0.0:
        family = family / largest
        family = family / np.sqrt((family**2).sum())
    # Many realised actions span few directions; the recursion works on those.
    small = compress(family)
    bases, decided = decompose(small, tol)
    if not decided:
        # Noise would have destroyed a form that two or more generators share to the last digits.
        exact, certain = decompose(small, min(EXACT, tol))
        if certain and len(exact) > 1 and len(exact) >= len(bases):
            shared = np.linalg.matrix_rank(traceless(small).reshape(len(small), -1)) > 1
            bases, decided = exact, bool(shared)
    bases.sort(key=lambda basis: -basis.shape[1])
    basis = np.concatenate(bases, 1)
    blocks = tuple(part.shape[1] for part in bases)
    residual = off_block(family, basis, blocks)
    if residual > LARGEST_RESIDUAL:
        # Errors of nested splits have added up: return the trivial form.
        basis, blocks, residual, decided = np.eye(len(basis)), (len(basis),), 0.0, False
    return Reduction(torch.from_numpy(basis.copy()), blocks, residual, decided and len(blocks) == 1, decided)
