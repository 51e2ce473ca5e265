"""Linear algebra over F_q against direct checks, and block forms that are known beforehand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shippo_lab.tasks.finite_field import algebra, commutant, decompose, inverse, null_space, reduce_rows

seeds = st.integers(0, 2**32 - 1)


def invertible(rng: np.random.Generator, width: int, modulus: int) -> np.ndarray:
    while True:
        matrix = rng.integers(0, modulus, (width, width))
        if reduce_rows(matrix, modulus)[1] == width:
            return matrix


def block_diagonal(blocks: list[np.ndarray]) -> np.ndarray:
    width = sum(len(block) for block in blocks)
    whole, start = np.zeros((width, width), dtype=np.int64), 0
    for block in blocks:
        whole[start : start + len(block), start : start + len(block)] = block
        start += len(block)
    return whole


@given(seed=seeds, modulus=st.sampled_from([2, 5, 31]), width=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_inverse_and_null_space(seed, modulus, width):
    rng = np.random.default_rng(seed)
    matrix = invertible(rng, width, modulus)
    assert (matrix @ inverse(matrix, modulus) % modulus == np.eye(width)).all()
    wide = rng.integers(0, modulus, (width + 2, width))
    kernel = null_space(wide, modulus)
    assert len(kernel) == width + 2 - reduce_rows(wide, modulus)[1]
    assert (kernel @ wide % modulus == 0).all()
    assert reduce_rows(kernel, modulus)[1] == len(kernel)


@given(seed=seeds)
@settings(max_examples=40, deadline=None)
def test_rank_is_that_of_the_factors(seed):
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(0, 5))
    left, right = invertible(rng, 5, 31), invertible(rng, 5, 31)
    middle = np.diag([1] * rank + [0] * (5 - rank))
    batch = np.stack([left @ middle @ right, left @ right])
    assert reduce_rows(batch % 31, 31)[1].tolist() == [rank, 5]


def test_singular_matrices_have_no_inverse():
    with pytest.raises(ValueError, match="singular over F_31"):
        inverse(np.array([[[1, 0], [0, 1]], [[2, 4], [1, 2]]]), 31)


def test_a_composite_modulus_is_refused():
    with pytest.raises(ValueError, match="modulus is 9; expected a prime"):
        reduce_rows(np.eye(2, dtype=np.int64), 9)


@pytest.mark.parametrize("widths", [(4,), (3, 1), (2, 2), (2, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_hidden_blocks_are_found(widths, seed):
    """Random blocks, hidden by a change of basis, come back with their widths and a basis that shows them."""
    rng = np.random.default_rng(seed)
    hidden = invertible(rng, 4, 31)
    blocks = np.stack([block_diagonal([invertible(rng, width, 31) for width in widths]) for _ in range(3)])
    matrices = inverse(hidden, 31) @ blocks % 31 @ hidden % 31
    found = decompose(matrices, 31)
    assert found.blocks == widths
    assert found.irreducible == (widths == (4,))
    shown = found.basis @ matrices % 31 @ inverse(found.basis, 31) % 31
    mask = block_diagonal([np.ones((width, width), dtype=np.int64) for width in found.blocks])
    assert (shown[:, mask == 0] == 0).all()


def test_triangular_is_reducible_but_not_a_block_form():
    """Shears alone leave a line invariant that has no invariant complement: reducible, and no collapse."""
    shear = np.array([[[1, 1], [0, 1]]])
    found = decompose(shear, 31)
    assert found.blocks == (2,)
    assert not found.irreducible


def test_a_block_may_split_over_an_extension():
    """A quarter turn has no eigenvalue in F_31 (-1 is no square) and two in F_29: its algebra has dimension 2 in both."""
    turn = np.array([[[0, 1], [-1, 0]]])
    assert decompose(turn, 31).blocks == (2,)
    assert not decompose(turn, 31).irreducible
    assert len(algebra(turn % 31, 31)) == len(commutant(turn % 31, 31)) == 2


def test_shape_is_checked():
    with pytest.raises(ValueError, match=r"expected \[num, P, P\]"):
        decompose(np.eye(3, dtype=np.int64), 31)
