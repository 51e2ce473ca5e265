"""One battery for all factors, against the dense exponential of their generator."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shippo_ssm.actions import Diagonal, RankOne, Rotation, Shear, expm
from shippo_ssm.actions.factors import phi

U = torch.tensor([0.3, -1.2, 0.5], dtype=torch.float64)
V = torch.tensor([0.7, 0.1, -0.4], dtype=torch.float64)
FACTORS = {
    "diagonal": Diagonal(3, 1),
    "rotation": Rotation(3, 2, 0),
    "shear": Shear(4, 1, 3),
    "rank one": RankOne(U, V),
    "rank one, nilpotent": RankOne(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 2.0, 0.0])),
}


@pytest.fixture(params=FACTORS.values(), ids=list(FACTORS))
def factor(request):
    return request.param


def test_dense_is_the_exponential_of_the_generator(factor):
    coef = torch.tensor([[0.0, 1e-9, -0.3], [2.0, -4.0, 0.7]], dtype=torch.float64)
    want = torch.linalg.matrix_exp(coef[..., None, None] * factor.generator.double())
    torch.testing.assert_close(factor.dense(coef), want, rtol=1e-13, atol=1e-13)


def test_act_is_a_product_and_broadcasts(factor):
    coef = torch.randn(5, 1, dtype=torch.float64)
    state = torch.randn(2, 7, factor.width, dtype=torch.float64)
    torch.testing.assert_close(factor.act(state, coef), state @ factor.dense(coef), rtol=1e-12, atol=1e-12)


def test_inverse_is_the_true_inverse(factor):
    coef = torch.randn(6, dtype=torch.float64)
    eye = torch.eye(factor.width, dtype=torch.float64).expand(6, -1, -1)
    torch.testing.assert_close(factor.dense(coef) @ factor.inverse(coef), eye, rtol=1e-12, atol=1e-12)


def test_gradients(factor):
    coef = torch.tensor([0.0, 0.4, -1.1], dtype=torch.float64, requires_grad=True)
    state = torch.randn(3, 2, factor.width, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(factor.act, (state, coef))
    assert torch.autograd.gradgradcheck(factor.dense, (coef,))
    want = torch.autograd.grad(expm(coef[:, None, None] * factor.generator.double()).square().sum(), coef)
    torch.testing.assert_close(torch.autograd.grad(factor.dense(coef).square().sum(), coef), want)


@settings(max_examples=20, deadline=None)
@given(st.floats(-3, 3), st.floats(-3, 3))
def test_one_parameter_group(first, second):
    for factor in FACTORS.values():
        first_then_second = factor.act(factor.dense(torch.tensor(first, dtype=torch.float64)), second)
        torch.testing.assert_close(
            first_then_second, factor.dense(torch.tensor(first + second, dtype=torch.float64)), rtol=1e-11, atol=1e-11
        )


def test_paper_conventions():
    angle = 0.3
    turn = Rotation(2, 0, 1).dense(torch.tensor(angle))
    torch.testing.assert_close(turn, torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]))
    state = torch.arange(6.0).reshape(2, 3)
    sheared = Shear(3, 0, 2).act(state, 10.0)
    assert sheared.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 35.0]]


def test_untouched_columns_are_bitwise_the_same():
    state = torch.randn(5, 4)
    for factor, kept in ((Rotation(4, 0, 3), [1, 2]), (Shear(4, 0, 3), [0, 1, 2]), (Diagonal(4, 2), [0, 1, 3])):
        assert torch.equal(factor.act(state, 0.7)[:, kept], state[:, kept])


def test_phi_is_exact_at_zero_and_smooth_across_the_switch():
    kappa = torch.tensor([0.0, 1e-300, 1e-12, 0.4999999, 0.5000001, -20.0], dtype=torch.float64, requires_grad=True)
    values = phi(kappa)
    assert values[0].item() == 1.0
    exact = [1.0, 1.0, 1.0 + 5e-13, math.expm1(0.4999999) / 0.4999999, math.expm1(0.5000001) / 0.5000001]
    torch.testing.assert_close(values[:5], torch.tensor(exact, dtype=torch.float64), rtol=4e-16, atol=0)
    (slope,) = torch.autograd.grad(values.sum(), kappa)
    assert slope[0].item() == 0.5
    torch.testing.assert_close(slope[3], slope[4], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Diagonal(3, 3), "`i` is 3; expected a channel, an integer in 0..2"),
        (lambda: Rotation(3, 1, 1), "different channels"),
        (lambda: Shear(2, 0, -1), "`j` is -1"),
        (lambda: RankOne(torch.ones(2), torch.ones(3)), "`u` and `v`"),
        (lambda: Shear(2, 0, 1).act(torch.ones(4, 3), 1.0), "`state` has shape"),
    ],
)
def test_bad_input(build, words):
    with pytest.raises(ValueError, match=words):
        build()
