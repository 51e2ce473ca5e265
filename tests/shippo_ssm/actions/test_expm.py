"""The exponential: accuracy from tiny to large norms, derivatives of first and second order, batches, dtypes, errors."""

from __future__ import annotations

import pytest
import torch

from shippo_ssm.actions import expm
from shippo_ssm.actions.expm import frechet_op

NORMS = [1e-8, 1e-3, 0.3, 1.0, 10.0, 100.0, 1e3]


def matrices(kind: str, width: int, norm: float, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.randn(width, width, dtype=torch.float64)
    if kind == "skew":
        raw = raw - raw.mT
    elif kind == "nilpotent":
        raw = raw.triu(1)
    elif kind == "contracting":
        raw = raw @ raw.mT * -0.05 + (raw - raw.mT)
    return (raw * (norm / raw.abs().sum(0).max())).to(dtype)


@pytest.mark.parametrize("kind", ["skew", "nilpotent", "contracting"])
@pytest.mark.parametrize("width", [2, 4, 5])
def test_accuracy_across_norms(kind, width, exact_expm):
    for norm in NORMS:
        single = matrices(kind, width, norm, torch.float32)
        assert exact_expm(single, expm(single)) <= 2 * torch.finfo(torch.float32).eps, f"float32 at norm {norm}"
        double = single.double()
        # In its own precision the condition number of exp, at least max(1, norm), multiplies the unit roundoff.
        assert exact_expm(double, expm(double)) <= 4 * torch.finfo(torch.float64).eps * max(1.0, norm), norm


def test_small_members_of_a_batch_keep_their_accuracy():
    small, large = torch.randn(3, 4, 4, dtype=torch.float64) * 1e-8, torch.randn(2, 4, 4, dtype=torch.float64) * 300
    large = large - large.mT
    assert torch.equal(expm(torch.cat([small, large]))[:3], expm(small))


@pytest.mark.parametrize("norm", [0.5, 30.0, 1e6])
def test_neighbours_of_a_matrix_that_is_not_finite(norm):
    """They may need many squarings, which the gradient of the kernel goes back through in its own memory."""
    generator = norm * torch.tensor([[0.0, -1.0], [1.0, 0.0]]).repeat(64, 1, 1)
    good = torch.arange(64) != 3
    spoilt = generator.clone()
    spoilt[3, 0, 0] = float("inf")
    found, expected = (tensor.requires_grad_() for tensor in (spoilt, generator))
    expm(found, backend="fused").sum().backward()
    expm(expected, backend="fused").sum().backward()
    assert found.grad is not None
    assert expected.grad is not None
    assert found.grad[3].isnan().all()
    torch.testing.assert_close(found.grad[good], expected.grad[good])


@pytest.mark.parametrize("width", [1, 16, 64])
def test_wide_matrices_agree_with_torch(width):
    generator = torch.randn(3, width, width, dtype=torch.float64) / width**0.5
    torch.testing.assert_close(expm(generator), torch.linalg.matrix_exp(generator), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_products_of_4096_float32_rotations_stay_orthogonal(backend):
    for scale in (0.05, 0.5, 3.0):
        raw = torch.randn(4096, 4, 4) * scale
        product = torch.eye(4)
        for turn in expm(raw - raw.mT, backend=backend):
            product = product @ turn
        assert (product @ product.mT - torch.eye(4)).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128])
def test_dtypes(dtype):
    generator = (torch.randn(7, 3, 3, dtype=torch.complex128 if dtype.is_complex else torch.float64) * 0.5).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    result = expm(generator)
    assert result.dtype == dtype
    # The comparison in double precision carries an error of its own.
    tolerance = (16 if dtype == torch.complex128 else 2) * torch.finfo(dtype).eps
    torch.testing.assert_close(result.to(wide), torch.linalg.matrix_exp(generator.to(wide)), rtol=tolerance, atol=tolerance)


def test_gradients_of_first_and_second_order():
    for norm in (0.01, 1.0, 6.0):
        generator = torch.randn(2, 3, 3, dtype=torch.float64)
        generator = (generator * norm / generator.norm()).requires_grad_()
        assert torch.autograd.gradcheck(expm, (generator,))
        assert torch.autograd.gradgradcheck(expm, (generator,))
    complex_generator = torch.randn(2, 2, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(expm, (complex_generator,))


def test_gradient_agrees_with_torch_in_float32():
    generator = torch.randn(50, 4, 4, requires_grad=True)
    cotangent = torch.randn(50, 4, 4)
    ours = torch.autograd.grad(expm(generator, backend="torch"), generator, cotangent)[0]
    wide = generator.detach().double().requires_grad_()
    exact = torch.autograd.grad(torch.linalg.matrix_exp(wide), wide, cotangent.double())[0]
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_third_derivative_of_a_scalar_exponential():
    point = torch.tensor([[0.7]], dtype=torch.float64, requires_grad=True)
    value = expm(point).sum()
    for _ in range(3):
        (slope,) = torch.autograd.grad(value, point, create_graph=True)
        value = slope.sum()
        torch.testing.assert_close(slope, point.exp())


def test_op_contracts_vmap_and_compile():
    generator = torch.randn(4, 3, 3, requires_grad=True)
    torch.library.opcheck(torch.ops.shippo.expm.default, (generator, "torch"))
    torch.library.opcheck(frechet_op._opoverload, (generator, torch.randn(4, 3, 3, requires_grad=True), "torch"))
    assert torch.equal(torch.func.vmap(expm, in_dims=1)(generator.detach().movedim(0, 1)), expm(generator))
    compiled = torch.compile(expm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(generator), expm(generator))


def test_empty_and_strided_batches():
    assert expm(torch.zeros(0, 3, 3)).shape == (0, 3, 3)
    generator = torch.randn(3, 5, 3).movedim(1, 0)
    assert torch.equal(expm(generator), expm(generator.contiguous()))
    transposed = torch.randn(6, 3, 3).mT
    assert torch.equal(expm(transposed), expm(transposed.contiguous()))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (torch.zeros(3, 2), "expected square"),
        (torch.zeros(3), "expected square"),
        (torch.zeros(2, 2, dtype=torch.int64), "floating"),
        ([[0.0]], "expected a tensor"),
    ],
)
def test_bad_input(argument, words):
    with pytest.raises(ValueError, match=words):
        expm(argument)


def test_unknown_backend():
    with pytest.raises(ValueError, match="`backend` is 'cuda'; expected one of 'auto', 'torch', 'fused'"):
        expm(torch.eye(2), backend="cuda")
