"""The sequence model: six mixers behind the same calls, the paper's parameter counts, checkpoints, and that it learns."""

import dataclasses
import json
import pickle
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from shippo_ssm.layers import CausalAttention, Shippo, weight_decay_groups
from shippo_ssm.models import (
    Heads,
    SequenceConfig,
    SequenceModel,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)

MIXERS: dict[str, dict[str, Any]] = {name: {"right": name} for name in ("split", "dense", "none")}
MIXERS |= {name: {"mixer": name} for name in ("free", "gru", "lstm", "transformer")}
MIXERS["hybrid"] = {"attention_every": 2}
MIXERS["sliding"] = {"layer_types": ("sliding_attention", "shippo"), "sliding_window": 4}
SMALL = SequenceConfig(d_model=16, n_layers=2, d_state=8, vocab_size=11)


@pytest.mark.parametrize("mixer", MIXERS)
def test_all_ways_agree(mixer):
    model = SequenceModel(dataclasses.replace(SMALL, **MIXERS[mixer])).double()
    ids = torch.randint(0, 11, (3, 9))
    whole = model(ids)
    assert whole.shape == (3, 9, 11)
    states, outputs = model.init_state(3), []
    for t in range(9):
        logits, states = model.step(ids[:, t], states)
        outputs.append(logits)
    assert (torch.stack(outputs, 1) - whole).abs().max() < 1e-9
    first, states = model(ids[:, :4], output_state=True)
    second, _ = model(ids[:, 4:], states, output_state=True)
    assert (torch.cat([first, second], 1) - whole).abs().max() < 1e-9


@pytest.mark.parametrize("mixer", MIXERS)
def test_causal_and_every_parameter_learns(mixer):
    model = SequenceModel(dataclasses.replace(SMALL, **MIXERS[mixer]))
    ids = torch.randint(0, 11, (2, 12))
    changed = ids.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 11
    assert torch.allclose(model(ids)[:, :8], model(changed)[:, :8], atol=1e-6)
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
def test_few_positions_give_the_same_loss_and_gradients(mixer, recompute):
    model = SequenceModel(dataclasses.replace(SMALL, **MIXERS[mixer])).double()
    model.layers.recompute = recompute
    ids, asked = torch.randint(0, 11, (3, 9)), torch.rand(3, 9) < 0.3
    asked[0, :] = False
    asked[1, 8] = True

    def loss_and_gradients(features):
        loss = F.cross_entropy(model.head(features), ids[asked])
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    whole, few = loss_and_gradients(model.features(ids)[asked]), loss_and_gradients(model.features(ids, asked))
    torch.testing.assert_close(few, whole, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("mixer", ["none", "transformer"])
def test_nothing_is_computed_where_nobody_asks(mixer):
    """The last layer makes reads, its mlp and its outputs of the positions that are asked; the layers before it of all."""
    model, rows = SequenceModel(dataclasses.replace(SMALL, **MIXERS[mixer])), {}

    def watch(name, module):
        module.register_forward_hook(lambda module, args, y: rows.update({name: y.shape[:-1].numel()}))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            watch(name, module)
    asked = torch.zeros(3, 9, dtype=torch.bool)
    asked[0, 2] = asked[2, :2] = True
    model.head(model.features(torch.randint(0, 11, (3, 9)), asked))
    few = ["out_proj", "head.proj", "layers.1.mixer.out_proj"]
    few += ["layers.1.mixer.controller.read_proj"] if mixer == "none" else ["layers.1.mlp.0", "layers.1.mlp.2"]
    assert {name: count for name, count in rows.items() if count != 27} == dict.fromkeys(few, 3)


def test_own_embedding_and_head():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.kinds, self.keys = nn.Embedding(3, 16), nn.Embedding(5, 16)

        def forward(self, events):
            return self.kinds(events[..., 0]) + self.keys(events[..., 1])

    config = dataclasses.replace(SMALL, vocab_size=None, num_outputs=4, num_classes=31)
    model = SequenceModel(config, embedding=Sum())
    events = torch.randint(0, 3, (2, 6, 2))
    assert model(events).shape == (2, 6, 4, 31)
    at = torch.zeros(2, 6, dtype=torch.bool)
    at[:, 5] = True
    assert torch.allclose(model.head(model.features(events, at)), model(events)[:, 5], atol=1e-6)
    vectors = SequenceModel(dataclasses.replace(SMALL, vocab_size=None))
    assert vectors(torch.randn(2, 6, 16)).shape == (2, 6, 16)


POOLED = dataclasses.replace(SMALL, pool="last")


@pytest.mark.parametrize(
    "options", [{}, {"attention_every": 2}, {"mixer": "transformer"}, {"num_outputs": 2, "num_classes": 3}]
)
def test_pooling_reads_the_last_real_position(options):
    """Right padding, left padding, packing and segments: one answer per sequence, that of the sequence alone."""
    model = SequenceModel(dataclasses.replace(POOLED, **options)).double()
    ids = torch.randint(0, 11, (3, 7))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1, 0]]).bool()
    rows = [ids[row, mask[row]] for row in range(3)]
    alone = torch.cat([model(row[None]) for row in rows])
    torch.testing.assert_close(model(ids, attention_mask=mask), alone)
    torch.testing.assert_close(model(torch.cat(rows)[None], cu_seqlens=torch.tensor([0, 4, 9, 12])), alone)
    every = SequenceModel(dataclasses.replace(SMALL, **options)).double()
    every.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(ids), every(ids)[:, -1])
    first, states = model(ids[:, :6], output_state=True)
    assert first.shape == every(ids)[:, -1].shape
    torch.testing.assert_close(model.step(ids[:, 6], states)[0], model(ids))


def test_pooling_refuses_sequences_without_a_last_position():
    model = SequenceModel(POOLED)
    with pytest.raises(ValueError, match="`cu_seqlens` has an empty sequence"):
        model(torch.zeros(1, 3, dtype=torch.int64), cu_seqlens=torch.tensor([0, 3, 3]))
    with pytest.raises(ValueError, match="nonempty sequences"):
        model(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match="`pool` is 'mean'; expected None or 'last'"):
        dataclasses.replace(SMALL, pool="mean")


def test_hybrids_have_the_layers_that_are_asked_for():
    kinds = [type(block.mixer) for block in SequenceModel(dataclasses.replace(SMALL, n_layers=5, attention_every=2)).layers]
    assert kinds == [Shippo, CausalAttention, Shippo, CausalAttention, Shippo]
    for options, message in (
        ({"layer_types": ["shippo"]}, "expected 2 of 'shippo', 'full_attention', 'sliding_attention'"),
        ({"layer_types": ["full_attention"] * 2}, "at least one of them 'shippo'"),
        ({"attention_every": 1}, "`attention_every` is 1"),
        ({"layer_types": ["full_attention", "shippo"], "attention_every": 2}, "expected one of them"),
        ({"sliding_window": 1, "layer_types": ["sliding_attention", "shippo"]}, "`window` is 1"),
        ({"dropout": 1.0}, "`dropout` is 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            SequenceModel(dataclasses.replace(SMALL, **options))


def test_branches_start_smaller_in_deeper_models_and_dropout_acts_in_training_only():
    deep = dataclasses.replace(SMALL, n_layers=4, attention_every=2)
    models: list[Any] = []
    for options in ({}, {"branch_init": "depth", "dropout": 0.5}):
        torch.manual_seed(0)
        models.append(SequenceModel(dataclasses.replace(deep, **options)))
    unit, scaled = models
    for ours, theirs in zip(scaled.layers, unit.layers):
        torch.testing.assert_close(ours.mixer.out_proj.weight, theirs.mixer.out_proj.weight / 2)
    ids = torch.randint(0, 11, (2, 5))
    assert not torch.equal(scaled(ids), scaled(ids))
    scaled.eval()
    assert torch.equal(scaled(ids), scaled(ids))


def test_a_tied_classifier_is_the_embedding(tmp_path):
    model: Any = SequenceModel(dataclasses.replace(SMALL, tie_embeddings=True))
    assert model.head.proj.weight is model.embedding.weight
    again: Any = load_checkpoint(save_checkpoint(model, tmp_path))
    assert again.head.proj.weight is again.embedding.weight
    ids = torch.randint(0, 11, (2, 5))
    assert torch.equal(again(ids), model(ids))
    with pytest.raises(ValueError, match="`tie_embeddings` is True; expected `vocab_size`"):
        dataclasses.replace(SMALL, tie_embeddings=True, num_classes=3)


def test_masks_go_to_shippo_mixers_only():
    ids, mask = torch.randint(0, 11, (2, 5)), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    model = SequenceModel(SMALL)
    assert torch.allclose(model(ids, attention_mask=mask)[0, 2:], model(ids[:1, 2:])[0], atol=1e-5)
    for mixer in ("gru", "lstm"):
        with pytest.raises(ValueError, match="`attention_mask` or `cu_seqlens` came"):
            SequenceModel(dataclasses.replace(SMALL, mixer=mixer))(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="`states` has 1 entries"):
        model(ids, model.init_state(2)[:1])
    with pytest.raises(ValueError, match="`mixer` is 'rnn'"):
        SequenceConfig(mixer="rnn")


def test_checkpoints_round_trip(tmp_path):
    model = SequenceModel(SMALL).bfloat16()
    save_checkpoint(model, tmp_path / "deep" / "folder", notes={"seed": 3})
    config, notes = read_checkpoint(tmp_path / "deep" / "folder")
    assert config == SMALL
    assert notes == {"seed": 3}
    again = load_checkpoint(tmp_path / "deep" / "folder")
    assert {name: (t.dtype, t.tolist()) for name, t in again.state_dict().items()} == {
        name: (t.dtype, t.tolist()) for name, t in model.state_dict().items()
    }
    assert {file.name for file in (tmp_path / "deep" / "folder").iterdir()} == {"model.safetensors", "config.json"}


def test_checkpoints_refuse_what_they_do_not_know(tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a checkpoint was unpickled")

    save_checkpoint(SequenceModel(SMALL), tmp_path)
    monkeypatch.setattr(pickle, "load", never)
    monkeypatch.setattr(pickle, "loads", never)
    monkeypatch.setattr(torch, "load", never)
    load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"`embedding\.weight` has shape"):
        load_checkpoint(tmp_path, embedding=nn.Embedding(12, 16))
    with pytest.raises(ValueError, match="the file lacks"):
        load_checkpoint(tmp_path, embedding=nn.Sequential(nn.Embedding(11, 16)))
    file = tmp_path / "config.json"
    header = json.loads(file.read_text())
    file.write_text(json.dumps(header | {"config": header["config"] | {"width": 3}}))
    with pytest.raises(ValueError, match=r"unknown keys \['width'\]"):
        load_checkpoint(tmp_path)
    file.write_text(json.dumps(header | {"version": 99}))
    with pytest.raises(ValueError, match=r"`version` is 99 .*; expected 3"):
        load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_checkpoint(tmp_path / "nowhere")


def test_classifiers_can_start_as_the_embedding():
    model = SequenceModel(dataclasses.replace(SMALL, head_init="embedding"))
    assert isinstance(model.head, Heads)
    assert isinstance(model.embedding, torch.nn.Embedding)
    assert torch.equal(model.head.proj.weight, model.embedding.weight * SMALL.d_model**-0.5)
    for other in ({"num_outputs": 2}, {"num_classes": 3}, {"vocab_size": None}):
        with pytest.raises(ValueError, match="`head_init` is 'embedding'"):
            dataclasses.replace(SMALL, head_init="embedding", **other)


def test_checkpoints_refuse_wrong_types(tmp_path):
    """Integer and 8-bit weights, booleans given as text, a version that is `true` or of another time."""
    model = SequenceModel(SMALL)
    for dtype in (torch.int64, torch.float8_e4m3fn):
        folder = save_checkpoint(model, tmp_path)
        tensors = load_file(folder / "model.safetensors")
        for names in (["in_proj.weight"], list(tensors)):
            save_file(tensors | {name: tensors[name].to(dtype) for name in names}, folder / "model.safetensors")
            with pytest.raises(ValueError, match=r"has dtype (I64|F8_E4M3) in the file; expected one of"):
                load_checkpoint(folder)
    file = save_checkpoint(model, tmp_path) / "config.json"
    header = json.loads(file.read_text())
    for version in (True, 2, 3.0, "3", None):
        file.write_text(json.dumps(header | {"version": version}))
        with pytest.raises(ValueError, match=r"`version` is .*; expected 3"):
            load_checkpoint(tmp_path)
    flags = [field.name for field in dataclasses.fields(SequenceConfig) if field.type == "bool"]
    assert "read_norm" in flags
    for name in flags:
        for value in ("false", 1, None):
            file.write_text(json.dumps(header | {"config": header["config"] | {name: value}}))
            with pytest.raises(ValueError, match=f"`{name}` is .*; expected true or false"):
                read_checkpoint(tmp_path)


def test_learns_to_copy():
    """32 tokens read, then written again, in rows of 64: to zero loss within a minute of one core's time."""
    model = SequenceModel(dataclasses.replace(SMALL, d_model=48))
    tokens = torch.randint(0, 8, (4, 32))
    ids = torch.cat([tokens, torch.full((4, 1), 8), torch.full((4, 31), 9)], 1)
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.01), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=1200, pct_start=0.1)
    start = time.process_time()
    for _ in range(1200):
        loss = F.cross_entropy(model(ids)[:, 32:].flatten(0, 1), tokens.flatten())
        if loss.item() < 5e-3:
            break
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert time.process_time() - start < 60
    assert loss.item() < 5e-3
    assert torch.equal(model(ids)[:, 32:].argmax(-1), tokens)
