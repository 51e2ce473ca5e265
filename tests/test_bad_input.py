"""Five hundred bad calls at the public functions: each is refused in one clear line, and none is taken for something else.

An entry yields `Bad` calls, made from a compact description: what is right, and the ways to spoil it. A call
must raise `ValueError` with the words that name the place, and every message speaks one dialect: "op: `name` is what came;
expected what; remedy". At the command line the same is one line on stderr and exit code 2.
"""

# Wrong types are what this file is about.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from shippo_lab import cli, tasks
from shippo_lab.experiments import names as experiment_names
from shippo_ssm import actions, layers, projection, scan
from shippo_ssm.collapse import bank, collapse, collapse_of_model
from shippo_ssm.layers import Shippo, ShippoBackbone, lift, shippo_cell
from shippo_ssm.models import (
    CausalAttention,
    PrefixCache,
    SequenceConfig,
    SequenceModel,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)

NAN = float("nan")


class Bad(NamedTuple):
    """One bad call, and words that its message must have."""

    what: str
    call: Callable[[], Any]
    words: tuple[str, ...]


def bad(what: str, call: Callable[[], Any], *words: str) -> Bad:
    return Bad(what, call, words)


def options(op: str, make: Callable[..., Any], **wrong: list[Any]) -> Iterator[Bad]:
    """Each option alone set to each of its wrong values; the message names it."""
    for name, values in wrong.items():
        for value in values:
            yield bad(f"{op}({name}={value!r:.40})", partial(make, **{name: value}), f"`{name}`", "expected")


# Letters of the operands of a scan, and a size for each.
SIZES = {"B": 2, "T": 3, "G": 2, "N": 4, "P": 3}
LETTERS = {"value": "BTGP", "write": "BTGN", "read": "BTGN", "step": "BTG", "drift": "GN", "right": "BTGPP"}


def operands(letters: dict[str, str]) -> dict[str, Tensor]:
    return {name: torch.rand([SIZES[letter] for letter in word]) for name, word in letters.items()}


def spoiled(op: str, run: Callable[..., Any], letters: dict[str, str], strict: bool = True) -> Iterator[Bad]:
    """Every operand of a call spoiled in every way: kind, number of dimensions, each size, dtype, device."""
    right = operands(letters)
    for name, tensor in right.items():
        ways: dict[str, Any] = {"a list": tensor.tolist(), "an array": tensor.numpy(), "one dimension less": tensor[0]}
        ways |= {"three dimensions more": tensor[None, None, None], "integers": tensor.long(), "truth values": tensor > 0.5}
        ways |= {"complex numbers": tensor.to(torch.complex64)}
        if name != "right":
            ways["nothing"] = None
        if strict:
            ways |= {"another precision": tensor.double(), "another device": tensor.to("meta")}
        for axis, letter in enumerate(letters[name]):
            ways[f"one more in {letter}, axis {axis}"] = torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
        for way, wrong in ways.items():
            # Where the first operand with a letter is of another size or kind, the next one is the one that does not fit.
            leads = name in ("value", "update") and way.startswith(("one ", "another", "complex"))
            leads = leads or (name, way) == ("write", "one more in N, axis 3")
            yield bad(
                f"{op}: {name} as {way}", partial(run, **right | {name: wrong}), op, "`" if leads else f"`{name}`", "expected"
            )


def boundaries(op: str, run: Callable[..., Any]) -> Iterator[Bad]:
    """`cu_seqlens` in every wrong way, for a row of 5 positions."""
    wrong = {"a list": [0, 5], "no boundary": torch.tensor([0]), "a matrix": torch.tensor([[0, 5]])}
    wrong |= {"fractions": torch.tensor([0.0, 5.0]), "a late begin": torch.tensor([1, 5]), "an early end": torch.tensor([0, 4])}
    wrong |= {
        "a late end": torch.tensor([0, 6]),
        "going back": torch.tensor([0, 3, 2, 5]),
        "below zero": torch.tensor([0, -1, 5]),
    }
    wrong |= {"truth values": torch.tensor([False, True])}
    for way, value in wrong.items():
        yield bad(f"{op}: cu_seqlens as {way}", partial(run, cu_seqlens=value), op, "`cu_seqlens`", "expected")


def entry_scan() -> Iterator[Bad]:
    yield from spoiled("transport_scan", scan.transport_scan, LETTERS)
    yield from spoiled("block_affine_scan", scan.block_affine_scan, {"update": "BTNP", "left": "BTN", "right": "BTPP"})
    good = operands(LETTERS)
    run = partial(scan.transport_scan, **good)
    state = torch.rand(2, 2, 4, 3)
    for way, wrong in {
        "a list": [0.0],
        "too few dimensions": state[0],
        "another batch": state[:1],
        "another order": state[:, :, :3],
        "another width": state[..., :2],
        "integers": state.long(),
        "double": state.double(),
        "meta": state.to("meta"),
    }.items():
        yield bad(f"transport_scan: initial_state {way}", partial(run, initial_state=wrong), "`initial_state`", "expected")
    for backend in ("fast", "", "FUSED", None, 3):
        yield bad(f"transport_scan(backend={backend!r})", partial(run, backend=backend), "`backend`", "expected one of")
        resolve = partial(scan.resolve_backend, good["value"], backend=backend)
        yield bad(f"resolve_backend({backend!r})", resolve, "`backend`", "expected one of")
    for backend in ("fused", "chunked", "triton", "slow"):
        call = partial(scan.block_affine_scan, torch.rand(3, 4), None, torch.rand(3, 4, 3), backend=backend)
        yield bad(f"block_affine_scan(backend={backend!r})", call, "`backend`", "expected 'auto', 'reference'")
    row = {name: tensor if name == "drift" else torch.rand(1, 5, *tensor.shape[2:]) for name, tensor in good.items()}
    yield from boundaries("transport_scan", partial(scan.transport_scan, **row))
    yield bad("transport_scan: packed rows", partial(run, cu_seqlens=torch.tensor([0, 3])), "`cu_seqlens`", "B = 1")
    one, other = scan.Affine(torch.rand(4), None, torch.rand(4, 3)), scan.Affine(torch.rand(5), None, torch.rand(5, 3))
    dense = scan.Affine(torch.rand(4, 4), None, torch.rand(4, 3))
    yield bad("compose of two orders", lambda: scan.compose(one, other), "compose", "`first`", "`second`")
    yield bad("compose of two kinds", lambda: scan.compose(one, dense), "compose", "torch.diag_embed")


def entry_actions() -> Iterator[Bad]:
    matrix = torch.rand(3, 3)
    for way, wrong in {
        "a list": matrix.tolist(),
        "None": None,
        "a vector": matrix[0],
        "not square": matrix[:2],
        "empty": matrix[:0, :0],
        "integers": matrix.long(),
        "truth values": matrix > 0.5,
    }.items():
        yield bad(f"expm of {way}", partial(actions.expm, wrong), "expm", "expected")
    yield bad("expm by an unknown backend", partial(actions.expm, matrix, backend="fast"), "`backend`", "expected one of")
    for channel in (-1, 3, 1.0, "0", None, True):
        yield bad(f"Diagonal(3, {channel!r})", partial(actions.Diagonal, 3, channel), "factor", "`i`", "0..2")
        yield bad(f"Rotation(3, {channel!r}, 1)", partial(actions.Rotation, 3, channel, 1), "factor", "`i`", "0..2")
        yield bad(f"Shear(3, 0, {channel!r})", partial(actions.Shear, 3, 0, channel), "factor", "`j`", "0..2")
    for factor in (actions.Rotation, actions.Shear):
        yield bad(f"{factor.__name__}(3, 1, 1)", partial(factor, 3, 1, 1), "two different channels")
    for u, v in ((torch.rand(3), torch.rand(2)), (torch.rand(3, 1), torch.rand(3)), (torch.rand(3), torch.rand(()))):
        yield bad(f"RankOne {tuple(u.shape)} {tuple(v.shape)}", partial(actions.RankOne, u, v), "RankOne", "vectors [P]")
    for factor in (
        actions.Diagonal(3, 0),
        actions.Rotation(3, 0, 1),
        actions.Shear(3, 0, 1),
        actions.RankOne(*torch.rand(2, 3)),
    ):
        for state in (torch.rand(4, 2), torch.rand(3)):
            what = f"{type(factor).__name__}.act on {tuple(state.shape)}"
            yield bad(what, partial(factor.act, state, torch.rand(())), type(factor).__name__, "`state`", "[.., N, 3]")
    families = (
        actions.SplitFlow,
        actions.DenseExp,
        actions.Orthogonal,
        actions.Dissipative,
        actions.Structured,
        actions.Oracle,
    )
    for family in families:
        name = family.__name__
        for width in (0, -1, 2.0, "4", None, True):
            yield bad(f"{name}({width!r})", partial(family, width), name, "`width`", "positive integer")
        action = family(3)
        coords = torch.rand(2, action.num_coordinates)
        for way, wrong in {"a list": coords.tolist(), "None": None, "integers": coords.long(), "short": coords[:, 1:]}.items():
            yield bad(f"{name}: coords as {way}", partial(action.dense, wrong, 1.0), name, "`coords`", "expected")
        yield bad(f"{name}: step that does not fit", partial(action.dense, coords, torch.rand(5)), name, "`step`", "broadcast")
    for generators in (matrix, torch.rand(2, 3, 2), torch.rand(3)):
        yield bad(f"Lie {tuple(generators.shape)}", partial(actions.Lie, generators), "Lie", "P, P]")
    yield bad("Lie with NaN", partial(actions.Lie, torch.full((1, 2, 2), NAN)), "Lie", "not finite")
    for word in ("rotary", "", None, 4, "Orthogonal"):
        yield bad(f"get_family({word!r})", partial(actions.get_family, word, 4), "get_family", "expected one of")
    yield bad("get_family of another width", lambda: actions.get_family(actions.Orthogonal(3), 4), "width 3", "expected 4")


def small_layer(**changed: Any) -> Shippo:
    return Shippo(**{"d_model": 8, "d_state": 4, "backend": "reference"} | changed)


def entry_layers() -> Iterator[Bad]:
    yield from options(
        "Shippo",
        small_layer,
        d_model=[0, -8, 8.0, "8", None, True],
        d_state=[0, -1, 4.0, "4", None],
        d_conv=[0, -1, 2.5],
        expand=[0, -2, 0.3, NAN, "2", None],
        group_width=[0, -4, 3, 5, 32, 4.0],
        right=["rotary", None, 7, actions.Orthogonal(3)],
        write_rank=[0, -1, 1.5],
        controller_conv=[-1, 1.5, None],
        initial_state_std=[-1.0, NAN, "1"],
        drift_init=["hippo", None, 3],
        memory_length=[0, 0.5, -3, NAN, "long"],
        dt_min=[0, -1, NAN, 2.0, "1"],
        dt_max=[0.5, NAN, "1"],
        in_init=["zero", None],
        conv_init=["zeros", 1],
        read_init=["read", None],
        out_init=["identity", 0],
        right_std=[-0.1, NAN, "0"],
        backend=["fast", "", None, 3],
    )
    yield bad("Shippo with a spec and options", lambda: Shippo(8, spec=layers.ShippoSpec(), d_state=4), "`spec` came with")
    for layer in (small_layer(), ShippoBackbone(8, 1, d_state=4, backend="reference")):
        op = type(layer).__name__
        u, mask = torch.rand(2, 3, 8), torch.ones(2, 3, dtype=torch.int64)
        for name, call, v in ((op, layer, u), (f"{op}.step", layer.step, u[:, 0])):
            for way, wrong in {
                "a list": v.tolist(),
                "nothing": None,
                "tokens": v[..., 0].long(),
                "one dimension less": v[0],
                "one dimension more": v[None],
                "another width": v[..., :4],
                "integers": v.long(),
                "complex numbers": v.to(torch.complex64),
            }.items():
                yield bad(f"{name} on {way}", partial(call, wrong), op, "`u`", "expected")
        for way, wrong in {
            "short": mask[:, :2],
            "long": mask.repeat(1, 2),
            "of one row": mask[:1],
            "a vector": mask[0],
            "a list": mask.tolist(),
            "additive": torch.zeros(2, 3),
            "of twos": 2 * mask,
            "below zero": -mask,
        }.items():
            yield bad(f"{op}: a mask {way}", partial(layer, u, attention_mask=wrong), op, "`attention_mask`", "expected")
        yield from boundaries(op, partial(layer, torch.rand(1, 5, 8)))
        both = partial(layer, u[:1], attention_mask=mask[:1], cu_seqlens=torch.tensor([0, 3]))
        yield bad(f"{op}: mask and boundaries", both, op, "expected one of them")
    layer, state = small_layer(), small_layer().init_state(2)
    for way, wrong in {
        "a tensor": state.conv,
        "a list": list(state),
        "a string": "state",
        "another batch": small_layer().init_state(3),
        "another order": small_layer(d_state=5).init_state(2),
        "another width": small_layer(d_model=12).init_state(2),
        "another convolution": small_layer(d_conv=3).init_state(2),
        "a controller's window": small_layer(controller_conv=3).init_state(2),
        "another rank": small_layer(write_rank=2).init_state(2),
        "meta": state.to("meta"),
    }.items():
        yield bad(f"Shippo from {way}", partial(layer, torch.rand(2, 3, 8), wrong), "Shippo", "`state`", "expected")
        yield bad(f"Shippo.step from {way}", partial(layer.step, torch.rand(2, 8), wrong), "Shippo", "`state`", "expected")
    stack = ShippoBackbone(8, 2, d_state=4, backend="reference")
    yield bad("a stack from one state", partial(stack, torch.rand(2, 3, 8), [state]), "`states` has 1", "expected 2")
    yield bad("a stack without layers", lambda: ShippoBackbone(8, 0), "Stack", "at least 1")
    cell_letters = LETTERS | {"mix": "BTG"}
    yield from spoiled("shippo_cell", shippo_cell, cell_letters, strict=False)
    cell = partial(shippo_cell, **operands(cell_letters))
    memory = torch.rand(2, 2, 4, 3)
    held = layers.CellState(memory, torch.rand(2, 2, 4), torch.rand(2, 2, 3))
    for way, wrong, words in (
        ("a tensor", memory, "a Tensor; expected a CellState"),
        ("a tuple", tuple(held), "a tuple; expected a CellState"),
        ("another batch", layers.CellState(*(part[:1] for part in held)), "`initial_state.memory`"),
        ("another write", held._replace(write=torch.rand(2, 2, 5)), "`initial_state.write`"),
        ("another value", held._replace(value=torch.rand(2, 2, 4)), "`initial_state.value`"),
        ("no tensor", held._replace(value=[1.0]), "`initial_state.value`"),
    ):
        yield bad(f"shippo_cell from {way}", partial(cell, initial_state=wrong), "shippo_cell", words)
    mask = torch.ones(2, 3, dtype=torch.bool)
    for way, wrong in {"integers": mask.long(), "short": mask[:, :2], "a list": mask.tolist()}.items():
        yield bad(f"shippo_cell: mask as {way}", partial(cell, mask=wrong), "shippo_cell", "`mask`", "expected")
    yield bad("shippo_cell(backend='fast')", partial(cell, backend="fast"), "`backend`", "expected one of")
    for measure in ("hippo", "", None, 3):
        yield bad(f"lift({measure!r})", partial(lift, measure, d_model=8, d_state=4), "lift", "`measure`", "expected")
    make = partial(lift, "legs", d_state=4)
    yield from options("lift", partial(make, d_model=8), group_width=[3, 0, -4], step=[0, -1.0, NAN], right=["rotary"])
    yield from options("lift", make, d_model=[0, -8, 2.5])
    lifted = make(d_model=8)
    yield bad(
        "a lift from another state", partial(lifted, torch.rand(2, 3, 8), lifted.init_state(3)), "LiftedMemory", "`state`"
    )
    for measure in ("legs", "legt", "s4d"):
        yield bad(f"online_memory({measure!r}, 0)", partial(layers.online_memory, measure, 0), "expected")
    stream = layers.StreamingLayer(projection.LegT(4, 1.0), 3)
    for dt in (-0.1, NAN, float("inf"), torch.tensor([0.1, float("inf")])):
        yield bad(
            f"StreamingLayer with dt {dt}", partial(stream, torch.zeros(1, 2, 3), dt), "StreamingLayer", "`dt`", "expected"
        )
    plain = torch.nn.Linear(2, 2)
    for name, wrap in (("identity_right", layers.identity_right), ("zero_right_suffix", layers.zero_right_suffix)):
        yield bad(f"{name} of a model without layers", lambda wrap=wrap: wrap(plain).__enter__(), "`model`", "SHiPPO layers")


@cache
def small_model(**changed: Any) -> SequenceModel:
    return SequenceModel(
        SequenceConfig(**{"d_model": 8, "n_layers": 1, "d_state": 4, "vocab_size": 5, "backend": "reference"} | changed)
    )


def entry_models() -> Iterator[Bad]:
    def make(**changed: Any) -> SequenceModel:
        return SequenceModel(SequenceConfig(**{"d_model": 8, "n_layers": 1, "d_state": 4, "vocab_size": 5} | changed))

    yield from options(
        "SequenceConfig",
        make,
        mixer=["rnn", "", None, 3],
        d_model=[0, -8, 8.5, "8", None],
        n_layers=[0, -1, 1.5, "2", None],
        vocab_size=[0, -5, 2.5, "5"],
        num_outputs=[0, -1, 1.5],
        num_classes=[0, -2, 1.5],
        frame_init=["eye", None],
        head_init=["tied", None],
        d_state=[0, "4"],
        group_width=[3],
        backend=["fast"],
        norm_eps=[-1.0, NAN],
    )
    for d_model, n_heads in ((8, 3), (9, 3), (8, 0), (0, 1)):
        yield bad(
            f"CausalAttention({d_model}, {n_heads})", partial(CausalAttention, d_model, n_heads), "CausalAttention", "expected"
        )
    yield bad("a transformer of 3 heads", partial(make, mixer="transformer", n_heads=3), "CausalAttention", "multiple of 6")
    model, ids = small_model(), torch.zeros(2, 3, dtype=torch.int64)
    mask = torch.ones_like(ids)
    for way, wrong in {"short": mask[:, :2], "a list": mask.tolist(), "additive": mask.float(), "of twos": 2 * mask}.items():
        yield bad(
            f"SequenceModel: a mask {way}", partial(model, ids, attention_mask=wrong), "SequenceModel", "`attention_mask`"
        )
    yield from boundaries("SequenceModel", partial(model, torch.zeros(1, 5, dtype=torch.int64)))
    yield bad("SequenceModel from no states", partial(model, ids, []), "`states` has 0", "expected 1")
    yield bad("SequenceModel from two states", partial(model, ids, [None, None]), "`states` has 2", "expected 1")
    gru = make(mixer="gru")
    yield bad("a GRU over padding", partial(gru, ids, attention_mask=mask), "GRUMixer", "expected `None`")
    prefixes = PrefixCache(model)
    for prompt in ([], torch.zeros(0, dtype=torch.int64)):
        yield bad(f"PrefixCache.read({prompt!r})", partial(prefixes.read, prompt), "`prompt` is empty", "expected")
    hf = pytest.importorskip("shippo_ssm.models.hf")
    sizes: dict[str, Any] = {"vocab_size": 5, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}
    wrong: dict[str, list[Any]] = {
        "num_hidden_layers": [-1, 0, 1.5],
        "hidden_size": [-8, 0],
        "vocab_size": [0, -1],
        "state_size": [0, -4],
        "conv_kernel": [1],
        "controller_conv": [1, -1],
        "group_width": [0, 3],
        "right": ["rotary"],
        "backend": ["fast"],
        "write_rank": [0],
        "layer_norm_epsilon": [-1.0],
    }
    for name, values in wrong.items():
        for value in values:
            # The library says `Field error for 'name'` of a type; a value is our own affair.
            make_config = lambda name=name, value=value: hf.ShippoModel(hf.ShippoConfig(**sizes | {name: value}))  # noqa: E731
            yield bad(f"ShippoConfig({name}={value!r})", make_config, HF_NAMES.get(name, name))
    language = cached_language_model()
    yield bad("no tokens at all", language, "exactly one of `input_ids` and `inputs_embeds`")
    both = partial(language, input_ids=ids, inputs_embeds=torch.rand(2, 3, 8))
    yield bad("tokens twice", both, "exactly one of `input_ids` and `inputs_embeds`")
    for way, wrong_mask in {"short": mask[:, :2], "of one row": mask[:1], "long": mask.repeat(1, 2)}.items():
        call = partial(language, ids, attention_mask=wrong_mask, use_cache=False)
        yield bad(f"a language model with a mask {way}", call, "`attention_mask`", "expected")
    from transformers import DynamicCache

    yield bad("a cache of another model", partial(language, ids, past_key_values=DynamicCache()), "DynamicCache(config=")
    cache_layer = hf.ShippoCacheLayer()
    yield bad("keys in a cache", lambda: cache_layer.update(ids, ids), "keys and values")
    for back in (1, -1, -100):
        yield bad(f"crop({back})", partial(cache_layer.crop, back), "`tokens_to_remove`", "activate_past_recording")


# Where the name in a message is that of the layer's own option.
HF_NAMES = {"state_size": "d_state"}


@cache
def cached_language_model() -> Any:
    from shippo_ssm.models.hf import ShippoConfig, ShippoModel

    sizes: dict[str, Any] = {"vocab_size": 5, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}
    return ShippoModel(ShippoConfig(**sizes)).eval()


def entry_tasks() -> Iterator[Bad]:
    made: dict[str, tuple[Any, dict[str, list[Any]]]] = {
        "MQAR": (tasks.MQAR, {"length": [0, 7, 8, -2], "num_pairs": [0, -1, 99], "vocab_size": [7, 8, 0]}),
        "TransportMQAR": (tasks.TransportMQAR, {"library": ["rotations", None], "length": [0, -1], "num_active": [0, 999]}),
        "LanguageTask": (tasks.LanguageTask, {"name": ["german", None], "min_length": [0, 99], "max_length": [0, -1]}),
        "WordTask": (tasks.WordTask, {"group": ["a99", "", None, 5], "length": [0, -3], "elements": [(), "half", (999,)]}),
        "TextTask": (tasks.TextTask, {"corpus": ["word", None], "length": [0, -1, 10**9]}),
    }
    for op, (make, wrong) in made.items():
        yield from options(op, make, **wrong)
        yield from options(op, make, seed=[-1, 2**64, 0.5, "0", None])
    yield from options("TransportMQAR", tasks.TransportMQAR, p_query=[0, -0.1, 2, NAN])
    small = {
        "MQAR": tasks.MQAR(vocab_size=20, length=12, num_pairs=2),
        "TransportMQAR": tasks.TransportMQAR(length=8),
        "LanguageTask": tasks.LanguageTask(name="parity", max_length=4),
        "WordTask": tasks.WordTask(group="A5", length=4),
        "TextTask": tasks.TextTask(length=8),
    }
    for op, task in small.items():
        for indices in ([], [-1], [2**64], [0.5], ["0"], [None], [True], 3):
            yield bad(f"{op}.batch({indices!r})", partial(task.batch, indices), "`indices`", "expected")
        for split in ("test", "", None) if op != "TextTask" else ("eval", "", None):
            yield bad(f"{op}.batch(split={split!r})", partial(task.batch, [0], split), "`split`", "expected one of")
        vocabulary = 31 if op == "TransportMQAR" else task.vocab_size  # pyright: ignore[reportAttributeAccessIssue]

        def answer(tokens: Tensor, op: str = op, size: int = vocabulary) -> Tensor:
            lead = (*tokens.shape[:2], 4) if op == "TransportMQAR" else tokens.shape
            return torch.zeros(*lead, size)

        for count in (0, -1, 0.5, None) if op != "TextTask" else (0, -1, 0.5):
            yield bad(f"{op}.evaluate({count!r})", partial(task.evaluate, answer, count), "`num_examples`", "expected")
        for size in (0, -1):
            yield bad(f"{op}.evaluate(batch_size={size})", partial(task.evaluate, answer, 2, size), "`batch_size`", "expected")
        yield bad(
            f"{op}.evaluate, a class too many",
            partial(task.evaluate, partial(answer, size=vocabulary + 1), 2),
            "evaluate: `model`",
            "shape",
        )
        yield bad(f"{op}.evaluate, no tensor", partial(task.evaluate, lambda tokens: [0.0], 2), "evaluate: `model`", "expected")
    yield bad("WordTask.batch of length 0", partial(small["WordTask"].batch, [0], "train", 0), "`length`", "at least 1")


def entry_checkpoints() -> Iterator[Bad]:
    """A good checkpoint, spoiled in one place."""
    import tempfile

    folder = Path(tempfile.mkdtemp())
    save_checkpoint(small_model(), folder)
    header, tensors = json.loads((folder / "config.json").read_text()), (folder / "model.safetensors").read_bytes()
    good = json.dumps(header).encode()

    def spoil(config: bytes | None, weights: bytes | None = tensors) -> SequenceModel:
        for name, content in (("config.json", config), ("model.safetensors", weights)):
            if content is None:
                (folder / name).unlink(missing_ok=True)
            else:
                (folder / name).write_bytes(content)
        return load_checkpoint(folder)

    for content in (b"", b"{", b"[]", b"null", b"3", b'"text"', b"{}", b"\xff\xfe", b"[" * 100_000):
        yield bad(f"config.json is {content[:9]!r}", partial(spoil, content), "config.json")
    for key in header:
        if key != "notes":
            short = {name: value for name, value in header.items() if name != key}
            yield bad(f"config.json without {key}", partial(spoil, json.dumps(short).encode()), "config.json")
    for key, value in {"format": "other", "version": 99, "config": [], "notes": 3}.items():
        yield bad(f"config.json: {key} {value!r}", partial(spoil, json.dumps(header | {key: value}).encode()), "config.json")

    def with_config(**changed: Any) -> bytes:
        return json.dumps(header | {"config": header["config"] | changed}).encode()

    for name in ("d_model", "n_layers", "vocab_size", "mixer", "d_state", "group_width", "right", "write_rank"):
        lacking = {key: value for key, value in header["config"].items() if key != name}
        call = partial(spoil, json.dumps(header | {"config": lacking}).encode())
        yield bad(f"a config without {name}", call, "read_checkpoint", f"'{name}'")
        for value in ("many", None, -1, [1]) if name not in ("vocab_size",) else ("many", -1, [1]):
            yield bad(f"a config with {name} = {value!r}", partial(spoil, with_config(**{name: value})), f"`{name}`")
    # Sizes that no machine could hold are compared with the file, not built.
    for name, value in {"d_model": 10**9, "d_state": 10**9, "n_layers": 10**6, "vocab_size": 10**12, "expand": 10**6}.items():
        yield bad(
            f"a config with {name} = {value}", partial(spoil, with_config(**{name: value})), "load_checkpoint", "expected"
        )
    for name, value in {"d_model": 16, "d_state": 8, "n_layers": 2, "vocab_size": 7, "d_conv": 3, "mixer": "gru"}.items():
        yield bad(f"a config of another {name}", partial(spoil, with_config(**{name: value})), "load_checkpoint", "expected")
    yield bad("a config with an unknown key", partial(spoil, with_config(colour="blue")), "unknown keys", "colour")
    for length in (0, 4, 8, 100, len(tensors) // 2, len(tensors) - 1):
        yield bad(f"weights cut at {length}", partial(spoil, good, tensors[:length]), "model.safetensors")
    yield bad("weights of nonsense", partial(spoil, good, b"\xff" * 1000), "model.safetensors")
    yield bad("no weights", partial(spoil, good, None), "model.safetensors")
    yield bad("no folder", partial(load_checkpoint, folder / "nowhere"), "no config.json", "save_checkpoint")
    yield bad("a file in the place of a folder", partial(read_checkpoint, folder / "config.json"), "no config.json")


def entry_collapse() -> Iterator[Bad]:
    family = torch.rand(2, 3, 3)
    for way, wrong in {
        "a matrix": family[0],
        "not square": family[:, :2],
        "none": family[:0],
        "of width 0": family[:, :0, :0],
        "four dimensions": family[None],
        "text": "abc",
        "nothing": None,
        "ragged": [[[1.0]], [[1.0, 2.0]]],
        "complex": family.to(torch.complex64),
        "a complex array": family.numpy() * 1j,
        "with NaN": family * NAN,
        "with an infinity": family / 0,
    }.items():
        yield bad(f"collapse of a family {way}", partial(collapse, wrong), "collapse", "`generators`", "expected")
    for tol in (0, -1e-7, 1e-2, 1, NAN, "small"):
        yield bad(f"collapse(tol={tol!r})", partial(collapse, family, tol), "collapse", "`tol`", "expected")
    for half in (torch.float16, torch.bfloat16):
        yield bad(f"collapse in {half}", partial(collapse, family.to(half)), "collapse", "`generators`", "pass `tol`")
    reduction = collapse(family)
    ones = torch.ones(1, 3, 1, 3)
    record = (ones, ones, ones, ones[..., 0], torch.zeros(1, 3), torch.rand(1, 3, 1, 3, 3))
    yield bad("bank without a right action", lambda: bank((*record[:5], None), reduction), "bank", "`right` is None")
    yield bad("bank of another width", lambda: bank((ones[..., :2], *record[1:]), reduction), "bank", "`value`")
    yield bad("bank of another action", lambda: bank((*record[:5], torch.rand(1, 3, 1, 2, 2)), reduction), "bank", "`right`")
    halves = collapse(torch.diag_embed(torch.rand(2, 3)))
    yield bad("bank that does not collapse", lambda: bank(record, halves), "bank", "does not collapse")
    yield bad("bank of generators of another width", lambda: bank(actions.Lie(torch.rand(2, 2, 2)), reduction), "bank")
    yield bad("join of other parts", lambda: bank(record, reduction).join([ones[..., :1]]), "Banks", "`parts`")
    yield bad("audit of a model without layers", lambda: collapse_of_model(torch.nn.Linear(3, 3), torch.rand(2, 3)), "`model`")


def entry_projection() -> Iterator[Bad]:
    for measure in (
        projection.LegS,
        projection.LagT,
        partial(projection.LegT, theta=1.0),
        partial(projection.Fourier, theta=1.0),
    ):
        name = type(measure(1)).__name__
        for order in (0, -1, 2.5, "8", None, True):
            yield bad(f"{name}({order!r})", partial(measure, order), name, "`N`", "positive integer")
    for measure in (projection.LegT, projection.Fourier):
        for theta in (0, -1.0, NAN, float("inf"), "1", None):
            yield bad(f"{measure.__name__}(4, {theta!r})", partial(measure, 4, theta), measure.__name__, "`theta`", "window")
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    for way, wrong in {
        "a vector": turn[0],
        "not square": turn[:1],
        "of another width": np.eye(3),
        "pieces without times": np.stack([turn, turn]),
        "complex": turn * 1j,
        "with NaN": turn * NAN,
        "text": "turn",
        "nothing": None,
        "a call that gives a vector": lambda t: turn[0],
        "a call that gives complex numbers": lambda t: turn * 1j,
        "a call that gives nothing": lambda t: None,
        "a call that gives NaN": lambda t: turn * NAN,
    }.items():
        yield bad(f"Transport of {way}", partial(projection.Transport, wrong, 2), "Transport", "`generator`", "expected")
    for width in (0, -2, 2.0, "2", None, True):
        yield bad(f"Transport(width={width!r})", partial(projection.Transport, turn, width), "Transport", "`width`", "expected")
    pieces = np.stack([turn, turn])
    for times in ([0.0], [0.0, 0.0], [1.0, 0.0], [-1.0, 1.0], [0.0, NAN], [[0.0, 1.0]], [0.0, 1.0, 2.0], ["a", "b"]):
        call = partial(projection.Transport, pieces, 2, times=times)
        yield bad(f"Transport(times={times})", call, "Transport", "`times`" if len(times) == 2 else "times", "expected")
    transport = projection.Transport(turn, 2)
    for t, tau in ((1.0, 2.0), (1.0, -0.5), (NAN, 0.0), (1.0, NAN), (float("inf"), 0.0), ("1", 0.0)):
        yield bad(f"P({t!r}, {tau!r})", partial(transport.P, t, tau), "Transport", "`t", "expected")
    for measure in ("legs", None, 4):
        yield bad(f"ProjectionMemory({measure!r})", partial(projection.ProjectionMemory, measure), "`measure`", "LegS(32)")
    yield bad("a bare generator", lambda: projection.ProjectionMemory(projection.LegS(4), turn), "`transport`", "wrap")
    memory = projection.ProjectionMemory(projection.LegS(4))
    signal = lambda t: np.array([t, 1.0])  # noqa: E731
    for t in (0.0, -1.0, NAN, float("inf"), "1", None, [1.0, 2.0]):
        yield bad(f"project at {t!r}", partial(memory.project, signal, t), "projection: `t`", "expected")
    for times in ([], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [1.0, NAN], [[1.0, 2.0]], "soon"):
        yield bad(f"evolve over {times!r}", partial(memory.evolve, signal, times), "projection: `times", "expected")
    for method in ("euler", "", None):
        yield bad(
            f"evolve by {method!r}", partial(memory.evolve, signal, [1.0, 2.0], method=method), "`method`", "expected one of"
        )
    yield bad("evolve and keep 'some'", partial(memory.evolve, signal, [1.0, 2.0], keep="some"), "`keep`", "expected one of")
    for state in (np.zeros((3, 2)), np.zeros(4), "state"):
        yield bad(f"reconstruct of {state!r:.30}", partial(memory.reconstruct, state, 1.0, [0.5]), "`C`", "expected")
    for tau in ([2.0], [-1.0], [NAN], "past"):
        yield bad(f"reconstruct at {tau!r}", partial(memory.reconstruct, np.zeros((4, 2)), 1.0, tau), "`tau`", "expected")
    for values, times in ((np.zeros((3, 2)), [0.0, 1.0]), (np.zeros(()), [0.0]), (np.zeros((2, 2)), [1.0, 0.0])):
        yield bad(f"Samples {values.shape} {times}", partial(projection.Samples, values, times), "Samples", "expected")


class Refused(ValueError):
    """What the command line said."""


def shippo(*words: str) -> None:
    """Run a command line in this process; what it refuses in one line with exit code 2 is raised, anything else is an error."""
    import contextlib
    import io

    errors = io.StringIO()
    before, sys.argv = sys.argv, ["shippo", *words]
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            cli.main()
    except SystemExit as end:
        if end.code == 2 and errors.getvalue().count("\n") == 1 and errors.getvalue().startswith("shippo: "):
            raise Refused(errors.getvalue()) from None
        raise AssertionError(f"code {end.code}: {errors.getvalue()}") from None
    finally:
        sys.argv = before


def entry_commands() -> Iterator[Bad]:
    def said(line: str, *words: str) -> Bad:
        return bad(f"shippo {line}", partial(shippo, *line.split()), *words)

    for name in ("nothing", "Paired", "paired.json", "-"):
        for command in ("run", "table", "figure"):
            yield said(f"{command} {name}", "expected one of paired")
    for command in ("run", "table", "figure"):
        yield said(f"{command} paired --preset huge", "expected one of full, smoke" if command == "run" else "preset")
        yield said(f"{command} paired --smoke --preset full", "give one of them")
        yield said(command, "shippo")
        yield said(f"{command} paired --frobnicate", "--frobnicate")
        yield said(f"{command} paired rotation", "extra")
    yield said("frobnicate", "shippo --help")
    yield said("run paired --smoke --row nothing", "expected rows among")
    yield said("run paired --smoke --seeds 0", "`seeds` is 0")
    yield said("run paired --smoke --seeds 99999999999999999999", "`seeds` is 99999999999999999999", "10000")
    yield said("run paired --smoke --seeds many", "--seeds", "integer")
    yield said("run paired --smoke --jobs 0", "--jobs is 0")
    yield said("run paired --smoke --jobs -2", "--jobs is -2")
    yield said("run paired --smoke --out file", "'file'", "File exists")
    yield said("run paired --smoke --out file/below", "file/below", "Not a directory")
    yield said("run paired --smoke --out /proc/runs", "/proc/runs")
    for name in experiment_names():
        yield said(f"table {name} --out missing", f"shippo run {name}")
        yield said(f"table {name} --smoke", "--preset smoke")
        yield said(f"table {name} --out other.json", "is a result of 'other'")
    yield said("table paired --format html", "html")
    yield said("table paired --out file", "file")
    yield said("figure paired --out picture.docx", ".png")
    yield said("figure paired --out picture", ".png")
    yield said("figure groups --out groups.png", "no figure")
    yield said("figure overview --out file/overview.png", "file")
    yield said("report --out page.pdf", ".html")
    yield said("report --out file/page.html", "'file'")
    yield said("verify --only nothing", "part of the name of a check", "CHECKS")
    yield said("verify --only rotation_example --out file/v.json", "file")
    yield said("inspect missing", "folder of save_checkpoint")
    yield said("inspect file", "folder of save_checkpoint")
    yield said("inspect", "CHECKPOINT")
    yield said("bench --device tpu", "tpu")


RESULT = {
    "experiment": "paired",
    "preset": "full",
    "versions": {"torch": "2"},
    "wall_seconds": 1.0,
    "rows": [
        {
            "name": "no-right-r1",
            "label": "No-right",
            "config": {"steps": 1, "rank": 1},
            "seeds": [0, 1],
            "metrics": {"nmse": [1.0, 2.0], "pair_nmse": [1.0, 1.0]},
            "curves": {},
            "notes": {},
            "seconds": 1.0,
        }
    ],
}
ABSENT = object()
MANIFEST = {"experiment": "paired", "preset": "smoke", "configs": [], "versions": {}, "wall_seconds": 0.0}


def entry_runs() -> Iterator[Bad]:
    """Folders and files that a run cannot continue: manifests, finished units and checkpoints."""

    def resumed(what: str, files: dict[str, Any], *words: str) -> Bad:
        def call() -> None:
            shutil.rmtree("run", ignore_errors=True)
            for name, content in {"manifest.json": MANIFEST, **files}.items():
                path = Path("run") / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content if isinstance(content, str) else json.dumps(content))
            shippo("run", "paired", "--smoke", "--jobs", "1", "--row", "no-right-r1", "--out", "run", "--resume")

        return bad(f"run --resume: {what}", call, *words)

    for content in ({}, [], 3, None, "{"):
        yield resumed(f"the manifest is {content!r}", {"manifest.json": content}, "manifest.json")
    for key in MANIFEST:
        for wrong in (None, True, {"a": 1} if key != "versions" else [3]):
            yield resumed(f"{key} is {wrong!r}", {"manifest.json": MANIFEST | {key: wrong}}, "manifest.json", f"'{key}'")
    for wrong in (3, {}, {"name": "no-right-r1"}, {"name": 3, "num_seeds": 1}, {"name": "no-right-r1", "num_seeds": "many"}):
        yield resumed(f"a row is {wrong!r}", {"manifest.json": MANIFEST | {"configs": [wrong]}}, "configuration 0")
    for wrong in (0, 10**20):
        row = {"name": "no-right-r1", "num_seeds": wrong}
        yield resumed(f"{wrong} seeds", {"manifest.json": MANIFEST | {"configs": [row]}}, "`num_seeds`")
    for content in ({}, [], "{", {"seconds": 1.0, "metrics": {}, "curves": [], "notes": {}}):
        yield resumed(f"a unit is {content!r}", {"units/no-right-r1.s0-s1.json": content}, "no-right-r1.s0-s1.json")
    yield resumed("a checkpoint is text", {"checkpoints/no-right-r1.s0-s1.pt": "nothing"}, "no-right-r1.s0-s1.pt")


def entry_results() -> Iterator[Bad]:
    """Result files that are no result, or one with a piece missing or of another kind."""

    def shown(what: str, content: Any, *words: str, command: str = "table") -> Bad:
        def call() -> None:
            Path("bad.json").write_text(content if isinstance(content, str) else json.dumps(content))
            option = "--out" if command == "table" else "--run"
            shippo(command, "paired", option, "bad.json")

        return bad(f"{command}: {what}", call, "bad.json", *words)

    for text in ("", "{", "[]", "{}", "null", "3", '"text"', "[" * 100_000, "{]"):
        yield shown(f"the file is {text[:9]!r}", text)
    for key in RESULT:
        yield shown(f"without {key}", {name: value for name, value in RESULT.items() if name != key}, f"'{key}'")
        for wrong in (None, True, 3, [3]) if key not in ("rows", "wall_seconds") else (None, True, "many", {}):
            yield shown(f"{key} is {wrong!r}", RESULT | {key: wrong}, key)
    row: dict[str, Any] = RESULT["rows"][0]  # pyright: ignore[reportArgumentType]

    def with_row(**changed: Any) -> dict[str, Any]:
        return RESULT | {"rows": [{key: value for key, value in (row | changed).items() if value is not ABSENT}]}

    for wrong in (None, 3, "row", []):
        yield shown(f"a row is {wrong!r}", RESULT | {"rows": [wrong]}, "row 0")
    for key in row:
        yield shown(f"a row without {key}", with_row(**{key: ABSENT}), f"'{key}'")
        for wrong in (None, 3, [3]) if key not in ("seeds", "seconds") else (None, "many", {}):
            yield shown(f"a row's {key} is {wrong!r}", with_row(**{key: wrong}), f"'{key}'")
    yield shown("no rows", RESULT | {"rows": []}, "no finished row")
    yield shown("no seeds", with_row(seeds=[]), "no seeds")
    for wrong in (None, 3, "1", [1.0], ["a", "b"], [None, None], [1.0, 2.0, 3.0], {}):
        yield shown(f"a metric is {wrong!r}", with_row(metrics={"nmse": wrong, "pair_nmse": [1.0, 1.0]}), "metric 'nmse'")
    yield shown("a metric that the verdict needs is missing", with_row(metrics={"nmse": [1.0, 2.0]}), "'pair_nmse'")
    yield shown("steps are words", with_row(config={"steps": "many", "rank": 1}), "steps")
    yield shown("no version of torch", RESULT | {"versions": {}}, "'torch'")
    yield shown("too few rows for a figure", RESULT, "lacks", command="figure")


ENTRY_POINTS = {
    name.removeprefix("entry_"): entry for name, entry in sorted(globals().items()) if name.startswith("entry_")
}  # fmt: skip


def refusal(call: Callable[[], Any]) -> str:
    """What a call says when it refuses; a call that does not, or in another way, is told instead."""
    try:
        result = call()
    except ValueError as error:
        return str(error)
    except Exception as error:
        # The Hugging Face library wraps what a configuration raises in an error of its own.
        if type(error).__module__.startswith("huggingface_hub"):
            return str(error)
        return f"!! {type(error).__name__}: {error}"
    return f"!! was taken: {result!r:.80}"


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_bad_calls_are_refused_in_clear_words(entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("a file")
    Path("other.json").write_text(json.dumps(RESULT | {"experiment": "other"}))
    wrong = []
    for case in ENTRY_POINTS[entry]():
        said = refusal(case.call)
        if said.startswith("!!") or not all(word in said for word in case.words) or len(said) > 1500:
            wrong.append(f"{case.what}: wanted {case.words}, got {said[:300]}")
    assert not wrong, f"{len(wrong)} of them\n" + "\n".join(wrong)


def test_there_are_five_hundred_different_ones():
    calls = [case.what for entry in ENTRY_POINTS.values() for case in entry()]
    assert len(calls) == len(set(calls)) >= 500, len(calls)
