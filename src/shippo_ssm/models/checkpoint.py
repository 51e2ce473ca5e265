"""Checkpoints of a `SequenceModel`: a folder with `model.safetensors` and `config.json`. Loading never unpickles.

Data path: the configuration goes to JSON field by field, with the format's version and whatever notes the caller adds; the
tensors go to safetensors under their state-dict names. Loading refuses unknown or missing keys and tensors, and sizes that do
not fit, before it builds anything. An embedding or head of one's own is code, not data: give it to `load_checkpoint` again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from shippo_ssm.layers import PAPER_START
from shippo_ssm.models.sequence import SequenceConfig, SequenceModel

logger = logging.getLogger("shippo_ssm")

FORMAT = "shippo-sequence-model"
VERSION = 2
# What the first version called otherwise, and how its models started: it wrote down neither.
RENAMED = {".attention_norm.": ".norm.", ".attention.": ".mixer."}
FIRST_START = {name: value for name, value in PAPER_START.items() if name != "right"} | {"frame_init": "random"}

# Sizes of a model; none of them is above the number of its parameters.
SIZES = (
    "d_model",
    "d_state",
    "d_conv",
    "expand",
    "group_width",
    "write_rank",
    "controller_conv",
    "vocab_size",
    "num_outputs",
    "num_classes",
)


def save_checkpoint(model: SequenceModel, path: str | Path, *, notes: dict[str, Any] | None = None) -> Path:
    """Write `model` to the folder `path`.

    Args:
        model: a `SequenceModel`.
        path: a folder; made if it is not there, overwritten if it is.
        notes: anything JSON can hold, such as the seed and the step.

    Returns:
        The folder.

    Example:
        >>> import tempfile, torch
        >>> from shippo_ssm.models import SequenceConfig, SequenceModel, load_checkpoint, save_checkpoint
        >>> model = SequenceModel(SequenceConfig(mixer="gru", d_model=8, n_layers=1, vocab_size=5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load_checkpoint(save_checkpoint(model, folder))
        >>> torch.equal(again.in_proj.weight, model.in_proj.weight)
        True
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    header = {"format": FORMAT, "version": VERSION, "config": dataclasses.asdict(model.config), "notes": notes or {}}
    (folder / "config.json").write_text(json.dumps(header, indent=2) + "\n")
    return folder


def read_checkpoint(path: str | Path) -> tuple[SequenceConfig, dict[str, Any]]:
    """The configuration and the notes of the checkpoint in the folder `path`, without its tensors."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"read_checkpoint: `path` is {str(path)!r}, which has no config.json; expected a folder of save_checkpoint"
        )
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
    # Bytes that are no text, no JSON, or lists in lists without end.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"read_checkpoint: {file} is not valid JSON ({error}); save the model again") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") not in (1, VERSION):
        raise ValueError(f"read_checkpoint: {file} is not a {FORMAT!r} file of version {VERSION}; save the model again")
    config, notes = header.get("config"), header.get("notes", {})
    if not isinstance(config, dict) or not isinstance(notes, dict):
        raise ValueError(f"read_checkpoint: {file} lacks `config`, or it or `notes` is no object; save the model again")
    known = {field.name for field in dataclasses.fields(SequenceConfig)}
    # Version 1 wrote down neither how its models started nor what came later.
    earlier: dict[str, Any] = FIRST_START if header["version"] == 1 else {}
    unknown, missing = sorted(set(config) - known), sorted(known - set(config) - set(earlier))
    if unknown:
        raise ValueError(f"read_checkpoint: {file} has unknown keys {unknown}; expected some of {sorted(known)}")
    if missing and header["version"] == VERSION:
        raise ValueError(f"read_checkpoint: {file} lacks the keys {missing} of `config`; save the model again")
    if header["version"] == 1:
        logger.warning("%s is of version 1: read with the start of that time, without a norm of what is read", path)
    return SequenceConfig(**earlier | config), notes


def load_checkpoint(
    path: str | Path,
    *,
    embedding: nn.Module | None = None,
    head: nn.Module | None = None,
    device: torch.device | str = "cpu",
) -> SequenceModel:
    """The model in the folder `path`.

    Args:
        path: a folder of `save_checkpoint`.
        embedding, head: modules of the same kind as the saved model's, if they were not the default ones; their weights are
            replaced by the saved ones.
        device: where to put the model.
    """
    config, _ = read_checkpoint(path)
    file = Path(path) / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"load_checkpoint: `path` is {str(path)!r}, which has no {file.name}; save the model again")
    try:
        with safe_open(file, framework="pt") as held:
            shapes = {_present_name(name): tuple(held.get_slice(name).get_shape()) for name in held.keys()}  # noqa: SIM118
            _compare(config, shapes, embedding, head)
            tensors = {_present_name(name): held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"load_checkpoint: {file} is damaged ({error}); save the model again") from error
    model = SequenceModel(config, embedding, head)
    model.to(tensors["in_proj.weight"].dtype).load_state_dict(tensors)
    return model.to(device)


def _compare(config: SequenceConfig, shapes: dict[str, Any], embedding: nn.Module | None, head: nn.Module | None) -> None:
    """The shapes in a file against those of the model, which is built without storage."""
    # A config may ask for any size; one beyond all numbers in the file is not tried, not even without storage.
    num_layers = len({name.split(".")[1] for name in shapes if name.startswith("layers.")})
    most = {name: sum(map(math.prod, shapes.values())) for name in SIZES} | {"n_layers": num_layers}
    for name, limit in most.items():
        size = getattr(config, name) or 0
        if size > limit or (name == "n_layers" and size < limit):
            raise ValueError(
                f"load_checkpoint: `{name}` is {size} in the config; expected {'at most ' * (name != 'n_layers')}{limit} by "
                "what the file holds; save the model again"
            )
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in SequenceModel(config, embedding, head).state_dict().items()}
    missing, unknown = sorted(set(expected) - set(shapes)), sorted(set(shapes) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"load_checkpoint: the file lacks {missing} and has unknown {unknown}; expected the names of the model that was "
            "saved; give the embedding and head that it had"
        )
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ValueError(
                f"load_checkpoint: `{name}` has shape {shape} in the file; expected {expected[name]}; give the embedding and "
                "head that the saved model had"
            )


def _present_name(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name
