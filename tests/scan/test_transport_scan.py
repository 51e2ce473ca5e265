"""Every backend against the reference loop: outputs, last state, gradients of every argument; laws; bad input."""

import functools
import importlib.util
import inspect
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shippo_ssm.scan import BACKENDS, resolve_backend, transport_scan
from shippo_ssm.scan.chunked import chunk_length

FAST = ["associative", "chunked", "fused"]
LENGTHS = [1, 2, 63, 64, 100, 4096]


@pytest.fixture(scope="module")
def reference(helpers):
    """The float64 reference run of one case, computed once for all backends and dtypes."""

    @functools.cache
    def run(**case):
        options = {"backend": "reference"}
        if "cu_seqlens" in case:
            options["cu_seqlens"] = torch.tensor(case["cu_seqlens"])
        shape = {name: size for name, size in case.items() if name != "cu_seqlens"}
        operands = helpers.make_operands(**shape)
        return operands, helpers.run_with_gradients(transport_scan, operands, **options)

    return run


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("regime", ["contracting", "near-unit", "strong decay", "expanding"])
def test_reference_is_the_equation(helpers, regime, length):
    """The oracle itself, against the recurrence written out with dense matrices (short lengths: it is slow)."""
    operands = helpers.make_operands(regime=regime, T=min(length, 100), shown=True)
    options = {"initial_state": operands.initial_state, "shown": operands.shown, "output_final_state": True}
    y, final_state = transport_scan(*operands[:6], **options, backend="reference")
    state = operands.initial_state
    for t in range(y.shape[1]):
        left = torch.diag_embed(torch.exp(operands.step[:, t, :, None] * operands.drift))
        source = torch.einsum("bgn,bgp->bgnp", operands.write[:, t], operands.value[:, t])
        state = torch.einsum("bgmn,bgnp,bgpq->bgmq", left, state, operands.right[:, t]) + source
        seen = state - source + torch.einsum("bgn,bgp->bgnp", operands.write[:, t], operands.shown[:, t])
        torch.testing.assert_close(y[:, t], torch.einsum("bgn,bgnp->bgp", operands.read[:, t], seen))
    torch.testing.assert_close(final_state, state)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("regime", ["contracting", "near-unit", "strong decay", "expanding"])
def test_backends_equal_the_reference(helpers, reference, backend, regime, length):
    batch = 1 if length == 4096 else 2
    operands, expected = reference(regime=regime, T=length, B=batch)
    for dtype, tolerance in helpers.TOLERANCE.items():
        got = helpers.run_with_gradients(transport_scan, operands.to(dtype), backend=backend)
        helpers.assert_agree(got, expected, tolerance)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(
    "case",
    [
        {"right": False, "T": 37},
        {"varying": True, "T": 37},
        {"rank": 3, "T": 37},
        {"rank": 2, "varying": True, "right": False, "T": 5, "N": 2, "P": 5},
        {"T": 20, "N": 3, "P": 2},
        {"shown": True, "T": 37},
        {"shown": True, "rank": 2, "varying": True, "right": False, "T": 5, "N": 9, "P": 5},
    ],
    ids=lambda case: " ".join(f"{key}={value}" for key, value in case.items()),
)
def test_variants_equal_the_reference(helpers, reference, backend, case):
    operands, expected = reference(**case)
    got = helpers.run_with_gradients(transport_scan, operands, backend=backend)
    helpers.assert_agree(got, expected, helpers.TOLERANCE[torch.float64])


def test_backends_have_one_signature():
    signatures = {name: inspect.signature(backend.transport_scan) for name, backend in BACKENDS.items()}
    assert set(signatures.values()) == {signatures["reference"]}
    front = inspect.signature(transport_scan)
    assert front.replace(parameters=[p for p in front.parameters.values() if p.name != "backend"]) == signatures["reference"]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("bounds", [(0, 70), (0, 0, 3, 3, 40, 70, 70), (0, 1, 2, 70)])
def test_packed_equals_the_reference_and_each_sequence_alone(helpers, reference, backend, varying, bounds):
    case = {"B": 1, "T": 70, "states": len(bounds) - 1, "varying": varying, "shown": varying}
    operands, expected = reference(**case, cu_seqlens=bounds)
    got = helpers.run_with_gradients(transport_scan, operands, backend=backend, cu_seqlens=torch.tensor(bounds))
    helpers.assert_agree(got, expected, helpers.TOLERANCE[torch.float64])
    for s, (low, high) in enumerate(pairwise(bounds)):
        cut = [tensor[:, low:high] for tensor in operands[:4]]
        drift = operands.drift[:, low:high] if varying else operands.drift
        start = operands.initial_state[s : s + 1]
        options = {"initial_state": start, "output_final_state": True, "backend": backend}
        if operands.shown is not None:
            options["shown"] = operands.shown[:, low:high]
        y, final_state = transport_scan(*cut, drift, operands.right[:, low:high], **options)
        torch.testing.assert_close(got["y"][:, low:high], y, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got["final_state"][s : s + 1], final_state, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_gradcheck(helpers, backend):
    operands = helpers.make_operands(B=1, T=5, G=1, N=2, P=3, shown=True)
    leaves = [tensor.clone().requires_grad_() for tensor in operands]

    def scan(*given):
        return transport_scan(*given[:6], initial_state=given[6], shown=given[7], output_final_state=True, backend=backend)

    assert torch.autograd.gradcheck(scan, leaves)


@pytest.mark.parametrize("backend", ["associative", "chunked"])
def test_gradients_with_respect_to_right_hold_off_the_orthogonal_group(helpers, backend):
    """A frame that divided by its transpose would pass with rotations and fail here."""
    operands = helpers.make_operands(B=1, T=9, G=1, N=3, P=3)
    right = operands.right.clone() @ torch.diag(torch.tensor([1.3, 0.8, 1.0], dtype=torch.float64))
    stretched = operands._replace(right=right)
    expected = helpers.run_with_gradients(transport_scan, stretched, backend="reference")
    helpers.assert_agree(helpers.run_with_gradients(transport_scan, stretched, backend=backend), expected, 1e-10)


@settings(max_examples=200)
@given(
    B=st.integers(1, 3),
    T=st.integers(0, 40),
    G=st.integers(1, 3),
    N=st.integers(1, 6),
    P=st.integers(1, 5),
    rank=st.sampled_from([None, 1, 2]),
    varying=st.booleans(),
    right=st.booleans(),
    cut=st.floats(0, 1),
    backend=st.sampled_from(["reference", "associative", "chunked"]),
    seed=st.integers(0, 10**6),
)
def test_split_anywhere_equals_whole(helpers, B, T, G, N, P, rank, varying, right, cut, backend, seed):
    case = {"B": B, "T": T, "G": G, "N": N, "P": P, "rank": rank, "varying": varying, "right": right, "seed": seed}
    operands = helpers.make_operands(**case)
    whole, whole_state = transport_scan(
        *operands[:6], initial_state=operands.initial_state, output_final_state=True, backend="reference"
    )
    middle = round(cut * T)
    outputs, state = [], operands.initial_state
    for span in (slice(0, middle), slice(middle, T)):
        drift = operands.drift[:, span] if varying else operands.drift
        actions = None if operands.right is None else operands.right[:, span]
        cut_operands = [tensor[:, span] for tensor in operands[:4]]
        y, state = transport_scan(*cut_operands, drift, actions, initial_state=state, output_final_state=True, backend=backend)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, whole_state, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(helpers, backend, dtype):
    operands = helpers.make_operands(T=20).to(dtype)
    y, final_state = transport_scan(
        *operands[:6], initial_state=operands.initial_state, output_final_state=True, backend=backend
    )
    wide = operands.to(torch.float32)
    expected, expected_state = transport_scan(
        *wide[:6], initial_state=wide.initial_state, output_final_state=True, backend=backend
    )
    assert (y.dtype, final_state.dtype) == (dtype, torch.float32)
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(final_state, expected_state)


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_half_precision_takes_float32_step_drift_and_state(helpers, backend):
    operands = helpers.make_operands(T=6).to(torch.bfloat16)
    y, _ = transport_scan(
        *operands[:3],
        operands.step.float(),
        operands.drift.float(),
        operands.right,
        initial_state=operands.initial_state.float(),
        backend=backend,
    )
    assert y.dtype == torch.bfloat16


def test_compiles_without_a_graph_break(helpers):
    operands = helpers.make_operands(T=6)
    compiled = torch.compile(lambda *given: transport_scan(*given)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands[:6]), transport_scan(*operands[:6])[0])


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_no_positions(helpers, backend):
    operands = helpers.make_operands(T=0)
    y, state = transport_scan(*operands[:6], initial_state=operands.initial_state, output_final_state=True, backend=backend)
    assert y.shape == (2, 0, 2, 3)
    assert torch.equal(state, operands.initial_state)
    _, state = transport_scan(*operands[:6], output_final_state=True, backend=backend)
    assert torch.equal(state, torch.zeros_like(operands.initial_state))


@pytest.mark.parametrize("backend", ["reference", *FAST])
def test_final_state_only_when_asked(helpers, backend):
    operands = helpers.make_operands(T=3)
    assert transport_scan(*operands[:6], backend=backend)[1] is None


def test_chunks_shorten_where_the_frame_is_ill_conditioned(helpers):
    rotations = helpers.make_operands(regime="near-unit", T=256).right
    assert chunk_length(256, rotations) == 64
    squeezed = rotations @ torch.diag(torch.tensor([1.0, 1.0, 1e-3], dtype=torch.float64))
    assert chunk_length(256, squeezed) < 8
    singular = rotations @ torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert chunk_length(256, singular) == 1


@pytest.mark.parametrize("smallest", [1e-3, 0.0])
def test_chunked_is_right_where_the_frame_is_not_invertible(helpers, smallest):
    operands = helpers.make_operands(T=50)
    squeeze = torch.diag(torch.tensor([1.0, 0.9, smallest], dtype=torch.float64))
    operands = operands._replace(right=operands.right @ squeeze)
    expected = helpers.run_with_gradients(transport_scan, operands, backend="reference")
    helpers.assert_agree(helpers.run_with_gradients(transport_scan, operands, backend="chunked"), expected, 1e-10)


def test_resolve_backend_says_what_and_why():
    here = resolve_backend(torch.zeros(1, 4, 2, 4))
    assert here == "fused"
    assert "CPU" in repr(here)
    wide = resolve_backend(torch.zeros(1, 4, 2, 32))
    assert wide == "chunked"
    assert "32" in wide.reason
    assert resolve_backend(torch.zeros(1, 4, 2, 4, device="meta")) == "chunked"
    assert resolve_backend(torch.zeros(1, 4, 2, 4), backend="reference") == "reference"
    with pytest.raises(ValueError, match=r"fused.*chunked"):
        resolve_backend(torch.zeros(1, 4, 2, 32), backend="fused")


def test_auto_takes_what_it_says(helpers):
    operands = helpers.make_operands(T=6)
    named = resolve_backend(operands.value)
    assert importlib.util.find_spec(f"shippo_ssm.scan.{named}") is not None
    assert torch.equal(transport_scan(*operands[:6])[0], transport_scan(*operands[:6], backend=str(named))[0])


GOOD = {"value": (2, 6, 3, 4), "write": (2, 6, 3, 5), "read": (2, 6, 3, 5), "step": (2, 6, 3), "drift": (3, 5)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"value": torch.zeros(2, 6, 12)}, "value"),
        ({"value": torch.zeros(2, 6, 3, 4, dtype=torch.int64)}, "value"),
        ({"value": [1.0]}, "value"),
        ({"write": torch.zeros(2, 6, 3)}, "write"),
        ({"write": torch.zeros(2, 6, 1, 5)}, "write"),
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
        ({"shown": torch.zeros(2, 6, 3, 2, 4)}, "shown"),
        ({"shown": torch.zeros(2, 6, 3, 5)}, "shown"),
        ({"initial_state": torch.zeros(1, 3, 5, 4)}, "initial_state"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_bad_input_names_the_argument_and_the_remedy(change, named):
    arguments = {name: torch.zeros(shape) for name, shape in GOOD.items()} | change
    with pytest.raises(ValueError, match=rf"`{named}`.*expected.*;"):
        transport_scan(**arguments)


@pytest.mark.parametrize(
    "bounds", [[0, 4, 3, 6], [1, 6], [0, 5], [0, 9], [6], [[0, 6]], [0.0, 6.0]], ids=lambda bounds: str(bounds)
)
def test_bad_cu_seqlens(bounds):
    arguments = {name: torch.zeros((1, *shape[1:]) if len(shape) > 2 else shape) for name, shape in GOOD.items()}
    with pytest.raises(ValueError, match=r"`cu_seqlens`.*expected"):
        transport_scan(**arguments, cu_seqlens=torch.tensor(bounds))
