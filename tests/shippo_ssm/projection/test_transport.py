"""Transport: the transition family, its inverse, its determinant, in all three ways of giving a generator."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from shippo_ssm.projection import Transport

RNG = np.random.default_rng(3)
FIRST, SECOND = RNG.normal(size=(2, 3, 3))
PATHS = {
    "constant": Transport(FIRST, 3),
    "pieces": Transport(RNG.normal(size=(4, 3, 3)), 3, times=[0.5, 1.0, 2.0, 3.0]),
    "callable": Transport(lambda t: np.cos(2 * t) * FIRST + np.sin(3 * t) * SECOND, 3),
}


def solved(transport: Transport, t: float, tau: float) -> np.ndarray:
    """P by a plain ODE solver, stopping at every jump of the generator."""
    edges = [tau, *[b for b in transport.breaks if tau < b < t], t]
    matrix = np.eye(3)
    for start, stop in pairwise(edges):
        solution = solve_ivp(
            lambda s, y, last=stop: (y.reshape(3, 3) @ transport.generator(min(s, np.nextafter(last, 0)))).ravel(),
            (start, stop), matrix.ravel(), method="DOP853", rtol=1e-13, atol=1e-14,
        )  # fmt: skip
        matrix = solution.y[:, -1].reshape(3, 3)
    return matrix


@pytest.mark.parametrize("name", PATHS)
def test_against_a_plain_solver(name):
    transport = PATHS[name]
    for t, tau in [(0.4, 0.1), (2.0, 0.7), (5.0, 0.0)]:
        reference = solved(transport, t, tau)
        assert np.abs(transport.P(t, tau) - reference).max() < 1e-10 * np.abs(reference).max()


@pytest.mark.parametrize("name", PATHS)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.0, 4.0), min_size=3, max_size=3))
def test_laws(name, times):
    transport = PATHS[name]
    tau, sigma, t = sorted(times)
    matrix = transport.P(t, tau)
    size = np.abs(matrix).max()
    assert np.abs(transport.P(sigma, tau) @ transport.P(t, sigma) - matrix).max() < 1e-9 * size
    assert np.abs(matrix @ transport.inverse(t, tau) - np.eye(3)).max() < 1e-8 * max(1, size)
    assert np.abs(np.linalg.solve(transport.V(tau), transport.V(t)) - matrix).max() < 1e-7 * max(1, size)
    assert np.allclose(transport.P(t, t), np.eye(3))


@pytest.mark.parametrize("name", PATHS)
def test_arrays_broadcast(name):
    transport = PATHS[name]
    tau = np.linspace(0, 2.5, 11)
    many = transport.P(2.5, tau)
    assert many.shape == (11, 3, 3)
    for index in (0, 4, 10):
        assert np.allclose(many[index], transport.P(2.5, tau[index]), atol=1e-11)
    grid = np.linspace(0.1, 3.3, 9)
    local = transport.P(grid[1:], grid[:-1])
    assert np.allclose(np.linalg.multi_dot(list(local)), transport.P(grid[-1], grid[0]), rtol=1e-9, atol=1e-9)
    inverses = transport.inverse(2.5, tau)
    assert np.allclose(inverses @ many, np.eye(3), atol=1e-9)
    values = np.arange(33.0).reshape(11, 3)
    assert np.allclose(transport.carry(values, tau, 2.5), np.stack([v @ m for v, m in zip(values, many)]))


def test_long_history_stays_local():
    """P over a short stretch late in time is exact although the frame V has become singular to working precision."""
    spread = np.diag([3.0, -3.0])
    transport = Transport(lambda t: spread + 0 * t, 2)
    assert np.linalg.cond(transport.V(20.0)) > 1e16
    assert np.abs(transport.P(20.0, 19.5) - expm(0.5 * spread)).max() < 1e-9


def test_piece_borders():
    """A piece begins at its time; the first reaches back to 0 and the last goes on."""
    pieces = np.stack([np.eye(2), 2 * np.eye(2)])
    transport = Transport(pieces, 2, times=[1.0, 2.0])
    assert transport.generator(0.0)[0, 0] == 1
    assert transport.generator(2.0)[0, 0] == 2
    assert np.allclose(transport.P(4.0, 0.0), np.exp(2 + 4) * np.eye(2))


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: Transport(np.eye(2), 3), "generator"),
        (lambda: Transport(lambda t: np.zeros((2, 3)), 2), "generator"),
        (lambda: Transport(np.full((2, 2), np.nan), 2), "finite"),
        (lambda: Transport(np.zeros((4, 2, 2)), 2), "times"),
        (lambda: Transport(np.zeros((4, 2, 2)), 2, times=[0, 1, 2]), "generator"),
        (lambda: Transport(np.zeros((2, 2, 2)), 2, times=[1, 1]), "strictly increasing"),
        (lambda: Transport(np.eye(2), 0), "width"),
        (lambda: Transport(np.eye(2), 2).P(1.0, 2.0), "tau"),
        (lambda: Transport(np.eye(2), 2).P(1.0, -0.1), "tau"),
    ],
)
def test_bad_input(call, word):
    with pytest.raises(ValueError, match=word):
        call()
