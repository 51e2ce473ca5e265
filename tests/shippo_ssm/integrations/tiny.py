"""A Hugging Face model of a few thousand parameters, and a left-padded batch for it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from shippo_ssm.integrations.huggingface import ShippoConfig, ShippoForCausalLM  # noqa: E402
from shippo_ssm.layers import Shippo  # noqa: E402

transformers.utils.logging.disable_progress_bar()


def make_model(**options) -> ShippoForCausalLM:
    """A tiny model with weights large enough that its continuations differ from row to row."""
    settings: dict[str, Any] = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 8}
    settings |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2} | options
    model = ShippoForCausalLM(ShippoConfig(**settings)).eval()
    for name, parameter in model.named_parameters():
        if "proj" in name:
            torch.nn.init.normal_(parameter, std=0.5)
        elif "embed" in name:
            torch.nn.init.normal_(parameter)
    return model


def generate(model: Any, ids, mask, **how) -> Tensor:
    """`model.generate`, whose `self` the library annotates with a protocol that a model need not have."""
    return model.generate(ids, attention_mask=mask, **how)


def batch():
    ids = torch.randint(3, 23, (3, 7))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, :1] = 0
    return torch.where(mask.bool(), ids, 0), mask


def mixers(model: nn.Module) -> list[Shippo]:
    """The SHiPPO layers of a model, in their order."""
    return [module for module in model.modules() if isinstance(module, Shippo)]
