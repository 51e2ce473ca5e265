"""Collapse: hidden block structures are found, indecomposable families are not split, doubt is admitted."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from shippo_ssm.collapse import collapse


@pytest.fixture
def rng():
    return np.random.default_rng(0)


TURN = np.array([[0.0, -1.0], [1.0, 0.0]])


def blocks(*parts):
    """Block-diagonal families from families [M, n_i, n_i]."""
    width = sum(part.shape[-1] for part in parts)
    out, start = np.zeros((len(parts[0]), width, width)), 0
    for part in parts:
        stop = start + part.shape[-1]
        out[:, start:stop, start:stop] = part
        start = stop
    return out


def full(rng, width, count=3):
    return rng.standard_normal((count, width, width))


def complex_type(rng, width):
    """Real form of complex matrices: the commutant is the complex numbers."""
    return np.kron(full(rng, width), np.eye(2)) + np.kron(full(rng, width), TURN)


def quaternionic(rng):
    """Left multiplications by quaternions: the commutant is the quaternions."""
    i = np.kron(np.eye(2), TURN)
    j = np.array([[0.0, 0, -1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, -1, 0, 0]])
    return np.einsum("ma,aij->mij", rng.standard_normal((3, 4)), np.stack([np.eye(4), i, j, i @ j]))


def shears(width):
    eye = np.eye(width)
    return np.stack([np.outer(eye[i], eye[j]) for i in range(width) for j in range(i + 1, width)])


def twice(part):
    return blocks(part, part)


# Name -> (a draw of the family in its block basis, the sizes that must be found).
PATTERNS = {
    "commuting": (lambda rng: blocks(*[full(rng, 1) for _ in range(5)]), (1, 1, 1, 1, 1)),
    "two planes": (lambda rng: blocks(full(rng, 2), full(rng, 2)), (2, 2)),
    "three sizes": (lambda rng: blocks(full(rng, 3), full(rng, 2), full(rng, 1)), (3, 2, 1)),
    "four and four": (lambda rng: blocks(full(rng, 4), full(rng, 4)), (4, 4)),
    "rotated planes": (lambda rng: blocks(complex_type(rng, 1), complex_type(rng, 1)), (2, 2)),
    "equivalent rotated planes": (lambda rng: twice(complex_type(rng, 1)), (2, 2)),
    "equivalent copies": (lambda rng: blocks(twice(full(rng, 3)), full(rng, 1)), (3, 3, 1)),
    "three equivalent copies": (lambda rng: blocks(twice(part := full(rng, 2)), part), (2, 2, 2)),
    "equivalent complex copies": (lambda rng: twice(complex_type(rng, 2)), (4, 4)),
    "equivalent quaternionic copies": (lambda rng: twice(quaternionic(rng)), (4, 4)),
    "scalars": (lambda rng: rng.standard_normal((3, 1, 1)) * np.eye(4), (1, 1, 1, 1)),
    "repeated eigenvalues": (lambda rng: np.diag([1.0, 1.0, 1.0, 2.0, 2.0, 3.0])[None], (1,) * 6),
    "two kinds of shears": (lambda rng: blocks(shears(3), np.repeat(shears(2), 3, 0)), (3, 2)),
    "two Jordan chains": (lambda rng: blocks(np.eye(3, k=1)[None], np.eye(2, k=1)[None] - np.eye(2)), (3, 2)),
    "equal Jordan chains": (lambda rng: twice(np.eye(3, k=1)[None]), (3, 3)),
    "full": (lambda rng: full(rng, 4), (4,)),
    "full, two generators": (lambda rng: full(rng, 8, 2), (8,)),
    "complex type": (lambda rng: complex_type(rng, 2), (4,)),
    "quaternionic type": (lambda rng: quaternionic(rng), (4,)),
    "shears alone": (lambda rng: shears(4), (4,)),
    "one Jordan chain": (lambda rng: np.eye(4, k=1)[None] + 0.5 * np.eye(4), (4,)),
    "triangular": (lambda rng: np.triu(full(rng, 4)), (4,)),
}


def hide(rng, family, noise, condition=20.0):
    """Q G Q^{-1} with a random Q of the given condition number, and noise relative to the size of an entry."""
    width = family.shape[-1]
    left, right = (np.linalg.qr(rng.standard_normal((width, width)))[0] for _ in range(2))
    basis = left * np.geomspace(1.0, condition, width) @ right
    hidden = basis @ family @ np.linalg.inv(basis)
    return hidden + noise * np.sqrt((hidden**2).mean()) * rng.standard_normal(hidden.shape)


@pytest.mark.parametrize("name", PATTERNS)
def test_hidden_structure_is_found_in_100_draws(name, rng):
    draw, sizes = PATTERNS[name]
    for trial in range(100):
        noise = 1e-8 if trial % 2 else 0.0
        generators = hide(rng, draw(rng), noise)
        found = collapse(generators)
        assert found.decided, f"{name}, trial {trial}: cannot decide"
        assert found.blocks == sizes, f"{name}, trial {trial}"
        assert found.irreducible == (len(sizes) == 1)
        assert found.residual <= (1e-4 if noise else 1e-9)


@pytest.mark.parametrize("name", ["three sizes", "equivalent copies", "shears alone", "full", "commuting"])
def test_a_badly_conditioned_basis_is_at_worst_undecided(name, rng):
    draw, sizes = PATTERNS[name]
    decided = 0
    for trial in range(40):
        found = collapse(hide(rng, draw(rng), 1e-8 if trial % 2 else 0.0, condition=10.0 ** (1 + trial % 4)))
        decided += found.decided
        assert found.blocks == sizes or not found.decided, f"{name}, trial {trial}"
    assert decided >= 20


def test_the_basis_does_what_it_says(rng):
    generators = hide(rng, blocks(full(rng, 3), full(rng, 2)), 0.0)
    found = collapse(torch.from_numpy(generators))
    basis = found.basis.numpy()
    carried = np.linalg.inv(basis) @ generators @ basis
    assert np.abs(carried[:, :3, 3:]).max() < 1e-9 * np.abs(carried).max()
    assert np.abs(carried[:, 3:, :3]).max() < 1e-9 * np.abs(carried).max()
    assert found.slices == (slice(0, 3), slice(3, 5))
    for part in found.slices:
        np.testing.assert_allclose(basis[:, part].T @ basis[:, part], np.eye(part.stop - part.start), atol=1e-12)


def test_one_plane_rotation_is_one_block_and_a_reflection_is_two():
    assert collapse(TURN[None]).blocks == (2,)
    assert collapse(TURN[None]).irreducible
    assert collapse(np.array([[[0.0, 1.0], [1.0, 0.0]]])).blocks == (1, 1)
    assert collapse(np.zeros((2, 3, 3))).blocks == (1, 1, 1)
    assert collapse(np.ones((1, 1, 1))).irreducible


def test_a_coupling_between_noise_and_signal_is_left_undecided(rng):
    split = blocks(full(rng, 2), full(rng, 2))
    coupling = full(rng, 4)
    scale = np.sqrt((split**2).sum() / (coupling**2).sum())
    answers = {size: collapse(split + size * scale * coupling) for size in (1e-9, 1e-6, 1e-2)}
    assert answers[1e-9].status == "reducible"
    assert answers[1e-9].blocks == (2, 2)
    assert answers[1e-6].status == "cannot decide"
    assert not answers[1e-6].irreducible
    assert answers[1e-2].status == "irreducible"
    # The tolerance moves the border: told that 1e-6 is noise, or that it is not, the same family is decided.
    assert collapse(split + 1e-6 * scale * coupling, tol=1e-5).blocks == (2, 2)
    assert collapse(split + 1e-6 * scale * coupling, tol=1e-10).irreducible


def test_float32_actions_carry_their_own_tolerance(rng):
    hidden = hide(rng, blocks(full(rng, 2), full(rng, 2)), 0.0)
    assert collapse(torch.from_numpy(hidden).float()).blocks == (2, 2)


@pytest.mark.parametrize("sizes", [(32,), (16, 16), (1,) * 32])
def test_width_32_takes_less_than_a_second(sizes, rng):
    generators = hide(rng, blocks(*[full(rng, size) for size in sizes]), 0.0)
    collapse(generators[:, :4, :4])
    times = []
    for _ in range(3):
        # One thread: on a busy machine others spend most of their time waiting.
        with threadpool_limits(1):
            start = time.process_time()
            found = collapse(generators)
            times.append(time.process_time() - start)
    assert found.blocks == sizes
    assert min(times) < 1.0


@pytest.mark.parametrize(
    ("generators", "options", "words"),
    [
        (torch.zeros(2, 3, 2), {}, "expected square"),
        (torch.zeros(3, 3), {}, "expected square"),
        (torch.zeros(0, 3, 3), {}, "expected square"),
        (torch.full((1, 2, 2), float("nan")), {}, "not finite"),
        (torch.ones(1, 2, 2), {"tol": 0.0}, "`tol` is 0.0"),
        (torch.ones(1, 2, 2), {"tol": 0.5}, "`tol` is 0.5"),
    ],
)
def test_bad_input(generators, options, words):
    with pytest.raises(ValueError, match=words):
        collapse(generators, **options)


@pytest.mark.parametrize("scale", [1e155, 1e-200, 1e300, 1e-308])
def test_the_answer_does_not_depend_on_the_scale(scale):
    turns = torch.zeros(2, 3, 3, dtype=torch.float64)
    turns[0, 0, 1], turns[0, 1, 0], turns[1, 2, 2] = -1.0, 1.0, 2.0
    whole = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for family in (turns, whole):
        assert collapse(scale * family).blocks == collapse(family).blocks
        assert collapse(scale * family).status == collapse(family).status
    assert collapse(scale * turns).blocks == (2, 1)
    assert collapse(scale * whole).irreducible
