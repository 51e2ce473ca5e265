"""Checkpoints of a `SequenceModel`: a folder with `model.safetensors` and `config.json`. Loading never unpickles.

Loading checks keys, types, names, sizes and dtypes before it builds a model. A custom embedding or head is code, not data: pass
it to `load_checkpoint` again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from shippo_ssm.models.sequence import SequenceConfig, SequenceModel

FORMAT = "shippo-sequence-model"
VERSION = 3
# The dtypes of weights, as safetensors writes them.
DTYPES = ("F64", "F32", "F16", "BF16")
# Options and the words of their types; what is not named here is a list in JSON.
OPTIONS = {field.name: str(field.type).split(" | ") for field in dataclasses.fields(SequenceConfig)}
JSON_TYPES = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,), "None": (type(None),)}
# Numbers that no model has above the number of its parameters.
_FREE = ("attention_every", "sliding_window")
SIZES = ["expand", *(name for name, words in OPTIONS.items() if "int" in words and name not in _FREE)]


def save_checkpoint(model: SequenceModel, path: str | Path, *, notes: dict[str, Any] | None = None) -> Path:
    """Write `model` to the folder `path`, which is created or overwritten, and return it.

    Args:
        model: a `SequenceModel`.
        path: the folder.
        notes: JSON data, such as the seed and the step.

    Example:
        >>> import tempfile
        >>> from shippo_ssm.models import SequenceConfig, SequenceModel, load_checkpoint, save_checkpoint
        >>> model = SequenceModel(SequenceConfig(mixer="gru", d_model=8, n_layers=1, vocab_size=5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load_checkpoint(save_checkpoint(model, folder))
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    header = {"format": FORMAT, "version": VERSION, "config": dataclasses.asdict(model.config), "notes": notes or {}}
    (folder / "config.json").write_text(json.dumps(header, indent=2) + "\n")
    return folder


def read_checkpoint(path: str | Path) -> tuple[SequenceConfig, dict[str, Any]]:
    """The configuration and the notes of the checkpoint in the folder `path`, without its tensors."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"read_checkpoint: {str(path)!r} has no config.json; expected a folder of save_checkpoint")
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
    # Bytes that are not text, text that is not JSON, or nesting without end.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"read_checkpoint: {file} is not valid JSON ({error}); save the model again") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"read_checkpoint: {file} is not a {FORMAT!r} file; expected a folder of save_checkpoint")
    version, config, notes = header.get("version"), header.get("config"), header.get("notes", {})
    if type(version) is not int or version != VERSION:
        raise ValueError(f"read_checkpoint: `version` is {version!r} in {file}; expected {VERSION}; save the model again")
    if not isinstance(config, dict) or not isinstance(notes, dict):
        raise ValueError(f"read_checkpoint: {file} lacks `config`, or it or `notes` is not an object; save the model again")
    if config.keys() != OPTIONS.keys():
        came = f"unknown keys {sorted(config.keys() - OPTIONS)} and lacks {sorted(OPTIONS.keys() - config)}"
        raise ValueError(f"read_checkpoint: `config` in {file} has {came}; expected the options of this version")
    for name, words in OPTIONS.items():
        if not any(type(config[name]) in JSON_TYPES.get(word, (list,)) for word in words):
            wanted = "true or false" if "bool" in words else " or ".join(words)
            raise ValueError(f"read_checkpoint: `{name}` is {config[name]!r} in {file}; expected {wanted}")
    return SequenceConfig(**config), notes


def load_checkpoint(
    path: str | Path, *, embedding: nn.Module | None = None, head: nn.Module | None = None, device: torch.device | str = "cpu"
) -> SequenceModel:
    """The model in the folder `path`.

    Args:
        path: a folder of `save_checkpoint`.
        embedding, head: modules of the saved model's kind, if they were not the default ones; they get the saved weights.
        device: the device of the model.
    """
    config, _ = read_checkpoint(path)
    file = Path(path) / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"load_checkpoint: {str(path)!r} has no {file.name}; save the model again")
    try:
        with safe_open(file, framework="pt") as held:
            slices = {name: held.get_slice(name) for name in list(held.keys())}
            _check_tensors(config, slices, embedding, head)
            tensors = {name: held.get_tensor(name) for name in slices}
    except SafetensorError as error:
        raise ValueError(f"load_checkpoint: {file} is damaged ({error}); save the model again") from error
    model = SequenceModel(config, embedding, head)
    model.to(tensors["in_proj.weight"].dtype)
    # A model may have parts of another dtype: none is rounded.
    for name, held in (*model.named_parameters(), *model.named_buffers()):
        if name in tensors:
            held.data = held.data.to(torch.promote_types(held.dtype, tensors[name].dtype))
    model.load_state_dict(tensors)
    return model.to(device)


def _check_tensors(config: SequenceConfig, slices: dict[str, Any], embedding: nn.Module | None, head: nn.Module | None) -> None:
    """Compare the names, shapes and dtypes in a file with those of the model, built without storage."""
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
    # A config may contain any size: one above the number of values in the file is not built, not even without storage.
    num_layers = len({name.split(".")[1] for name in shapes if name.startswith("layers.")})
    if config.n_layers != num_layers:
        raise ValueError(
            f"load_checkpoint: `n_layers` is {config.n_layers} in the config; expected {num_layers} as in the file"
        )
    most = sum(map(math.prod, shapes.values()))
    for name in SIZES:
        if (size := getattr(config, name) or 0) > most:
            raise ValueError(
                f"load_checkpoint: `{name}` is {size} in the config; expected at most {most}, the values in the file"
            )
    with torch.device("meta"):
        expected = SequenceModel(config, embedding, head).state_dict()
    missing, unknown = sorted(set(expected) - set(shapes)), sorted(set(shapes) - set(expected))
    if missing or unknown:
        came, wanted = f"the file lacks {missing} and has unknown {unknown}", "the tensors of the saved model"
        raise ValueError(f"load_checkpoint: {came}; expected {wanted}; pass the embedding and head that it had")
    for name, shape in shapes.items():
        wanted, dtype = tuple(expected[name].shape), slices[name].get_dtype()
        if shape != wanted:
            came = f"`{name}` has shape {shape} in the file"
            raise ValueError(f"load_checkpoint: {came}; expected {wanted}; pass the embedding and head that the model had")
        if expected[name].is_floating_point() and dtype not in DTYPES:
            raise ValueError(f"load_checkpoint: `{name}` has dtype {dtype} in the file; expected one of {DTYPES}")
