"""Models: the sequence model of the experiments and its baselines, checkpoints, and the Hugging Face model (`models.hf`)."""

from shippo_ssm.models.controls import FreeMixer, GRUMixer
from shippo_ssm.models.parameters import PAPER_CONFIGS, count_parameters, parameter_rows, parameter_table
from shippo_ssm.models.sequence import MIXERS, Heads, SequenceConfig, SequenceModel
from shippo_ssm.models.transformer import AttentionCache, TransformerBlock

__all__ = [
    "MIXERS",
    "PAPER_CONFIGS",
    "AttentionCache",
    "FreeMixer",
    "GRUMixer",
    "Heads",
    "SequenceConfig",
    "SequenceModel",
    "TransformerBlock",
    "count_parameters",
    "parameter_rows",
    "parameter_table",
]
