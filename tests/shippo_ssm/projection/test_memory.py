"""Projection memories: the state is the minimiser, found online at the declared order, and the past can be read back."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy.optimize import minimize

from shippo_lab.theory.constructions import MetricOnly
from shippo_ssm.projection import ORDERS, Fourier, LagT, LegS, LegT, ProjectionMemory, Samples, Transport

CLOSED = {"LegS": LegS(4), "LagT": LagT(4)}
# Steps from t = 1 to t = 2: coarse for the sixth-order rule, which would otherwise sit at rounding.
GRIDS = {"exact": (4, 6, 9), "bilinear": (24, 48, 96), "zoh": (96, 192, 384)}


def relative(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


@pytest.mark.parametrize("method", ORDERS)
@pytest.mark.parametrize("name", CLOSED)
def test_evolve_converges_to_project_at_the_declared_order(name, method, transport, signal):
    memory = ProjectionMemory(CLOSED[name], transport)
    target = memory.project(signal, 2.0)
    errors = [
        relative(memory.evolve(signal, np.linspace(1, 2, num + 1), method=method, keep="last"), target) for num in GRIDS[method]
    ]
    slopes = -np.diff(np.log(errors)) / np.diff(np.log(GRIDS[method]))
    assert np.all(np.abs(slopes - ORDERS[method]) < 0.35), (errors, slopes)


@pytest.mark.parametrize("measure", [LegS(12), LagT(12)], ids=repr)
def test_exact_reaches_the_projection(measure, transport, signal):
    memory = ProjectionMemory(measure, transport)
    times = np.linspace(0.5, 2, 301)
    states = memory.evolve(signal, times)
    for index in (0, 150, 300):
        assert relative(states[index], memory.project(signal, times[index])) < 1e-9


@pytest.mark.parametrize("measure", [LegT(12, 1.0), Fourier(12, 1.0), Fourier(13, 1.0)], ids=repr)
def test_windows_follow_the_projection_roughly(measure, transport, signal):
    memory = ProjectionMemory(measure, transport)
    state = memory.evolve(signal, np.linspace(1.2, 3, 400), keep="last")
    assert relative(state, memory.project(signal, 3.0)) < (1e-5 if isinstance(measure, LegT) else 0.12)


@pytest.mark.parametrize("measure", [LegS(5), LagT(5), LegT(5, 0.8), Fourier(5, 0.8)], ids=repr)
def test_projection_minimises_the_error(measure, moving, signal):
    """A generic optimiser, which knows only `objective`, comes to the same coefficients."""
    memory = ProjectionMemory(measure, moving)
    C = memory.project(signal, 1.5)
    best = memory.objective(signal, C, 1.5)
    rng = np.random.default_rng(0)
    direction = rng.normal(size=C.shape)
    found = minimize(lambda s: memory.objective(signal, C + s[0] * direction, 1.5), [0.3], method="BFGS")
    assert abs(found.x[0]) < 1e-5
    for _ in range(5):
        assert memory.objective(signal, C + 0.01 * rng.normal(size=C.shape), 1.5) > best
    assert memory.error(signal, C, 1.5) == pytest.approx(np.sqrt(best))


def test_reconstructs_in_a_rotating_shearing_frame():
    """LegS, N = 24: three smooth channels on [0, 2], read back to 1e-3 from the online state."""
    turn = np.array([[0.0, -2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    shear = np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    frame = Transport(lambda t: turn + np.sin(3 * t) * shear, 3)
    f = lambda t: np.array([np.sin(3 * t), np.cos(2 * t), t * np.exp(-t)])  # noqa: E731
    memory = ProjectionMemory(LegS(24), frame)
    state = memory.evolve(f, np.linspace(0.02, 2, 500), keep="last")
    tau = np.linspace(0, 2, 201)
    gap = memory.reconstruct(state, 2.0, tau) - np.array([f(s) for s in tau])
    assert np.abs(gap).max() < 1e-3
    assert memory.error(f, state, 2.0) < 1e-4


def test_hippo_is_no_transport(signal):
    still = ProjectionMemory(LegS(6), Transport(np.zeros((3, 3)), 3))
    plain = ProjectionMemory(LegS(6))
    times = np.linspace(0.5, 1.5, 40)
    for method in ORDERS:
        assert np.allclose(still.evolve(signal, times, method=method), plain.evolve(signal, times, method=method), atol=1e-13)


@pytest.mark.parametrize("method", ORDERS)
def test_keep_last_is_the_last_of_all(method, transport, signal):
    memory = ProjectionMemory(LegS(8), transport)
    times = np.sort(np.random.default_rng(1).uniform(0.3, 3, 200))
    states = memory.evolve(signal, times, method=method)
    assert states.shape == (200, 8, 3)
    assert relative(memory.evolve(signal, times, method=method, keep="last"), states[-1]) < 1e-8


def test_zero_order_hold_is_exact_for_held_signals(moving):
    """Held samples in a held frame: the same dynamics, solved as pieces of the exact method."""
    times = np.linspace(0.5, 2.0, 31)
    values = np.random.default_rng(0).normal(size=(31, 3))
    held = Transport(np.stack([moving.generator(s) for s in times[:-1]]), 3, times=times[:-1])
    start = np.zeros((6, 3))
    got = ProjectionMemory(LegS(6), moving).evolve(values, times, method="zoh", keep="last", initial_state=start)
    fine = start
    memory = ProjectionMemory(LegS(6), held)
    for low, high, value in zip(times[:-1], times[1:], values):
        steps = np.linspace(low, high, 4)
        fine = memory.evolve(lambda t, v=value: v, steps, keep="last", initial_state=fine)
    assert relative(got, fine) < 1e-11


def test_samples_are_joined_by_lines(moving):
    times = np.linspace(0.1, 2.0, 400)
    values = np.stack([np.sin(times), np.cos(3 * times), times**2], axis=1)
    memory = ProjectionMemory(LegS(8), moving)
    target = memory.project(Samples(times, values), 2.0)
    assert relative(memory.evolve(values, times, keep="last"), target) < 1e-9
    assert relative(memory.project(values, 2.0, times=times), target) < 1e-12
    smooth = memory.project(lambda t: np.array([np.sin(t), np.cos(3 * t), t**2]), 2.0)
    assert 1e-9 < relative(target, smooth) < 1e-2


def test_split_anywhere(moving, signal):
    memory = ProjectionMemory(LagT(6), moving)
    times = np.linspace(0.5, 2, 90)
    whole = memory.evolve(signal, times)
    middle = memory.evolve(signal, times[:38], keep="last")
    assert np.allclose(memory.evolve(signal, times[37:], initial_state=middle), whole[37:], atol=1e-11)


def test_memory_does_not_grow_with_the_number_of_samples():
    def peak(num: int) -> float:
        times = np.arange(1, num + 1) / 1000
        samples = Samples(times, np.ones((num, 4)))
        memory = ProjectionMemory(LegS(16), Transport(0.1 * np.ones((4, 4)), 4))
        start = memory.project(lambda t: np.ones(4), times[0])
        tracemalloc.start()
        memory.evolve(samples, times, keep="last", initial_state=start)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(2000)
    assert peak(20000) < 1.3 * peak(5000)


def test_many_channels_quickly():
    """A tenth of the benchmark of `benchmarks/projection.py`, bounded generously: seconds, not minutes."""
    import time

    times = np.arange(1, 10_001) / 1000
    values = np.sin(np.outer(times, np.linspace(1, 5, 16)))
    start = time.perf_counter()
    state = ProjectionMemory(LegS(64)).evolve(values, times, keep="last")
    assert time.perf_counter() - start < 5
    tau = np.linspace(0, 10, 50)
    truth = np.sin(np.outer(tau, np.linspace(1, 5, 16)))
    assert np.abs(ProjectionMemory(LegS(64)).reconstruct(state, 10.0, tau) - truth).max() < 1e-3


def test_metric_only(signal):
    """The operator equation holds; a metric without tau gives HiPPO back; a metric with tau does not factor."""
    measure = LegS(5)
    tilt = MetricOnly(measure, lambda t, tau: np.diag([1.0, 1.0 + tau, 1.0]) + 0.3 * tau * np.ones((3, 3)), 3)
    C = tilt.project(signal, 1.5)
    assert np.allclose(np.einsum("nimj,mj->ni", tilt.operator(1.5), C), tilt.moments(signal, 1.5), atol=1e-10)
    assert tilt.factor_gap(1.5) > 0.05
    hippo = ProjectionMemory(measure).project(signal, 1.5)
    assert relative(C, hippo) > 1e-6
    flat = MetricOnly(measure, lambda t, tau: np.diag([1.0, 2.0, 3.0]) + 0.2, 3)
    assert relative(flat.project(signal, 1.5), hippo) < 1e-10
    assert flat.factor_gap(1.5) < 1e-10
    with pytest.raises(ValueError, match="channels"):
        flat.moments(lambda t: np.zeros(2), 1.0)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda m, f: m.project(f, 0.0), "expected a time > 0"),
        (lambda m, f: m.project(f, -1.0), "expected a time > 0"),
        (lambda m, f: m.reconstruct(np.zeros((4, 3)), 1.0, [1.2]), "tau"),
        (lambda m, f: m.reconstruct(np.zeros((4, 3)), 1.0, [-0.2]), "tau"),
        (lambda m, f: m.reconstruct(np.zeros((4, 2)), 1.0, [0.2]), "`C` has shape"),
        (lambda m, f: m.project(lambda t: np.zeros(2), 1.0), "2 channels"),
        (lambda m, f: m.project(lambda t: np.zeros((3, 3)), 1.0), "vector"),
        (lambda m, f: m.evolve(np.zeros((5, 2)), np.arange(1, 6)), "2 channels"),
        (lambda m, f: m.evolve(np.zeros((5, 3)), np.arange(1, 7)), "one row per time"),
        (lambda m, f: m.evolve(f, [1.0, 1.0, 2.0]), "strictly increasing"),
        (lambda m, f: m.evolve(f, [2.0, 1.0]), "strictly increasing"),
        (lambda m, f: m.evolve(f, [0.0, 1.0]), "> 0"),
        (lambda m, f: m.evolve(f, []), "at least one"),
        (lambda m, f: m.evolve(f, [1.0, 2.0], method="euler"), "method"),
        (lambda m, f: m.evolve(f, [1.0, 2.0], keep="some"), "keep"),
        (lambda m, f: m.evolve(f, [1.0, 2.0], initial_state=np.zeros((3, 3))), "`C` has shape"),
        (lambda m, f: m.project(np.zeros((5, 3)), 1.0), "times"),
        (lambda m, f: m.project(np.zeros((2, 3)), 1.0, times=[1.0, 0.5]), "strictly increasing"),
        (lambda m, f: ProjectionMemory("LegS"), "measure"),  # pyright: ignore[reportArgumentType]
        (lambda m, f: ProjectionMemory(LegS(4), np.eye(3)), "transport"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_input(call, word, moving, signal):
    with pytest.raises(ValueError, match=word):
        call(ProjectionMemory(LegS(4), moving), signal)
