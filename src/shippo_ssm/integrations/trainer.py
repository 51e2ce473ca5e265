"""A `transformers.Trainer` that applies no weight decay to the parameters that SHiPPO layers exempt from it."""

from __future__ import annotations

from torch import nn
from transformers import Trainer

from shippo_ssm.layers.weight_decay import NoWeightDecay


class ShippoTrainer(Trainer):
    """`transformers.Trainer`, with the exemptions of `weight_decay_groups` for every SHiPPO layer inside the model.

    The plain `Trainer` does as well if it is given an optimizer:
    `Trainer(.., optimizers=(torch.optim.AdamW(weight_decay_groups(model, 0.1), lr=1e-3), None))`.

    Example:
        >>> from transformers import TrainingArguments
        >>> from shippo_ssm.integrations.huggingface import ShippoConfig, ShippoForCausalLM
        >>> from shippo_ssm.integrations.trainer import ShippoTrainer
        >>> model = ShippoForCausalLM(ShippoConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, state_size=8))
        >>> trainer = ShippoTrainer(model, TrainingArguments(output_dir="run", weight_decay=0.1, report_to="none"))
        >>> any(name.endswith("drift_log") for name in trainer.get_decay_parameter_names(model))
        False
    """

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that take weight decay."""
        # By module, not by the mark on a parameter: FSDP puts parameters of its own in their place.
        exempt = {id(p) for m in model.modules() if isinstance(m, NoWeightDecay) for p in m.no_weight_decay_parameters()}
        names = {name for name, parameter in model.named_parameters() if id(parameter) in exempt}
        return [name for name in super().get_decay_parameter_names(model) if name not in names]
