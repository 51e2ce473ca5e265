"""Every backend against the reference loop: outputs, last state, gradients of every argument; laws; bad input."""

import importlib.util
import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shippo_ssm.scan import BACKENDS, Recurrence, resolve_backend, scan, transport_scan
from shippo_ssm.scan.checks import check_recurrence
from shippo_ssm.scan.chunked import chunk_length
from tests.shippo_ssm.scan.conftest import VARIANTS

FAST = ["associative", "chunked", "fused", "segmented"]
LENGTHS = [1, 2, 63, 64, 100, 1500]


@pytest.mark.parametrize("length", LENGTHS[:-1])
@pytest.mark.parametrize("regime", ["contracting", "near-unit", "strong decay", "expanding"])
def test_reference_is_the_equation(helpers, regime, length):
    """The oracle itself, against the recurrence written out with dense matrices (short lengths: it is slow)."""
    recurrence, state = helpers.make_recurrence(regime=regime, T=length, G=6, Q=3, rank=2, seen=True)
    y, final_state = scan(recurrence, initial_state=state, output_final_state=True, backend="reference")
    value, write, read, step, drift, right, seen = recurrence
    write, read = write[:, :, [0, 0, 1, 1, 2, 2]], read[:, :, [0, 0, 1, 1, 2, 2]]
    for t in range(y.shape[1]):
        left = torch.diag_embed(torch.exp(step[:, t, :, None] * drift))
        moved = torch.einsum("bgmn,bgnp,bgpq->bgmq", left, state, right[:, t])
        state = moved + torch.einsum("bgrn,bgrp->bgnp", write[:, t], value[:, t])
        shown = moved + torch.einsum("bgrn,bgrp->bgnp", write[:, t], seen[:, t])
        torch.testing.assert_close(y[:, t], torch.einsum("bgn,bgnp->bgp", read[:, t], shown))
    torch.testing.assert_close(final_state, state)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("regime", ["contracting", "near-unit", "strong decay", "expanding"])
def test_backends_equal_the_reference(helpers, backend, regime, length):
    for dtype in helpers.TOLERANCE:
        helpers.check_backend(backend, dtype, regime=regime, T=length, B=1 if length == 1500 else 2)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: " ".join(f"{key}={value}" for key, value in case.items()))
def test_variants_equal_the_reference(helpers, backend, case):
    helpers.check_backend(backend, **case)


def test_backends_have_one_signature():
    signatures = {name: inspect.signature(backend) for name, backend in BACKENDS.items()}
    assert set(signatures.values()) == {signatures["reference"]}
    assert list(signatures["reference"].parameters) == ["recurrence", "initial_state", "cu_seqlens"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_public_call_is_the_scan_of_a_normalised_record(helpers, dtype):
    recurrence, state = helpers.make_recurrence(T=6, dtype=dtype)
    value, write = recurrence.value.squeeze(-2), recurrence.write.squeeze(-2)
    y, final_state = helpers.with_state(
        transport_scan(value, write, *recurrence[2:6], initial_state=state, output_final_state=True)
    )
    plain = Recurrence(value, write, *recurrence[2:6], seen=value)
    for one, two in zip(plain.normalised()[:6], recurrence.normalised()):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    seen = plain.normalised().seen
    assert seen is not None
    assert seen.shape == recurrence.value.shape
    expected, expected_state = helpers.with_state(
        scan(recurrence.normalised(), initial_state=state.float(), output_final_state=True)
    )
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(final_state, expected_state)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("bounds", [(0, 70), (0, 0, 3, 3, 40, 70, 70), (0, 1, 2, 70)])
def test_packed_equals_the_reference_and_each_sequence_alone(helpers, backend, varying, bounds):
    case = {"B": 1, "T": 70, "states": len(bounds) - 1, "varying": varying, "seen": varying, "Q": 1 if varying else 2}
    got = helpers.check_backend(backend, cu_seqlens=bounds, **case)
    recurrence, state = helpers.make_recurrence(**case)
    for s, (low, high) in enumerate(pairwise(bounds)):
        options = {"initial_state": state[s : s + 1], "output_final_state": True, "backend": backend}
        y, final_state = scan(recurrence.between(low, high), **options)
        torch.testing.assert_close(got["y"][:, low:high], y, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got["final_state"][s : s + 1], final_state, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_gradcheck(helpers, backend):
    recurrence, state = helpers.make_recurrence(B=1, T=5, G=2, Q=1, N=2, P=3, seen=True)
    leaves = [tensor.clone().requires_grad_() for tensor in (*recurrence, state)]

    def run(*given):
        result = scan(Recurrence(*given[:7]), initial_state=given[7], output_final_state=True, backend=backend)
        return helpers.with_state(result)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("backend", ["associative", "chunked"])
def test_gradients_with_respect_to_right_hold_off_the_orthogonal_group(helpers, backend):
    """A frame that divided by its transpose would pass with rotations and fail here."""
    recurrence, state = helpers.make_recurrence(B=1, T=9, G=1, N=3, P=3)
    right = recurrence.right @ torch.diag(torch.tensor([1.3, 0.8, 1.0], dtype=torch.float64))
    stretched = recurrence._replace(right=right)
    expected = helpers.run_with_gradients(stretched, state, backend="reference")
    helpers.assert_agree(helpers.run_with_gradients(stretched, state, backend=backend), expected, 1e-10)


@settings(max_examples=200)
@given(
    B=st.integers(1, 3),
    T=st.integers(0, 40),
    shape=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]),
    N=st.integers(1, 6),
    P=st.integers(1, 5),
    rank=st.integers(1, 2),
    varying=st.booleans(),
    right=st.booleans(),
    cut=st.floats(0, 1),
    backend=st.sampled_from(["reference", "associative", "chunked"]),
    seed=st.integers(0, 10**6),
)
def test_split_anywhere_equals_whole(helpers, B, T, shape, N, P, rank, varying, right, cut, backend, seed):
    G, Q = shape
    case = {"B": B, "T": T, "G": G, "Q": Q, "N": N, "P": P, "rank": rank, "varying": varying, "right": right, "seed": seed}
    recurrence, start = helpers.make_recurrence(**case)
    whole, whole_state = scan(recurrence, initial_state=start, output_final_state=True, backend="reference")
    middle = round(cut * T)
    outputs, state = [], start
    for low, high in ((0, middle), (middle, T)):
        y, state = scan(recurrence.between(low, high), initial_state=state, output_final_state=True, backend=backend)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, whole_state, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(helpers, backend, dtype):
    recurrence, state = helpers.make_recurrence(T=20, dtype=dtype)
    options = {"output_final_state": True, "backend": backend}
    y, final_state = helpers.with_state(transport_scan(*recurrence[:6], initial_state=state, **options))
    single = recurrence.map(Tensor.float)
    expected, expected_state = helpers.with_state(transport_scan(*single[:6], initial_state=state.float(), **options))
    assert (y.dtype, final_state.dtype) == (dtype, torch.float32)
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(final_state, expected_state)


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_half_precision_takes_float32_step_drift_and_state(helpers, backend):
    given, state = helpers.make_recurrence(T=6, dtype=torch.bfloat16)
    mixed = given._replace(step=given.step.float(), drift=given.drift.float())
    y, _ = transport_scan(*mixed[:6], initial_state=state.float(), backend=backend)
    assert y.dtype == torch.bfloat16


def test_compiles_without_a_graph_break(helpers):
    recurrence, _ = helpers.make_recurrence(T=6)

    def outputs(*given):
        return transport_scan(*given)[0]

    compiled = torch.compile(outputs, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*recurrence[:6]), outputs(*recurrence[:6]))


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_no_positions(helpers, backend):
    recurrence, start = helpers.make_recurrence(T=0)
    y, state = helpers.with_state(scan(recurrence, initial_state=start, output_final_state=True, backend=backend))
    assert y.shape == (2, 0, 2, 3)
    assert torch.equal(state, start)
    _, state = helpers.with_state(scan(recurrence, output_final_state=True, backend=backend))
    assert torch.equal(state, torch.zeros_like(start))


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_final_state_only_when_asked(helpers, backend):
    recurrence, _ = helpers.make_recurrence(T=3)
    assert scan(recurrence, backend=backend)[1] is None


def test_chunks_shorten_where_the_frame_is_ill_conditioned(helpers):
    rotations = helpers.make_recurrence(regime="near-unit", T=256)[0].right
    assert chunk_length(256, rotations) == 64
    squeezed = rotations @ torch.diag(torch.tensor([1.0, 1.0, 1e-3], dtype=torch.float64))
    assert chunk_length(256, squeezed) < 8
    singular = rotations @ torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert chunk_length(256, singular) == 1


@pytest.mark.parametrize("smallest", [1e-3, 0.0])
def test_chunked_is_right_where_the_frame_is_not_invertible(helpers, smallest):
    recurrence, state = helpers.make_recurrence(T=50)
    squeeze = torch.diag(torch.tensor([1.0, 0.9, smallest], dtype=torch.float64))
    squeezed = recurrence._replace(right=recurrence.right @ squeeze)
    expected = helpers.run_with_gradients(squeezed, state, backend="reference")
    helpers.assert_agree(helpers.run_with_gradients(squeezed, state, backend="chunked"), expected, 1e-10)


def test_resolve_backend_says_what_and_why():
    here = resolve_backend(torch.zeros(1, 4, 2, 4))
    assert here == "fused"
    assert "CPU" in repr(here)
    wide = resolve_backend(torch.zeros(1, 4, 2, 32))
    assert wide == "chunked"
    assert "32" in wide.reason
    assert resolve_backend(torch.zeros(1, 4, 2, 4, device="meta")) == "chunked"
    torch.set_num_threads(2)
    assert resolve_backend(torch.zeros(1, 2048, 1, 4)) == "segmented"
    assert "2 threads" in resolve_backend(torch.zeros(1, 2048, 1, 4)).reason
    assert resolve_backend(torch.zeros(2, 2048, 1, 4)) == resolve_backend(torch.zeros(1, 2047, 1, 4)) == "fused"
    assert resolve_backend(torch.zeros(1, 4, 2, 4), backend="reference") == "reference"
    with pytest.raises(ValueError, match=r"fused.*chunked"):
        resolve_backend(torch.zeros(1, 4, 2, 32), backend="fused")


def test_auto_takes_what_it_says(helpers):
    recurrence, _ = helpers.make_recurrence(T=6)
    named = resolve_backend(recurrence.value)
    assert importlib.util.find_spec(f"shippo_ssm.scan.{named}") is not None
    assert torch.equal(scan(recurrence)[0], scan(recurrence, backend=str(named))[0])


GOOD = {"value": (2, 6, 3, 4), "write": (2, 6, 3, 5), "read": (2, 6, 3, 5), "step": (2, 6, 3), "drift": (3, 5)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"value": torch.zeros(2, 6, 12)}, "value"),
        ({"value": torch.zeros(2, 6, 3, 4, dtype=torch.int64)}, "value"),
        ({"value": [1.0]}, "value"),
        ({"write": torch.zeros(2, 6, 3)}, "write"),
        ({"write": torch.zeros(2, 6, 1, 5)}, "read"),
        ({"write": torch.zeros(2, 6, 2, 5), "read": torch.zeros(2, 6, 2, 5)}, "write"),
        ({"write": torch.zeros(2, 6, 6, 5), "read": torch.zeros(2, 6, 6, 5)}, "write"),
        ({"write": torch.zeros(2, 6, 0, 5), "read": torch.zeros(2, 6, 0, 5)}, "write"),
        ({"write": torch.zeros(2, 6, 3, 2, 5)}, "write"),
        ({"read": torch.zeros(2, 6, 3, 1)}, "read"),
        ({"read": torch.zeros(2, 6, 3, 5, dtype=torch.float64)}, "read"),
        ({"step": torch.zeros(2, 6)}, "step"),
        ({"step": torch.zeros(2, 1, 3)}, "step"),
        ({"drift": torch.zeros(5)}, "drift"),
        ({"drift": torch.zeros(1, 5)}, "drift"),
        ({"drift": torch.zeros(3, 5, dtype=torch.float16)}, "drift"),
        ({"right": torch.zeros(2, 6, 3, 4)}, "right"),
        ({"right": torch.zeros(2, 6, 3, 5, 5)}, "right"),
        ({"right": torch.zeros(2, 6, 3, 4, 4, device="meta")}, "right"),
        ({"initial_state": torch.zeros(1, 3, 5, 4)}, "initial_state"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_bad_input_names_the_argument_and_the_remedy(change, named):
    arguments = {name: torch.zeros(shape) for name, shape in GOOD.items()} | change
    with pytest.raises(ValueError, match=rf"`{named}`.*expected.*;"):
        transport_scan(**arguments)


@pytest.mark.parametrize("shape", [(2, 6, 3, 2, 4), (2, 6, 3, 5)])
def test_what_is_seen_has_the_shape_of_the_value(shape):
    operands = {name: torch.zeros(size) for name, size in GOOD.items()}
    with pytest.raises(ValueError, match=r"op: `seen`.*expected.*;"):
        check_recurrence("op", Recurrence(**operands, seen=torch.zeros(shape)))


@pytest.mark.parametrize(
    "bounds", [[0, 4, 3, 6], [1, 6], [0, 5], [0, 9], [6], [[0, 6]], [0.0, 6.0]], ids=lambda bounds: str(bounds)
)
def test_bad_cu_seqlens(bounds):
    arguments: dict[str, Any] = {
        name: torch.zeros((1, *shape[1:]) if len(shape) > 2 else shape) for name, shape in GOOD.items()
    }
    with pytest.raises(ValueError, match=r"`cu_seqlens`.*expected"):
        transport_scan(**arguments, cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_no_position_at_all_has_gradients(backend):
    """An empty sequence gives an empty output that still belongs to the graph, and its state passes through."""
    shapes = {"value": (2, 0, 2, 3), "write": (2, 0, 2, 4), "read": (2, 0, 2, 4), "step": (2, 0, 2), "right": (2, 0, 2, 3, 3)}
    operands: dict[str, Any] = {name: torch.rand(shape, requires_grad=True) for name, shape in shapes.items()}
    before = torch.rand(2, 2, 4, 3, requires_grad=True)
    drift = -torch.rand(2, 4)
    y, after = transport_scan(**operands, drift=drift, initial_state=before, output_final_state=True, backend=backend)
    assert y.shape == (2, 0, 2, 3)
    assert after is not None
    assert torch.equal(after, before)
    y.sum().backward()
    assert operands["value"].grad is not None
