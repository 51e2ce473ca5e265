"""The Hugging Face model: saving, loading, generating with and without a cache, training."""

import json
import math
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
)

from shippo_ssm.integrations.huggingface import ShippoCacheLayer, ShippoConfig, ShippoForCausalLM, ShippoModel
from shippo_ssm.integrations.peft import LORA_TARGETS, register
from shippo_ssm.layers import ShippoBackbone, ShippoState, weight_decay_groups
from shippo_ssm.layers.spec import make_spec
from tests.shippo_ssm.integrations.tiny import batch, generate, make_model, mixers


def held(cache, index) -> ShippoState:
    """The state that one layer of a cache holds."""
    layer = cache.layers[index]
    assert isinstance(layer, ShippoCacheLayer)
    assert layer.state is not None
    return layer.state


def test_the_cache_is_a_dynamic_cache_of_fixed_size():
    # In float64: weights this large amplify the rounding of float32 to 1e-3.
    model = make_model().double()
    ids, mask = batch()
    whole = model(ids, attention_mask=mask, use_cache=False)
    assert whole.past_key_values is None
    cache = DynamicCache(config=model.config)
    first = model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
    assert first.past_key_values is cache
    assert cache.get_seq_length() == 5
    sizes = [part.numel() for part in held(cache, 0).tensors()]
    second = model(ids[:, 5:6], attention_mask=mask[:, :6], past_key_values=cache)
    third = model(ids[:, 6:], attention_mask=mask, past_key_values=cache)
    parts = torch.cat([first.logits, second.logits, third.logits], 1)
    torch.testing.assert_close(parts[mask.bool()], whole.logits[mask.bool()], atol=1e-9, rtol=1e-9)
    assert sizes == [part.numel() for part in held(cache, 0).tensors()]

    repeated = generate(model, ids, mask, max_new_tokens=3, do_sample=False, num_return_sequences=1)
    assert repeated.shape[0] == 3
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 1]))
    memory = held(cache, 1).cell.memory
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


def test_a_configuration_of_another_version_is_refused(tmp_path):
    make_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    assert ShippoConfig.from_dict(saved).spec == make_model().config.spec
    file.write_text(json.dumps(saved | {"config_version": 99}))
    with pytest.raises(Exception, match="`config_version` is 99; expected 2"):
        AutoConfig.from_pretrained(tmp_path)


def test_half_precision_keeps_the_sensitive_parameters(tmp_path):
    model = ShippoForCausalLM(make_model(read_norm=True).config).eval()
    ids, mask = batch()
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name.split("mixer.")[1] for name, p in half.named_parameters() if p.dtype == torch.float32}
    exempt = {name.split("mixer.")[1] for name, p in half.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert kept == exempt
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
    ours, theirs = mixers(again)[0], mixers(model)[0]
    torch.testing.assert_close(ours.drift, -torch.logspace(-math.log10(4096), 0, 8).expand(8, 8))
    assert torch.equal(ours.in_proj.weight, theirs.in_proj.weight)
    assert torch.equal(ours.skip, theirs.skip)


@pytest.mark.parametrize("options", [{}, {"attention_every": 2}], ids=["pure", "hybrid"])
def test_gradient_checkpointing_is_exact(options):
    model = make_model(**options).train()
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


def test_gradients_pass_the_cache():
    """Two segments through a cache give the gradients of one; a static cache refuses, since it is overwritten."""
    model = make_model()
    ids, mask = batch()
    grads = []
    for cuts in ([0, 7], [0, 4, 7]):
        model.zero_grad()
        cache, logits = DynamicCache(config=model.config), []
        for first, last in pairwise(cuts):
            logits.append(model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache).logits)
        torch.cat(logits, 1)[mask.bool()].logsumexp(-1).sum().backward()
        assert model.model.embed_tokens.weight.grad is not None
        grads.append([parameter.grad for parameter in model.parameters()])
    for whole, cut in zip(*grads):
        torch.testing.assert_close(cut, whole, atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="static cache is overwritten"):
        model(ids, attention_mask=mask, past_key_values=StaticCache(config=model.config, max_cache_len=8))


def test_times_between_positions_reach_the_layers():
    """A time of zero leaves the memory of the recurrent layers alone; segments and a cache give what one call gives."""
    model = make_model(attention_every=2)
    ids, _ = batch()
    times = torch.rand(3, 7) * 2
    whole = model(ids, time_deltas=times, use_cache=False).logits
    assert (whole - model(ids, use_cache=False).logits).abs().max() > 1e-3
    cache = DynamicCache(config=model.config)
    parts = [
        model(ids[:, start:stop], time_deltas=times[:, start:stop], past_key_values=cache).logits
        for start, stop in ((0, 4), (4, 5), (5, 7))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-3, rtol=1e-3)


def test_the_default_is_the_language_preset_and_branches_scale_with_depth():
    config = ShippoConfig(vocab_size=11, hidden_size=32, num_hidden_layers=4, attention_every=2, dropout=0.5)
    assert config.spec == make_spec("Shippo", "language")
    backbone: Any = ShippoBackbone(16, 1)
    assert backbone.layers[0].mixer.spec == config.spec
    torch.manual_seed(0)
    model: Any = ShippoModel(config)
    for block in model.layers:
        weight = block.mixer.out_proj.weight
        spread = (3 * weight.shape[1]) ** -0.5 / 2
        assert 0.8 * spread < weight.std() < 1.2 * spread
    ids = torch.randint(0, 11, (2, 5))
    assert not torch.equal(model.train()(ids).last_hidden_state, model(ids).last_hidden_state)
    assert torch.equal(model.eval()(ids).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.works_with("Packing")
@pytest.mark.parametrize(
    "says",
    [
        {},
        {"position_ids_start": 2},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_position_ids": False, "return_seq_idx": True},
    ],
)
@pytest.mark.parametrize("options", [{}, {"attention_every": 2}], ids=["pure", "hybrid"])
def test_sequences_that_a_collator_packs_do_not_see_each_other(says, options):
    model = make_model(**options)
    rows = [torch.randint(3, 23, (length,)) for length in (5, 1, 3, 7)]
    packed = DataCollatorWithFlattening(**says)([{"input_ids": row} for row in rows])
    outputs = model(**packed)
    alone = [model(row[None], labels=row[None]) for row in rows]
    expected = torch.cat([output.logits[0] for output in alone])
    torch.testing.assert_close(outputs.logits[0], expected, atol=1e-3, rtol=1e-3)
    lengths = torch.tensor([len(row) - 1.0 for row in rows])
    losses = torch.stack([output.loss for output in alone])[lengths > 0]
    torch.testing.assert_close(outputs.loss, (losses * lengths[lengths > 0]).sum() / lengths.sum(), atol=1e-3, rtol=1e-3)
    leaked = model(packed["input_ids"]).logits[0]
    assert (leaked - expected).abs().max() > 0.1


def test_positions_that_start_again_are_refused_where_they_cannot_be_packed():
    model = make_model()
    ids, mask = batch()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(3, -1)
    for rows, padding in ((3, None), (3, mask), (1, mask[1:2].flip(1))):
        with pytest.raises(ValueError, match="`position_ids` starts a sequence inside a row"):
            model(ids[:rows], attention_mask=padding, position_ids=positions[:rows])
    # Positions of a left-padded batch say nothing new, whatever stands at the padding.
    counted = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    expected = model(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask, position_ids=counted).logits, expected)


def test_logits_to_keep():
    model = make_model()
    ids, _ = batch()
    logits = model(ids).logits
    for keep, expected in (
        (2, logits[:, -2:]),
        (torch.tensor([0, 5]), logits[:, [0, 5]]),
        (torch.tensor([[0], [3], [6]]), logits[torch.arange(3), [0, 3, 6]].unsqueeze(1)),
        (ids > 9, logits[ids > 9]),
    ):
        torch.testing.assert_close(model(ids, logits_to_keep=keep).logits, expected)


def test_hidden_states_of_some_layers():
    model = make_model()
    ids, _ = batch()
    before, after_first, last = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(before, model.model.embed_tokens(ids))
    assert torch.equal(last, model.model(ids).last_hidden_state)
    first, none = model(ids, output_hidden_states=[0]).hidden_states
    assert torch.equal(first, after_first)
    assert none is None


@pytest.mark.works_with("Continuous batching")
def test_continuous_batching_is_refused_in_words():
    model: Any = make_model()
    for call in (model.init_continuous_batching, lambda: model.generate_batch([[3, 4]])):
        with pytest.raises(ValueError, match="continuous batching is for paged keys and values"):
            call()


def run_python(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


@pytest.mark.works_with("Auto classes")
@pytest.mark.parametrize(("module", "first"), [("shippo_ssm.models.hf", True), ("shippo_ssm.integrations.huggingface", False)])
def test_an_import_registers_with_the_auto_classes(module, first, tmp_path):
    """Each name of the module; before and after transformers is imported."""
    make_model().save_pretrained(tmp_path)
    imports = [f"import {module}", "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM"]
    script = (
        "\n".join(imports if first else reversed(imports))
        + f"""
for auto in (AutoModelForCausalLM, AutoModel, AutoConfig):
    print(type(auto.from_pretrained({str(tmp_path)!r})).__name__)
"""
    )
    assert run_python(script).split() == ["ShippoForCausalLM", "ShippoModel", "ShippoConfig"]


def test_importing_the_package_changes_no_other_library():
    """No import hook, no alias module, no patched class: not after an import, a probe or a reload."""
    run_python("""
import importlib, importlib.util, sys
before = list(sys.meta_path)
import shippo_ssm
assert sys.meta_path == before and not {"torch", "transformers", "peft"} & set(sys.modules)
assert importlib.util.find_spec("transformers.trainer") is not None
hooks = list(sys.meta_path)
importlib.reload(shippo_ssm)
assert sys.meta_path == hooks
from shippo_ssm import Shippo
import shippo_ssm.collapse, shippo_ssm.models, shippo_ssm.projection
assert not [hook for hook in sys.meta_path if "shippo" in str(hook)]
import transformers
from transformers import Trainer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as targets
assert Trainer.get_decay_parameter_names.__module__ == "transformers.trainer"
assert "shippo" not in targets and "shippo" not in transformers.models.auto.configuration_auto.CONFIG_MAPPING
assert not [name for name in sys.modules if name.startswith("transformers") and "shippo" in name]
import shippo_ssm.integrations.huggingface
assert Trainer.get_decay_parameter_names.__module__ == "transformers.trainer"
""")


@pytest.mark.works_with("Trainer")
def test_the_trainer_trains_on_packed_rows_with_the_weight_decay_of_the_layers(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    from shippo_ssm.integrations.trainer import ShippoTrainer

    model = ShippoForCausalLM(make_model().config)
    rows = [{"input_ids": [3 + (start + step) % 20 for step in range(5 + start % 4)]} for start in range(16)]
    settings: dict[str, Any] = {"max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 2e-2, "weight_decay": 0.1}
    settings |= {"report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 5, "disable_tqdm": True}
    settings |= {"lr_scheduler_type": "constant"}
    trainer = ShippoTrainer(
        model,
        TrainingArguments(output_dir=str(tmp_path), remove_unused_columns=False, **settings),
        data_collator=DataCollatorWithFlattening(),
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    optimizer: Any = trainer.optimizer
    decayed, exempt = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    marked = {id(p) for p in model.parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked
    assert marked <= exempt
    assert marked <= {id(p) for p in weight_decay_groups(model, 0.1)[1]["params"]}
    assert {id(mixer.in_proj.weight) for mixer in mixers(model)} <= decayed


@pytest.mark.works_with("Pipelines")
def test_a_pipeline_generates_text():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, 23)}}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    model = make_model()
    writer: Any = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    prompts = ["w3 w4 w5", "w7"]
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    texts = [output[0]["generated_text"] for output in writer(prompts, batch_size=2, **how)]
    for prompt, text in zip(prompts, texts):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        alone = generate(model, ids, torch.ones_like(ids), **how)[0, ids.shape[1] :]
        assert text.removeprefix(prompt).split() == str(tokenizer.decode(alone, skip_special_tokens=True)).split()


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
    """With the default targets that `register` gives PEFT."""
    peft = pytest.importorskip("peft")
    register()
    model = make_model()
    ids, _ = batch()
    ids = ids.clamp_min(3)
    before = model(ids).logits.detach()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False))
    assert not torch.allclose(adapted(ids).logits, before)
    trainable = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(trainable) == 2 * len(LORA_TARGETS) * 2
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
