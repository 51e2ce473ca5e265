"""The models of Transport-MQAR: a row's configuration, the embedding of its events, and the model of a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm.experiments.mqar.recall import RecallConfig
from shippo_ssm.experiments.mqar.slots import single_events, start_slots
from shippo_ssm.layers import PAPER_START
from shippo_ssm.models import GRUMixer, Heads, SequenceConfig, SequenceModel, load_checkpoint
from shippo_ssm.tasks.mqar import MODULUS, WIDTH, TransportMQAR

# Scales of the unit start: of all embeddings, of keys beside them, and of the classifiers.
EMBEDDING, KEY, HEAD = 0.5, 2.0, 0.3
# The characters of F_31 without their conjugates, in an order whose first eight keep the values furthest apart: no two of them
# are closer than a cosine of 0.14.
FREQUENCIES = (3, 4, 9, 10, 11, 12, 14, 15, 1, 2, 5, 6, 7, 8, 13)
# Events that the slowest slot of its memory remembers: operations leave little of an older binding (`ceilings.py`), which would
# only stand in the way of the newer ones of the same key.
MEMORY_LENGTH = 32.0
# Spread of the right projection. In unit time, full generators of the layer's own spread stretch a memory by a third per event:
# it overflows within the first batch. Right actions are therefore held at norm one, and start closer to the identity.
RIGHT_STD = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class MqarConfig(RecallConfig):
    """A row of the table; defaults are the paper's protocol."""

    start: Literal["paper", "unit"] = "unit"
    """How layers and projections start: as in the first version of the layer, or in unit time with what is written aligned
    with what is answered (see `build_model`); the same for every row, as far as it has the part."""
    mixer: str = "split"
    """A mixer of `SequenceModel`, or "untouched" for the predictor that has nothing to train."""
    slots: int = 0
    """Slots that the GRUs of a model start as (`slots.py`); 0 for torch's own start."""
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
            else {"memory_length": MEMORY_LENGTH, "right_std": RIGHT_STD}
        )
        return self.shared(SequenceConfig, num_outputs=WIDTH, num_classes=MODULUS, **start)


class EventEmbedding(nn.Module):
    """The sum of type, key, operation and per-coordinate value embeddings: tokens [.., 7] -> [.., d_model].

    One table holds 3 types, the keys, 13 operations and 4 x 31 values, and a last row of zeros for what an event does not have.
    """

    def __init__(self, task: TransportMQAR, d_model: int) -> None:
        super().__init__()
        sizes = [3, task.num_keys, task.num_operations] + [MODULUS] * WIDTH
        num_rows, self.num_keys = sum(sizes), task.num_keys
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

    @torch.no_grad()
    def start_apart(self) -> Tensor:
        """Start with keys and values in channels of their own, and values as characters of F_31.

        The second half of the channels holds kinds, keys and operations, so that one projection tells an address from what is
        stored there. The first half holds the values: cos and sin of 2 pi k x / 31, coordinate j in column j of every four
        channels. A right action on groups of four then meets the same character of all coordinates, and can add one to another
        as a transvection does.

        Returns:
            The characters [4 * 31, d_model] of the values, of variance one where they are not zero.
        """
        table = self.table.weight
        half, num_others = table.shape[1] // 2, self.absent - WIDTH * MODULUS
        table[:num_others, :half] = 0
        table[3 : 3 + self.num_keys] *= KEY
        values = table[num_others : self.absent].zero_()
        angles = torch.arange(MODULUS)[:, None] * torch.tensor(FREQUENCIES) * (2 * math.pi / MODULUS)
        waves = torch.stack([angles.cos(), angles.sin()], -1).flatten(1) * 2**0.5
        for column in range(WIDTH):
            channels = range(column, half - half % WIDTH, WIDTH)[: waves.shape[1]]
            values[column * MODULUS : (column + 1) * MODULUS, list(channels)] = waves[:, : len(channels)]
        characters = values.clone()
        # As large as the sum of four values that share their channels.
        values *= WIDTH**0.5
        table *= EMBEDDING
        return characters


def build_model(config: MqarConfig, seed: int) -> SequenceModel:
    """The model of a row, a function of configuration and seed: tokens [B, T, 7] -> logits [B, T, 4, 31].

    With the unit start, the same for every row, keys and values have channels of their own, values are characters of F_31, and
    the classifiers begin as the values that they answer with, unsure (`EventEmbedding.start_apart`). Where all embeddings share
    all channels, as they fall, a write's address is made of its values for the most part, and a model first learns which values
    were stored, long before it learns under which keys. Chosen on seed 10 by the accuracy of training (2 layers, no right
    action, length 512; coordinate / exact, mean over steps 26 to 50): all channels shared .053, keys apart from random values
    .080 / .005, and from characters .096 / .019. `MEMORY_LENGTH` was chosen on the same seed.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        embedding = EventEmbedding(config.task(seed), config.d_model)
        model = SequenceModel(config.geometry, embedding=embedding)
    if config.start == "unit":
        assert isinstance(model.head, Heads)
        with torch.no_grad():
            model.head.proj.weight.copy_(embedding.start_apart() * HEAD * (config.d_model / 2) ** -0.5)
            model.head.proj.bias.zero_()
            if config.slots:
                layers = [block.mixer.gru for block in model.layers if isinstance(block.mixer, GRUMixer)]
                events = next(iter(model.layers)).norm(model.in_proj(embedding(single_events(config.task(seed)))))
                start_slots(layers, events, config.task(seed), config.slots, seed)
    return model


def weights_folder(run: Path, row: str, seed: int) -> Path:
    """Where a run keeps the trained weights of a row, for interventions."""
    return run / "weights" / f"{row}.s{seed}"


def load_model(folder: Path, config: MqarConfig, seed: int) -> SequenceModel:
    """A trained model of a run, from its folder of weights."""
    return load_checkpoint(folder, embedding=EventEmbedding(config.task(seed), config.d_model))
