"""Measures: orthonormal, closed where they say so, and exactly moved by their flows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import expm

from shippo_lab.theory.constructions import BasisPath, closure, psi_rate
from shippo_ssm.projection import Fourier, LagT, LegS, LegT
from shippo_ssm.projection._numerics import integrate
from shippo_ssm.projection.signals import as_signal

MEASURES = [LegS(7), LagT(7), LegT(7, 1.2), Fourier(7, 1.2)]
CLOSED = [LegS(7), LagT(7), LegS(64), LagT(64)]


def defect(measure, f, t):
    """||C' - (A_L C + B_L f^T)||_F / ||C'||_F for the projection C of a signal f: time -> [d]; 0 for exact closure."""
    signal = as_signal(f)
    low = max(measure._start(t), 0.0)

    def moments(tau, w):
        values = signal(tau) * w[:, None]
        return np.stack([measure._psi(t, tau).T @ values, psi_rate(measure, t, tau).T @ values])

    coefficients, inner = integrate(moments, low, t, breaks=signal.breaks, panels=4 + measure.N // 4, rtol=1e-11)
    ends = signal(np.array([low, t]))
    true = inner + np.outer(measure._psi(t, np.asarray(t)), ends[1])
    if low > 0:
        true -= np.outer(measure._psi(t, np.asarray(low)), ends[0])
    claimed = measure.A(t) @ coefficients + np.outer(measure.B(t), ends[1])
    return np.linalg.norm(true - claimed) / max(np.linalg.norm(true), 1e-300)


@pytest.mark.parametrize("measure", [*MEASURES, LegS(64), LagT(64), LegT(64, 1.2), Fourier(65, 1.2), Fourier(8, 1.2)], ids=repr)
@pytest.mark.parametrize("t", [0.3, 2.5])
def test_orthonormal(measure, t):
    assert np.abs(measure.gram(t) - np.eye(measure.N)).max() < 1e-12


@pytest.mark.parametrize("measure", CLOSED, ids=repr)
@pytest.mark.parametrize("t", [0.4, 3.0])
def test_exact_closure(measure, t, signal):
    assert measure.closes
    report = closure(measure, t)
    assert report.derivative < 1e-8
    assert report.source < 1e-14
    assert defect(measure, signal, t) < 1e-8


@pytest.mark.parametrize("measure", MEASURES[:3], ids=repr)
def test_source_is_the_boundary_value(measure):
    assert np.allclose(measure.B(2.0), measure.psi(2.0, 2.0))


def test_windows_close_only_approximately(signal):
    """LegT converges spectrally and is exact on polynomials below N; Fourier converges like 1 / N; neither closes pointwise."""
    for measure in MEASURES[2:]:
        assert not measure.closes
        assert closure(measure, 2.0).derivative > 0.1
    spectral = [defect(LegT(N, 1.0), signal, 2.0) for N in (3, 5, 7)]
    assert spectral[0] > 30 * spectral[1] > 900 * spectral[2]
    assert defect(LegT(6, 1.0), lambda t: t**5, 2.0) < 1e-8 < defect(LegT(6, 1.0), lambda t: t**6, 2.0)
    algebraic = [defect(Fourier(N, 1.0), signal, 2.0) for N in (9, 17, 33, 65)]
    slopes = np.diff(np.log2(algebraic))
    assert np.all(slopes < -0.4)
    assert np.allclose(Fourier(5, 1.0).B(1.0), 2 * Fourier(5, 1.0).psi(1.0, 1.0))


@pytest.mark.parametrize("measure", [*MEASURES, LegS(1), LagT(1), LegT(1, 0.5), Fourier(1, 0.5), Fourier(6, 1.2)], ids=repr)
def test_flow_is_the_exponential(measure):
    start, stop = 1.1, 1.7
    span = np.log(stop / start) if isinstance(measure, LegS) else stop - start
    reference = expm(span * measure.A(1.0))
    assert np.abs(measure.flow(stop, start) - reference).max() < 1e-12
    assert np.abs(measure.impulse(stop, start) - reference @ measure.B(start)).max() < 1e-12


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.05, 9.0), min_size=3, max_size=3, unique=True), st.sampled_from([*MEASURES, LegS(40), LagT(40)]))
def test_flow_composes(times, measure):
    first, second, third = sorted(times)
    whole = measure.flow(third, first)
    assert np.abs(measure.flow(third, second) @ measure.flow(second, first) - whole).max() < 1e-9 * max(1, np.abs(whole).max())


def test_published_operators():
    """The matrices of HiPPO at order 3, written out."""
    r3, r5, r15 = np.sqrt([3, 5, 15])
    assert np.allclose(LegS(3).A(2.0), -np.array([[1, 0, 0], [r3, 2, 0], [r5, r15, 3]]) / 2)
    assert np.allclose(LegT(3, 2.0).A(1.0), -np.array([[1, -r3, r5], [r3, 3, -r15], [r5, r15, 5]]) / 2)
    assert np.allclose(LagT(3).A(1.0), -np.tril(np.ones((3, 3))))
    root, turn = np.sqrt(2), 2 * np.pi
    assert np.allclose(Fourier(3, 1.0).A(1.0), [[-2, -2 * root, 0], [-2 * root, -4, -turn], [0, turn, 0]])


def test_shapes_and_window():
    measure = LegT(4, 1.0)
    tau = np.linspace(0, 3, 7)
    assert measure.basis(3.0, tau).shape == (7, 4)
    assert measure.basis(3.0, 2.5).shape == (4,)
    assert measure.weight(3.0, tau).tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert np.all(measure.basis(3.0, tau)[:4] == 0)


def test_non_orthonormal_path():
    """A, B of the moved basis close; the generator of the coefficients carries -G^{-1} G'."""
    shape = np.eye(5) + 0.2 * np.tril(np.ones((5, 5)), -1)
    rate = lambda t: 0.3 * np.cos(t) * shape  # noqa: E731
    path = BasisPath(5, LegS(5), lambda t: shape * (1 + 0.3 * np.sin(t)), rate)
    report = closure(path, 1.5)
    assert report.derivative < 1e-8
    assert report.source < 1e-12
    assert report.gram > 0.1
    change = path.change(1.5)
    assert np.abs(path.gram(1.5) - change @ change.T).max() < 1e-12
    step = 1e-4
    numeric = (path.gram(1.5 + step) - path.gram(1.5 - step)) / (2 * step)
    assert np.abs(path.gram_rate(1.5) - numeric).max() < 1e-7
    gram = path.gram(1.5)
    without = np.linalg.solve(gram, path.A(1.5) @ gram)
    # Coefficients of the same function: C' = S^{-T} C.
    flows = [np.linalg.solve(path.change(t).T, path.measure.flow(t, 1.5) @ change.T) for t in (1.5 + step, 1.5 - step)]
    flow_rate = (flows[0] - flows[1]) / (2 * step)
    assert np.abs(path.left(1.5) - flow_rate).max() < 1e-6
    assert np.abs(without - flow_rate).max() > 0.03


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: LegS(0), "N"),
        (lambda: LegS(2.5), "N"),  # pyright: ignore[reportArgumentType]
        (lambda: LegT(4, -1.0), "theta"),
        (lambda: Fourier(4, np.inf), "theta"),
        (lambda: LegS(4).basis(0.0, 0.0), "expected a time > 0"),
        (lambda: LagT(4).A(-1.0), "expected a time > 0"),
        (lambda: LegS(4).basis(1.0, 1.5), "tau"),
        (lambda: LegT(4, 1.0).weight(1.0, [-0.5]), "tau"),
        (lambda: LegS(4).gram("late"), "expected one number"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_input(call, word):
    with pytest.raises(ValueError, match=word):
        call()
