"""The Hugging Face model: saving, loading, generating with and without a cache, training."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache  # noqa: E402

from shippo_ssm.models.hf import ShippoCacheLayer, ShippoConfig, ShippoForCausalLM, ShippoModel  # noqa: E402

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


def held(cache, index) -> tuple[Tensor, Tensor]:
    """The memory and the last source that one layer of a cache holds."""
    layer = cache.layers[index]
    assert isinstance(layer, ShippoCacheLayer)
    memory, source = layer.recurrent_states[0], layer.conv_states[1]
    assert memory is not None
    assert source is not None
    return memory, source


def batch():
    ids = torch.randint(3, 23, (3, 7))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, :1] = 0
    return torch.where(mask.bool(), ids, 0), mask


VARIANTS = [
    {},
    {"right": "split"},
    {"right": "dense"},
    {"right": "none"},
    {"controller_conv": 3, "write_rank": 2, "learnable_initial_state": False, "read_norm": True},
]


@pytest.mark.parametrize("options", VARIANTS)
def test_generate_with_cache_equals_without(options):
    """Greedy, beam and sampled, on a left-padded batch of different lengths; each row as if it were alone."""
    model = make_model(**options)
    ids, mask = batch()
    length = {"max_new_tokens": 6, "min_new_tokens": 6}
    for how in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True}):
        outputs = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            outputs.append(generate(model, ids, mask, use_cache=use_cache, **how, **length))
        assert torch.equal(*outputs), how
    greedy = generate(model, ids, mask, do_sample=False, **length)
    alone = generate(model, ids[:1, 4:], mask[:1, 4:], do_sample=False, **length)
    assert torch.equal(greedy[0, 7:], alone[0, 3:])
    assert len({tuple(row) for row in greedy[:, 7:].tolist()}) > 1


def test_the_cache_is_a_dynamic_cache_of_fixed_size():
    model = make_model()
    ids, mask = batch()
    whole = model(ids, attention_mask=mask, use_cache=False)
    assert whole.past_key_values is None
    cache = DynamicCache(config=model.config)
    first = model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
    assert first.past_key_values is cache
    assert cache.get_seq_length() == 5
    sizes = [part.numel() for part in held(cache, 0)]
    second = model(ids[:, 5:6], attention_mask=mask[:, :6], past_key_values=cache)
    third = model(ids[:, 6:], attention_mask=mask, past_key_values=cache)
    parts = torch.cat([first.logits, second.logits, third.logits], 1)
    torch.testing.assert_close(parts[mask.bool()], whole.logits[mask.bool()], atol=1e-4, rtol=1e-4)
    assert sizes == [part.numel() for part in held(cache, 0)]

    repeated = generate(model, ids, mask, max_new_tokens=3, do_sample=False, num_return_sequences=1)
    assert repeated.shape[0] == 3
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 1]))
    memory, _ = held(cache, 1)
    assert torch.equal(memory[0], memory[1])
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model\.config\)"):
        model(ids, past_key_values=DynamicCache())


def test_save_load_and_auto_classes(tmp_path):
    model = make_model(learnable_initial_state=True)
    ids, mask = batch()
    expected = model(ids, attention_mask=mask).logits
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert isinstance(AutoConfig.from_pretrained(tmp_path), ShippoConfig)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, ShippoForCausalLM)
    assert torch.equal(again(ids, attention_mask=mask).logits, expected)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert isinstance(backbone, ShippoModel)
    hidden = backbone(ids, attention_mask=mask, output_hidden_states=True)
    assert len(hidden.hidden_states) == 3
    assert torch.equal(again.lm_head(hidden.last_hidden_state), expected)


def test_a_configuration_of_the_first_version_keeps_its_start():
    config = make_model().config
    old = {name: value for name, value in config.to_dict().items() if name in ("hidden_size", "vocab_size", "model_type")}
    spec = ShippoConfig.from_dict(old).spec
    assert (spec.right, spec.read_norm, spec.dt_max, spec.conv_init) == ("split", False, 0.1, "random")
    assert ShippoConfig.from_dict(config.to_dict()).spec == config.spec


def test_half_precision_keeps_the_sensitive_parameters(tmp_path):
    model = ShippoForCausalLM(make_model(read_norm=True).config).eval()
    ids, mask = batch()
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name.split("mixer.")[1] for name, p in half.named_parameters() if p.dtype == torch.float32}
    own = {"drift_log", "skip", "initial_memory", "read_norm.weight"}
    assert kept == own | {"controller.scalar_bias", "controller.right_bias"}
    assert (half(ids, attention_mask=mask).logits[mask.bool()] - expected).norm() < 0.05 * expected.norm()


def test_missing_weights_start_as_the_layers_do(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make_model()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mixer.drift_log"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = ShippoForCausalLM.from_pretrained(tmp_path)
    ours, theirs = again.model.mixers[0], model.model.mixers[0]
    torch.testing.assert_close(ours.drift, -torch.logspace(-math.log10(4096), 0, 8).expand(8, 8))
    assert torch.equal(ours.in_proj.weight, theirs.in_proj.weight)
    assert torch.equal(ours.skip, theirs.skip)


def test_gradient_checkpointing_is_exact():
    model = make_model().train()
    ids, mask = batch()
    grads: list[list[Tensor]] = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=torch.where(mask.bool(), ids, -100)).loss
        loss.backward()
        grads.append([])
        for parameter in model.parameters():
            assert parameter.grad is not None
            grads[-1].append(parameter.grad.clone())
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert all(grad.abs().sum() > 0 for grad in grads[0])


def test_bad_configurations():
    for name in ("conv_kernel", "controller_conv"):
        bad: dict[str, Any] = {name: 1}
        with pytest.raises(Exception, match=f"`{name}` is 1"):
            ShippoConfig(**bad)
    model = make_model()
    with pytest.raises(ValueError, match="exactly one"):
        model()


@pytest.mark.works_with("PEFT")
def test_lora_changes_the_output_and_trains():
    peft = pytest.importorskip("peft")
    model = make_model()
    ids, _ = batch()
    ids = ids.clamp_min(3)
    before = model(ids).logits.detach()
    targets = ["in_proj", "out_proj", "write_proj", "read_proj", "right_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    assert not torch.allclose(adapted(ids).logits, before)
    trainable = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(trainable) == 2 * len(targets) * 2
    optimizer = torch.optim.Adam(trainable, lr=1e-2)
    losses = []
    for _ in range(15):
        loss = adapted(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in trainable)
    assert losses[-1] < 0.8 * losses[0]
    with adapted.disable_adapter():
        assert torch.allclose(adapted(ids).logits, before, atol=1e-5)
