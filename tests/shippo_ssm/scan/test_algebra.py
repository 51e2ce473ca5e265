"""The composition law: associative, with an identity, in time order; and block_affine_scan on top of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shippo_ssm.scan import Affine, apply, block_affine_scan, compose, cumulative_affine, identity_affine
from shippo_ssm.scan.algebra import map_tensors

KINDS = {
    "N": st.integers(1, 5),
    "P": st.integers(1, 5),
    "dense": st.booleans(),
    "right": st.booleans(),
    "seed": st.integers(0, 10**6),
}


def random_affine(seed, N, P, *, batch=(), dense=False, right=True, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    left = torch.randn(*batch, N, *((N,) if dense else ()), generator=random, dtype=dtype)
    actions = torch.randn(*batch, P, P, generator=random, dtype=dtype) if right else None
    return Affine(left, actions, torch.randn(*batch, N, P, generator=random, dtype=dtype))


def assert_same_map(one, two, state):
    torch.testing.assert_close(apply(one, state), apply(two, state), rtol=1e-10, atol=1e-10)


@settings(max_examples=200)
@given(**KINDS, batch=st.lists(st.integers(1, 3), max_size=2))
def test_composition_is_associative(N, P, batch, dense, right, seed):
    a, b, c = (random_affine(seed + k, N, P, batch=tuple(batch), dense=dense, right=right) for k in range(3))
    left_first, right_first = compose(compose(a, b), c), compose(a, compose(b, c))
    for one, two in zip(left_first, right_first):
        if one is not None:
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@settings(max_examples=200)
@given(**KINDS, batch=st.lists(st.integers(1, 3), max_size=2))
def test_identity_changes_nothing(N, P, batch, dense, right, seed):
    element = random_affine(seed, N, P, batch=tuple(batch), dense=dense, right=right)
    unit = identity_affine(N, P, batch_shape=tuple(batch), dense=dense, dtype=torch.float64)
    state = torch.randn(*batch, N, P, dtype=torch.float64)
    assert torch.equal(apply(unit, state), state)
    assert_same_map(compose(unit, element), element, state)
    assert_same_map(compose(element, unit), element, state)


def test_compose_applies_first_then_second():
    first, second = random_affine(1, 4, 3), random_affine(2, 4, 3)
    state = torch.randn(4, 3, dtype=torch.float64)
    assert_same_map(compose(first, second), compose(first, second), state)
    torch.testing.assert_close(apply(compose(first, second), state), apply(second, apply(first, state)))
    swapped = apply(compose(second, first), state)
    assert (swapped - apply(second, apply(first, state))).norm() > 0.1


@settings(max_examples=200)
@given(**KINDS, T=st.integers(0, 20), cut=st.floats(0, 1), backend=st.sampled_from(["reference", "associative"]))
def test_split_anywhere_equals_whole(N, P, T, cut, dense, right, backend, seed):
    elements = random_affine(seed, N, P, batch=(T,), dense=dense, right=right)
    elements = elements._replace(left=0.5 * elements.left, right=None if elements.right is None else 0.5 * elements.right)
    start = torch.randn(N, P, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    whole = block_affine_scan(*elements, initial_state=start, backend="reference")
    middle = round(cut * T)
    left, actions, update = elements
    head = block_affine_scan(
        left[:middle], None if actions is None else actions[:middle], update[:middle], initial_state=start, backend=backend
    )
    joint = head[-1] if middle else start
    tail = block_affine_scan(
        left[middle:], None if actions is None else actions[middle:], update[middle:], initial_state=joint, backend=backend
    )
    torch.testing.assert_close(torch.cat([head, tail]), whole, rtol=1e-9, atol=1e-9)


def test_cumulative_maps_join_exactly():
    elements = random_affine(3, 4, 3, batch=(9,))
    head = map_tensors(lambda tensor: tensor[:4], elements)
    tail = map_tensors(lambda tensor: tensor[4:], elements)
    last = map_tensors(lambda tensor: tensor[-1:].expand(5, *tensor.shape[1:]), cumulative_affine(head, 0))
    joined = compose(last, cumulative_affine(tail, 0))
    whole = cumulative_affine(elements, 0)
    for one, two in zip(joined, map_tensors(lambda tensor: tensor[4:], whole)):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("dense", [False, True])
def test_block_affine_scan_backends_agree_with_any_leading_dimensions(dtype, dense):
    N, P = 4, 3
    elements = random_affine(5, N, P, batch=(2, 3, 7), dense=dense, dtype=dtype)
    start = torch.randn(2, 3, N, P, dtype=dtype)
    reference = block_affine_scan(*elements, initial_state=start, backend="reference")
    torch.testing.assert_close(block_affine_scan(*elements, initial_state=start), reference, rtol=1e-9, atol=1e-9)
    state = start
    assert elements.right is not None
    for t in range(7):
        rows = torch.diag_embed(elements.left[:, :, t]) if not dense else elements.left[:, :, t]
        state = rows @ state @ elements.right[:, :, t] + elements.update[:, :, t]
        torch.testing.assert_close(reference[:, :, t], state)


def test_block_affine_scan_gradients():
    elements = random_affine(6, 3, 2, batch=(5,), dense=True)
    start = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    leaves = [tensor.requires_grad_() for tensor in elements if tensor is not None]
    assert torch.autograd.gradcheck(lambda *given: block_affine_scan(*given[:3], initial_state=given[3]), (*leaves, start))


def test_block_affine_scan_half_precision_keeps_a_float32_state():
    elements = random_affine(7, 3, 2, batch=(50,), dtype=torch.float32)
    halves = map_tensors(lambda tensor: (0.5 * tensor).bfloat16(), elements)
    states = block_affine_scan(*halves)
    assert states.dtype == torch.bfloat16
    assert torch.equal(states, block_affine_scan(*map_tensors(Tensor.float, halves)).bfloat16())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"update": torch.zeros(3, 2)}, "update"),
        ({"left": torch.zeros(5)}, "left"),
        ({"left": torch.zeros(4, 3)}, "left"),
        ({"right": torch.zeros(5, 3, 3)}, "right"),
        ({"right": torch.zeros(1, 2, 2)}, "right"),
        ({"initial_state": torch.zeros(2, 3)}, "initial_state"),
        ({"left": torch.zeros(5, 3, dtype=torch.float64)}, "left"),
        ({"left": torch.zeros(5, 3, device="meta")}, "left"),
        ({"backend": "fused"}, "backend"),
        ({"update": torch.zeros(5, 3, 2, dtype=torch.int64)}, "update"),
        ({"left": 3.0}, "left"),
    ],
)
def test_block_affine_scan_names_the_bad_argument(change, named):
    given = {"left": torch.zeros(5, 3), "right": torch.zeros(5, 2, 2), "update": torch.zeros(5, 3, 2)} | change
    with pytest.raises(ValueError, match=f"`{named}`.*expected"):
        block_affine_scan(given.pop("left"), given.pop("right"), given.pop("update"), **given)


def test_compose_refuses_different_sizes_and_kinds():
    with pytest.raises(ValueError, match="compose"):
        compose(random_affine(0, 3, 2), random_affine(0, 3, 3))
    with pytest.raises(ValueError, match="diag_embed"):
        compose(random_affine(0, 3, 2), random_affine(0, 3, 2, dense=True))
