"""Checks of section 2 and appendix A: the approximation problem, its normal equation, and the dynamics of its solution.

Coefficients C are [N, d], signals [d]. The minimiser is found twice: by `ProjectionMemory.project` (normal equation) and by
least squares on a quadrature of the objective. No side of an equation is used to compute the other.
"""

from __future__ import annotations

import numpy as np

from shippo_lab.theory.cases import MIXED, TIME, WIDTH, Array, derivative, gap, moving, nodes, signal, skewed_basis, transports
from shippo_lab.theory.closure import closure
from shippo_lab.theory.metric_only import MetricOnly
from shippo_lab.theory.registry import Finding, at_least, at_most, check
from shippo_ssm.projection import LagT, LegS, Measure, ProjectionMemory, Transport


def _least_squares(measure: Measure, transport: Transport | None, t: float, metric: Array | None = None) -> Array:
    """argmin of the objective by weighted least squares on its quadrature; the metric at the nodes is M_P by default."""
    tau, weights = nodes(t)
    phi = measure.basis(t, tau)
    values = np.array([signal(s) for s in tau])
    eye = np.broadcast_to(np.eye(WIDTH), (len(tau), WIDTH, WIDTH))
    if metric is None:
        metric = eye if transport is None else transport.metric(t, tau)
    family = eye if transport is None else np.linalg.inv(transport.P(t, tau))
    # ||e||_M^2 = ||F^T e||^2 with M = F F^T; e = f - P^{-T} C^T Phi is linear in C.
    factor = np.sqrt(weights * measure.weight(t, tau))[:, None, None] * np.swapaxes(np.linalg.cholesky(metric), -1, -2)
    design = np.einsum("kai,kji,kn->kanj", factor, family, phi).reshape(len(tau) * WIDTH, -1)
    target = np.einsum("kai,ki->ka", factor, values).ravel()
    return np.linalg.lstsq(design, target, rcond=None)[0].reshape(measure.N, WIDTH)


def _gradient(memory: ProjectionMemory, C: Array, t: float) -> Array:
    """Gradient of J_t at C by central differences, which are exact for a quadratic."""
    result = np.empty_like(C)
    for index in np.ndindex(*C.shape):
        shift = np.zeros_like(C)
        shift[index] = 1.0
        result[index] = (memory.objective(signal, C + shift, t) - memory.objective(signal, C - shift, t)) / 2
    return result


@check("sec. 2, closure condition", "HiPPO closure: d_t psi = A_L psi, B_L = psi(t, t), G = I")
def hippo_closure_condition() -> Finding:
    reports = [closure(measure, t) for measure in (LegS(10), LagT(10)) for t in (0.6, TIME)]
    worst = max(max(report.derivative, report.source, report.gram) for report in reports)
    return at_most(worst, 1e-8, "largest relative gap, LegS and LagT")


@check("sec. 2, Definition", "SHiPPO online approximation problem")
def shippo_online_approximation_problem() -> Finding:
    worst = max(
        gap(ProjectionMemory(LegS(6), transport).project(signal, TIME), _least_squares(LegS(6), transport, TIME))
        for transport in transports().values()
        if len(transport.breaks) == 0
    )
    return at_most(worst, 1e-9, "project against least squares on J_t")


@check("sec. 2, Theorem (first part)", "Normal equation G C_S = int Phi f^T P dmu")
def shippo_normal_equation() -> Finding:
    basis, transport = skewed_basis(), moving()
    minimiser = _least_squares(basis, transport, TIME)
    moments = ProjectionMemory(basis, transport).moments(signal, TIME)
    return at_most(gap(basis.gram(TIME) @ minimiser, moments), 1e-9, "G C against int Phi f^T P dmu, with G != I")


@check("sec. 2, Theorem (second part)", "Sylvester coefficient dynamics")
def sylvester_coefficient_dynamics() -> Finding:
    worst = 0.0
    for measure in (LegS(6), LagT(6)):
        for transport in transports().values():
            memory = ProjectionMemory(measure, transport)
            C = memory.project(signal, TIME)
            rate = derivative(lambda t, m=memory: m.project(signal, t), TIME)
            law = measure.A(TIME) @ C + np.outer(measure.B(TIME), signal(TIME)) + C @ transport.generator(TIME)
            worst = max(worst, gap(rate, law))
    return at_most(worst, 1e-7, "d/dt of project against A_L C + B_L f^T + C A_R")


@check("sec. 2, Corollary", "Pathwise transported lift of closed online-memory dynamics")
def pathwise_transported_lift() -> Finding:
    path = Transport(lambda t: np.tanh(signal(t)[0]) * MIXED + np.outer(signal(t), [0.3, -0.2, 0.5]), WIDTH)
    memory = ProjectionMemory(LegS(8), path)
    state = memory.evolve(signal, np.linspace(0.2, TIME, 200), keep="last")
    return at_most(gap(state, memory.project(signal, TIME)), 1e-8, "evolve against project, A_R = phi(f(t))")


@check("sec. 2 and app. A, input-dependent transport", "The input-output map of a controlled path is not linear")
def controlled_path_is_nonlinear() -> Finding:
    def state(scale: float) -> Array:
        path = Transport(lambda t: np.tanh(scale * signal(t)[0]) * MIXED, WIDTH)
        return ProjectionMemory(LegS(5), path).project(lambda t: scale * signal(t), TIME)

    return at_least(gap(state(2.0), 2 * state(1.0)), 1e-2, "||C(2 f) - 2 C(f)|| / ||2 C(f)||")


@check("app. A.2, Proposition", "Ordinary HiPPO normal equation")
def ordinary_hippo_normal_equation() -> Finding:
    basis = skewed_basis()
    moments = ProjectionMemory(basis).moments(signal, TIME)
    return at_most(gap(basis.gram(TIME) @ _least_squares(basis, None, TIME), moments), 1e-9, "G C against int Phi f^T dmu")


@check("app. A.2, Proposition", "Ordinary HiPPO coefficient dynamics under closure")
def ordinary_hippo_coefficient_dynamics() -> Finding:
    worst = 0.0
    for measure in (LegS(8), LagT(8)):
        memory = ProjectionMemory(measure)
        law = measure.A(TIME) @ memory.project(signal, TIME) + np.outer(measure.B(TIME), signal(TIME))
        worst = max(worst, gap(derivative(lambda t, m=memory: m.project(signal, t), TIME), law))
    return at_most(worst, 1e-7, "d/dt of project against A_L C + B_L f^T")


def _moving_gram(transport: Transport | None) -> tuple[float, float]:
    """Gap of the non-orthonormal law, with and without its term -G^{-1} G' C."""
    basis = skewed_basis()
    memory = ProjectionMemory(basis, transport)
    C = memory.project(signal, TIME)
    gram = basis.gram(TIME)
    rate = derivative(lambda t: memory.project(signal, t), TIME)
    without = np.linalg.solve(gram, derivative(lambda t: memory.moments(signal, t), TIME))
    law = without - np.linalg.solve(gram, derivative(basis.gram, TIME) @ C)
    written = basis.left(TIME) @ C + np.outer(basis.source(TIME), signal(TIME))
    written += 0 if transport is None else C @ transport.generator(TIME)
    return max(gap(rate, law), gap(written, law)), gap(without, rate)


@check("app. A.2, non-orthonormal bases", "C_H' = G^-1 b' - G^-1 G' C_H")
def non_orthonormal_hippo_dynamics() -> Finding:
    return at_most(_moving_gram(None)[0], 1e-7, "differences of project, moments and gram")


@check("app. A.5, non-orthonormal bases", "C_S' = G^-1 b_S' - G^-1 G' C_S")
def non_orthonormal_shippo_dynamics() -> Finding:
    return at_most(_moving_gram(moving())[0], 1e-7, "differences of project, moments and gram, with transport")


@check("app. A.5, non-orthonormal bases", "The extra term -G^-1 G' C is really there")
def non_orthonormal_extra_term() -> Finding:
    return at_least(_moving_gram(moving())[1], 1e-2, "gap of the law without its extra term")


@check("app. A.3, Proposition", "SHiPPO normal equation from stationarity")
def shippo_stationarity() -> Finding:
    memory = ProjectionMemory(LegS(4), moving())
    C = memory.project(signal, TIME)
    scale = np.linalg.norm(_gradient(memory, np.zeros_like(C), TIME))
    return at_most(float(np.linalg.norm(_gradient(memory, C, TIME)) / scale), 1e-8, "||grad J(C_S)|| / ||grad J(0)||")


@check("app. A.3, Proposition (proof)", "First variation: grad J = -2 int Phi e_S^T P dmu")
def shippo_first_variation() -> Finding:
    transport = moving()
    memory = ProjectionMemory(LegS(4), transport)
    C = np.random.default_rng(1).normal(size=(4, WIDTH))
    tau, weights = nodes(TIME)
    residual = np.array([signal(s) for s in tau]) - memory.reconstruct(C, TIME, tau)
    formula = -2 * (memory.measure.psi(TIME, tau) * weights[:, None]).T @ transport.carry(residual, tau, TIME)
    return at_most(gap(_gradient(memory, C, TIME), formula), 1e-8, "differences of J against the formula")


def _fields(tau: Array) -> tuple[Array, Array]:
    u = np.stack([np.sin(tau), np.cos(2 * tau), tau**2], axis=-1)
    v = np.stack([np.exp(-tau), tau, np.sin(3 * tau)], axis=-1)
    return u, v


@check("app. A.4, Proposition", "Transport isometry")
def transport_isometry() -> Finding:
    tau, weights = nodes(TIME)
    u, v = _fields(tau)
    worst = 0.0
    for transport in transports().values():
        metric = np.einsum("k,ki,kij,kj->", weights, u, transport.metric(TIME, tau), v)
        plain = np.einsum("k,ki,ki->", weights, transport.carry(u, tau, TIME), transport.carry(v, tau, TIME))
        worst = max(worst, abs(metric - plain) / abs(plain))
    return at_most(worst, 1e-12, "<u, v>_M against <T u, T v>")


@check("app. A.4, Proposition", "T_t maps the transported family onto the ordinary one")
def transport_maps_families() -> Finding:
    transport = moving()
    memory = ProjectionMemory(LegS(6), transport)
    C = np.random.default_rng(2).normal(size=(6, WIDTH))
    tau = np.linspace(0, TIME, 41)
    carried = transport.carry(memory.reconstruct(C, TIME, tau), tau, TIME)
    return at_most(gap(carried, memory.measure.basis(TIME, tau) @ C), 1e-9, "P^T times `reconstruct` against C^T Phi")


@check("app. A.4, Proposition", "SHiPPO-HiPPO conjugacy: shippo_t(f) = hippo_t(T_t f)")
def shippo_hippo_conjugacy() -> Finding:
    transport = moving()
    history = ProjectionMemory(LegS(6)).project(lambda s: transport.P(TIME, s).T @ signal(s), TIME)
    return at_most(gap(_least_squares(LegS(6), transport, TIME), history), 1e-9, "shippo(f) against hippo(T f)")


def _metric_only() -> MetricOnly:
    return MetricOnly(LegS(4), Transport(MIXED, WIDTH).metric, WIDTH)


@check("app. A.6, Proposition", "Stationary condition for the metric-only extension")
def metric_only_stationarity() -> Finding:
    problem = _metric_only()
    metric = np.stack([problem.metric(TIME, s) for s in nodes(TIME)[0]])
    C = _least_squares(problem.measure, None, TIME, metric)
    image = np.einsum("nimj,mj->ni", problem.operator(TIME), C)
    return at_most(gap(image, problem.moments(signal, TIME)), 1e-9, "K_M[argmin J^M] against b_M")


@check("app. A.6, Proposition", "tau-independent metrics reduce to ordinary HiPPO")
def tau_independent_reduction() -> Finding:
    metric = MIXED @ MIXED.T + np.eye(WIDTH)
    C = MetricOnly(LegS(4), lambda t, tau: (1 + t) * metric, WIDTH).project(signal, TIME)
    return at_most(gap(C, ProjectionMemory(LegS(4)).project(signal, TIME)), 1e-10, "C_M against C_H")


@check("app. A.6, why tau-dependent metrics are obstructive", "K_M does not factor as C -> G C M'")
def tau_dependent_obstruction() -> Finding:
    return at_least(_metric_only().factor_gap(TIME), 0.05, "min over M' of ||K_M - G (x) M'|| / ||K_M||")


def _blind_rate(coupled: bool) -> float:
    """Largest ||C'(t)|| over unit signals g with C(t) = 0 and g(t) = 0; a closed law C' = F(t, C, f(t)) makes it zero.

    Signals are polynomials of degree < 5 in two channels; b(t) = int Phi g^T X dmu, X = P or M_P, is a matrix on them.
    """
    width, measure, wide = 2, LegS(3), LegS(5)
    shear = Transport(np.array([[0.0, 1.0], [0.0, 0.3]]), width)

    def moments(t: float) -> Array:
        tau, weights = nodes(t, 24)
        carried = shear.P(t, tau) if coupled else shear.metric(t, tau)
        columns = np.einsum("k,kn,km,kji->nimj", weights, measure.psi(t, tau), wide._phi(TIME, tau), carried)
        return columns.reshape(measure.N * width, wide.N * width)

    ends = np.kron(wide._phi(TIME, np.asarray(TIME)), np.eye(width))
    seen = np.concatenate([moments(TIME), ends])
    invisible = np.linalg.svd(seen)[2][len(seen) :].T
    # C = K^{-1} b, and b = 0 here, so C' = K^{-1} b'.
    size = measure.N * width
    operator = np.eye(size) if coupled else MetricOnly(measure, shear.metric, width).operator(TIME).reshape(size, size)
    return float(np.linalg.norm(np.linalg.solve(operator, derivative(moments, TIME) @ invisible), 2))


@check("app. A.6", "Metric-only modifications do not close")
def metric_only_does_not_close() -> Finding:
    return at_least(_blind_rate(coupled=False), 0.02, "||C_M'|| of a unit signal with C_M = 0 and f(t) = 0")


@check("app. A.6", "Coupling the metric with the family restores closure")
def coupled_transport_closes() -> Finding:
    return at_most(_blind_rate(coupled=True), 1e-6, "||C_S'|| of unit signals with C_S = 0 and f(t) = 0")
