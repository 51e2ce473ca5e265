"""Sequence models and their baselines, decoding and checkpoints.

`ShippoConfig`, `ShippoModel` and `ShippoForCausalLM` come from `shippo_ssm.integrations.huggingface`, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shippo_ssm.integrations.fla import FlaShippo
from shippo_ssm.integrations.mamba_ssm import MambaShippo
from shippo_ssm.layers.attention import AttentionCache, CausalAttention
from shippo_ssm.models.baselines import FreeMixer, GRUMixer, LSTMMixer, transformer_block
from shippo_ssm.models.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from shippo_ssm.models.decoding import PrefixCache, Verdict, speculate, verify
from shippo_ssm.models.sequence import MIXERS, Heads, SequenceConfig, SequenceModel, count_parameters

if TYPE_CHECKING:
    from shippo_ssm.models.hf import ShippoConfig as ShippoConfig
    from shippo_ssm.models.hf import ShippoForCausalLM as ShippoForCausalLM
    from shippo_ssm.models.hf import ShippoModel as ShippoModel

__all__ = [
    "MIXERS", "AttentionCache", "CausalAttention", "FlaShippo", "FreeMixer", "GRUMixer", "Heads", "LSTMMixer",
    "MambaShippo", "PrefixCache", "SequenceConfig", "SequenceModel", "Verdict", "count_parameters", "load_checkpoint",
    "read_checkpoint", "save_checkpoint", "speculate", "transformer_block", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("ShippoConfig", "ShippoModel", "ShippoForCausalLM"):
        return getattr(importlib.import_module("shippo_ssm.models.hf"), name)
    raise AttributeError(f"module 'shippo_ssm.models' has no attribute {name!r}")
