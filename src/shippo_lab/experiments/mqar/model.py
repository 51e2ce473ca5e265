"""The models of Transport-MQAR: a row's configuration, the embedding of its events, and the model of a seed."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_lab.experiments.mqar.scoring import RecallConfig
from shippo_lab.tasks.mqar import MODULUS, WIDTH, TransportMQAR
from shippo_ssm.collapse import ActionRow, collapse_of_model
from shippo_ssm.layers import PAPER_GEOMETRY
from shippo_ssm.models import Heads, SequenceConfig, SequenceModel, load_checkpoint, read_checkpoint

# Scales at the start: of all embeddings, of keys beside them, and of the classifiers.
EMBEDDING, KEY, HEAD = 0.5, 2.0, 0.3
# The characters of F_31 without their conjugates; the first eight keep the values furthest apart (cosines of 0.14 or less).
FREQUENCIES = (3, 4, 9, 10, 11, 12, 14, 15, 1, 2, 5, 6, 7, 8, 13)
# Events that the slowest memory slot remembers: operations leave little of an older binding (`ceilings.py`).
MEMORY_LENGTH = 32.0
# Spread of the right projection. In unit time, full generators of the layer's own spread stretch a memory by a third per event,
# and it overflows in the first batch. Right actions therefore have norm one at most, and start closer to the identity.
RIGHT_STD = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class MqarConfig(RecallConfig):
    """A row of the table; defaults are the paper's protocol."""

    start: Literal["unit", "plain"] = "unit"
    """How layers and projections start, the same for every row: in unit time, with what is written aligned with what is
    answered ("unit", see `build_model`); or the same with random values, which know nothing of F_31 ("plain")."""
    bounded: bool = True
    """Hold the norm of right actions at 1."""
    mixer: str = "shippo"
    """A mixer of `SequenceModel`, or "untouched" for the predictor that has nothing to train."""
    right: str = "none"
    expand: float = 2
    d_model: int = 128
    n_layers: int = 4
    d_state: int = 32
    group_width: int = 4
    library: str = "nonreducible"
    length: int = 512
    num_keys: int = 256
    num_active: int = 32
    steps: int = 5000
    num_seeds: int = 3

    def task(self, seed: int, length: int | None = None) -> TransportMQAR:
        return self.shared(TransportMQAR, length=length or self.length, seed=seed)

    @property
    def geometry(self) -> SequenceConfig:
        """The model's: the paper's layers, and four classifiers of 31 classes."""
        layers = PAPER_GEOMETRY | {"d_state": self.d_state, "memory_length": MEMORY_LENGTH, "right_std": RIGHT_STD}
        return self.shared(SequenceConfig, num_outputs=WIDTH, num_classes=MODULUS, **layers)


class EventEmbedding(nn.Module):
    """The sum of type, key, operation and per-coordinate value embeddings: tokens [.., 7] -> [.., d_model].

    One table holds 3 types, the keys, 13 operations and 4 x 31 values, and a last row of zeros for what an event does not have.
    """

    def __init__(self, task: TransportMQAR, d_model: int) -> None:
        super().__init__()
        sizes = [3, task.num_keys, task.num_operations] + [MODULUS] * WIDTH
        self.absent, self.num_keys = sum(sizes), task.num_keys
        self.sizes: Tensor
        self.offsets: Tensor
        self.table = nn.EmbeddingBag(self.absent + 1, d_model, mode="sum", padding_idx=self.absent)
        self.register_buffer("sizes", torch.tensor(sizes), persistent=False)
        self.register_buffer("offsets", torch.tensor([0, *sizes[:-1]]).cumsum(0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = torch.where(tokens < self.sizes, tokens + self.offsets, self.absent)
        if torch.is_grad_enabled() or tokens.shape[-2] > 1:
            return self.table(rows.flatten(0, -2)).unflatten(0, tokens.shape[:-1])
        # For a few rows the set-up of a bag takes longer than the sum.
        return F.embedding(rows, self.table.weight).sum(-2)

    @torch.no_grad()
    def start_apart(self, characters: bool = True) -> Tensor:
        """Start with keys and values in channels of their own; return the values [4 * 31, d_model], of variance one.

        The second half of the channels holds kinds, keys and operations. The first half holds the values as characters of
        F_31: cos and sin of 2 pi k x / 31, coordinate j in column j of every four channels. A right action on groups of four
        then meets the same character of all coordinates, and can add one to another. Without `characters` values are random.
        """
        table = self.table.weight
        half, num_others = table.shape[1] // 2, self.absent - WIDTH * MODULUS
        table[:num_others, :half] = 0
        table[3 : 3 + self.num_keys] *= KEY
        values = table[num_others : self.absent].zero_()
        angles = torch.arange(MODULUS)[:, None] * torch.tensor(FREQUENCIES) * (2 * math.pi / MODULUS)
        waves = torch.stack([angles.cos(), angles.sin()], -1).flatten(1) * 2**0.5
        if not characters:
            waves = torch.randn_like(waves)
        for column in range(WIDTH):
            channels = range(column, half - half % WIDTH, WIDTH)[: waves.shape[1]]
            values[column * MODULUS : (column + 1) * MODULUS, list(channels)] = waves[:, : len(channels)]
        stored = values.clone()
        # As large as the sum of four values that share their channels.
        values *= WIDTH**0.5
        table *= EMBEDDING
        return stored


def build_model(config: MqarConfig, seed: int) -> SequenceModel:
    """The model of a row, a function of configuration and seed: tokens [B, T, 7] -> logits [B, T, 4, 31].

    For every row, keys and values start in channels of their own, and the classifiers start as the values they answer with, at
    a small scale (`EventEmbedding.start_apart`). `docs/results/mqar.md` says how that was chosen.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        embedding = EventEmbedding(config.task(seed), config.d_model)
        model = SequenceModel(config.geometry, embedding=embedding)
        values = embedding.start_apart(config.start == "unit")
    assert isinstance(model.head, Heads)
    with torch.no_grad():
        model.head.proj.weight.copy_(values * HEAD * (config.d_model / 2) ** -0.5)
        model.head.proj.bias.zero_()
    return model


def weights_folder(run: Path, row: str, seed: int) -> Path:
    """Where a run keeps the trained weights of a row, for interventions."""
    return run / "weights" / f"{row}.s{seed}"


def load_model(folder: Path, config: MqarConfig, seed: int) -> SequenceModel:
    """A trained model of a run, from its folder of weights."""
    return load_checkpoint(folder, embedding=EventEmbedding(config.task(seed), config.d_model))


def inspect(folder: Path, *, num_sequences: int = 4, length: int = 64) -> list[ActionRow]:
    """The collapse report of every layer and group of the model saved in `folder`.

    A model of Transport-MQAR reads events that it never trained on; another one random tokens, or random vectors.
    """
    config, notes = read_checkpoint(folder)
    random = torch.Generator().manual_seed(0)
    if "row" in notes:
        row, seed = MqarConfig(d_model=config.d_model), int(notes["seed"])
        tokens = row.task(seed, length).batch(range(num_sequences), split="eval").tokens
        return collapse_of_model(load_model(folder, row, seed).eval(), tokens)
    if config.vocab_size is None:
        inputs = torch.randn(num_sequences, length, config.d_model, generator=random)
    else:
        inputs = torch.randint(config.vocab_size, (num_sequences, length), generator=random)
    return collapse_of_model(load_checkpoint(folder).eval(), inputs)
