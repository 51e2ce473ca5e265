"""The geometry of the paper's Transport-MQAR comparison ("Controls and realization geometry") and its parameter counts.

The paper gives totals; how they divide is our reading. Embedding: one table of 3 event types, 256 keys, 13 operations and
4 x 31 values; heads: 4 x 31 classes; input and output projections d_model x d_model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from shippo_ssm.models.sequence import SequenceConfig, SequenceModel

EMBEDDING_ROWS = 3 + 256 + 13 + 4 * 31

PAPER_CONFIGS = {
    "GRU": SequenceConfig(mixer="gru", num_outputs=4, num_classes=31),
    "Transformer": SequenceConfig(mixer="transformer", num_outputs=4, num_classes=31),
    "Free enc/dec": SequenceConfig(mixer="free", num_outputs=4, num_classes=31),
    "No-right": SequenceConfig(mixer="none", num_outputs=4, num_classes=31),
    "DirectGen-SingleExp": SequenceConfig(mixer="dense", expand=1, num_outputs=4, num_classes=31),
    "StructGen-Split": SequenceConfig(mixer="split", num_outputs=4, num_classes=31),
}
PAPER_MILLIONS = {
    "GRU": 0.50,
    "Transformer": 0.89,
    "Free enc/dec": 5.11,
    "No-right": 4.98,
    "DirectGen-SingleExp": 1.52,
    "StructGen-Split": 6.03,
}


class ParameterRow(NamedTuple):
    """Parameters of one model, ours and the paper's, in millions."""

    model: str
    ours: float
    paper: float

    @property
    def deviation(self) -> float:
        """ours / paper - 1."""
        return self.ours / self.paper - 1


def count_parameters(model: nn.Module) -> int:
    """The number of trainable numbers in `model`."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def parameter_rows() -> list[ParameterRow]:
    """Our counts beside the paper's, counted on models without storage."""
    rows = []
    for name, config in PAPER_CONFIGS.items():
        with torch.device("meta"):
            model = SequenceModel(config, embedding=nn.Embedding(EMBEDDING_ROWS, config.d_model))
        rows.append(ParameterRow(name, count_parameters(model) / 1e6, PAPER_MILLIONS[name]))
    return rows


def parameter_table() -> str:
    """The counts as a printable table.

    Example:
        >>> from shippo_ssm.models import parameter_table
        >>> print(parameter_table().splitlines()[0])
        model                   ours   paper  deviation
    """
    lines = [f"{'model':<20}{'ours':>8}{'paper':>8}{'deviation':>11}"]
    lines += [f"{row.model:<20}{row.ours:>7.2f}M{row.paper:>7.2f}M{row.deviation:>+10.1%} " for row in parameter_rows()]
    return "\n".join(line.rstrip() for line in lines)
