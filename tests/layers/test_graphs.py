"""The layer as one graph: torch.compile without breaks, torch.export with free batch and length."""

import pytest
import torch

from shippo_ssm.layers import Shippo


@pytest.mark.parametrize("right", ["split", "dense", "none"])
def test_compile_fullgraph(right):
    layer, u = Shippo(8, d_state=8, right=right), torch.randn(2, 6, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = compiled(u)
    assert torch.allclose(y, layer(u), atol=1e-6)
    parameters = list(layer.parameters())
    got = torch.autograd.grad(y.sum(), parameters)
    expected = torch.autograd.grad(layer(u).sum(), parameters)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected))


def test_compile_masked_and_step():
    layer, u = Shippo(8, d_state=8, right="none"), torch.randn(2, 6, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    with torch.no_grad():
        y, state = torch.compile(layer, fullgraph=True, backend="aot_eager")(u, attention_mask=mask, output_state=True)
        expected, after = layer(u, attention_mask=mask, output_state=True)
        assert torch.allclose(y, expected, atol=1e-6)
        assert torch.allclose(state.cell.memory, after.cell.memory, atol=1e-6)
        y, _ = torch.compile(layer.step, fullgraph=True, backend="aot_eager")(u[:, 0], state)
        assert torch.allclose(y, layer.step(u[:, 0], state)[0], atol=1e-6)


@pytest.mark.parametrize("right", ["split", "dense"])
def test_export_with_free_batch_and_length(right):
    layer = Shippo(8, d_state=8, right=right)
    sizes = {"u": {0: torch.export.Dim("B", max=64), 1: torch.export.Dim("T", min=3, max=4096)}}
    program = torch.export.export(layer, (torch.randn(2, 6, 8),), dynamic_shapes=sizes)
    u = torch.randn(3, 17, 8)
    assert torch.allclose(program.module()(u), layer(u), atol=1e-6)
