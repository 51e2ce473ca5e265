"""NaN: at a real position it shows from there on, at padding nobody sees it; no message, no look at numbers."""

import pytest
import torch

from shippo_ssm.layers import CellState, Shippo, ShippoBackbone, shippo_cell

RIGHTS = ("orthogonal", "dissipative", "split", "dense", "none")
NAN = float("nan")


@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("length", [6, 40])
def test_a_real_nan_propagates(right, length):
    """Few tokens take the torch formulas of the right action, many its kernel."""
    layer, u = Shippo(8, d_state=4, right=right), torch.randn(2, length, 8)
    u[0, 3] = NAN
    y = layer(u)
    assert y[0, :3].isfinite().all()
    assert y[0, 3:].isnan().all()
    assert y[1].isfinite().all()
    _, state = layer(u[:, :3], output_state=True)
    assert layer.step(u[:, 3], state)[0].isnan().any(-1).tolist() == [True, False]


@pytest.mark.parametrize("right", RIGHTS)
def test_padding_cannot_leak(right):
    """Whatever stands at padding: the same outputs, states and gradients, in a layer and in a stack of blocks."""
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    for layer in (Shippo(8, d_state=4, right=right, controller_conv=3), ShippoBackbone(8, 2, d_state=4, right=right)):
        outcomes = []
        u = torch.randn(2, 6, 8)
        for filling in (0.0, 7.0, NAN):
            filled = torch.where(mask.unsqueeze(-1), u, filling).requires_grad_()
            y, state = layer(filled, attention_mask=mask, output_state=True)
            slopes = torch.autograd.grad(y.square().sum(), [filled, *layer.parameters()])
            memory = (state if isinstance(layer, Shippo) else state[-1]).cell.memory
            outcomes.append([y, memory, *slopes])
        for other in outcomes[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other))


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_padding_cannot_leak_through_the_cell(backend):
    """Every operand of the public cell, a time-varying drift among them."""
    shapes = {"value": (1, 5, 2, 3), "write": (1, 5, 2, 4), "read": (1, 5, 2, 4), "step": (1, 5, 2), "mix": (1, 5, 2)}
    shapes |= {"drift": (1, 5, 2, 4), "right": (1, 5, 2, 3, 3)}
    operands = {name: torch.rand(shape) for name, shape in shapes.items()}
    mask = torch.tensor([[True, False, True, True, False]])
    outcomes = []
    for filling in (0.5, NAN):
        filled = {}
        for name, operand in operands.items():
            real = mask.view(1, 5, *[1] * (operand.ndim - 2))
            filled[name] = torch.where(real, operand, filling).requires_grad_()
        y, state = shippo_cell(**filled, mask=mask, output_final_state=True, backend=backend)
        assert isinstance(state, CellState)
        outcomes.append([y, *state, *torch.autograd.grad(y.sum() + state.memory.sum(), list(filled.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))
    assert not outcomes[0][0][~mask].any()


def test_the_forward_pass_looks_at_no_number():
    """A fake tensor has no numbers; on the meta device there are none either."""
    from torch._subclasses import FakeTensorMode

    mask = torch.ones(2, 5, dtype=torch.int64)
    with FakeTensorMode():
        fake = torch.empty(2, 5, 8, requires_grad=True)
        layer = Shippo(8, d_state=4, right="split")
        y, state = layer(fake, attention_mask=torch.ones(2, 5, dtype=torch.int64), output_state=True)
        assert torch.autograd.grad(y.sum(), fake)[0].shape == (2, 5, 8)
        assert layer.step(fake[:, 0], state)[0].shape == (2, 8)
    for right in RIGHTS:
        layer = Shippo(8, d_state=4, right=right, device="meta")
        u = torch.empty(2, 5, 8, device="meta", requires_grad=True)
        y, state = layer(u, attention_mask=mask.to("meta"), output_state=True)
        assert y.is_meta
        assert y.shape == (2, 5, 8)
        assert state.cell.memory.shape == (2, 4, 4, 4)
        assert torch.autograd.grad(y.sum(), u)[0].shape == (2, 5, 8)
