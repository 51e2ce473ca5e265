"""What the scan tests share: operands in four regimes, one tolerance table, and memory poisoned with NaN."""

import functools

import pytest
import torch
from torch import Tensor

from shippo_ssm.scan import Recurrence, scan

REGIMES = ("contracting", "near-unit", "strong decay", "expanding")
# RMS error over RMS of the reference, per dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def make_recurrence(
    *, regime="contracting", B=2, T=8, G=2, Q=None, N=5, P=3, rank=1, varying=False, right=True, seen=False, states=None,
    seed=0, dtype=torch.float64,
) -> tuple[Recurrence, Tensor]:  # fmt: skip
    """A normalised record and an initial state: float32-representable numbers, so that every dtype sees the same ones."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random)

    def uniform(*shape):
        return torch.rand(*shape, generator=random)

    drifts = (B, T, G, N) if varying else (G, N)
    step = 0.5 + 0.5 * uniform(B, T, G)
    if regime == "contracting":
        drift, spread = -0.1 - uniform(*drifts), 0.1
    elif regime == "near-unit":
        drift, spread = -1e-3 * uniform(*drifts), 0.0
    elif regime == "strong decay":
        drift, spread = torch.full(drifts, -160.0), 0.1
        step = torch.ones(B, T, G)
    else:
        drift, spread = 1e-3 * uniform(*drifts), 0.0
    actions = None
    if right:
        raw = normal(B, T, G, P, P)
        # Rotations, and in the regimes that forget also a little stretching.
        actions = torch.linalg.matrix_exp((0.3 * (raw - raw.mT) + spread * normal(B, T, G, P, P)).double()).float()
    sets = G if Q is None else Q
    value, write, read = normal(B, T, G, rank, P), normal(B, T, sets, rank, N), normal(B, T, sets, N)
    recurrence = Recurrence(value, write, read, step, drift, actions, normal(B, T, G, rank, P) if seen else None)
    initial_state = normal(B if states is None else states, G, N, P)
    return recurrence.map(lambda tensor: tensor.to(dtype)), initial_state.to(dtype)


def with_state(result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """What a scan gave that was asked for its final state."""
    y, final_state = result
    assert final_state is not None
    return y, final_state


def run_with_gradients(recurrence: Recurrence, initial_state: Tensor | None = None, **options) -> dict[str, Tensor]:
    """y, the final state, and the gradient of every operand for fixed cotangents on both outputs."""
    leaves = recurrence.map(lambda tensor: tensor.detach().clone().requires_grad_())
    start = None if initial_state is None else initial_state.detach().clone().requires_grad_()
    y, final_state = with_state(scan(leaves, initial_state=start, output_final_state=True, **options))
    random = torch.Generator().manual_seed(99)
    on_y = torch.randn(y.shape, generator=random, dtype=torch.float64).to(y.dtype)
    on_state = torch.randn(final_state.shape, generator=random, dtype=torch.float64).to(y.dtype)
    given = {name: tensor for name, tensor in (leaves._asdict() | {"initial_state": start}).items() if tensor is not None}
    # The loop never touches the gates of an empty sequence: their gradient is zero, not missing.
    gradients = torch.autograd.grad(
        [y, final_state], list(given.values()), [on_y, on_state], allow_unused=True, materialize_grads=True
    )
    return {"y": y.detach(), "final_state": final_state.detach()} | {
        f"gradient of {name}": gradient for name, gradient in zip(given, gradients)
    }


def rms_ratio(got: Tensor, expected: Tensor) -> float:
    """RMS of the error over RMS of what was expected; the floor stands for "both are zero in float32"."""
    error = (got.double() - expected.double()).norm().item()
    return error / max(expected.double().norm().item(), 1e-30)


def assert_agree(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert tensor.shape == expected[name].shape, name
        assert torch.isfinite(tensor).all(), name
        if tensor.numel():
            ratio = rms_ratio(tensor, expected[name])
            assert ratio <= tolerance, f"{name}: {ratio:.2e} > {tolerance:.0e}"


# Operands that a backend may meet, beside the regimes.
VARIANTS = (
    {"right": False, "T": 37},
    {"varying": True, "T": 37},
    {"rank": 3, "T": 37},
    {"rank": 2, "varying": True, "right": False, "T": 5, "N": 2, "P": 5},
    {"T": 20, "N": 3, "P": 2},
    {"seen": True, "T": 37},
    {"G": 4, "Q": 1, "T": 37},
    {"G": 4, "Q": 2, "T": 37, "seen": True},
    {"G": 6, "Q": 3, "rank": 2, "varying": True, "T": 20, "seen": True},
    {"G": 3, "Q": 1, "rank": 2, "right": False, "T": 5, "N": 9, "P": 6, "seen": True},
    {"seen": True, "rank": 2, "varying": True, "right": False, "T": 5, "N": 9, "P": 5},
)


@functools.cache
def reference_run(cu_seqlens=None, **case) -> tuple[Recurrence, Tensor, dict[str, Tensor]]:
    """A case and its float64 reference run, computed once for all backends and dtypes."""
    recurrence, state = make_recurrence(**case)
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    return recurrence, state, run_with_gradients(recurrence, state, cu_seqlens=bounds, backend="reference")


def check_backend(backend: str, dtype=torch.float64, **case) -> dict[str, Tensor]:
    """What every backend keeps: outputs, last state and the gradients of all operands are those of the reference loop."""
    recurrence, state, expected = reference_run(**case)
    bounds = torch.tensor(case["cu_seqlens"]) if "cu_seqlens" in case else None
    operands = recurrence.map(lambda tensor: tensor.to(dtype))
    got = run_with_gradients(operands, state.to(dtype), cu_seqlens=bounds, backend=backend)
    assert_agree(got, expected, TOLERANCE[dtype])
    return got


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """`torch.empty` gives NaN, so that a kernel that forgets to write a place is caught."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    # A property that torch gives the module at run time.
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def helpers():
    """The helpers above, for test files."""
    from types import SimpleNamespace

    shared = (make_recurrence, with_state, run_with_gradients, rms_ratio, assert_agree, check_backend)
    return SimpleNamespace(REGIMES=REGIMES, TOLERANCE=TOLERANCE, **{helper.__name__: helper for helper in shared})
