"""Decoding with states: known prefixes, proposed tokens, the Hugging Face cache, quantised weights."""

from typing import Any

import pytest
import torch

from shippo_ssm.layers import states
from shippo_ssm.models import PrefixCache, SequenceConfig, SequenceModel, speculate, verify

SIZES: dict[str, Any] = {"d_model": 10, "d_state": 6, "vocab_size": 13, "expand": 2}


def make(n_layers=2, seed=0, **options):
    torch.manual_seed(seed)
    chosen: dict[str, Any] = SIZES | options
    model = SequenceModel(SequenceConfig(n_layers=n_layers, **chosen)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def test_a_known_prefix_gives_the_same_logits():
    model = make()
    cache = PrefixCache(model)
    prompt = torch.randint(0, 13, (40,))
    for end in (10, 25, 25, 40):
        logits, after = cache.read(prompt[:end])
        assert torch.allclose(logits, model(prompt[None, :end])[:, -1], atol=1e-5)
        # What is given is a copy.
        model.step(prompt[:1], after, in_place=True)
    assert (cache.num_read, cache.num_known) == (40, 10 + 25 + 25)
    cache.read([*prompt[:25].tolist(), 1, 2])
    assert cache.num_known == 60 + 25


@torch.no_grad()
def test_kept_prefixes_are_bounded_and_the_least_used_goes():
    model = make()
    one = states.num_bytes(model.init_state(1)) + 13 * 4
    cache = PrefixCache(model, max_bytes=2 * one)
    for prompt in ([1], [2], [1, 3], [4]):
        cache.read(prompt)
    assert len(cache) == 2
    assert cache.num_bytes <= 2 * one
    before = cache.num_known
    cache.read([2, 5])
    assert cache.num_known == before
    with pytest.raises(ValueError, match="`prompt` is empty"):
        cache.read([])


@torch.no_grad()
def test_proposed_tokens_are_verified_in_one_call():
    model = make()
    _, before = model(torch.randint(0, 13, (1, 5)), output_state=True)
    greedy, token, after = [], torch.tensor([3]), before
    for _ in range(5):
        logits, after = model.step(token, after)
        token = logits.argmax(-1)
        greedy.append(token)
    proposed = torch.cat(greedy[:4])
    for wrong in range(5):
        guess = proposed.clone()
        if wrong < 4:
            guess[wrong] = (guess[wrong] + 1) % 13
        verdict = verify(model, torch.tensor([3]), guess, before)
        assert verdict.accepted == wrong
        assert torch.equal(verdict.following, greedy[wrong])
        if wrong < 4:
            assert torch.equal(model.step(verdict.following, verdict.states)[0].argmax(-1), greedy[wrong + 1])


@torch.no_grad()
def test_speculation_gives_greedy_tokens():
    model, assistant = make(), make(n_layers=1)
    for length in (1, 6):
        prompt = torch.randint(0, 13, (length,))
        plain, token = [], prompt
        logits, after = model(prompt[None], output_state=True)
        token = logits[:, -1].argmax(-1)
        for _ in range(20):
            plain.append(token)
            logits, after = model.step(token, after)
            token = logits.argmax(-1)
        assert torch.equal(speculate(model, assistant, prompt, 20), torch.cat(plain))
        assert torch.equal(speculate(model, model, prompt, 20, num_proposed=3), torch.cat(plain))


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
    # In two steps, with the rows exchanged between.
    cache.crop(-1)
    cache.batch_select_indices(torch.tensor([1, 0]))
    ids = ids.flip(0)
    cache.crop(-2)
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
