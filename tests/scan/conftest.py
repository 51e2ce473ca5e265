"""What the scan tests share: operands in four regimes, one tolerance table, and memory poisoned with NaN."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

REGIMES = ("contracting", "near-unit", "strong decay", "expanding")
# RMS error over RMS of the reference, per dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


class Operands(NamedTuple):
    value: Tensor
    write: Tensor
    read: Tensor
    step: Tensor
    drift: Tensor
    right: Tensor | None
    initial_state: Tensor | None
    shown: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Operands":
        return Operands(*(None if tensor is None else tensor.to(dtype) for tensor in self))


def make_operands(
    *, regime="contracting", B=2, T=8, G=2, N=5, P=3, rank=None, varying=False, right=True, shown=False, states=None, seed=0
) -> Operands:
    """float32-representable operands in float64, so that every dtype sees the same numbers."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random)

    def uniform(*shape):
        return torch.rand(*shape, generator=random)

    ranks = () if rank is None else (rank,)
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
    return Operands(
        normal(B, T, G, *ranks, P),
        normal(B, T, G, *ranks, N),
        normal(B, T, G, N),
        step,
        drift,
        actions,
        normal(B if states is None else states, G, N, P),
        normal(B, T, G, *ranks, P) if shown else None,
    ).to(torch.float64)


def run_with_gradients(scan, operands: Operands, **options) -> dict[str, Tensor]:
    """y, the final state, and the gradient of every operand for fixed cotangents on both outputs."""
    leaves = Operands(*(None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in operands))
    options |= {} if leaves.shown is None else {"shown": leaves.shown}
    y, final_state = scan(*leaves[:6], initial_state=leaves.initial_state, output_final_state=True, **options)
    random = torch.Generator().manual_seed(99)
    on_y = torch.randn(y.shape, generator=random, dtype=torch.float64).to(y.dtype)
    on_state = torch.randn(final_state.shape, generator=random, dtype=torch.float64).to(y.dtype)
    given = {name: tensor for name, tensor in leaves._asdict().items() if tensor is not None}
    gradients = torch.autograd.grad([y, final_state], list(given.values()), [on_y, on_state])
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


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """`torch.empty` gives NaN, so that a kernel that forgets to write a place is caught."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def helpers():
    """The helpers above, for test files: they cannot import this one."""
    from types import SimpleNamespace

    return SimpleNamespace(
        REGIMES=REGIMES,
        TOLERANCE=TOLERANCE,
        make_operands=make_operands,
        run_with_gradients=run_with_gradients,
        rms_ratio=rms_ratio,
        assert_agree=assert_agree,
    )
