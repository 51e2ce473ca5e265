"""Checks of section 2 and appendix A: the approximation problem, its normal equation, and the dynamics of its solution.

Coefficients C are [N, d], signals [d]. The minimiser is found twice: by `ProjectionMemory.project` (normal equation)
and by least squares on a quadrature of the objective. No side of an equation is used to compute the other.
"""

import numpy as np

from shippo_lab.theory.cases import MIXED, TIME, WIDTH, Array, derivative, moving, nodes, signal, smooth_transports, transports
from shippo_lab.theory.constructions import BasisPath, MetricOnly, closure
from shippo_lab.theory.registry import Pairs, check, gap
from shippo_ssm.projection import LagT, LegS, Measure, ProjectionMemory, Transport


def _skewed_basis() -> BasisPath:
    """A moving basis with G(t) != I and G'(t) != 0; `project` then gives the right side of its normal equation."""
    first, second = np.random.default_rng(5).normal(size=(2, 5, 5)) / 10
    return BasisPath(
        5,
        LegS(5),
        lambda t: np.eye(5) + np.sin(t) * first + np.cos(2 * t) * second,
        lambda t: np.cos(t) * first - 2 * np.sin(2 * t) * second,
    )


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


def _dynamics(measure: Measure, transport: Transport | None) -> tuple[Array, Array]:
    """d/dt of `project`, and the law A_L C + B_L f^T + C A_R."""
    memory = ProjectionMemory(measure, transport)
    C = memory.project(signal, TIME)
    law = measure.A(TIME) @ C + np.outer(measure.B(TIME), signal(TIME))
    if transport is not None:
        law = law + C @ transport.generator(TIME)
    return derivative(lambda t: memory.project(signal, t), TIME), law


@check("sec. 2, closure condition", "HiPPO closure: d_t psi = A_L psi, B_L = psi(t, t), G = I", at_most=1e-8)
def hippo_closure_condition() -> float:
    """largest relative gap, LegS and LagT"""
    return max(max(closure(measure, t)) for measure in (LegS(10), LagT(10)) for t in (0.6, TIME))


@check("sec. 2, Definition", "SHiPPO online approximation problem", at_most=1e-9)
def shippo_online_approximation_problem() -> Pairs:
    """project against least squares on J_t"""
    for p in smooth_transports():
        yield ProjectionMemory(LegS(6), p).project(signal, TIME), _least_squares(LegS(6), p, TIME)


@check("sec. 2, Theorem (first part)", "Normal equation G C_S = int Phi f^T P dmu", at_most=1e-9)
def shippo_normal_equation() -> Pairs:
    """G C against int Phi f^T P dmu, with G != I"""
    basis, transport = _skewed_basis(), moving()
    moments = ProjectionMemory(basis, transport).project(signal, TIME)
    yield basis.gram(TIME) @ _least_squares(basis, transport, TIME), moments


@check("sec. 2, Theorem (second part)", "Sylvester coefficient dynamics", at_most=1e-7)
def sylvester_coefficient_dynamics() -> Pairs:
    """d/dt of project against A_L C + B_L f^T + C A_R"""
    for measure in (LegS(6), LagT(6)):
        for transport in transports():
            yield _dynamics(measure, transport)


@check("sec. 2, Corollary", "Pathwise transported lift of closed online-memory dynamics", at_most=1e-8)
def pathwise_transported_lift() -> Pairs:
    """evolve against project, A_R = phi(f(t))"""
    path = Transport(lambda t: np.tanh(signal(t)[0]) * MIXED + np.outer(signal(t), [0.3, -0.2, 0.5]), WIDTH)
    memory = ProjectionMemory(LegS(8), path)
    yield memory.evolve(signal, np.linspace(0.2, TIME, 200), keep="last"), memory.project(signal, TIME)


@check("sec. 2 and app. A, input-dependent transport", "The input-output map of a controlled path is not linear", at_least=1e-2)
def controlled_path_is_nonlinear() -> float:
    """||C(2 f) - 2 C(f)|| / ||2 C(f)||"""

    def state(scale: float) -> Array:
        path = Transport(lambda t: np.tanh(scale * signal(t)[0]) * MIXED, WIDTH)
        return ProjectionMemory(LegS(5), path).project(lambda t: scale * signal(t), TIME)

    return gap(state(2.0), 2 * state(1.0))


@check("app. A.2, Proposition", "Ordinary HiPPO normal equation", at_most=1e-9)
def ordinary_hippo_normal_equation() -> Pairs:
    """G C against int Phi f^T dmu"""
    basis = _skewed_basis()
    yield basis.gram(TIME) @ _least_squares(basis, None, TIME), ProjectionMemory(basis).project(signal, TIME)


@check("app. A.2, Proposition", "Ordinary HiPPO coefficient dynamics under closure", at_most=1e-7)
def ordinary_hippo_coefficient_dynamics() -> Pairs:
    """d/dt of project against A_L C + B_L f^T"""
    for measure in (LegS(8), LagT(8)):
        yield _dynamics(measure, None)


def _moving_gram(transport: Transport | None) -> tuple[float, float]:
    """Gap of the non-orthonormal law, with and without its term -G^{-1} G' C."""
    basis = _skewed_basis()
    memory, gram = ProjectionMemory(basis, transport), basis.gram(TIME)

    def project(t: float) -> Array:
        return np.linalg.solve(basis.gram(t), memory.project(signal, t))

    C, rate = project(TIME), derivative(project, TIME)
    without = np.linalg.solve(gram, derivative(lambda t: memory.project(signal, t), TIME))
    law = without - np.linalg.solve(gram, derivative(basis.gram, TIME) @ C)
    written = basis.left(TIME) @ C + np.outer(basis.source(TIME), signal(TIME))
    written += 0 if transport is None else C @ transport.generator(TIME)
    return max(gap(rate, law), gap(written, law)), gap(without, rate)


@check("app. A.2, non-orthonormal bases", "C_H' = G^-1 b' - G^-1 G' C_H", at_most=1e-7)
def non_orthonormal_hippo_dynamics() -> float:
    """differences of project, moments and gram"""
    return _moving_gram(None)[0]


@check("app. A.5, non-orthonormal bases", "C_S' = G^-1 b_S' - G^-1 G' C_S", at_most=1e-7)
def non_orthonormal_shippo_dynamics() -> float:
    """differences of project, moments and gram, with transport"""
    return _moving_gram(moving())[0]


@check("app. A.5, non-orthonormal bases", "The extra term -G^-1 G' C is really there", at_least=1e-2)
def non_orthonormal_extra_term() -> float:
    """gap of the law without its extra term"""
    return _moving_gram(moving())[1]


@check("app. A.3, Proposition", "SHiPPO normal equation from stationarity", at_most=1e-8)
def shippo_stationarity() -> float:
    """||grad J(C_S)|| / ||grad J(0)||"""
    memory = ProjectionMemory(LegS(4), moving())
    C = memory.project(signal, TIME)
    scale = np.linalg.norm(_gradient(memory, np.zeros_like(C), TIME))
    return float(np.linalg.norm(_gradient(memory, C, TIME)) / scale)


@check("app. A.3, Proposition (proof)", "First variation: grad J = -2 int Phi e_S^T P dmu", at_most=1e-8)
def shippo_first_variation() -> Pairs:
    """differences of J against the formula"""
    transport = moving()
    memory = ProjectionMemory(LegS(4), transport)
    C = np.random.default_rng(1).normal(size=(4, WIDTH))
    tau, weights = nodes(TIME)
    residual = np.array([signal(s) for s in tau]) - memory.reconstruct(C, TIME, tau)
    formula = -2 * (memory.measure.psi(TIME, tau) * weights[:, None]).T @ transport.carry(residual, tau, TIME)
    yield _gradient(memory, C, TIME), formula


@check("app. A.4, Proposition", "Transport isometry", at_most=1e-12)
def transport_isometry() -> Pairs:
    """<u, v>_M against <T u, T v>"""
    tau, weights = nodes(TIME)
    u = np.stack([np.sin(tau), np.cos(2 * tau), tau**2], axis=-1)
    v = np.stack([np.exp(-tau), tau, np.sin(3 * tau)], axis=-1)
    for p in transports():
        metric = np.einsum("k,ki,kij,kj->", weights, u, p.metric(TIME, tau), v)
        yield metric, np.einsum("k,ki,ki->", weights, p.carry(u, tau, TIME), p.carry(v, tau, TIME))


@check("app. A.4, Proposition", "T_t maps the transported family onto the ordinary one", at_most=1e-9)
def transport_maps_families() -> Pairs:
    """P^T times `reconstruct` against C^T Phi"""
    transport = moving()
    memory = ProjectionMemory(LegS(6), transport)
    C = np.random.default_rng(2).normal(size=(6, WIDTH))
    tau = np.linspace(0, TIME, 41)
    yield transport.carry(memory.reconstruct(C, TIME, tau), tau, TIME), memory.measure.basis(TIME, tau) @ C


@check("app. A.4, Proposition", "SHiPPO-HiPPO conjugacy: shippo_t(f) = hippo_t(T_t f)", at_most=1e-9)
def shippo_hippo_conjugacy() -> Pairs:
    """shippo(f) against hippo(T f)"""
    transport = moving()
    history = ProjectionMemory(LegS(6)).project(lambda s: transport.P(TIME, s).T @ signal(s), TIME)
    yield _least_squares(LegS(6), transport, TIME), history


def _metric_only() -> MetricOnly:
    return MetricOnly(LegS(4), Transport(MIXED, WIDTH).metric, WIDTH)


@check("app. A.6, Proposition", "Stationary condition for the metric-only extension", at_most=1e-9)
def metric_only_stationarity() -> Pairs:
    """K_M[argmin J^M] against b_M"""
    problem = _metric_only()
    metric = np.stack([problem.metric(TIME, s) for s in nodes(TIME)[0]])
    C = _least_squares(problem.measure, None, TIME, metric)
    yield np.einsum("nimj,mj->ni", problem.operator(TIME), C), problem.moments(signal, TIME)


@check("app. A.6, Proposition", "tau-independent metrics reduce to ordinary HiPPO", at_most=1e-10)
def tau_independent_reduction() -> Pairs:
    """C_M against C_H"""
    metric = MIXED @ MIXED.T + np.eye(WIDTH)
    C = MetricOnly(LegS(4), lambda t, tau: (1 + t) * metric, WIDTH).project(signal, TIME)
    yield C, ProjectionMemory(LegS(4)).project(signal, TIME)


@check("app. A.6, why tau-dependent metrics are obstructive", "K_M does not factor as C -> G C M'", at_least=0.05)
def tau_dependent_obstruction() -> float:
    """min over M' of ||K_M - G (x) M'|| / ||K_M||"""
    return _metric_only().factor_gap(TIME)


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


@check("app. A.6", "Metric-only modifications do not close", at_least=0.02)
def metric_only_does_not_close() -> float:
    """||C_M'|| of a unit signal with C_M = 0 and f(t) = 0"""
    return _blind_rate(coupled=False)


@check("app. A.6", "Coupling the metric with the family restores closure", at_most=1e-6)
def coupled_transport_closes() -> float:
    """||C_S'|| of unit signals with C_S = 0 and f(t) = 0"""
    return _blind_rate(coupled=True)
