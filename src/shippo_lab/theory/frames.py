"""Checks of appendix B: the transport itself, when it is trivial, and SHiPPO as HiPPO in a moving frame."""

from itertools import pairwise

import numpy as np
from scipy.integrate import quad

from shippo_lab.theory.cases import MIXED, TIME, TURN, WIDTH, Array, derivative, moving, signal, smooth_transports, transports
from shippo_lab.theory.registry import Pairs, check, gap
from shippo_ssm.projection import LagT, LegS, ProjectionMemory, Transport

EARLIER = 0.4
EYE = np.eye(WIDTH)


@check("app. B.1, transport equation", "d_t P = P A_R, P(tau, tau) = I", at_most=1e-8)
def transport_equation() -> Pairs:
    """difference quotient of P against P A_R"""
    for p in transports():
        yield derivative(lambda t, p=p: p.P(t, EARLIER), TIME), p.P(TIME, EARLIER) @ p.generator(TIME)
        yield p.P(TIME, TIME), EYE


@check("app. B.1, Lemma", "Invertibility: P(t, tau) in GL(d)", at_least=1e-3)
def transport_invertibility() -> float:
    """smallest 1 / cond P(t, tau)"""
    tau = np.linspace(0, TIME, 18)
    return min(1 / np.linalg.cond(matrix) for transport in transports() for matrix in transport.P(TIME, tau))


@check("app. B.1, Lemma", "Inverse dynamics: d_t P^-1 = -A_R P^-1", at_most=1e-8)
def inverse_dynamics() -> Pairs:
    """P P^-1 against I, and d_t P^-1 against -A_R P^-1"""
    for p in transports():
        inverse = p.inverse(TIME, EARLIER)
        yield p.P(TIME, EARLIER) @ inverse, EYE
        yield derivative(lambda t, p=p: np.linalg.inv(p.P(t, EARLIER)), TIME), -p.generator(TIME) @ inverse


def _log_det(transport: Transport, t: float, tau: float) -> float:
    """int_tau^t tr A_R(s) ds, piece by piece."""
    edges = [tau, *transport.breaks[(transport.breaks > tau) & (transport.breaks < t)], t]
    pieces = (quad(lambda s: float(np.trace(transport.generator(s))), *ends, epsabs=1e-12) for ends in pairwise(edges))
    return sum(value for value, _ in pieces)


@check("app. B.1, Lemma", "Liouville's formula: det P = exp(int tr A_R)", at_most=1e-9)
def liouville_formula() -> float:
    """|det P / exp(int tr A_R) - 1|"""
    return max(
        abs(np.linalg.det(transport.P(t, tau)) / np.exp(_log_det(transport, t, tau)) - 1)
        for transport in transports()
        for t, tau in ((TIME, EARLIER), (3.0, 0.0))
    )


@check("app. B.1, Lemma", "Composition rule: P(t, tau) = P(sigma, tau) P(t, sigma)", at_most=1e-10)
def composition_rule() -> Pairs:
    """P(sigma, tau) P(t, sigma) against P(t, tau)"""
    for transport in transports():
        for sigma in (0.5, 0.9, 1.5):
            yield transport.P(sigma, EARLIER) @ transport.P(TIME, sigma), transport.P(TIME, EARLIER)


@check("app. B.1, order convention", "The order matters: P(t, sigma) P(sigma, tau) is another matrix", at_least=1e-2)
def composition_order() -> float:
    """distance of the swapped product"""
    transport = moving()
    return gap(transport.P(TIME, 0.9) @ transport.P(0.9, EARLIER), transport.P(TIME, EARLIER))


@check("app. B.2, Proposition (1 => 2)", "Exact reduction to ordinary HiPPO: A_R = 0 gives P = I", at_most=1e-13)
def exact_reduction() -> Pairs:
    """P, M_P and the state, against I and HiPPO"""
    for transport in (Transport(np.zeros((WIDTH, WIDTH)), WIDTH), Transport(lambda t: np.zeros((WIDTH, WIDTH)), WIDTH)):
        yield transport.P(TIME, EARLIER), EYE
        yield transport.metric(TIME, EARLIER), EYE
        times = np.linspace(0.3, TIME, 60)
        shippo, hippo = (ProjectionMemory(LegS(6), path).evolve(signal, times, keep="last") for path in (transport, None))
        yield shippo, hippo


@check("app. B.2, Proposition (2 => 1)", "Exact reduction, converse: P = I forces A_R = 0", at_most=1e-8)
def exact_reduction_converse() -> Pairs:
    """P^-1 d_t P against A_R"""
    for p in transports():
        yield np.linalg.solve(p.P(TIME, 0.0), derivative(lambda t, p=p: p.P(t, 0.0), TIME)), p.generator(TIME)


@check("app. B.3, Proposition (2 => 1)", "Identity metric if the generator is skew", at_most=1e-10)
def identity_metric_if_skew() -> float:
    """max |M_P - I|"""
    other = np.array([[0.0, 0.6, 0.0], [-0.6, 0.0, 0.8], [0.0, -0.8, 0.0]])
    transport = Transport(lambda t: TURN * np.cos(t) + other * t, WIDTH)
    return np.abs(transport.metric(TIME, np.linspace(0, TIME, 9)) - EYE).max()


@check("app. B.3, Proposition (1 => 2)", "Identity metric only if the generator is skew", at_most=1e-8)
def identity_metric_only_if_skew() -> Pairs:
    """P^-1 d_t M_P P^-T against A_R + A_R^T"""
    for p in transports():
        inverse, generator = np.linalg.inv(p.P(TIME, 0.0)), p.generator(TIME)
        yield inverse @ derivative(lambda t, p=p: p.metric(t, 0.0), TIME) @ inverse.T, generator + generator.T


@check("app. B.3, Proposition (consequence)", "A generator that is not skew changes the metric", at_least=0.1)
def metric_of_a_mixed_generator() -> float:
    """||M_P - I|| / ||I||"""
    return gap(moving().metric(TIME, 0.0), EYE)


def _rotation(speed: float) -> Transport:
    return Transport(speed * np.array([[0.0, -1.0], [1.0, 0.0]]), 2)


@check("app. B.3, Example", "Orthogonal transport: P is the plane rotation and M_P = I", at_most=1e-12)
def rotation_example() -> Pairs:
    """P against cos and sin, M_P against I"""
    turn, angle = _rotation(1.3), 1.3 * (TIME - EARLIER)
    yield turn.P(TIME, EARLIER), np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    yield turn.metric(TIME, EARLIER), np.eye(2)


@check("app. B.3, Example", "Orthogonal transport does not reduce to ordinary HiPPO", at_least=0.1)
def rotation_does_not_reduce() -> float:
    """||C_S - C_H|| and ||C_S A_R||"""
    turn = _rotation(1.3)
    C, plain = (ProjectionMemory(LegS(6), path).project(lambda t: signal(t)[:2], TIME) for path in (turn, None))
    return min(gap(C, plain), float(np.linalg.norm(C @ turn.generator(TIME)) / np.linalg.norm(C)))


@check("app. B.4, Lemma", "Frame representation: P(t, tau) = V(tau)^-1 V(t)", at_most=1e-10)
def frame_representation() -> Pairs:
    """V(tau)^-1 V(t) against P(t, tau)"""
    for p in transports():
        yield np.linalg.solve(p.V(EARLIER), p.V(TIME)), p.P(TIME, EARLIER)


@check("app. B.4, Lemma", "HiPPO equivariance to fixed channel mixing", at_most=1e-12)
def channel_equivariance() -> Pairs:
    """hippo(Q^T u) against hippo(u) Q"""
    mixing = MIXED + np.eye(WIDTH)
    memory = ProjectionMemory(LegS(7))
    yield memory.project(lambda t: mixing.T @ signal(t), TIME), memory.project(signal, TIME) @ mixing


@check("app. B.4, Proposition", "Moving-frame factorisation: shippo = D_V o hippo o E_V", at_most=1e-9)
def moving_frame_factorisation() -> Pairs:
    """hippo(V^-T f) V(t) against shippo(f)"""
    for p in smooth_transports():
        encoded = ProjectionMemory(LegS(6)).project(lambda s, p=p: np.linalg.solve(p.V(s).T, signal(s)), TIME)
        yield encoded @ p.V(TIME), ProjectionMemory(LegS(6), p).project(signal, TIME)


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


@check("app. B.5, Proposition", "Gauge equivalence: C~ V solves the Sylvester dynamics", at_most=1e-9)
def gauge_equivalence() -> Pairs:
    """C~ V against C_S, both by their own dynamics"""
    plain, coupled, frame = _gauge()
    yield plain @ frame, coupled


@check("app. B.5, Proposition (converse)", "Gauge equivalence: C_S V^-1 solves the HiPPO dynamics", at_most=1e-7)
def gauge_equivalence_converse() -> Pairs:
    """C_S V^-1 against C~, and d/dt of it against the HiPPO law"""
    plain, coupled, frame = _gauge()
    yield coupled @ np.linalg.inv(frame), plain
    transport, measure = moving(), LegS(5)
    memory = ProjectionMemory(measure, transport)

    def back(t: float) -> Array:
        return memory.project(signal, t) @ np.linalg.inv(transport.V(t))

    encoded = np.linalg.solve(transport.V(TIME).T, signal(TIME))
    yield derivative(back, TIME), measure.A(TIME) @ back(TIME) + np.outer(measure.B(TIME), encoded)


@check("app. B.5, what the equivalence does not say", "SHiPPO is not a static channel mixer", at_least=0.05)
def no_static_mixer() -> float:
    """min over Q of ||C_H Q - C_S|| / ||C_S||, nine times"""
    times = np.linspace(0.8, 2.4, 9)
    plain, coupled = (
        np.concatenate([ProjectionMemory(LegS(5), path).project(signal, t) for t in times]) for path in (None, moving())
    )
    best = np.linalg.lstsq(plain, coupled, rcond=None)[0]
    return gap(plain @ best, coupled)
