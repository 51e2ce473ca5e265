"""Sequence models, their baselines and checkpoints; the Hugging Face model is `shippo_ssm.integrations.huggingface`."""

from __future__ import annotations

from shippo_ssm.integrations.fla import FlaShippo
from shippo_ssm.integrations.mamba_ssm import MambaShippo
from shippo_ssm.layers.attention import AttentionCache, CausalAttention
from shippo_ssm.models.baselines import FreeMixer, GRUMixer, LSTMMixer, transformer_block
from shippo_ssm.models.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from shippo_ssm.models.sequence import MIXERS, Heads, SequenceConfig, SequenceModel, count_parameters

__all__ = [
    "MIXERS", "AttentionCache", "CausalAttention", "FlaShippo", "FreeMixer", "GRUMixer", "Heads", "LSTMMixer",
    "MambaShippo", "SequenceConfig", "SequenceModel", "count_parameters", "load_checkpoint",
    "read_checkpoint", "save_checkpoint", "transformer_block",
]  # fmt: skip
