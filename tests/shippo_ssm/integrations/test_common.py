"""Transformers' common model tests on the Hugging Face model: saving, loading, training, padding, outputs, plans."""

import importlib
import sys
import unittest
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("parameterized")

from transformers.models.auto import modeling_auto

from shippo_ssm.integrations.huggingface import ShippoConfig, ShippoForCausalLM, ShippoModel
from tests.shippo_ssm.integrations import transformers_tests

sys.path.append(str(transformers_tests.folder()))
try:
    modeling, training, fsdp, parallel = (
        importlib.import_module(f"{transformers_tests.PACKAGE}.{file}") for file in transformers_tests.FILES
    )
except ModuleNotFoundError as missing:
    pytest.skip(f"{missing}: run `python tests/shippo_ssm/integrations/transformers_tests.py`", allow_module_level=True)


class TinyModel:
    """What the common tests ask of a model: a tiny configuration and inputs for it."""

    causal_lm_class = ShippoForCausalLM
    base_model_class = ShippoModel
    batch_size, seq_length, hidden_size, num_hidden_layers, vocab_size = 3, 7, 16, 2, 99
    is_training = True

    def __init__(self, parent, **kinds) -> None:
        self.parent, self.kinds = parent, kinds

    def get_config(self) -> ShippoConfig:
        sizes: dict[str, Any] = {"hidden_size": self.hidden_size, "num_hidden_layers": self.num_hidden_layers, "state_size": 8}
        return ShippoConfig(vocab_size=self.vocab_size, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes, **self.kinds)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


# Its lists of models whose distributed tests run; `None` is all.
vars(fsdp)["FSDP_DISTRIBUTED_TEST_MODEL_TYPES"] = vars(parallel)["TP_DISTRIBUTED_TEST_MODEL_TYPES"] = None


@pytest.mark.works_with("Transformers' common tests")
@pytest.mark.filterwarnings("ignore")
class TestTransformersCommon(
    modeling.ModelTesterMixin,
    modeling.GenerationTesterMixin,
    training.TrainingTesterMixin,
    fsdp.FSDPTesterMixin,
    parallel.TensorParallelTesterMixin,
    unittest.TestCase,
):
    all_model_classes = (ShippoModel, ShippoForCausalLM)
    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True
    training_overfit_steps, training_overfit_learning_rate = 100, 5e-3
    model_tester: Any = None

    kinds: dict[str, Any] = {}  # noqa: RUF012

    def setUp(self) -> None:
        self.model_tester = TinyModel(self, **self.kinds)
        # The tests choose labels by transformers' own lists of names, which `AutoModel.register` does not extend.
        for mapping, model in (("MODEL_MAPPING", ShippoModel), ("MODEL_FOR_CAUSAL_LM_MAPPING", ShippoForCausalLM)):
            names = patch.dict(getattr(modeling_auto, f"{mapping}_NAMES"), shippo=model.__name__)
            names.start()
            self.addCleanup(names.stop)


class TestTransformersCommonOnHybrids(TestTransformersCommon):
    kinds = {"layer_types": ["shippo", "full_attention"], "num_attention_heads": 2}  # noqa: RUF012
