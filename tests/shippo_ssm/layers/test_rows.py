"""The RMS norm's kernels against torch's own formula, and where torch's has to be taken."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shippo_ssm.layers.rows import NoDecayNorm, RMSNorm


def pair(shape: tuple[int, ...], dtype: torch.dtype, eps: float) -> tuple[RMSNorm, Tensor, Tensor]:
    """A norm with a weight of its own, an input and a cotangent."""
    random = torch.Generator().manual_seed(0)
    norm = RMSNorm(shape[-1], eps=eps, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1], generator=random))
    u, dy = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for _ in range(2))
    return norm, u.requires_grad_(), dy


@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 20), (130, 13), (3, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_value_and_gradient_are_those_of_the_formula(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    norm, u, dy = pair(shape, dtype, 1e-5)
    y = norm(u)
    assert y.grad_fn is not None
    assert "Normed" in y.grad_fn.name()
    found = torch.autograd.grad(y, (u, norm.weight), dy)
    double, weight = u.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    true = F.rms_norm(double, (shape[-1],), weight, 1e-5)
    wanted = torch.autograd.grad(true, (double, weight), dy.double())
    for ours, theirs in zip((y, *found), (true, *wanted)):
        assert (ours.double() - theirs).norm() <= tolerance * (1 + theirs.norm())


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    norm, u, dy = pair((4, 300, 64), torch.float32, 1e-5)
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            y = norm(u)
            runs.append((y, *torch.autograd.grad(y, (u, norm.weight), dy)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*both) for both in zip(*runs))


def test_second_derivatives_are_right() -> None:
    norm, u, _ = pair((3, 6), torch.float64, 1e-3)
    assert torch.autograd.gradgradcheck(
        lambda u, weight: torch.func.functional_call(norm, {"weight": weight}, u), (u, norm.weight)
    )


def test_only_what_is_asked_for_is_returned() -> None:
    norm, u, dy = pair((5, 6), torch.float32, 1e-5)
    norm.requires_grad_(False)
    (gradient,) = torch.autograd.grad(norm(u), u, dy)
    assert gradient.isfinite().all()
    assert norm.weight.grad is None
    assert not norm(u.detach()).requires_grad


def test_a_nan_reaches_its_own_token_alone() -> None:
    norm, u, _ = pair((4, 16), torch.float32, 1e-5)
    broken = u.detach().clone()
    broken[1, 3] = torch.nan
    assert norm(broken).isnan().any(1).tolist() == [False, True, False, False]


def test_transforms_and_other_layouts_take_the_formula_of_torch() -> None:
    norm, u, dy = pair((4, 16), torch.float64, 1e-5)
    formula = F.rms_norm(u, (16,), norm.weight, 1e-5)
    slope = torch.func.grad(lambda u: (norm(u) * dy).sum())(u.detach())
    torch.testing.assert_close(slope, torch.autograd.grad(formula, u, dy)[0])
    torch.testing.assert_close(torch.func.vmap(norm)(u), formula)
    tangent = torch.func.jvp(norm, (u.detach(),), (dy,))[1]
    assert tangent.abs().sum() > 0
    strided = u.detach().repeat_interleave(2, 0)[::2].mT.contiguous().mT.requires_grad_()
    torch.testing.assert_close(norm(strided), formula)
    with torch.no_grad():
        torch.testing.assert_close(norm(strided), formula)


def test_the_weight_is_spared() -> None:
    norm = NoDecayNorm(8, eps=1e-5).to(torch.bfloat16)
    assert norm.weight.dtype == torch.float32
    assert norm(torch.randn(2, 8)).dtype == torch.float32


def test_two_dtypes_compute_in_the_wider_one_without_a_warning() -> None:
    norm, random = RMSNorm(16, eps=1e-5), torch.Generator().manual_seed(0)
    u = torch.randn(3, 16, generator=random).bfloat16().requires_grad_()
    torch.set_warn_always(True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            y = norm(u)
        y.sum().backward()
    finally:
        torch.set_warn_always(False)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, F.rms_norm(u.float(), (16,), norm.weight, 1e-5).bfloat16())
