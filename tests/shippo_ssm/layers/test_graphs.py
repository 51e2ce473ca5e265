"""The layer as one graph: torch.compile without breaks, torch.export and ONNX with free batch and length."""

from typing import Any

import pytest
import torch

from shippo_ssm._private import loop
from shippo_ssm.actions.expm import expm, expm_formula
from shippo_ssm.layers import Shippo
from shippo_ssm.scan import resolve_backend


@pytest.mark.works_with("torch.compile")
@pytest.mark.parametrize("right", ["split", "none"])
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


@pytest.mark.works_with("torch.export")
@pytest.mark.parametrize("right", ["orthogonal", "dense"])
@pytest.mark.parametrize("gradients", [True, False])
def test_export_with_free_batch_and_length_from_one_on(right, gradients):
    layer = Shippo(8, d_state=8, right=right)
    sizes = {"u": {0: torch.export.Dim("B", max=64), 1: torch.export.Dim("T", min=1, max=4096)}}
    with torch.set_grad_enabled(gradients):
        program = torch.export.export(layer, (torch.randn(2, 6, 8),), dynamic_shapes=sizes)
    for length in (1, 2, 17):
        u = torch.randn(3, length, 8)
        assert torch.allclose(program.module()(u), layer(u), atol=1e-6)


# What inductor says of itself is not ours.
@pytest.mark.works_with("torch.compile")
@pytest.mark.filterwarnings("ignore")
def test_inductor_gives_the_outputs_and_gradients_of_eager_mode():
    layer, u = Shippo(8, d_state=4), torch.randn(2, 6, 8)
    y = torch.compile(layer, fullgraph=True)(u)
    torch.testing.assert_close(y, layer(u), rtol=1e-4, atol=1e-6)
    got, want = (torch.autograd.grad(out.square().sum(), list(layer.parameters())) for out in (y, layer(u)))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.works_with("AOTInductor")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_package_takes_any_batch_and_length(tmp_path):
    layer = Shippo(8, d_state=4).eval()
    sizes = {"u": {0: torch.export.Dim("B", max=64), 1: torch.export.Dim("T", max=512)}}
    with torch.no_grad():
        program = torch.export.export(layer, (torch.randn(2, 6, 8),), dynamic_shapes=sizes)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        package = torch._inductor.aoti_load_package(path)
        for length in (1, 6, 20):
            u = torch.randn(3, length, 8)
            torch.testing.assert_close(package(u), layer(u), rtol=1e-4, atol=1e-6)


# Torch warns of its own walk over trees.
@pytest.mark.works_with("ONNX")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_onnx_with_free_batch_and_length():
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layer = Shippo(8, d_state=4, right="split").eval()
    sizes = {"u": {0: torch.export.Dim("B"), 1: torch.export.Dim("T")}}
    options: dict[str, Any] = {"dynamic_shapes": sizes, "opset_version": 18, "dynamo": True, "verbose": False}
    with torch.no_grad():
        program = torch.onnx.export(layer, (torch.randn(2, 6, 8),), **options)
        assert program is not None
        assert program.model_proto.opset_import[0].version >= 18
        session = runtime.InferenceSession(program.model_proto.SerializeToString())
        for length in (1, 2, 17):
            u = torch.randn(3, length, 8)
            assert torch.allclose(torch.from_numpy(session.run(None, {"u": u.numpy()})[0]), layer(u), atol=1e-5)


def test_what_onnx_cannot_hold_is_refused_in_words(monkeypatch):
    for module, name in ((torch.onnx, "is_in_onnx_export"), (torch.jit, "is_tracing")):
        monkeypatch.setattr(module, name, lambda: True)
    with pytest.raises(ValueError, match="'fused' with ONNX export, which has no kernels of ours; use backend='reference'"):
        Shippo(8, d_state=4, backend="fused")(torch.randn(2, 6, 8))
    with pytest.raises(ValueError, match=r"call torch\.onnx\.export under torch\.no_grad"):
        loop(lambda state, operand: (state, operand), torch.zeros(2), torch.zeros(3, 2))
    assert resolve_backend(torch.zeros(1, 4, 2, 4)) == "reference"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_the_exponential_without_kernels(scale):
    """What ONNX and torch.func run: as accurate as the kernel, NaN where nothing can be said."""
    generator = scale * torch.randn(5, 4, 4)
    torch.testing.assert_close(expm_formula(generator), expm(generator), rtol=1e-5, atol=1e-6)
    assert expm_formula(torch.tensor([[1e9, 0.0], [0.0, 0.0]])).isnan().all()
