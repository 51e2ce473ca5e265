"""Checks of sections 3.2 and 3.3 and appendices C.1 to C.3: what an exact scan can carry, and when a right action collapses.

States are [N, P]. `shippo_ssm.scan.compose` is compared with the recurrence H_t = L_t H_{t-1} R_t + U_t, written out
here."""

from functools import partial
from itertools import accumulate

import numpy as np
import torch
from scipy.linalg import expm
from scipy.optimize import minimize

import shippo_ssm.actions as actions
import shippo_ssm.scan as scan
from shippo_lab.theory.cases import Array
from shippo_lab.theory.registry import Pairs, check, gap

NUM, WIDTH, LENGTH = 5, 3, 9
KAPPA = 0.7


def _maps(length: int, seed: int = 0) -> list[scan.Affine]:
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


def _arrays(element: scan.Affine) -> tuple[Array, Array, Array]:
    """L as a matrix, R and U."""
    assert element.right is not None
    return np.diag(element.left.numpy()), element.right.numpy(), element.update.numpy()


def _step(state: Array, element: scan.Affine) -> Array:
    """L H R + U for one map, as the paper writes it."""
    left, right, update = _arrays(element)
    return left @ state @ right + update


@check("sec. 3.2, Definition", "Controller-compatible transport: for a given path the step is affine", at_most=1e-12)
def controller_compatible_transport() -> Pairs:
    """F(X + Y) against F(X) + F(Y) - F(0), nine tokens"""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    value, write, read = (draw(1, LENGTH, 1, size) for size in (WIDTH, NUM, NUM))
    step = torch.rand(1, LENGTH, 1, generator=generator, dtype=torch.float64) + 0.1
    # The controller reads the token: coordinates of the right action from the value.
    coords = torch.einsum("btgp,pk->btgk", value, draw(WIDTH, 9)) / 4
    right = actions.SplitFlow(WIDTH).dense(coords, step)
    drift = -torch.rand(1, NUM, generator=generator, dtype=torch.float64)

    def final(state: torch.Tensor) -> torch.Tensor:
        _, last = scan.transport_scan(
            value, write, read, step, drift, right, initial_state=state, output_final_state=True, backend="reference"
        )
        assert last is not None
        return last

    one, two = draw(1, 1, NUM, WIDTH), draw(1, 1, NUM, WIDTH)
    yield final(one + two), final(one) + final(two) - final(torch.zeros_like(one))


@check("sec. 3.2, Proposition", "Exact block-affine scan closure", at_most=1e-13)
def block_affine_scan_closure() -> Pairs:
    """compose, then apply, against two steps"""
    for seed in range(4):
        first, second = _maps(2, seed)
        state = np.random.default_rng(seed + 50).normal(size=(NUM, WIDTH))
        yield _step(state, scan.compose(first, second)), _step(_step(state, first), second)


@check("sec. 3.2, Proposition", "The summary is (L2 L1, R1 R2, L2 U1 R2 + U2)", at_most=1e-13)
def block_affine_summary() -> Pairs:
    """components of compose against the formula"""
    maps = _maps(2)
    (left1, right1, update1), (left2, right2, update2) = map(_arrays, maps)
    formula = left2 @ left1, right1 @ right2, left2 @ update1 @ right2 + update2
    yield from zip(_arrays(scan.compose(*maps)), formula)


@check("app. C.2, Proposition (proof)", "The composition is associative", at_most=1e-13)
def block_affine_associativity() -> Pairs:
    """(1 2) 3 against 1 (2 3), and identities"""
    one, two, three = _maps(3)
    unit = scan.identity_affine(NUM, WIDTH, dtype=torch.float64)
    yield from zip(scan.compose(scan.compose(one, two), three), scan.compose(one, scan.compose(two, three)))
    yield from zip(scan.compose(unit, one), one)
    yield from zip(scan.compose(one, unit), one)


@check("sec. 3.2, Proposition", "The recurrence has an exact prefix scan", at_most=1e-12)
def block_affine_prefix_scan() -> Pairs:
    """scans and a tree of compose, 33 steps"""
    maps = _maps(33)
    start = np.random.default_rng(7).normal(size=(NUM, WIDTH))
    reference = np.stack(list(accumulate(maps, _step, initial=start))[1:])
    left, right, update = (torch.stack(list(parts)) for parts in zip(*maps))
    for backend in ("reference", "associative"):
        yield scan.block_affine_scan(left, right, update, initial_state=torch.from_numpy(start), backend=backend), reference
    # A tree of `compose`, as the parallel scan uses it.
    level = list(maps)
    while len(level) > 1:
        pairs = [scan.compose(a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[2 * len(pairs) :]
    yield _step(start, level[0]), reference[-1]


def _coupled() -> tuple[Array, Array, Array, Array]:
    """L, U, W and M of the paper's failure mode R = I + kappa <W, H> M with M = e_1 e_2^T."""
    rng = np.random.default_rng(3)
    nilpotent = np.zeros((WIDTH, WIDTH))
    nilpotent[0, 1] = 1.0
    left, update = np.diag(rng.uniform(0.4, 1.0, NUM)), rng.normal(size=(NUM, WIDTH))
    return left, update, rng.normal(size=(NUM, WIDTH)), nilpotent


def _coupled_step(state: Array) -> Array:
    left, update, weight, nilpotent = _coupled()
    return left @ state @ expm(KAPPA * np.sum(weight * state) * nilpotent) + update


@check("app. C.2, concrete failure mode", "State coupling adds the quadratic term kappa <W, H> L H M", at_most=1e-12)
def state_coupled_quadratic_term() -> Pairs:
    """the bend of F along a ray against (s^2 - s) kappa <W, H> L H M"""
    left, _, weight, nilpotent = _coupled()
    state = np.random.default_rng(4).normal(size=(NUM, WIDTH))
    term = KAPPA * np.sum(weight * state) * left @ state @ nilpotent
    zero = _coupled_step(np.zeros_like(state))
    line = _coupled_step(state) - zero
    for s in (-1.0, 0.5, 3.0):
        yield _coupled_step(s * state) - zero - s * line, (s * s - s) * term


@check("sec. 3.2, Proposition (last part)", "A state-coupled step is not affine", at_least=0.05)
def state_coupled_failure_mode() -> float:
    """the best affine map leaves this relative error, 60 states"""
    states = np.random.default_rng(5).normal(size=(60, NUM, WIDTH))
    images = np.stack([_coupled_step(state) for state in states]).reshape(60, -1)
    design = np.concatenate([states.reshape(60, -1), np.ones((60, 1))], axis=1)
    return gap(design @ np.linalg.lstsq(design, images, rcond=None)[0], images)


# The paper's example: the transitions R_1 D_{2,n} of rows n = 1, 2.
CHANNELWISE = np.array([[1.0, 1.0], [1.0, -1.0]]) @ np.array([np.diag([1.0, 1.0]), np.diag([1.0, 2.0])])


@check("app. C.1, Proposition", "Direct channelwise lift: two steps, row by row", at_most=1e-13)
def direct_channelwise_two_steps() -> Pairs:
    """two steps against the row formula"""
    rng = np.random.default_rng(6)
    decay, update = rng.uniform(0.2, 1.0, (2, NUM, WIDTH)), rng.normal(size=(2, NUM, WIDTH))
    right, state = rng.normal(size=(2, WIDTH, WIDTH)), rng.normal(size=(NUM, WIDTH))
    whole = state
    for t in range(2):
        whole = (decay[t] * whole) @ right[t] + update[t]
    rows = []
    for n in range(NUM):
        first, second = np.diag(decay[0, n]), np.diag(decay[1, n])
        rows.append(state[n] @ first @ right[0] @ second @ right[1] + update[0, n] @ second @ right[1] + update[1, n])
    yield whole, np.stack(rows)


@check("app. C.1, Proposition", "Failure of closure for the direct channelwise factorisation", at_least=0.1)
def direct_channelwise_obstruction() -> float:
    """best ||D_n R* - R_1 D_2n|| over R*, D_n, relative"""

    def loss(flat: Array) -> float:
        shared, diagonals = flat[:4].reshape(2, 2), flat[4:].reshape(2, 2)
        return float(np.sum((diagonals[:, :, None] * shared - CHANNELWISE) ** 2))

    rng = np.random.default_rng(8)
    best = min(minimize(loss, rng.normal(size=8), method="BFGS").fun for _ in range(12))
    return np.sqrt(best) / np.linalg.norm(CHANNELWISE)


@check("app. C.1, Proposition (proof)", "The first rows (1, 1) and (1, 2) are not multiples of one row", at_least=0.5)
def direct_channelwise_rows() -> float:
    """|det of the two first rows|"""
    return abs(np.linalg.det(CHANNELWISE[:, 0]))


def _reducible() -> tuple[Array, Array, Array]:
    """Generators Q Lambda_m Q^{-1} [M, P, P] with blocks 2 + 2 that do not commute; Q; and coefficients [T, M]."""
    rng = np.random.default_rng(11)
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


@check("sec. 3.3, Proposition", "Collapse under fixed simultaneous block reduction: dense exponentials", at_most=1e-12)
def collapse_of_dense_exponentials() -> float:
    """part of Q^-1 R Q outside the blocks"""
    generators, basis, coefficients = _reducible()
    return _outside(_dense_actions(generators, coefficients), basis)


@check("sec. 3.3, Proposition", "Collapse under fixed simultaneous block reduction: split products", at_most=1e-12)
def collapse_of_split_products() -> float:
    """part of Q^-1 R Q outside the blocks"""
    generators, basis, coefficients = _reducible()
    products = np.stack([np.linalg.multi_dot([expm(0.8 * c * g) for c, g in zip(row, generators)]) for row in coefficients])
    return _outside(products, basis)


@check("sec. 3.3, Proposition (consequence)", "H Q decomposes into independent banks, fed by Q^T x", at_most=1e-12)
def collapse_to_banks() -> Pairs:
    """two banks side by side against H Q"""
    generators, basis, coefficients = _reducible()
    right, rng = _dense_actions(generators, coefficients), np.random.default_rng(12)
    blocks, length = np.linalg.solve(basis, right @ basis), len(right)
    left, write, value = rng.uniform(0.4, 1, (length, NUM)), rng.normal(size=(length, NUM)), rng.normal(size=(length, 4))
    whole, banks = np.zeros((NUM, 4)), [np.zeros((NUM, 2)), np.zeros((NUM, 2))]
    for t in range(length):
        whole = left[t][:, None] * whole @ right[t] + np.outer(write[t], value[t])
        fed = basis.T @ value[t]
        for index, part in enumerate((slice(0, 2), slice(2, 4))):
            banks[index] = left[t][:, None] * banks[index] @ blocks[t][part, part] + np.outer(write[t], fed[part])
    yield np.concatenate(banks, axis=1), whole @ basis


@check("sec. 3.3, after the Proposition", "Noncommutativity alone is insufficient", at_least=0.1)
def noncommutativity_is_insufficient() -> float:
    """||[G_1, G_2]|| / ||G_1 G_2||"""
    one, two = _reducible()[0][:2]
    return float(np.linalg.norm(one @ two - two @ one) / np.linalg.norm(one @ two))


@check("sec. 3.3, after the Proposition", "The split-flow family admits no fixed common block form", at_least=1e-2)
def split_flow_does_not_collapse() -> float:
    """second smallest singular value of X -> [X, R_t], relative"""
    flow = actions.SplitFlow(4)
    generator = torch.Generator().manual_seed(1)
    right = flow.dense(torch.randn(6, flow.num_coordinates, generator=generator, dtype=torch.float64), 0.7).numpy()
    # X R_t = R_t X for all t, as a linear map of X: scalars are one null direction, a block form would give another.
    eye = np.eye(4)
    system = np.concatenate([np.kron(eye, matrix.T) - np.kron(matrix, eye) for matrix in right])
    values = np.linalg.svd(system, compute_uv=False)
    return values[-2] / values[0]
