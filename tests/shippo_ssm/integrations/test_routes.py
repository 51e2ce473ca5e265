"""Routes around the model: several processes, offloading, quantised weights, trainers of other projects, ONNX."""

import copy
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shippo_ssm import ShippoBackbone
from shippo_ssm.integrations.huggingface import ShippoConfig, ShippoForCausalLM
from tests.shippo_ssm.integrations.tiny import mixers


def make_model(**options: Any) -> ShippoForCausalLM:
    settings: dict[str, Any] = {"vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}
    return ShippoForCausalLM(ShippoConfig(**settings | options)).eval()


def generated(model, ids):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    script = str(Path(__file__).with_name("ranks.py"))
    ranks = [subprocess.Popen([sys.executable, script, str(rank), str(folder)]) for rank in range(2)]
    assert [process.wait(timeout=250) for process in ranks] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.works_with("DDP")
def test_two_processes_have_the_gradients_of_one(two_processes):
    assert all(rank["DDP"] < 1e-6 for rank in two_processes)


@pytest.mark.works_with("FSDP2")
def test_sharded_blocks_have_the_gradients_of_whole_ones_and_step(two_processes):
    for rank in two_processes:
        assert rank["split"]
        assert rank["FSDP2"] < 1e-6
        assert rank["outputs"] < 1e-6
        assert rank["steps"] < 1e-6


@pytest.mark.works_with("Offload")
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_weights_give_the_same_text(place, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, ids = make_model(), torch.randint(1, 23, (2, 5))
    logits, text = model(ids).logits, generated(model, ids)
    device = torch.device("cpu")
    if place == "cpu":
        accelerate.cpu_offload(model, execution_device=device)
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=device)
    assert mixers(model)[0].in_proj.weight.is_meta
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(generated(model, ids), text)


@pytest.mark.works_with("torchao")
def test_int8_weights_stay_close_and_decode():
    quantization = pytest.importorskip("torchao.quantization")
    model, ids = make_model(hidden_size=32), torch.randint(1, 23, (2, 5))
    exact = model(ids).logits
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    weight = mixers(model)[0].in_proj.weight
    assert type(weight).__name__ != "Parameter"
    close = model(ids).logits
    assert not torch.equal(close, exact)
    assert (close - exact).norm() < 0.05 * exact.norm()
    whole = model(generated(model, ids)).logits[:, 4:-1].argmax(-1)
    assert torch.equal(generated(model, ids)[:, 5:], whole)


# Torch says that it will give this way up.
@pytest.mark.works_with("quantize_dynamic")
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_dynamically_quantised_weights_stay_close_and_step():
    model = ShippoBackbone(32, 2, d_state=4).eval()
    quantised: Any = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert callable(quantised.layers[0].mixer.in_proj.weight)
    u, state = torch.randn(2, 5, 32), quantised.init_state(2)
    exact, steps = model(u), []
    for position in u.unbind(1):
        y, state = quantised.step(position, state)
        steps.append(y)
    # Activations are rounded by the range of a call, so that steps and the whole differ by the rounding.
    for close in (quantised(u), torch.stack(steps, 1)):
        assert not torch.equal(close, exact)
        assert (close - exact).norm() < 0.05 * exact.norm()


def trained_alone(model: nn.Module, batches) -> list[torch.Tensor]:
    """Parameters after a step of SGD per batch, without anybody's help."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (u,) in batches:
        optimizer.zero_grad()
        model(u).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def training() -> tuple[ShippoBackbone, DataLoader, list[torch.Tensor]]:
    """A stack, batches, and what training by hand makes of it."""
    model = ShippoBackbone(8, 1, d_state=4)
    loader = DataLoader(TensorDataset(torch.randn(6, 5, 8)), batch_size=2)
    return model, loader, trained_alone(copy.deepcopy(model), loader)


# Lightning's own: deprecated calls of torch, and advice on workers.
@pytest.mark.works_with("Lightning")
@pytest.mark.filterwarnings("ignore")
def test_a_lightning_trainer_trains_as_by_hand(tmp_path):
    lightning = pytest.importorskip("lightning")
    model, loader, want = training()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(Module(), loader)
    for got, parameter in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(got.detach(), parameter)


@pytest.mark.works_with("accelerate")
def test_an_accelerator_trains_as_by_hand_and_restores(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, loader, want = training()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for (u,) in loader:
        optimizer.zero_grad()
        accelerator.backward(model(u).square().mean())
        optimizer.step()
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    for got, parameter in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(got.detach(), parameter)


# Torch warns of its own walk over trees.
@pytest.mark.works_with("ONNX")
@pytest.mark.filterwarnings("ignore")
def test_a_language_model_of_any_length_and_padding_in_onnxruntime():
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make_model(num_hidden_layers=1)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits

    ids = torch.randint(1, 23, (2, 5))
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    options: dict[str, Any] = {"dynamic_shapes": (free, free), "opset_version": 18, "dynamo": True, "verbose": False}
    with torch.no_grad():
        program = torch.onnx.export(Logits().eval(), (ids, torch.ones_like(ids)), **options)
        assert program is not None
        session = runtime.InferenceSession(program.model_proto.SerializeToString())
        for length in (1, 2, 9):
            ids = torch.randint(1, 23, (3, length))
            mask = (torch.rand(3, length) > 0.3).long()
            (got,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
            want = model(ids, attention_mask=mask).logits
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)
