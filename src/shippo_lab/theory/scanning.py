"""Checks of sections 3.2 and 3.3 and appendices C.1 to C.3: what an exact scan can carry, and when a right action collapses.

States are [N, P]. `shippo_ssm.scan.compose` is compared with the recurrence H_t = L_t H_{t-1} R_t + U_t, written out here."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import expm
from scipy.optimize import minimize

import shippo_ssm.actions as actions
import shippo_ssm.scan as scan
from shippo_lab.theory.cases import Array, gap
from shippo_lab.theory.registry import Finding, at_least, at_most, check

NUM, WIDTH, LENGTH = 5, 3, 9


def _maps(length: int = LENGTH, seed: int = 0) -> list[scan.Affine]:
    """Random two-sided affine maps with diagonal left factors."""
    rng = np.random.default_rng(seed)
    return [
        scan.Affine(
            torch.from_numpy(rng.uniform(0.3, 1.0, NUM)),
            torch.from_numpy(np.eye(WIDTH) + 0.4 * rng.normal(size=(WIDTH, WIDTH))),
            torch.from_numpy(rng.normal(size=(NUM, WIDTH))),
        )
        for _ in range(length)
    ]


def _step(element: scan.Affine, state: Array) -> Array:
    """L H R + U for one map, as the paper writes it."""
    assert element.right is not None
    return np.diag(element.left.numpy()) @ state @ element.right.numpy() + element.update.numpy()


def _run(maps: list[scan.Affine], state: Array) -> list[Array]:
    states = []
    for element in maps:
        state = _step(element, state)
        states.append(state)
    return states


@check("sec. 3.2, Definition", "Controller-compatible transport: given the path, the step is affine in the state")
def controller_compatible_transport() -> Finding:
    generator = torch.Generator().manual_seed(0)
    value, write, read = (
        torch.randn(1, LENGTH, 1, size, generator=generator, dtype=torch.float64) for size in (WIDTH, NUM, NUM)
    )
    step = torch.rand(1, LENGTH, 1, generator=generator, dtype=torch.float64) + 0.1
    # The controller reads the token: coordinates of the right action from the value.
    coords = torch.einsum("btgp,pk->btgk", value, torch.randn(WIDTH, 9, generator=generator, dtype=torch.float64)) / 4
    right = actions.SplitFlow(WIDTH).dense(coords, step)
    drift = -torch.rand(1, NUM, generator=generator, dtype=torch.float64)

    def final(state: torch.Tensor) -> torch.Tensor:
        _, last = scan.transport_scan(
            value, write, read, step, drift, right, initial_state=state, output_final_state=True, backend="reference"
        )
        assert last is not None
        return last

    one, two = (torch.randn(1, 1, NUM, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    affine = final(one) + final(two) - final(torch.zeros_like(one))
    return at_most(gap(final(one + two), affine), 1e-12, "F(X + Y) against F(X) + F(Y) - F(0), nine tokens")


@check("sec. 3.2, Proposition", "Exact block-affine scan closure")
def block_affine_scan_closure() -> Finding:
    worst = 0.0
    for seed in range(4):
        first, second = _maps(2, seed)
        state = np.random.default_rng(seed + 50).normal(size=(NUM, WIDTH))
        worst = max(worst, gap(_step(scan.compose(first, second), state), _step(second, _step(first, state))))
    return at_most(worst, 1e-13, "compose, then apply, against two steps")


@check("sec. 3.2, Proposition", "The summary is (L2 L1, R1 R2, L2 U1 R2 + U2)")
def block_affine_summary() -> Finding:
    first, second = _maps(2)
    whole = scan.compose(first, second)
    assert first.right is not None
    assert second.right is not None
    assert whole.right is not None
    left, right = np.diag(second.left.numpy()), second.right.numpy()
    worst = max(
        gap(whole.left.numpy(), second.left.numpy() * first.left.numpy()),
        gap(whole.right.numpy(), first.right.numpy() @ right),
        gap(whole.update.numpy(), left @ first.update.numpy() @ right + second.update.numpy()),
    )
    return at_most(worst, 1e-13, "components of compose against the formula")


@check("app. C.2, Proposition (proof)", "The composition is associative")
def block_affine_associativity() -> Finding:
    one, two, three = _maps(3)
    early = scan.compose(scan.compose(one, two), three)
    late = scan.compose(one, scan.compose(two, three))
    unit = scan.identity_affine(NUM, WIDTH, dtype=torch.float64)
    pairs = [(early, late), (scan.compose(unit, one), one), (scan.compose(one, unit), one)]
    return at_most(max(gap(a, b) for x, y in pairs for a, b in zip(x, y)), 1e-13, "(1 2) 3 against 1 (2 3), and identities")


@check("sec. 3.2, Proposition", "The recurrence has an exact prefix scan")
def block_affine_prefix_scan() -> Finding:
    maps = _maps(33)
    start = np.random.default_rng(7).normal(size=(NUM, WIDTH))
    reference = np.stack(_run(maps, start))
    left, right, update = (torch.stack(list(parts)) for parts in zip(*maps))
    worst = 0.0
    for backend in ("reference", "associative"):
        states = scan.block_affine_scan(left, right, update, initial_state=torch.from_numpy(start), backend=backend)
        worst = max(worst, gap(states, reference))
    # A tree of `compose`, as the parallel scan uses it.
    level = list(maps)
    while len(level) > 1:
        pairs = [scan.compose(a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[2 * len(pairs) :]
    return at_most(max(worst, gap(_step(level[0], start), reference[-1])), 1e-12, "scans and a tree of compose, 33 steps")


def _coupled(kappa: float = 0.7) -> tuple[Array, Array, Array, Array, float]:
    """L, U, W, M and kappa of the paper's failure mode R = I + kappa <W, H> M with M = e_1 e_2^T."""
    rng = np.random.default_rng(3)
    nilpotent = np.zeros((WIDTH, WIDTH))
    nilpotent[0, 1] = 1.0
    return np.diag(rng.uniform(0.4, 1.0, NUM)), rng.normal(size=(NUM, WIDTH)), rng.normal(size=(NUM, WIDTH)), nilpotent, kappa


def _coupled_step(state: Array) -> Array:
    left, update, weight, nilpotent, kappa = _coupled()
    return left @ state @ expm(kappa * np.sum(weight * state) * nilpotent) + update


@check("app. C.2, concrete failure mode", "State coupling adds the quadratic term kappa <W, H> L H M")
def state_coupled_quadratic_term() -> Finding:
    left, _, weight, nilpotent, kappa = _coupled()
    state = np.random.default_rng(4).normal(size=(NUM, WIDTH))
    term = kappa * np.sum(weight * state) * left @ state @ nilpotent
    zero = _coupled_step(np.zeros_like(state))
    line = _coupled_step(state) - zero
    worst = max(gap(_coupled_step(s * state) - zero - s * line, (s * s - s) * term) for s in (-1.0, 0.5, 3.0))
    return at_most(worst, 1e-12, "the bend of F along a ray against (s^2 - s) kappa <W, H> L H M")


@check("sec. 3.2, Proposition (last part)", "A state-coupled step is not affine")
def state_coupled_failure_mode() -> Finding:
    states = np.random.default_rng(5).normal(size=(60, NUM, WIDTH))
    images = np.stack([_coupled_step(state) for state in states]).reshape(60, -1)
    design = np.concatenate([states.reshape(60, -1), np.ones((60, 1))], axis=1)
    fit = design @ np.linalg.lstsq(design, images, rcond=None)[0]
    return at_least(gap(fit, images), 0.05, "the best affine map leaves this relative error, 60 states")


def _channelwise() -> tuple[Array, Array]:
    """The paper's example: the transitions R_1 D_{2,n} of rows n = 1, 2."""
    first = np.array([[1.0, 1.0], [1.0, -1.0]])
    return first @ np.diag([1.0, 1.0]), first @ np.diag([1.0, 2.0])


@check("app. C.1, Proposition", "Direct channelwise lift: two steps, row by row")
def direct_channelwise_two_steps() -> Finding:
    rng = np.random.default_rng(6)
    decay, update = rng.uniform(0.2, 1.0, (2, NUM, WIDTH)), rng.normal(size=(2, NUM, WIDTH))
    right, state = rng.normal(size=(2, WIDTH, WIDTH)), rng.normal(size=(NUM, WIDTH))
    whole = state
    for t in range(2):
        whole = (decay[t] * whole) @ right[t] + update[t]
    rows = np.stack(
        [
            state[n] @ np.diag(decay[0, n]) @ right[0] @ np.diag(decay[1, n]) @ right[1]
            + update[0, n] @ np.diag(decay[1, n]) @ right[1]
            + update[1, n]
            for n in range(NUM)
        ]
    )
    return at_most(gap(whole, rows), 1e-13, "two steps against the row formula")


@check("app. C.1, Proposition", "Failure of closure for the direct channelwise factorisation")
def direct_channelwise_obstruction() -> Finding:
    targets = np.stack(_channelwise())

    def loss(flat: Array) -> float:
        shared, diagonals = flat[:4].reshape(2, 2), flat[4:].reshape(2, 2)
        return float(np.sum((diagonals[:, :, None] * shared - targets) ** 2))

    rng = np.random.default_rng(8)
    best = min(minimize(loss, rng.normal(size=8), method="BFGS").fun for _ in range(12))
    return at_least(np.sqrt(best) / np.linalg.norm(targets), 0.1, "best ||D_n R* - R_1 D_2n|| over R*, D_n, relative")


@check("app. C.1, Proposition (proof)", "The first rows (1, 1) and (1, 2) are not multiples of one row")
def direct_channelwise_rows() -> Finding:
    first, second = _channelwise()
    return at_least(abs(np.linalg.det(np.stack([first[0], second[0]]))), 0.5, "|det of the two first rows|")


def _reducible(seed: int = 11) -> tuple[Array, Array, Array]:
    """Generators Q Lambda_m Q^{-1} [M, P, P] with blocks 2 + 2 that do not commute; Q; and coefficients [T, M]."""
    rng = np.random.default_rng(seed)
    blocks = np.zeros((4, 4, 4))
    blocks[:, :2, :2], blocks[:, 2:, 2:] = rng.normal(size=(2, 4, 2, 2))
    basis = np.eye(4) + 0.5 * rng.normal(size=(4, 4))
    return basis @ blocks @ np.linalg.inv(basis), basis, 0.4 * rng.normal(size=(7, 4))


def _outside(right: Array, basis: Array) -> float:
    """Relative size of Q^{-1} R Q outside the two blocks, over a stack of right actions."""
    moved = np.linalg.solve(basis, right @ basis)
    outside = moved.copy()
    outside[:, :2, :2] = outside[:, 2:, 2:] = 0
    return float(np.linalg.norm(outside) / np.linalg.norm(moved))


def _dense_actions(generators: Array, coefficients: Array, step: float = 0.8) -> Array:
    return actions.expm(torch.from_numpy(step * np.einsum("tm,mij->tij", coefficients, generators))).numpy()


@check("sec. 3.3, Proposition", "Collapse under fixed simultaneous block reduction: dense exponentials")
def collapse_of_dense_exponentials() -> Finding:
    generators, basis, coefficients = _reducible()
    return at_most(_outside(_dense_actions(generators, coefficients), basis), 1e-12, "part of Q^-1 R Q outside the blocks")


@check("sec. 3.3, Proposition", "Collapse under fixed simultaneous block reduction: split products")
def collapse_of_split_products() -> Finding:
    generators, basis, coefficients = _reducible()
    products = np.stack([np.linalg.multi_dot([expm(0.8 * c * g) for c, g in zip(row, generators)]) for row in coefficients])
    return at_most(_outside(products, basis), 1e-12, "part of Q^-1 R Q outside the blocks")


@check("sec. 3.3, Proposition (consequence)", "H Q decomposes into independent banks, fed by Q^T x")
def collapse_to_banks() -> Finding:
    generators, basis, coefficients = _reducible()
    right = _dense_actions(generators, coefficients)
    blocks = np.linalg.solve(basis, right @ basis)
    rng = np.random.default_rng(12)
    length = len(right)
    left, write, value = rng.uniform(0.4, 1, (length, NUM)), rng.normal(size=(length, NUM)), rng.normal(size=(length, 4))
    whole = np.zeros((NUM, 4))
    banks = [np.zeros((NUM, 2)), np.zeros((NUM, 2))]
    for t in range(length):
        whole = left[t][:, None] * whole @ right[t] + np.outer(write[t], value[t])
        fed = basis.T @ value[t]
        for index, part in enumerate((slice(0, 2), slice(2, 4))):
            banks[index] = left[t][:, None] * banks[index] @ blocks[t][part, part] + np.outer(write[t], fed[part])
    return at_most(gap(np.concatenate(banks, axis=1), whole @ basis), 1e-12, "two banks side by side against H Q")


@check("sec. 3.3, after the Proposition", "Noncommutativity alone is insufficient")
def noncommutativity_is_insufficient() -> Finding:
    generators, _, _ = _reducible()
    one, two = generators[:2]
    return at_least(np.linalg.norm(one @ two - two @ one) / np.linalg.norm(one @ two), 0.1, "||[G_1, G_2]|| / ||G_1 G_2||")


@check("sec. 3.3, after the Proposition", "The split-flow family admits no fixed common block form")
def split_flow_does_not_collapse() -> Finding:
    flow = actions.SplitFlow(4)
    generator = torch.Generator().manual_seed(1)
    right = flow.dense(torch.randn(6, flow.num_coordinates, generator=generator, dtype=torch.float64), 0.7).numpy()
    # X R_t = R_t X for all t, as a linear map of X: scalars are one null direction, a block form would give another.
    eye = np.eye(4)
    system = np.concatenate([np.kron(eye, matrix.T) - np.kron(matrix, eye) for matrix in right])
    values = np.linalg.svd(system, compute_uv=False)
    return at_least(values[-2] / values[0], 1e-2, "second smallest singular value of X -> [X, R_t], relative")
