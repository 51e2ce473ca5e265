"""The models of Transport-MQAR: a row's configuration, the embedding of its events, and the model of a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm.experiments.mqar.recall import RecallConfig
from shippo_ssm.layers import PAPER_START
from shippo_ssm.models import Heads, SequenceConfig, SequenceModel, load_checkpoint
from shippo_ssm.tasks.mqar import MODULUS, WIDTH, TransportMQAR

# Scales of the unit start, over unit embeddings and a head of unit logits.
EMBEDDING, KEY, HEAD = 0.5, 0.5, 0.3
# Events that the slowest slot of its memory remembers: operations leave little of an older binding (`ceilings.py`), which would
# only stand in the way of the newer ones of the same key.
MEMORY_LENGTH = 32.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MqarConfig(RecallConfig):
    """A row of the table; defaults are the paper's protocol."""

    start: Literal["paper", "unit"] = "unit"
    """How layers and projections start: as in the first version of the layer, or in unit time with what is written aligned
    with what is answered (see `build_model`); the same for every row, as far as it has the part."""
    mixer: str = "split"
    """A mixer of `SequenceModel`, or "untouched" for the predictor that has nothing to train."""
    expand: float = 2
    d_model: int = 128
    n_layers: int = 4
    d_state: int = 32
    group_width: int = 4
    library: str = "nonreducible"
    length: int = 512
    """Training length."""
    num_keys: int = 256
    num_active: int = 32
    steps: int = 5000
    num_seeds: int = 3

    def task(self, seed: int, length: int | None = None) -> TransportMQAR:
        """The task at a length, by default that of training."""
        return self.shared(TransportMQAR, length=length or self.length, seed=seed)

    @property
    def geometry(self) -> SequenceConfig:
        """The model's: four classifiers of 31 classes."""
        start = (
            PAPER_START | {"frame_init": "random"}
            if self.start == "paper"
            else {"bounded": False, "memory_length": MEMORY_LENGTH}
        )
        return self.shared(SequenceConfig, num_outputs=WIDTH, num_classes=MODULUS, **start)


class EventEmbedding(nn.Module):
    """The sum of type, key, operation and per-coordinate value embeddings: tokens [.., 7] -> [.., d_model].

    One table holds 3 types, the keys, 13 operations and 4 x 31 values, and a last row of zeros for what an event does not have.
    """

    def __init__(self, task: TransportMQAR, d_model: int) -> None:
        super().__init__()
        sizes = [3, task.num_keys, task.num_operations] + [MODULUS] * WIDTH
        num_rows = sum(sizes)
        self.sizes: Tensor
        self.offsets: Tensor
        self.table = nn.EmbeddingBag(num_rows + 1, d_model, mode="sum", padding_idx=num_rows)
        self.absent = num_rows
        self.register_buffer("sizes", torch.tensor(sizes), persistent=False)
        self.register_buffer("offsets", torch.tensor([0, *sizes[:-1]]).cumsum(0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = torch.where(tokens < self.sizes, tokens + self.offsets, self.absent)
        if torch.is_grad_enabled() or tokens.shape[-2] > 1:
            return self.table(rows.flatten(0, -2)).unflatten(0, tokens.shape[:-1])
        # A bag is set up for longer than a few rows take to add.
        return F.embedding(rows, self.table.weight).sum(-2)


def build_model(config: MqarConfig, seed: int) -> SequenceModel:
    """The model of a row, a function of configuration and seed: tokens [B, T, 7] -> logits [B, T, 4, 31].

    With the unit start, the same for every row, the classifiers begin as the embeddings of the values that they answer with:
    values and answers share a vocabulary. Embeddings are small beside what the layers add, those of keys smaller still, and
    the classifiers begin unsure. These scales (`EMBEDDING`, `KEY`, `HEAD`) were chosen on seed 10 by the coordinate accuracy
    of a smaller model (2 layers, length 128, no right action) after 150 steps: .122 with them, .108 with all of them one.
    `MEMORY_LENGTH` was chosen on the same seed by training accuracy at length 512 (2 layers, 50 steps): .053, with 4,096 .040.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        embedding = EventEmbedding(config.task(seed), config.d_model)
        model = SequenceModel(config.geometry, embedding=embedding)
    if config.start == "unit":
        assert isinstance(model.head, Heads)
        with torch.no_grad():
            values, keys = embedding.table.weight[-WIDTH * MODULUS - 1 : -1], embedding.table.weight[3 : 3 + config.num_keys]
            model.head.proj.weight.copy_(values * HEAD * config.d_model**-0.5)
            model.head.proj.bias.zero_()
            keys *= KEY
            embedding.table.weight *= EMBEDDING
    return model


def weights_folder(run: Path, row: str, seed: int) -> Path:
    """Where a run keeps the trained weights of a row, for interventions."""
    return run / "weights" / f"{row}.s{seed}"


def load_model(folder: Path, config: MqarConfig, seed: int) -> SequenceModel:
    """A trained model of a run, from its folder of weights."""
    return load_checkpoint(folder, embedding=EventEmbedding(config.task(seed), config.d_model))
