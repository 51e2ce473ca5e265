"""The short convolution's kernels against its formula, and where the formula has to be taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shippo_ssm.layers.rows import ShortConv, shifted_sums


def case(shape: tuple[int, int, int], taps: int, dtype: torch.dtype = torch.float64, bias: bool = True):
    """A convolution, inputs behind a window that is not empty, and a cotangent."""
    random = torch.Generator().manual_seed(0)
    conv = ShortConv(shape[-1], taps, bias=bias, dtype=dtype)
    x, dy = (torch.randn(shape, generator=random, dtype=dtype) for _ in range(2))
    window = torch.randn(shape[0], taps - 1, shape[-1], generator=random, dtype=dtype)
    return conv, x.requires_grad_(), window.requires_grad_(), dy


def formula(conv: ShortConv, x: Tensor, window: Tensor) -> Tensor:
    """y_t = bias + sum_k weight_k x_{t-K+1+k} in float64, position by position."""
    row = torch.cat([window, x], 1).double()
    bias = 0.0 if conv.bias is None else conv.bias.double()
    weight = conv.weight.double()
    return torch.stack([bias + (row[:, t : t + conv.width] * weight).sum(1) for t in range(x.shape[1])], 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "taps"), [((2, 5, 16), 4), ((1, 1, 3), 2), ((3, 2, 37), 4), ((2, 70, 20), 1), ((5, 9, 1), 3)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_value_and_gradient_are_those_of_the_formula(shape, taps, dtype, tolerance, bias) -> None:
    conv, x, window, dy = case(shape, taps, dtype, bias)
    y, after = conv(x, window)
    assert y.grad_fn is not None
    assert "Convolved" in y.grad_fn.name()
    assert torch.equal(after, torch.cat([window, x], 1)[:, shape[1] :])
    true, leaves = formula(conv, x, window), (x, window, *conv.parameters())
    found, wanted = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(true, leaves, dy.double())
    for ours, theirs in zip((y, *found), (true, *wanted), strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * (1 + theirs.norm())


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    conv, x, window, dy = case((5, 300, 64), 4, torch.float32)
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            y = conv(x, window)[0]
            runs.append((y, *torch.autograd.grad(y, (x, window, *conv.parameters()), dy)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*both) for both in zip(*runs))


def test_second_derivatives_are_right() -> None:
    conv, x, window, _ = case((2, 3, 5), 3)
    assert conv.bias is not None
    assert torch.autograd.gradgradcheck(
        lambda x, window, weight, bias: torch.func.functional_call(conv, {"weight": weight, "bias": bias}, (x, window))[0],
        (x, window, conv.weight, conv.bias),
    )


def test_cotangents_that_are_not_contiguous() -> None:
    conv, x, window, dy = case((2, 6, 8), 4)
    turned = dy.transpose(1, 2).contiguous().transpose(1, 2)
    for found, expected in zip(*(torch.autograd.grad(conv(x, window)[0], (x, conv.weight), d) for d in (turned, dy))):
        assert torch.equal(found, expected)


def test_only_what_is_asked_for_is_returned() -> None:
    conv, x, window, dy = case((2, 6, 8), 4)
    conv.requires_grad_(False)
    (gradient,) = torch.autograd.grad(conv(x, window)[0], x, dy)
    assert gradient.isfinite().all()
    assert conv.weight.grad is None
    assert not conv(x.detach(), window.detach())[0].requires_grad


def test_transforms_and_other_layouts_take_the_formula_of_torch() -> None:
    conv, x, window, dy = case((2, 6, 8), 4)
    y, bias = conv(x, window)[0], conv.bias
    assert bias is not None
    expected = shifted_sums(torch.cat([window, x], 1), conv.weight, bias)
    torch.testing.assert_close(y, expected)
    slope = torch.func.grad(lambda x: (conv(x, window.detach())[0] * dy).sum())(x.detach())
    torch.testing.assert_close(slope, torch.autograd.grad(expected, x, dy, retain_graph=True)[0])
    rows = torch.func.vmap(lambda x, window: conv(x.unsqueeze(0), window.unsqueeze(0))[0][0])(x, window)
    torch.testing.assert_close(rows, expected)
    tangent = torch.func.jvp(lambda x: conv(x, window.detach())[0], (x.detach(),), (dy,))[1]
    torch.testing.assert_close(tangent, shifted_sums(torch.cat([torch.zeros_like(window), dy], 1), conv.weight, 0 * bias))
    half = conv.to(torch.bfloat16)(x.bfloat16(), window.bfloat16())[0]
    assert (half.double() - expected).norm() < 0.02 * expected.norm()
