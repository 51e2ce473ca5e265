"""Checks of section 3.4 and appendices C.4 to C.7: closed-form factors, split products, and the two-point exponential cell.

One step of H' = Diag(a) H + U(tau) + H A over [0, Delta], with H [N, P], is H* = L H R + int_0^Delta G(s) ds with G(s)
= exp((Delta - s) a) U(s) exp((Delta - s) A); the cell replaces the integral by (1 - lambda) Delta G(0) + lambda Delta
G(Delta).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm

import shippo_ssm.actions as actions
from shippo_lab.theory.cases import Array, nodes, slope
from shippo_lab.theory.registry import Pairs, check
from shippo_ssm.layers import CellState, shippo_cell
from shippo_ssm.projection import Transport

NUM, WIDTH = 4, 3
STEPS = 2.0 ** -np.arange(3, 9)
COEFFICIENTS = [-1.3, -1e-9, 0.0, 1e-6, 0.4, 2.0]


def _factor(factor: actions.Factor) -> Pairs:
    """`dense`, `act` and `inverse` against the exponential of the generator."""
    generator = factor.generator.double().numpy()
    state = np.random.default_rng(0).normal(size=(NUM, factor.width))
    for coefficient in COEFFICIENTS:
        coef = torch.tensor(coefficient, dtype=torch.float64)
        reference = expm(coefficient * generator)
        yield factor.dense(coef), reference
        yield factor.act(torch.from_numpy(state), coef), state @ reference
        yield factor.inverse(coef).numpy() @ reference, np.eye(factor.width)


@check("app. C.4, Proposition (1)", "Diagonal scalings: exp(D) = Diag(exp(delta)), inverse exp(-D)", at_most=1e-13)
def diagonal_scalings() -> Pairs:
    """act, dense, inverse"""
    for i in range(4):
        yield from _factor(actions.Diagonal(4, i))


@check("app. C.4, Proposition (2)", "Two-plane rotations act on two columns, inverse is the transpose", at_most=1e-13)
def two_plane_rotations() -> Pairs:
    """act, dense, inverse, transpose"""
    angle = torch.tensor(0.9, dtype=torch.float64)
    for i, j in ((0, 1), (0, 3), (2, 3)):
        factor = actions.Rotation(4, i, j)
        omega = np.zeros((4, 4))
        omega[j, i], omega[i, j] = 1.0, -1.0
        yield from _factor(factor)
        yield factor.dense(angle), expm(0.9 * omega)
        yield factor.inverse(angle), factor.dense(angle).mT


@check("app. C.4, Proposition (3)", "Nilpotent shears: exp(eta N) = I + eta N, inverse I - eta N", at_most=1e-13)
def nilpotent_shears() -> Pairs:
    """act, dense, inverse"""
    eta = torch.tensor(0.9, dtype=torch.float64)
    for i, j in ((0, 1), (3, 0), (2, 3)):
        factor = actions.Shear(4, i, j)
        nilpotent = np.outer(np.eye(4)[i], np.eye(4)[j])
        yield from _factor(factor)
        yield factor.dense(eta), np.eye(4) + 0.9 * nilpotent
        yield factor.inverse(eta), np.eye(4) - 0.9 * nilpotent


@check("app. C.4, Proposition (4)", "Rank-one exponentials: I + phi(s v^T u) s u v^T", at_most=1e-12)
def rank_one_exponentials() -> Pairs:
    """act, dense, inverse, with v^T u generic, 0 and near 0"""
    u, v = np.random.default_rng(1).normal(size=(2, 4))
    across = v - (v @ u) / (u @ u) * u
    for other in (v, across, across + 1e-9 * u):
        yield from _factor(actions.RankOne(torch.from_numpy(u), torch.from_numpy(other)))


def _split_errors() -> tuple[Array, float, int]:
    """||split - dense|| at STEPS for one set of coordinates, the largest ||A_k|| and the number of factors K."""
    flow = actions.SplitFlow(4)
    coords = torch.randn(flow.num_coordinates, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    dense = flow.generator(coords).numpy()
    errors = np.array([np.linalg.norm(flow.dense(coords, float(step)).numpy() - expm(step * dense), 2) for step in STEPS])
    # The generators of all 16 factors have unit norm, so the largest weight is the largest ||A_k||.
    size = float(torch.cat([torch.nn.functional.softplus(coords[:4]), coords[4:].abs()]).max())
    return errors, size, flow.num_coordinates


@check("app. C.5, Lemma", "First-order Lie-Trotter local error: order 2", at_most=0.1)
def lie_trotter_local_order() -> float:
    """|measured slope - 2|, 16 factors"""
    return abs(slope(STEPS[2:], _split_errors()[0][2:]) - 2)


@check("app. C.5, Lemma", "First-order Lie-Trotter local error: a constant of K and M", at_most=1.0)
def lie_trotter_constant() -> float:
    """largest error / ((K M)^2 e^(K M Delta) Delta^2)"""
    errors, size, count = _split_errors()
    return np.max(errors / ((count * size) ** 2 * np.exp(count * size * STEPS) * STEPS**2))


# The frozen step: drift a [N], generator A [P, P], memory H [N, P], and a rank-one source b(s) x(s)^T.
_RNG = np.random.default_rng(4)
DRIFT = -_RNG.uniform(0.3, 1.5, NUM)
GENERATOR = 0.8 * _RNG.normal(size=(WIDTH, WIDTH))
MEMORY = _RNG.normal(size=(NUM, WIDTH))


def _write(s: Any, order: int = 0) -> Array:
    """b(s) [.., N] and its derivatives."""
    speed, phase = np.arange(1, NUM + 1) * 0.7, np.arange(NUM)
    return speed**order * np.sin(speed * np.asarray(s)[..., None] + phase + order * np.pi / 2)


def _value(s: Any, order: int = 0) -> Array:
    """x(s) [.., P] and its derivatives."""
    speed, phase = 1.1 + 0.3 * np.arange(WIDTH), 0.4 * np.arange(WIDTH)
    return speed**order * np.cos(speed * np.asarray(s)[..., None] + phase + order * np.pi / 2)


def _source(s: Any, order: int = 0) -> Array:
    """U(s) = b(s) x(s)^T [.., N, P] and its first two derivatives, by the product rule."""
    pairs = {0: [(1, 0, 0)], 1: [(1, 1, 0), (1, 0, 1)], 2: [(1, 2, 0), (2, 1, 1), (1, 0, 2)]}[order]
    terms = (c * _write(s, i)[..., :, None] * _value(s, j)[..., None, :] for c, i, j in pairs)
    return sum(terms, start=np.zeros(()))


def _right(step: float, s: Any = 0.0) -> Array:
    """exp((step - s) A) [.., P, P]."""
    return Transport(GENERATOR, WIDTH).P(step, s)


def _split_right(step: float) -> Array:
    """A first-order split of exp(step A): its symmetric part, then its skew part."""
    symmetric, skew = (GENERATOR + sign * GENERATOR.T for sign in (1, -1))
    return Transport(symmetric / 2, WIDTH).P(step, 0.0) @ Transport(skew / 2, WIDTH).P(step, 0.0)


def _integrand(s: Any, step: float, order: int = 0) -> Array:
    """G(s) [.., N, P] and its first two derivatives: each turns U into U' - a U - U A under the two exponentials."""
    drift = DRIFT[:, None]
    u = _source(s)
    if order == 1:
        u = _source(s, 1) - drift * u - u @ GENERATOR
    elif order == 2:
        rate = _source(s, 1)
        u = _source(s, 2) - 2 * (drift * rate + rate @ GENERATOR) + drift**2 * u + 2 * drift * (u @ GENERATOR)
        u = u + _source(s) @ GENERATOR @ GENERATOR
    return np.exp((step - np.asarray(s))[..., None, None] * drift) * (u @ _right(step, s))


def _moved(step: float) -> Array:
    """L H R."""
    return np.exp(step * DRIFT)[:, None] * (MEMORY @ _right(step))


def _exact(step: float) -> Array:
    """H* by variation of constants, the integral by Gauss points."""
    s, w = nodes(step, 14)
    return _moved(step) + np.einsum("k,knp->np", w, _integrand(s, step))


def _cell(step: float, mix: float, right: Array | None = None) -> Array:
    """H_t by `shippo_cell`, continued from (H, b(0), x(0)); the dense action unless `right` is given."""

    def tensor(array: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))[None, None]

    write, one = tensor(_write(step))[None], torch.ones(1, 1, 1, dtype=torch.float64)
    _, state = shippo_cell(
        tensor(_value(step))[None], write, torch.ones_like(write), step * one, mix * one, tensor(DRIFT)[0],
        tensor(_right(step) if right is None else right)[None],
        initial_state=CellState(tensor(MEMORY), tensor(_write(0.0)), tensor(_value(0.0))),
        output_final_state=True, backend="reference",
    )  # fmt: skip
    assert state is not None
    return state.memory[0, 0].numpy()


@check("app. C.6, Theorem (proof)", "Variation of constants for the two-sided frozen step", at_most=1e-9)
def frozen_step_duhamel() -> Pairs:
    """ODE solver against Duhamel's formula"""
    step = 0.7

    def rate(s: float, flat: Array) -> Array:
        state = flat.reshape(NUM, WIDTH)
        return (DRIFT[:, None] * state + _source(s) + state @ GENERATOR).ravel()

    solved = solve_ivp(rate, (0, step), MEMORY.ravel(), method="DOP853", rtol=1e-12, atol=1e-13)
    yield solved.y[:, -1].reshape(NUM, WIDTH), _exact(step)


@check("sec. 3.4, Theorem", "Exponential-adjusted cell: two-point exponential source quadrature", at_most=1e-13)
def exponential_adjusted_cell() -> Pairs:
    """shippo_cell against the quadrature of the Duhamel integral"""
    for step in (0.1, 0.7):
        for mix in (0.0, 0.3, 1.0):
            rule = step * ((1 - mix) * _integrand(0.0, step) + mix * _integrand(step, step))
            yield _cell(step, mix), _moved(step) + rule


def _sequence(width: int, flow: actions.SplitFlow | None = None) -> dict[str, torch.Tensor]:
    """Random operands of seven tokens; with right actions of `flow` if there is one."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    value, write, read = (draw(1, 7, 1, size) for size in (width, NUM, NUM))
    step, mix, drift = draw(1, 7, 1).abs() + 0.05, draw(1, 7, 1).sigmoid(), -draw(1, NUM).abs()
    case = {"value": value, "write": write, "read": read, "step": step, "mix": mix, "drift": drift}
    return case if flow is None else case | {"right": flow.dense(draw(1, 7, 1, flow.num_coordinates), step)}


def _output(case: dict[str, Any], backend: str = "reference") -> torch.Tensor:
    return shippo_cell(**case, backend=backend)[0][0, :, 0]


def _equation(case: dict[str, torch.Tensor]) -> Array:
    """y of the cell, written out: H_t = L H R + (1 - lambda) Delta L U_{t-1} R + lambda Delta U_t with U_0 = 0."""
    value, write, read, step, mix = (case[name][0, :, 0].numpy() for name in ("value", "write", "read", "step", "mix"))
    drift, (length, width) = case["drift"][0].numpy(), value.shape
    right = case["right"][0, :, 0].numpy() if "right" in case else [np.eye(width)] * length
    state = before = np.zeros((NUM, width))
    outputs = []
    for t in range(length):
        left = np.exp(step[t] * drift)[:, None]
        update = np.outer(write[t], value[t])
        source = (1 - mix[t]) * step[t] * left * before @ right[t] + mix[t] * step[t] * update
        state = left * state @ right[t] + source
        before = update
        outputs.append(read[t] @ state)
    return np.stack(outputs)


@check("sec. 3.4, Theorem (split backend)", "A split action: the same formula is the exact discrete recurrence", at_most=1e-11)
def split_backend_recurrence() -> Pairs:
    """shippo_cell against the written recurrence, seven tokens"""
    case = _sequence(WIDTH, actions.SplitFlow(WIDTH))
    reference = _equation(case)
    for backend in ("reference", "associative", "chunked"):
        yield _output(case, backend), reference


@check("sec. 3.4, Theorem (A_R = 0)", "Reduction to the one-sided diagonal-left selective update", at_most=1e-13)
def reduction_without_right_action() -> Pairs:
    """R against I, and the cell against the one-sided update"""
    case = _sequence(WIDTH)
    reference = _equation(case)
    yield _output(case), reference
    flow, dense = actions.SplitFlow(WIDTH, diagonal=False), actions.DenseExp(WIDTH)
    for family, size in ((flow, flow.num_coordinates), (dense, WIDTH**2)):
        right = family.dense(torch.zeros(1, 7, 1, size, dtype=torch.float64), case["step"])
        yield right, np.broadcast_to(np.eye(WIDTH), right.shape)
        yield _output(case | {"right": right}), reference


@check("sec. 3.4, Theorem (P = 1, lambda = 1)", "Reduction to the one-channel exponential-Euler update", at_most=1e-13)
def reduction_to_one_channel() -> Pairs:
    """shippo_cell against the scalar recurrence"""
    case = _sequence(1)
    case["mix"] = torch.ones_like(case["mix"])
    state, outputs = np.zeros(NUM), []
    for t in range(7):
        step = case["step"][0, t, 0].item()
        decay = np.exp(step * case["drift"][0].numpy())
        state = decay * state + step * case["write"][0, t, 0].numpy() * case["value"][0, t, 0, 0].item()
        outputs.append(case["read"][0, t, 0].numpy() @ state)
    yield _output(case)[:, 0], np.array(outputs)


def _errors(state_at: Callable[[float], Array]) -> Array:
    """||state - H*|| of one step, at STEPS."""
    return np.array([np.linalg.norm(state_at(step) - _exact(step)) for step in STEPS])


def _order(errors: Array) -> float:
    return slope(STEPS[1:], errors[1:])


def _suprema() -> tuple[Array, Array]:
    """sup ||G'|| and sup ||G''|| over a step, at STEPS."""

    def largest(step: float, order: int) -> float:
        return np.linalg.norm(_integrand(np.linspace(0, step, 65), step, order), axis=(1, 2)).max()

    first, second = (np.array([largest(step, order) for step in STEPS]) for order in (1, 2))
    return first, second


def _check_truncation(
    part: int, key: str, which: str, mix: Callable[[float], float], order: int, formula: str, bound: Callable[..., Array]
) -> None:
    """Register the order and the constant of one part of the corollary, for the source weight lambda = mix(Delta)."""
    place, title, name = f"app. C.7, Corollary ({part})", f"Local truncation for {which}", f"local_truncation_{key}"
    measured = f"|measured slope - {order}|", f"largest error / ({formula})"

    @check(place, f"{title}: order {order}", at_most=0.1, name=f"{name}_order", measured=measured[0])
    def _order_of_errors() -> float:
        return abs(_order(_errors(lambda step: _cell(step, mix(step)))) - order)

    @check(place, f"{title}: constant", at_most=1.0, name=f"{name}_constant", measured=measured[1])
    def _constant() -> float:
        return np.max(_errors(lambda step: _cell(step, mix(step))) / bound(*_suprema()))


_check_truncation(
    1, "any_mix", "any lambda", lambda step: 0.2, 2, "Delta^2 / 2 sup ||G'||", lambda first, second: STEPS**2 / 2 * first
)
_check_truncation(
    2, "half", "lambda = 1/2", lambda step: 0.5, 3, "Delta^3 / 12 sup ||G''||", lambda first, second: STEPS**3 / 12 * second
)
# The weight stays within c Delta of one half, with c = 1.
_check_truncation(
    3, "near_half", "lambda = 1/2 + O(Delta)", lambda step: 0.5 + step, 3, "Delta^3 (sup ||G''|| / 12 + c sup ||G'||)",
    lambda first, second: STEPS**3 * (second / 12 + first),
)  # fmt: skip


@check("app. C.7, Remark", "Split-backend replacement error: identity", at_most=1e-11)
def split_replacement_identity() -> Pairs:
    """difference of two cells against the formula"""
    mix = 0.3
    for step in (0.1, 0.5):
        split = _split_right(step)
        carried = MEMORY + (1 - mix) * step * _source(0.0)
        formula = np.exp(step * DRIFT)[:, None] * carried @ (split - _right(step))
        yield _cell(step, mix, split) - _cell(step, mix), formula


@check("app. C.7, Remark", "Split-backend replacement error: bound", at_most=1.0)
def split_replacement_bound() -> float:
    """largest error / bound"""
    mix = 0.5
    ratios = []
    for step in STEPS:
        split, dense = _split_right(step), _right(step)
        exact = _exact(step)
        size = np.linalg.norm(MEMORY) + (1 - mix) * step * np.linalg.norm(_source(0.0))
        bound = np.exp(step * DRIFT).max() * size * np.linalg.norm(split - dense, 2)
        bound += np.linalg.norm(_cell(step, mix) - exact)
        ratios.append(np.linalg.norm(_cell(step, mix, split) - exact) / bound)
    return max(ratios)


@check("app. C.7, Remark", "With a split action the full one-step discrepancy is of order 2", at_most=0.1)
def split_backend_order() -> float:
    """|measured slope - 2| at lambda = 1/2"""
    return abs(_order(_errors(lambda step: _cell(step, 0.5, _split_right(step)))) - 2)


@check("app. C.6, boundary source", "U_0 = 0 stands for U(0) = 0: with another U(0) the first step is of order 1", at_most=0.1)
def boundary_source() -> float:
    """|measured slope - 1|: the order falls from 3 to 1"""
    mix = 0.5
    errors = _errors(lambda step: _cell(step, mix) - (1 - mix) * step * _integrand(0.0, step))
    return abs(_order(errors) - 1)
