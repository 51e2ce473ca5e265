"""The decode step on a GPU: Triton's kernel, run by Triton's interpreter, against the same steps of the layer in torch."""

from typing import Any

import pytest
import torch

from shippo_ssm import Shippo
from shippo_ssm.dispatch import uses_gpu_step
from shippo_ssm.layers.cell import gpu_step

SMALL: dict[str, Any] = {"d_state": 3, "group_width": 2, "expand": 1}


@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [
        ("float64", {"right": "split"}, 1e-13),
        ("float64", {"right": "none", "write_rank": 2}, 1e-13),
        ("float32", {"group_width": 3}, 1e-5),
        ("bfloat16", {}, 1e-2),
    ],
)
def test_steps_of_a_layer(interpreter, dtype, options, tolerance):
    errors = interpreter.ask("step", dtype=dtype, **(SMALL | options))
    assert set(errors) == {"y", "memory", "write", "value"}
    assert max(errors.values()) <= tolerance


def test_it_serves_a_gpu_without_gradients(monkeypatch):
    """A meta tensor stands for a GPU: it is not on the CPU, and nothing is computed."""
    value, memory = torch.zeros(2, 3, 4, device="meta"), torch.zeros(2, 3, 5, 4, device="meta")
    monkeypatch.setattr("shippo_ssm.dispatch.gpu_reason", lambda tensor: "")
    assert not uses_gpu_step(value, memory)
    with torch.no_grad():
        assert uses_gpu_step(value, memory)
        assert not uses_gpu_step(torch.zeros(2, 3, 32, device="meta"), memory)
        assert not uses_gpu_step(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5, 4))


def test_a_layer_on_a_gpu_steps_through_one_operator(monkeypatch):
    """The state goes in and comes out with fixed shapes, under fake tensors as under a graph."""
    monkeypatch.setattr("shippo_ssm.dispatch.gpu_reason", lambda tensor: "")
    layer = Shippo(8, **SMALL, device="meta")
    called = []
    monkeypatch.setattr("shippo_ssm.layers.cell.gpu_step", lambda *operands: called.append(operands) or gpu_step(*operands))
    with torch.no_grad():
        before = layer.init_state(2)
        y, after = layer.step(torch.zeros(2, 8, device="meta"), before)
    assert len(called) == 1
    assert y.shape == (2, 8)
    assert [tensor.shape for tensor in after.cell] == [tensor.shape for tensor in before.cell]
