"""A saved model and inputs that show its right actions at work, for `shippo inspect`.

Right actions are realised on inputs: a model saved by Transport-MQAR gets events of that task, which it never trained on;
another model with a vocabulary gets random tokens, and one without gets random vectors.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shippo_ssm.collapse import ActionRow, collapse_of_model
from shippo_ssm.experiments.mqar.model import MqarConfig, load_model
from shippo_ssm.models import SequenceModel, load_checkpoint, read_checkpoint


def inspect(folder: Path, *, num_sequences: int = 4, length: int = 64) -> list[ActionRow]:
    """The collapse report of every layer and group of the model saved in `folder`."""
    model, inputs = model_and_inputs(folder, num_sequences, length)
    return collapse_of_model(model.eval(), inputs)


def model_and_inputs(folder: Path, num_sequences: int, length: int) -> tuple[SequenceModel, Tensor]:
    """The model in `folder`, and inputs [num_sequences, length, ..] of the kind that it takes."""
    config, notes = read_checkpoint(folder)
    if "row" in notes:
        row, seed = MqarConfig(d_model=config.d_model), int(notes["seed"])
        events = row.task(seed, length).batch(range(num_sequences), split="eval")
        return load_model(folder, row, seed), events.tokens
    random = torch.Generator().manual_seed(0)
    if config.vocab_size is None:
        inputs = torch.randn(num_sequences, length, config.d_model, generator=random)
    else:
        inputs = torch.randint(config.vocab_size, (num_sequences, length), generator=random)
    return load_checkpoint(folder), inputs
