"""What other libraries learn of SHiPPO once both are imported, in either order, so that `import shippo_ssm` is all it takes.

Nothing is imported here: a library that is already loaded is told at once, any other at the moment it loads. Transformers' Auto
classes get the names of the Hugging Face model, whose module loads when one of them is asked for; its `Trainer` learns which
parameters of a SHiPPO layer take no weight decay, and PEFT which modules an adapter goes to by default.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

logger = logging.getLogger("shippo_ssm")

NAME, HOME = "shippo", "shippo_ssm.models.hf"
# Mapping of `transformers.models.auto.modeling_auto` -> our class.
CLASSES = {"MODEL_MAPPING": "ShippoModel", "MODEL_FOR_CAUSAL_LM_MAPPING": "ShippoForCausalLM"}
CONFIG = "ShippoConfig"
LORA_TARGETS = ["in_proj", "out_proj", "write_proj", "read_proj", "right_proj"]


def tell_configurations(auto: Any) -> None:
    """`AutoConfig`: the name of our configuration."""
    auto.CONFIG_MAPPING_NAMES.setdefault(NAME, CONFIG)


def tell_models(auto: Any) -> None:
    """`AutoModel` and `AutoModelForCausalLM`: the names of our models."""
    from shippo_ssm._private import name_configuration

    for mapping, model in CLASSES.items():
        getattr(auto, f"{mapping}_NAMES").setdefault(NAME, model)
        name_configuration(getattr(auto, mapping), CONFIG, NAME)


def tell_trainer(trainer: Any) -> None:
    """`Trainer`: it goes by the names of parameters alone, so the spared ones of our layers are taken out of its list."""
    ask = trainer.Trainer.get_decay_parameter_names

    @wraps(ask)
    def get_decay_parameter_names(self: Any, model: Any) -> list[str]:
        # Only our modules have spared parameters (`layers.spared`).
        ours = {id(p) for module in model.modules() if hasattr(module, "spared_parameters") for p in module.spared_parameters()}
        spared = {name for name, parameter in model.named_parameters() if id(parameter) in ours}
        return [name for name in ask(self, model) if name not in spared]

    trainer.Trainer.get_decay_parameter_names = get_decay_parameter_names


def tell_peft(constants: Any) -> None:
    """PEFT: the default targets of LoRA and its kin."""
    constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(NAME, LORA_TARGETS)


LISTENERS: dict[str, Callable[[Any], None]] = {
    "transformers.models.auto.configuration_auto": tell_configurations,
    "transformers.models.auto.modeling_auto": tell_models,
    "transformers.trainer": tell_trainer,
    "peft.utils.constants": tell_peft,
}


def introduce_to(module: ModuleType, tell: Callable[[Any], None]) -> None:
    """`tell(module)`; a library that has changed must still load, so a failure is a warning."""
    try:
        tell(module)
    except Exception as error:
        logger.warning("shippo_ssm: `%s` could not be told of SHiPPO (%r); is its version supported?", module.__name__, error)


class Messenger(MetaPathFinder):
    """Runs a listener right after its module has been loaded."""

    def __init__(self, listeners: dict[str, Callable[[Any], None]]) -> None:
        self.listeners = listeners

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        tell = self.listeners.pop(name, None)
        # The others find the module; this one has nothing to say about it any more.
        spec = None if tell is None else importlib.util.find_spec(name)
        if tell is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            introduce_to(module, tell)

        spec.loader.exec_module = exec_module
        return spec


class Alias(ModuleType):
    """`transformers.models.shippo`, where the Auto classes look: our module, loaded when one of its classes is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name in (CONFIG, *CLASSES.values()):
            return getattr(importlib.import_module(HOME), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def introduce() -> None:
    """Tell every library that is loaded, and wait for the others."""
    waiting = dict(LISTENERS)
    for name in [name for name in waiting if name in sys.modules]:
        introduce_to(sys.modules[name], waiting.pop(name))
    sys.modules.setdefault(f"transformers.models.{NAME}", Alias(f"transformers.models.{NAME}"))
    sys.meta_path.insert(0, Messenger(waiting))
