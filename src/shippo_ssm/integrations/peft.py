"""PEFT: the default target modules of LoRA for the Hugging Face model."""

from __future__ import annotations

LORA_TARGETS = ["in_proj", "out_proj", "write_proj", "read_proj", "right_proj"]


def register() -> None:
    """Make `LORA_TARGETS` the default of `peft.LoraConfig` for SHiPPO models.

    Example:
        >>> from shippo_ssm.integrations.peft import register
        >>> register()
    """
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    TARGETS.setdefault("shippo", LORA_TARGETS)
