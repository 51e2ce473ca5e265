"""Checkpoints of a `SequenceModel`: a folder with `model.safetensors` and `config.json`. Loading never unpickles.

Data path: the configuration goes to JSON field by field, with the format's version and whatever notes the caller adds; the
tensors go to safetensors under their state-dict names. Loading builds the model from the configuration and refuses unknown or
missing keys and tensors. An embedding or head of one's own is code, not data: give it to `load_checkpoint` again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shippo_ssm.layers import PAPER_START
from shippo_ssm.models.sequence import SequenceConfig, SequenceModel

logger = logging.getLogger("shippo_ssm")

FORMAT = "shippo-sequence-model"
VERSION = 2
# What the first version called otherwise, and how its models started: it wrote down neither.
RENAMED = {".attention_norm.": ".norm.", ".attention.": ".mixer."}
FIRST_START = {name: value for name, value in PAPER_START.items() if name != "right"} | {"frame_init": "random"}


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
    header = json.loads(file.read_text())
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") not in (1, VERSION):
        raise ValueError(f"read_checkpoint: {file.name} is not a {FORMAT!r} file of version {VERSION}; save the model again")
    fields = {field.name for field in dataclasses.fields(SequenceConfig)}
    unknown = sorted(set(header["config"]) - fields)
    if unknown:
        raise ValueError(f"read_checkpoint: the config has unknown keys {unknown}; expected some of {sorted(fields)}")
    if header["version"] == 1:
        logger.warning("%s is of version 1: read with the start of that time, without a norm of what is read", path)
    earlier = FIRST_START if header["version"] == 1 else {}
    return SequenceConfig(**earlier | header["config"]), header["notes"]


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
    model = SequenceModel(config, embedding, head)
    tensors = {_present_name(name): tensor for name, tensor in load_file(Path(path) / "model.safetensors").items()}
    expected = model.state_dict()
    missing, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"load_checkpoint: the file lacks {missing} and has unknown {unknown}; expected the names of the model that was "
            "saved; give the embedding and head that it had"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"load_checkpoint: `{name}` has shape {tuple(tensor.shape)} in the file; expected "
                f"{tuple(expected[name].shape)}; give the embedding and head that the saved model had"
            )
    model.to(tensors["in_proj.weight"].dtype).load_state_dict(tensors)
    return model.to(device)


def _present_name(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name
