"""Checks of appendix B: the transport itself, when it is trivial, and SHiPPO as HiPPO in a moving frame."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from scipy.integrate import quad

from shippo_lab.theory.cases import MIXED, TIME, WIDTH, Array, derivative, gap, gaps, moving, signal, skew, transports
from shippo_lab.theory.registry import Finding, at_least, at_most, check
from shippo_ssm.projection import LagT, LegS, ProjectionMemory, Transport

EARLIER = 0.4
EYE = np.eye(WIDTH)


@check("app. B.1, transport equation", "d_t P = P A_R, P(tau, tau) = I")
def transport_equation() -> Finding:
    worst = max(
        gaps((derivative(lambda t, p=p: p.P(t, EARLIER), TIME), p.P(TIME, EARLIER) @ p.generator(TIME)), (p.P(TIME, TIME), EYE))
        for p in transports().values()
    )
    return at_most(worst, 1e-8, "difference quotient of P against P A_R")


@check("app. B.1, Lemma", "Invertibility: P(t, tau) in GL(d)")
def transport_invertibility() -> Finding:
    tau = np.linspace(0, TIME, 18)
    worst = min(1 / np.linalg.cond(matrix) for transport in transports().values() for matrix in transport.P(TIME, tau))
    return at_least(worst, 1e-3, "smallest 1 / cond P(t, tau)")


@check("app. B.1, Lemma", "Inverse dynamics: d_t P^-1 = -A_R P^-1")
def inverse_dynamics() -> Finding:
    worst = 0.0
    for transport in transports().values():
        inverse = transport.inverse(TIME, EARLIER)
        rate = derivative(lambda t, p=transport: np.linalg.inv(p.P(t, EARLIER)), TIME)
        pairs = (transport.P(TIME, EARLIER) @ inverse, EYE), (rate, -transport.generator(TIME) @ inverse)
        worst = max(worst, gaps(*pairs))
    return at_most(worst, 1e-8, "P P^-1 against I, and d_t P^-1 against -A_R P^-1")


def _log_det(transport: Transport, t: float, tau: float) -> float:
    """int_tau^t tr A_R(s) ds, piece by piece."""
    edges = [tau, *transport.breaks[(transport.breaks > tau) & (transport.breaks < t)], t]
    pieces = (quad(lambda s: float(np.trace(transport.generator(s))), *ends, epsabs=1e-12) for ends in pairwise(edges))
    return sum(value for value, _ in pieces)


@check("app. B.1, Lemma", "Liouville's formula: det P = exp(int tr A_R)")
def liouville_formula() -> Finding:
    worst = max(
        abs(np.linalg.det(transport.P(t, tau)) / np.exp(_log_det(transport, t, tau)) - 1)
        for transport in transports().values()
        for t, tau in ((TIME, EARLIER), (3.0, 0.0))
    )
    return at_most(worst, 1e-9, "|det P / exp(int tr A_R) - 1|")


@check("app. B.1, Lemma", "Composition rule: P(t, tau) = P(sigma, tau) P(t, sigma)")
def composition_rule() -> Finding:
    worst = max(
        gap(transport.P(sigma, EARLIER) @ transport.P(TIME, sigma), transport.P(TIME, EARLIER))
        for transport in transports().values()
        for sigma in (0.5, 0.9, 1.5)
    )
    return at_most(worst, 1e-10, "P(sigma, tau) P(t, sigma) against P(t, tau)")


@check("app. B.1, order convention", "The order matters: P(t, sigma) P(sigma, tau) is another matrix")
def composition_order() -> Finding:
    transport = moving()
    swapped = transport.P(TIME, 0.9) @ transport.P(0.9, EARLIER)
    return at_least(gap(swapped, transport.P(TIME, EARLIER)), 1e-2, "distance of the swapped product")


@check("app. B.2, Proposition (1 => 2)", "Exact reduction to ordinary HiPPO: A_R = 0 gives P = I")
def exact_reduction() -> Finding:
    worst = 0.0
    for transport in (Transport(np.zeros((WIDTH, WIDTH)), WIDTH), Transport(lambda t: np.zeros((WIDTH, WIDTH)), WIDTH)):
        worst = max(worst, gap(transport.P(TIME, EARLIER), EYE), gap(transport.metric(TIME, EARLIER), EYE))
        times = np.linspace(0.3, TIME, 60)
        states = [ProjectionMemory(LegS(6), path).evolve(signal, times, keep="last") for path in (transport, None)]
        worst = max(worst, gap(*states))
    return at_most(worst, 1e-13, "P, M_P and the state, against I and HiPPO")


@check("app. B.2, Proposition (2 => 1)", "Exact reduction, converse: P = I forces A_R = 0")
def exact_reduction_converse() -> Finding:
    worst = max(
        gap(np.linalg.solve(p.P(TIME, 0.0), derivative(lambda t, p=p: p.P(t, 0.0), TIME)), p.generator(TIME))
        for p in transports().values()
    )
    return at_most(worst, 1e-8, "P^-1 d_t P against A_R")


@check("app. B.3, Proposition (2 => 1)", "Identity metric if the generator is skew")
def identity_metric_if_skew() -> Finding:
    transport = Transport(skew, WIDTH)
    return at_most(float(np.abs(transport.metric(TIME, np.linspace(0, TIME, 9)) - EYE).max()), 1e-10, "max |M_P - I|")


@check("app. B.3, Proposition (1 => 2)", "Identity metric only if the generator is skew")
def identity_metric_only_if_skew() -> Finding:
    worst = 0.0
    for transport in transports().values():
        inverse = np.linalg.inv(transport.P(TIME, 0.0))
        generator = transport.generator(TIME)
        rate = derivative(lambda t, p=transport: p.metric(t, 0.0), TIME)
        worst = max(worst, gap(inverse @ rate @ inverse.T, generator + generator.T))
    return at_most(worst, 1e-8, "P^-1 d_t M_P P^-T against A_R + A_R^T")


@check("app. B.3, Proposition (consequence)", "A generator that is not skew changes the metric")
def metric_of_a_mixed_generator() -> Finding:
    return at_least(gap(moving().metric(TIME, 0.0), EYE), 0.1, "||M_P - I|| / ||I||")


def _rotation(speed: float) -> Transport:
    return Transport(speed * np.array([[0.0, -1.0], [1.0, 0.0]]), 2)


def _plane(t: float) -> Array:
    return signal(t)[:2]


@check("app. B.3, Example", "Orthogonal transport: P is the plane rotation and M_P = I")
def rotation_example() -> Finding:
    turn, angle = _rotation(1.3), 1.3 * (TIME - EARLIER)
    closed = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    worst = gaps((turn.P(TIME, EARLIER), closed), (turn.metric(TIME, EARLIER), np.eye(2)))
    return at_most(worst, 1e-12, "P against cos and sin, M_P against I")


@check("app. B.3, Example", "Orthogonal transport does not reduce to ordinary HiPPO")
def rotation_does_not_reduce() -> Finding:
    turn = _rotation(1.3)
    C = ProjectionMemory(LegS(6), turn).project(_plane, TIME)
    term = np.linalg.norm(C @ turn.generator(TIME)) / np.linalg.norm(C)
    return at_least(min(gap(C, ProjectionMemory(LegS(6)).project(_plane, TIME)), term), 0.1, "||C_S - C_H|| and ||C_S A_R||")


@check("app. B.4, Lemma", "Frame representation: P(t, tau) = V(tau)^-1 V(t)")
def frame_representation() -> Finding:
    worst = gaps(*((np.linalg.solve(p.V(EARLIER), p.V(TIME)), p.P(TIME, EARLIER)) for p in transports().values()))
    return at_most(worst, 1e-10, "V(tau)^-1 V(t) against P(t, tau)")


@check("app. B.4, Lemma", "HiPPO equivariance to fixed channel mixing")
def channel_equivariance() -> Finding:
    mixing = MIXED + np.eye(WIDTH)
    memory = ProjectionMemory(LegS(7))
    mixed = memory.project(lambda t: mixing.T @ signal(t), TIME)
    return at_most(gap(mixed, memory.project(signal, TIME) @ mixing), 1e-12, "hippo(Q^T u) against hippo(u) Q")


@check("app. B.4, Proposition", "Moving-frame factorisation: shippo = D_V o hippo o E_V")
def moving_frame_factorisation() -> Finding:
    worst = 0.0
    for transport in transports().values():
        if len(transport.breaks) > 0:
            continue
        encoded = ProjectionMemory(LegS(6)).project(lambda s, p=transport: np.linalg.solve(p.V(s).T, signal(s)), TIME)
        worst = max(worst, gap(encoded @ transport.V(TIME), ProjectionMemory(LegS(6), transport).project(signal, TIME)))
    return at_most(worst, 1e-9, "hippo(V^-T f) V(t) against shippo(f)")


def _gauge() -> tuple[Array, Array, Array]:
    """Online states at TIME: HiPPO driven by V^{-T} f, SHiPPO driven by f, and V; both from zero at t = 0.3."""
    transport = moving()
    times = np.linspace(0.3, TIME, 120)
    start = np.zeros((6, WIDTH))
    plain = ProjectionMemory(LagT(6)).evolve(
        lambda t: np.linalg.solve(transport.V(t).T, signal(t)), times, keep="last", initial_state=start
    )
    coupled = ProjectionMemory(LagT(6), transport).evolve(signal, times, keep="last", initial_state=start)
    return plain, coupled, transport.V(TIME)


@check("app. B.5, Proposition", "Gauge equivalence: C~ V solves the Sylvester dynamics")
def gauge_equivalence() -> Finding:
    plain, coupled, frame = _gauge()
    return at_most(gap(plain @ frame, coupled), 1e-9, "C~ V against C_S, both by their own dynamics")


@check("app. B.5, Proposition (converse)", "Gauge equivalence: C_S V^-1 solves the HiPPO dynamics")
def gauge_equivalence_converse() -> Finding:
    plain, coupled, frame = _gauge()
    transport, measure = moving(), LegS(5)
    memory = ProjectionMemory(measure, transport)

    def back(t: float) -> Array:
        return memory.project(signal, t) @ np.linalg.inv(transport.V(t))

    encoded = np.linalg.solve(transport.V(TIME).T, signal(TIME))
    law = measure.A(TIME) @ back(TIME) + np.outer(measure.B(TIME), encoded)
    worst = max(gap(coupled @ np.linalg.inv(frame), plain), gap(derivative(back, TIME), law))
    return at_most(worst, 1e-7, "C_S V^-1 against C~, and d/dt of it against the HiPPO law")


@check("app. B.5, what the equivalence does not say", "SHiPPO is not a static channel mixer")
def no_static_mixer() -> Finding:
    times = np.linspace(0.8, 2.4, 9)
    plain = np.concatenate([ProjectionMemory(LegS(5)).project(signal, t) for t in times])
    coupled = np.concatenate([ProjectionMemory(LegS(5), moving()).project(signal, t) for t in times])
    best = np.linalg.lstsq(plain, coupled, rcond=None)[0]
    return at_least(gap(plain @ best, coupled), 0.05, "min over Q of ||C_H Q - C_S|| / ||C_S||, nine times")
