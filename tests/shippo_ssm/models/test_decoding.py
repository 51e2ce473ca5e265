"""Decoding with states: assisted generation, the Hugging Face cache, quantised weights."""

from typing import Any

import pytest
import torch

from shippo_ssm.models import SequenceConfig, SequenceModel

SIZES: dict[str, Any] = {"d_model": 10, "d_state": 6, "vocab_size": 13, "expand": 2}


def make(n_layers=2, seed=0, **options):
    torch.manual_seed(seed)
    chosen: dict[str, Any] = SIZES | options
    model = SequenceModel(SequenceConfig(n_layers=n_layers, **chosen)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def language_models():
    hf = pytest.importorskip("shippo_ssm.models.hf")
    models = []
    for n_layers in (2, 1):
        torch.manual_seed(0)
        model = hf.ShippoForCausalLM(
            hf.ShippoConfig(vocab_size=13, hidden_size=10, state_size=6, num_hidden_layers=n_layers)
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        models.append(model)
    return models


@pytest.mark.works_with("Assisted generation")
@pytest.mark.filterwarnings("ignore:Passing `generation_config`")
def test_assisted_generation_gives_the_greedy_tokens_of_40_prompts(language_models):
    model, assistant = language_models
    options = {"max_new_tokens": 6, "do_sample": False}
    generator = torch.Generator().manual_seed(0)
    for index in range(40):
        ids = torch.randint(0, 13, (1, 2 + index % 7), generator=generator)
        mask = torch.ones_like(ids)
        plain = model.generate(ids, attention_mask=mask, **options)
        helper = {"assistant_model": assistant} if index % 4 == 0 else {"prompt_lookup_num_tokens": 3}
        assert torch.equal(model.generate(ids, attention_mask=mask, **options, **helper), plain)


@pytest.mark.works_with("Assisted generation")
@torch.no_grad()
def test_the_cache_goes_back_to_what_it_recorded(language_models):
    from transformers import DynamicCache

    model, _ = language_models
    ids = torch.randint(0, 13, (2, 70))
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 70
    cache.crop(-3)
    model(ids[:, 67:69], past_key_values=cache)
    cache.crop(-1)
    assert cache.get_seq_length() == 68
    logits = model(ids[:, 68:], past_key_values=cache).logits[:, -1]
    assert torch.allclose(logits, model(ids).logits[:, -1], atol=1e-4)
    with pytest.raises(ValueError, match=r"`tokens_to_remove` is -65 .* at most 64"):
        cache.crop(-65)


@torch.no_grad()
def test_int8_weights_step():
    torchao = pytest.importorskip("torchao.quantization")
    model = make(d_model=32)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert type(model.get_submodule("layers.0.mixer.in_proj").weight) is not torch.nn.Parameter
    ids, after = torch.randint(0, 13, (2, 6)), None
    for token in ids.unbind(1):
        logits, after = model.step(token, after)
    expected = model(ids)[:, -1]
    assert float((logits - expected).norm() / expected.norm()) < 1e-3
