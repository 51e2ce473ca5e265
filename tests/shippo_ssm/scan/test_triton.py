"""Triton's kernels of the scan, run by Triton's interpreter, against the reference loop: outputs, last state, all gradients."""

import pytest
import torch

from shippo_ssm import dispatch
from shippo_ssm.scan import resolve_backend, transport_scan
from shippo_ssm.scan.triton import span_of
from tests.shippo_ssm.scan.conftest import REGIMES, TOLERANCE

# One program, unless a case says otherwise: the interpreter is slow.
SMALL = {"B": 1, "G": 2, "N": 3, "P": 2}


def assert_small(errors, tolerance):
    assert errors
    wrong = {name: ratio for name, ratio in errors.items() if not ratio <= tolerance}
    assert not wrong


@pytest.mark.parametrize(
    ("length", "regime"),
    [(1, "contracting"), (2, "near-unit"), (15, "strong decay"), (16, "expanding"), (17, "contracting"), (100, "near-unit")],
)
def test_lengths_and_regimes_equal_the_reference(interpreter, length, regime):
    assert regime in REGIMES
    assert_small(interpreter.ask("scan", dtype="float32", T=length, regime=regime, **SMALL), TOLERANCE[torch.float32])


@pytest.mark.parametrize("regime", REGIMES)
def test_double_precision_equals_the_reference(interpreter, regime):
    errors = interpreter.ask("scan", dtype="float64", T=5, regime=regime, **SMALL)
    assert_small(errors, TOLERANCE[torch.float64])


@pytest.mark.parametrize(
    "case",
    [
        {"right": False, "T": 3, "B": 2, "G": 3},
        {"varying": True, "T": 4, "G": 3},
        {"rank": 3, "T": 5},
        {"T": 5, "G": 4, "Q": 1},
        {"T": 5, "G": 6, "Q": 3, "rank": 2, "seen": True, "varying": True, "B": 2},
        {"T": 10, "G": 3, "Q": 1, "P": 5, "right": False},
        {"seen": True, "T": 18, "P": 3, "N": 5, "G": 1},
        {"seen": True, "rank": 3, "varying": True, "T": 4},
        {"right": False, "rank": 2, "T": 3, "P": 5, "N": 9, "G": 1},
        {"T": 2, "P": 1, "N": 1},
        {"T": 5, "P": 4, "N": 13, "G": 3},
        {"T": 2, "P": 16, "N": 2, "G": 1, "right": False},
    ],
    ids=lambda case: " ".join(f"{key}={value}" for key, value in case.items()),
)
def test_variants_equal_the_reference(interpreter, case):
    assert_small(interpreter.ask("scan", dtype="float64", **(SMALL | case)), TOLERANCE[torch.float64])


@pytest.mark.parametrize("bounds", [[0, 20], [0, 0, 3, 3, 20, 20]])
def test_packed_sequences_equal_the_reference(interpreter, bounds):
    case = SMALL | {"T": 20, "states": len(bounds) - 1, "seen": len(bounds) > 2, "varying": len(bounds) > 2, "Q": 1}
    assert_small(interpreter.ask("scan", dtype="float64", cu_seqlens=bounds, **case), TOLERANCE[torch.float64])


@pytest.mark.parametrize(
    "case",
    [{"T": 11, "Q": 1}, {"T": 10, "cu_seqlens": [0, 0, 2, 10], "states": 3, "varying": True}, {"T": 7, "B": 2, "right": False}],
    ids=["one sequence", "packed", "no right action"],
)
def test_segments_of_a_card_equal_the_reference(interpreter, case):
    """Summaries, their prefix and the replay of each segment, forward and backward, are all GPU kernels."""
    assert_small(interpreter.ask("segmented", **(SMALL | case)), TOLERANCE[torch.float64])


@pytest.mark.parametrize("bounds", [[0, 8, 1 << 22], [0, -5, 20], [3, 8, 20], [0, 8, 17]])
def test_invalid_bounds_give_nan(interpreter, bounds):
    assert interpreter.ask("invalid_bounds", cu_seqlens=bounds, T=20, **SMALL) == {"final_state": True, "gradient": True}


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 5e-3), ("float16", 1e-3)])
def test_half_precision_operands_are_loaded_as_they_are(interpreter, dtype, tolerance):
    """The state is float32 and sees no rounding but that of the operands; gradients are rounded once, at the end."""
    errors = interpreter.ask("half", dtype=dtype, T=5, **SMALL)
    assert errors.pop("final_state") <= TOLERANCE[torch.float32]
    assert_small(errors, tolerance)


def test_operators_say_what_they_return(interpreter):
    """torch's own checks pass, or the question raises; and the interpreter is never chosen by itself."""
    assert interpreter.ask("opcheck", T=3, seen=True, Q=1, **SMALL) == {"auto": "fused"}


def test_a_compiled_graph_holds_both_passes(interpreter):
    errors = interpreter.ask("compiled", T=3, Q=1, **SMALL)
    assert len(errors) == 6
    assert max(errors.values()) <= TOLERANCE[torch.float64]


def test_the_backward_pass_has_few_long_programs_or_many_short_ones():
    """A span is a power of two; a sequence that is alone is cut into more of them."""
    assert span_of(1024, 512) == 256
    assert span_of(1, 512) == span_of(1 << 20, 3) == 64
    assert span_of(1024, 10_000) == 8192
    for chains, length in ((1, 70_000), (512, 4096), (3, 0)):
        assert span_of(chains, length).bit_count() == 1


def test_auto_takes_a_card_where_triton_is_there(monkeypatch):
    """A meta tensor stands for a GPU tensor: it is not on the CPU, and nothing is computed."""
    value = torch.zeros(1, 4, 2, 4, device="meta")
    assert resolve_backend(value) == "chunked"
    monkeypatch.setattr("shippo_ssm.dispatch.gpu_reason", lambda tensor: "")
    taken = resolve_backend(value)
    assert taken == "triton"
    assert "auto" in taken.reason
    assert resolve_backend(torch.zeros(1, 4, 2, 32, device="meta")) == "chunked"
    few, many = (resolve_backend(torch.zeros(batch, 4096, 64, 4, device="meta")) for batch in (1, 16))
    assert (few, many) == ("segmented", "triton")
    assert "fill a GPU" in few.reason


def test_without_triton_it_is_refused_by_name(monkeypatch):
    value = torch.zeros(1, 2, 1, 1)
    with pytest.raises(ValueError, match=r"`backend` is 'triton' with tensors on cpu.*chunked"):
        transport_scan(value, value, value, value[..., 0], value[0, 0], backend="triton")
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert "extra `gpu`" in dispatch.gpu_reason(value)
