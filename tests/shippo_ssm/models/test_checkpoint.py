"""Checkpoints that are damaged or made by hand: refused with `ValueError` before a model is built, or restored exactly."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from shippo_ssm.models import SequenceConfig, SequenceModel, load_checkpoint, save_checkpoint

SMALL = SequenceConfig(d_model=8, n_layers=1, d_state=4, vocab_size=5, backend="reference")
HUGE = 1 << 70


@pytest.fixture
def folder(tmp_path):
    return save_checkpoint(SequenceModel(SMALL), tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("controller_rank", HUGE), ("d_model", HUGE), ("num_bc_groups", HUGE), ("n_heads", HUGE), ("expand", HUGE),
        ("vocab_size", True),
        ("dropout", "0.1"), ("dropout", None), ("layer_types", 1), ("layer_types", "shippo"), ("layer_types", [1]),
        ("sliding_window", "512"), ("sliding_window", []), ("mixer", ["shippo"]), ("norm_eps", {}), ("pool", 0),
    ],
)  # fmt: skip
def test_options_of_other_types_and_sizes_are_named(folder, name, value):
    file = folder / "config.json"
    header = json.loads(file.read_text())
    file.write_text(json.dumps(header | {"config": header["config"] | {name: value}}))
    with pytest.raises(ValueError, match=f"`{name}`"):
        load_checkpoint(folder)


def test_damaged_headers_and_odd_tensors_are_refused(folder):
    file = folder / "model.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    (length,) = struct.unpack("<Q", whole[:8])
    damaged = [whole[:size] for size in (0, 7, 8, 9, length, 8 + length, len(whole) - 1)] + [whole + b"\0"]
    damaged += [struct.pack("<Q", size) + whole[8:] for size in (0, 1, length - 1, length + 1, 1 << 31, (1 << 64) - 1)]
    damaged.append(struct.pack("<Q", 200_000) + b"[" * 200_000)
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(ValueError, match="is damaged"):
            load_checkpoint(folder)
    for odd in (
        {name: tensor[:0] for name, tensor in tensors.items()},
        {},
        tensors | {"layers.": torch.ones(2)},
        *(
            {name: tensor.to(dtype) for name, tensor in tensors.items()}
            for dtype in (torch.complex64, torch.bool, torch.uint16)
        ),
    ):
        save_file(odd, file)
        with pytest.raises(ValueError, match="in the file"):
            load_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=name):
        load_checkpoint(folder)


def test_parts_of_another_dtype_are_not_rounded(folder):
    """A head kept in float32, and one in float64."""
    for dtype in (torch.float32, torch.float64):
        model = SequenceModel(SMALL).bfloat16()
        model.get_submodule("head").to(dtype)
        again = load_checkpoint(save_checkpoint(model, folder)).state_dict()
        for name, tensor in model.state_dict().items():
            assert again[name].dtype == tensor.dtype, name
            assert torch.equal(again[name], tensor), name
