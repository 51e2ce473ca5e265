"""Checks of section 3.4 and appendices C.4 to C.7: closed-form factors, split products, and the two-point exponential cell.

One step of the frozen dynamics H' = Diag(a) H + U(tau) + H A over [0, Delta], with H [N, P]. Its exact solution is
H* = L H R + int_0^Delta G(s) ds with G(s) = exp((Delta - s) a) U(s) exp((Delta - s) A); the cell replaces the integral by
(1 - lambda) Delta G(0) + lambda Delta G(Delta).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm

import shippo_ssm.actions as actions
from shippo_lab.theory.cases import Array, gap, gaps, nodes, slope
from shippo_lab.theory.registry import Finding, at_most, check
from shippo_ssm.layers import CellState, shippo_cell
from shippo_ssm.projection import Transport

NUM, WIDTH = 4, 3
STEPS = 2.0 ** -np.arange(3, 9)
MIXES: dict[str, Callable[[float], float]] = {
    "any": lambda step: 0.2,
    "half": lambda step: 0.5,
    "near half": lambda step: 0.5 + step,
}
"""Source weights lambda(Delta) of the three statements; the last one stays within c Delta of one half, with c = 1."""


def _factor_gap(factor: actions.Factor, coefficients: list[float]) -> float:
    """Largest gap of `dense`, `act` and `inverse` from the exponential of the generator."""
    generator = factor.generator.double().numpy()
    state = np.random.default_rng(0).normal(size=(NUM, factor.width))
    worst = 0.0
    for coefficient in coefficients:
        coef = torch.tensor(coefficient, dtype=torch.float64)
        reference = expm(coefficient * generator)
        acted, inverse = factor.act(torch.from_numpy(state), coef), factor.inverse(coef).numpy()
        pairs = (factor.dense(coef), reference), (acted, state @ reference), (inverse @ reference, np.eye(factor.width))
        worst = max(worst, gaps(*pairs))
    return worst


COEFFICIENTS = [-1.3, -1e-9, 0.0, 1e-6, 0.4, 2.0]


@check("app. C.4, Proposition (1)", "Diagonal scalings: exp(D) = Diag(exp(delta)), inverse exp(-D)")
def diagonal_scalings() -> Finding:
    return at_most(max(_factor_gap(actions.Diagonal(4, i), COEFFICIENTS) for i in range(4)), 1e-13, "act, dense, inverse")


@check("app. C.4, Proposition (2)", "Two-plane rotations act on two columns, inverse is the transpose")
def two_plane_rotations() -> Finding:
    worst = 0.0
    for i, j in ((0, 1), (0, 3), (2, 3)):
        factor = actions.Rotation(4, i, j)
        omega = np.zeros((4, 4))
        omega[j, i], omega[i, j] = 1.0, -1.0
        angle = torch.tensor(0.9, dtype=torch.float64)
        pairs = (factor.dense(angle), expm(0.9 * omega)), (factor.inverse(angle), factor.dense(angle).mT)
        worst = max(worst, _factor_gap(factor, COEFFICIENTS), gaps(*pairs))
    return at_most(worst, 1e-13, "act, dense, inverse, transpose")


@check("app. C.4, Proposition (3)", "Nilpotent shears: exp(eta N) = I + eta N, inverse I - eta N")
def nilpotent_shears() -> Finding:
    worst = 0.0
    for i, j in ((0, 1), (3, 0), (2, 3)):
        factor = actions.Shear(4, i, j)
        nilpotent = np.outer(np.eye(4)[i], np.eye(4)[j])
        eta = torch.tensor(0.9, dtype=torch.float64)
        pairs = (factor.dense(eta), np.eye(4) + 0.9 * nilpotent), (factor.inverse(eta), np.eye(4) - 0.9 * nilpotent)
        worst = max(worst, _factor_gap(factor, COEFFICIENTS), gaps(*pairs))
    return at_most(worst, 1e-13, "act, dense, inverse")


@check("app. C.4, Proposition (4)", "Rank-one exponentials: I + phi(s v^T u) s u v^T")
def rank_one_exponentials() -> Finding:
    rng = np.random.default_rng(1)
    u, v = rng.normal(size=(2, 4))
    across = v - (v @ u) / (u @ u) * u
    pairs = [(u, v), (u, across), (u, across + 1e-9 * u)]
    worst = max(_factor_gap(actions.RankOne(torch.from_numpy(a), torch.from_numpy(b)), COEFFICIENTS) for a, b in pairs)
    return at_most(worst, 1e-12, "act, dense, inverse, with v^T u generic, 0 and near 0")


def _split_errors() -> tuple[Array, float, int]:
    """||split - dense|| at STEPS for one set of coordinates, the largest ||A_k|| and the number of factors K."""
    flow = actions.SplitFlow(4)
    coords = torch.randn(flow.num_coordinates, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    dense = flow.generator(coords).numpy()
    errors = np.array([np.linalg.norm(flow.dense(coords, float(step)).numpy() - expm(step * dense), 2) for step in STEPS])
    # The generators of all 16 factors have unit norm, so the largest weight is the largest ||A_k||.
    size = float(torch.cat([torch.nn.functional.softplus(coords[:4]), coords[4:].abs()]).max())
    return errors, size, flow.num_coordinates


@check("app. C.5, Lemma", "First-order Lie-Trotter local error: order 2")
def lie_trotter_local_order() -> Finding:
    return at_most(abs(slope(STEPS[2:], _split_errors()[0][2:]) - 2), 0.1, "|measured slope - 2|, 16 factors")


@check("app. C.5, Lemma", "First-order Lie-Trotter local error: a constant of K and M")
def lie_trotter_constant() -> Finding:
    errors, size, count = _split_errors()
    bound = (count * size) ** 2 * np.exp(count * size * STEPS) * STEPS**2
    return at_most(float(np.max(errors / bound)), 1.0, "largest error / ((K M)^2 e^(K M Delta) Delta^2)")


@dataclass(frozen=True)
class _Frozen:
    """One frozen step: drift a [N], generator A [P, P], memory H [N, P] and a rank-one source b(s) x(s)^T."""

    drift: Array
    generator: Array
    memory: Array

    def write(self, s: Any, order: int = 0) -> Array:
        """b(s) [.., N] and its derivatives."""
        speed, phase = np.arange(1, NUM + 1) * 0.7, np.arange(NUM)
        return speed**order * np.sin(speed * np.asarray(s)[..., None] + phase + order * np.pi / 2)

    def value(self, s: Any, order: int = 0) -> Array:
        """x(s) [.., P] and its derivatives."""
        speed, phase = 1.1 + 0.3 * np.arange(WIDTH), 0.4 * np.arange(WIDTH)
        return speed**order * np.cos(speed * np.asarray(s)[..., None] + phase + order * np.pi / 2)

    def source(self, s: Any, order: int = 0) -> Array:
        """U(s) = b(s) x(s)^T [.., N, P] and its first two derivatives, by the product rule."""
        pairs = {0: [(1, 0, 0)], 1: [(1, 1, 0), (1, 0, 1)], 2: [(1, 2, 0), (2, 1, 1), (1, 0, 2)]}[order]
        terms = (c * self.write(s, i)[..., :, None] * self.value(s, j)[..., None, :] for c, i, j in pairs)
        return sum(terms, start=np.zeros(()))

    def right(self, step: float, s: Any = 0.0) -> Array:
        """exp((step - s) A) [.., P, P]."""
        return Transport(self.generator, WIDTH).P(step, s)

    def integrand(self, s: Any, step: float, order: int = 0) -> Array:
        """G(s) [.., N, P] and its first two derivatives: each turns U into U' - a U - U A under the two exponentials."""
        drift, generator = self.drift[:, None], self.generator
        u = self.source(s)
        if order == 1:
            u = self.source(s, 1) - drift * u - u @ generator
        elif order == 2:
            rate = self.source(s, 1)
            u = self.source(s, 2) - 2 * (drift * rate + rate @ generator) + drift**2 * u + 2 * drift * (u @ generator)
            u = u + self.source(s) @ generator @ generator
        return np.exp((step - np.asarray(s))[..., None, None] * drift) * (u @ self.right(step, s))

    def largest(self, step: float, order: int) -> float:
        """sup of ||G^(order)|| over [0, step], on a grid."""
        return float(np.linalg.norm(self.integrand(np.linspace(0, step, 65), step, order), axis=(1, 2)).max())

    def moved(self, step: float) -> Array:
        """L H R."""
        return np.exp(step * self.drift)[:, None] * (self.memory @ self.right(step))

    def exact(self, step: float) -> Array:
        """H* by variation of constants, the integral by Gauss points."""
        s, w = nodes(step, 14)
        return self.moved(step) + np.einsum("k,knp->np", w, self.integrand(s, step))

    def cell(self, step: float, mix: float, right: Array | None = None) -> Array:
        """H_t by `shippo_cell`, continued from (H, b(0), x(0)); the dense action unless `right` is given."""
        right = self.right(step) if right is None else right

        def tensor(array: Array, *shape: int) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).reshape(*shape)

        before = CellState(
            tensor(self.memory, 1, 1, NUM, WIDTH), tensor(self.write(0.0), 1, 1, NUM), tensor(self.value(0.0), 1, 1, WIDTH)
        )
        write = tensor(self.write(step), 1, 1, 1, NUM)
        _, state = shippo_cell(
            tensor(self.value(step), 1, 1, 1, WIDTH), write, torch.ones_like(write),
            torch.full((1, 1, 1), step, dtype=torch.float64), torch.full((1, 1, 1), mix, dtype=torch.float64),
            tensor(self.drift, 1, NUM), tensor(right, 1, 1, 1, WIDTH, WIDTH),
            initial_state=before, output_final_state=True, backend="reference",
        )  # fmt: skip
        assert state is not None
        return state.memory[0, 0].numpy()


def _frozen() -> _Frozen:
    rng = np.random.default_rng(4)
    return _Frozen(-rng.uniform(0.3, 1.5, NUM), 0.8 * rng.normal(size=(WIDTH, WIDTH)), rng.normal(size=(NUM, WIDTH)))


@check("app. C.6, Theorem (proof)", "Variation of constants for the two-sided frozen step")
def frozen_step_duhamel() -> Finding:
    frozen, step = _frozen(), 0.7

    def rate(s: float, flat: Array) -> Array:
        state = flat.reshape(NUM, WIDTH)
        return (frozen.drift[:, None] * state + frozen.source(s) + state @ frozen.generator).ravel()

    solved = solve_ivp(rate, (0, step), frozen.memory.ravel(), method="DOP853", rtol=1e-12, atol=1e-13)
    return at_most(gap(solved.y[:, -1].reshape(NUM, WIDTH), frozen.exact(step)), 1e-9, "ODE solver against Duhamel's formula")


@check("sec. 3.4, Theorem", "Exponential-adjusted cell: two-point exponential source quadrature")
def exponential_adjusted_cell() -> Finding:
    frozen = _frozen()
    worst = 0.0
    for step in (0.1, 0.7):
        for mix in (0.0, 0.3, 1.0):
            rule = step * ((1 - mix) * frozen.integrand(0.0, step) + mix * frozen.integrand(step, step))
            worst = max(worst, gap(frozen.cell(step, mix), frozen.moved(step) + rule))
    return at_most(worst, 1e-13, "shippo_cell against the quadrature of the Duhamel integral")


def _sequence(width: int, right: bool, seed: int = 6) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    length = 7
    tensors = {
        "value": draw(1, length, 1, width), "write": draw(1, length, 1, NUM), "read": draw(1, length, 1, NUM),
        "step": draw(1, length, 1).abs() + 0.05, "mix": draw(1, length, 1).sigmoid(), "drift": -draw(1, NUM).abs(),
    }  # fmt: skip
    if right:
        coords = draw(1, length, 1, actions.SplitFlow(width).num_coordinates)
        tensors["right"] = actions.SplitFlow(width).dense(coords, tensors["step"])
    return tensors


def _equation(case: dict[str, Any]) -> Array:
    """y of the cell, written out: H_t = L H R + (1 - lambda) Delta L U_{t-1} R + lambda Delta U_t with U_0 = 0."""
    value, write, read, step, mix = (case[name][0, :, 0].numpy() for name in ("value", "write", "read", "step", "mix"))
    drift = case["drift"][0].numpy()
    length, width = value.shape
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


@check("sec. 3.4, Theorem (split backend)", "With a split action the same formula is the exact discrete recurrence")
def split_backend_recurrence() -> Finding:
    case = _sequence(WIDTH, right=True)
    reference = _equation(case)
    worst = max(
        gap(shippo_cell(**case, backend=backend)[0][0, :, 0], reference) for backend in ("reference", "associative", "chunked")
    )
    return at_most(worst, 1e-11, "shippo_cell against the written recurrence, seven tokens")


@check("sec. 3.4, Theorem (A_R = 0)", "Reduction to the one-sided diagonal-left selective update")
def reduction_without_right_action() -> Finding:
    case = _sequence(WIDTH, right=False)
    flow = actions.SplitFlow(WIDTH, diagonal=False)
    zero = torch.zeros(1, 7, 1, flow.num_coordinates, dtype=torch.float64)
    dense = actions.DenseExp(WIDTH).dense(torch.zeros(1, 7, 1, WIDTH**2, dtype=torch.float64), case["step"])
    reference = _equation(case)
    worst = gap(shippo_cell(**case, backend="reference")[0][0, :, 0], reference)
    for right in (flow.dense(zero, case["step"]), dense):
        worst = max(worst, gap(right, np.broadcast_to(np.eye(WIDTH), right.shape)))
        worst = max(worst, gap(shippo_cell(**case, right=right, backend="reference")[0][0, :, 0], reference))
    return at_most(worst, 1e-13, "R against I, and the cell against the one-sided update")


@check("sec. 3.4, Theorem (P = 1, lambda = 1)", "Reduction to the one-channel exponential-Euler selective update")
def reduction_to_one_channel() -> Finding:
    case = _sequence(1, right=False)
    case["mix"] = torch.ones_like(case["mix"])
    state, outputs = np.zeros(NUM), []
    for t in range(7):
        step = case["step"][0, t, 0].item()
        decay = np.exp(step * case["drift"][0].numpy())
        state = decay * state + step * case["write"][0, t, 0].numpy() * case["value"][0, t, 0, 0].item()
        outputs.append(case["read"][0, t, 0].numpy() @ state)
    cell = shippo_cell(**case, backend="reference")[0][0, :, 0, 0]
    return at_most(gap(cell, np.array(outputs)), 1e-13, "shippo_cell against the scalar recurrence")


def _truncation(name: str) -> Array:
    """Errors ||H_den - H*|| of one step, at STEPS."""
    frozen = _frozen()
    return np.array([np.linalg.norm(frozen.cell(step, MIXES[name](step)) - frozen.exact(step)) for step in STEPS])


def _order(name: str, order: int) -> Finding:
    return at_most(abs(slope(STEPS[1:], _truncation(name)[1:]) - order), 0.1, f"|measured slope - {order}|")


def _constant(name: str, formula: str) -> Finding:
    frozen = _frozen()
    first, second = (np.array([frozen.largest(step, order) for step in STEPS]) for order in (1, 2))
    bounds = {"any": STEPS**2 / 2 * first, "half": STEPS**3 / 12 * second, "near half": STEPS**3 * (second / 12 + first)}
    return at_most(float(np.max(_truncation(name) / bounds[name])), 1.0, f"largest error / ({formula})")


def _truncation_checks(part: int, name: str, key: str, which: str, order: int, formula: str) -> None:
    """Register the order and the constant of one part of the corollary."""

    def measured_order() -> Finding:
        return _order(name, order)

    def measured_constant() -> Finding:
        return _constant(name, formula)

    mix = {"any": "0.2", "half": "1/2", "near half": "1/2 + Delta"}[name]
    measured_order.__doc__ = f"Falsified if the error of one step with lambda = {mix} is not of order Delta^{order}."
    measured_constant.__doc__ = f"Falsified if the error exceeds {formula}."
    for function, kind, title in ((measured_order, "order", f"order {order}"), (measured_constant, "constant", "constant")):
        function.__name__ = f"local_truncation_{key}_{kind}"
        check(f"app. C.7, Corollary ({part})", f"Local truncation for {which}: {title}")(function)


_truncation_checks(1, "any", "any_mix", "any lambda", 2, "Delta^2 / 2 sup ||G'||")
_truncation_checks(2, "half", "half", "lambda = 1/2", 3, "Delta^3 / 12 sup ||G''||")
_truncation_checks(3, "near half", "near_half", "lambda = 1/2 + O(Delta)", 3, "Delta^3 (sup ||G''|| / 12 + c sup ||G'||)")


def _split_right(frozen: _Frozen, step: float) -> Array:
    """A first-order split of exp(step A): its symmetric part, then its skew part."""
    symmetric, skew = (frozen.generator + sign * frozen.generator.T for sign in (1, -1))
    return Transport(symmetric / 2, WIDTH).P(step, 0.0) @ Transport(skew / 2, WIDTH).P(step, 0.0)


@check("app. C.7, Remark", "Split-backend replacement error: identity")
def split_replacement_identity() -> Finding:
    frozen, mix = _frozen(), 0.3
    worst = 0.0
    for step in (0.1, 0.5):
        split, dense = _split_right(frozen, step), frozen.right(step)
        carried = frozen.memory + (1 - mix) * step * frozen.source(0.0)
        formula = np.exp(step * frozen.drift)[:, None] * carried @ (split - dense)
        worst = max(worst, gap(frozen.cell(step, mix, split) - frozen.cell(step, mix), formula))
    return at_most(worst, 1e-11, "difference of two cells against the formula")


@check("app. C.7, Remark", "Split-backend replacement error: bound")
def split_replacement_bound() -> Finding:
    frozen, mix = _frozen(), 0.5
    ratios = []
    for step in STEPS:
        split, dense = _split_right(frozen, step), frozen.right(step)
        exact = frozen.exact(step)
        size = np.linalg.norm(frozen.memory) + (1 - mix) * step * np.linalg.norm(frozen.source(0.0))
        bound = np.exp(step * frozen.drift).max() * size * np.linalg.norm(split - dense, 2)
        bound += np.linalg.norm(frozen.cell(step, mix) - exact)
        ratios.append(np.linalg.norm(frozen.cell(step, mix, split) - exact) / bound)
    return at_most(max(ratios), 1.0, "largest error / bound")


@check("app. C.7, Remark", "With a split action the full one-step discrepancy is of order 2")
def split_backend_order() -> Finding:
    frozen = _frozen()
    errors = [np.linalg.norm(frozen.cell(step, 0.5, _split_right(frozen, step)) - frozen.exact(step)) for step in STEPS]
    return at_most(abs(slope(STEPS[1:], np.array(errors[1:])) - 2), 0.1, "|measured slope - 2| at lambda = 1/2")


@check("app. C.6, boundary source", "U_0 = 0 stands for U(0) = 0: with another U(0) the first step is of order 1")
def boundary_source() -> Finding:
    frozen, mix = _frozen(), 0.5
    without = (frozen.cell(step, mix) - (1 - mix) * step * frozen.integrand(0.0, step) for step in STEPS)
    errors = [np.linalg.norm(state - frozen.exact(step)) for state, step in zip(without, STEPS)]
    return at_most(abs(slope(STEPS[1:], np.array(errors[1:])) - 1), 0.1, "|measured slope - 1|: the order falls from 3 to 1")
