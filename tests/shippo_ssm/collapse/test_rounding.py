"""Trained actions that nearly multiply like a finite group are rounded to some that do."""

import math

import pytest
import torch

from shippo_ssm import Shippo
from shippo_ssm.actions import Orthogonal, expm
from shippo_ssm.collapse import exact_right, nearest_representation, realised_actions


def turn(width: int, i: int, j: int) -> torch.Tensor:
    generator = torch.zeros(width, width).double()
    generator[i, j], generator[j, i] = math.pi / 2, -math.pi / 2
    return torch.linalg.matrix_exp(generator)


def disturbed(matrices: torch.Tensor, size: float, copies: int = 1) -> torch.Tensor:
    noise = size * torch.randn(copies, *matrices.shape, dtype=matrices.dtype)
    return (matrices @ expm(noise - noise.mT)).flatten(0, 1)


@pytest.mark.parametrize(("width", "order"), [(2, 4), (3, 24)])
def test_generators_with_noise_give_the_whole_group_exactly(width, order):
    generators = torch.stack([turn(width, i, i + 1) for i in range(width - 1)])
    found = nearest_representation(disturbed(generators, 0.02, copies=5))
    assert found is not None
    elements, table = found.elements, found.table
    assert elements.shape == (order, width, width)
    torch.testing.assert_close(elements.unsqueeze(1) @ elements, elements[table], atol=1e-12, rtol=0)
    torch.testing.assert_close(elements @ elements.mT, torch.eye(width).double().expand_as(elements), atol=1e-12, rtol=0)
    assert 0 < found.moved < 0.2
    # Every generator is near one element.
    assert all(float((elements - own).flatten(1).norm(dim=1).min()) < 0.1 for own in generators)


def test_reflections_and_the_trivial_group():
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    found = nearest_representation(disturbed(torch.stack([turn(2, 0, 1), swap]), 0.02))
    assert found is not None
    assert len(found.elements) == 8
    trivial = nearest_representation(disturbed(torch.eye(4).double().unsqueeze(0), 0.01, copies=20))
    assert trivial is not None
    torch.testing.assert_close(trivial.elements, torch.eye(4).double().unsqueeze(0))


def test_actions_that_generate_no_small_group_are_left():
    right = Orthogonal(3).dense(torch.randn(6, 3).double(), 1.0)
    assert nearest_representation(right, tol=0.1) is None
    assert nearest_representation(torch.stack([turn(3, 0, 1), turn(3, 1, 2)]), max_order=23) is None


@pytest.fixture
def quarter_turns():
    """A layer whose first group of channels turns by nearly a quarter at every token; the others by nothing in particular."""
    layer = Shippo(8, d_state=4, group_width=2, backend="reference").eval()
    projection, bias = layer.controller.right_proj, layer.controller.right_bias
    assert projection is not None
    assert bias is not None
    with torch.no_grad():
        projection.weight[0] = 0
        layer.controller.scalar_bias[0, 0] = math.log(math.e - 1)
        layer.controller.scalar_proj.weight[0] = 0
        bias[0] = math.pi / 2 + 0.02
        bias[1:] = torch.randn(len(bias) - 1, 1)
        projection.weight[1:].normal_()
    return layer


def test_a_model_runs_with_exact_actions_while_the_context_lasts(quarter_turns):
    layer, u = quarter_turns, torch.randn(2, 7, 8)
    before, trained = layer(u), layer.right
    with exact_right(layer, u) as found:
        ((first, *_),) = found.values()
        assert first is not None
        assert len(first.elements) == 4
        actions = realised_actions(layer, u)["Shippo"][:, 0]
        fourth = torch.linalg.matrix_power(actions, 4)
        torch.testing.assert_close(fourth, torch.eye(2).expand_as(fourth), atol=1e-6, rtol=0)
        y = layer(u)
        assert not torch.allclose(y, before, atol=1e-4)
        # Decoding and gradients take the same actions.
        state, steps = layer.init_state(2), []
        with torch.no_grad():
            for t in range(7):
                out, state = layer.step(u[:, t], state)
                steps.append(out)
        torch.testing.assert_close(torch.stack(steps, 1), y, atol=1e-5, rtol=1e-4)
        y.sum().backward()
        assert float(layer.controller.right_bias.grad[0].abs()) > 0
    assert layer.right is trained
    assert torch.equal(layer(u), before)
