"""Text at equal size.

Claim: At equal parameters and tokens SHiPPO has no more bits per byte of text than the better of Mamba and Transformer.
Protocol: the standard library's source, bytes; 0.8 and 3 M parameters, 600 steps of 8 x 256, the best of three rates
Time: planned for 8 core hours, not measured yet

`docs/results/text.md` has the protocol. Mamba is mambapy's (extra `bench`).
"""

import bisect
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shippo_lab.experiments.tracking.curriculum import LayerConfig, held_rate
from shippo_lab.harness import experiment as lab
from shippo_lab.harness.plots import SERIES, new_figure, save
from shippo_lab.harness.store import read_json, write_json
from shippo_lab.harness.training import Trainee, fit
from shippo_lab.tasks.text import TextTask, bits, digest
from shippo_ssm.layers import PAPER_GEOMETRY, PRESETS, states
from shippo_ssm.models import SequenceModel, count_parameters

# Row -> label, and its fields of `SequenceConfig`.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("SHiPPO", {}),
    "none": ("SHiPPO, no right action", {"right": "none"}),
    "paper": ("SHiPPO, paper geometry", PAPER_GEOMETRY),
    "hybrid": ("SHiPPO, 1 of 4 attention", {"attention_every": 4}),
    "mamba": ("Mamba (mambapy)", {"mixer": "mamba"}),
    "transformer": ("Transformer", {"mixer": "transformer", "mlp": "swiglu"}),
    "gru": ("GRU", {"mixer": "gru"}),
}
# Size -> parameters without embedding and classifier, layers, seeds.
SIZES = {"small": (800_000, 4, 3), "large": (3_000_000, 8, 1)}
TIMES = (1, 4, 16)
# The learning rate is chosen on a seed that is not reported.
RATE_SEED = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig(LayerConfig):
    """A row: a model of `size` parameters, without embedding and classifier."""

    size: int = SIZES["small"][0]
    n_layers: int = SIZES["small"][1]
    length: int = 256
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    test_bytes: int = 65_536
    validation_windows: int = 64
    steps: int = 600
    batch: int = 8
    weight_decay: float = 1e-2
    eval_every: int = 100


def rows() -> tuple[TextConfig, ...]:
    """All rows at both sizes."""
    return tuple(
        TextConfig(name=f"{row}-{size}", label=f"{label}, {size}", layer=layer, size=target, n_layers=n, num_seeds=seeds)
        for size, (target, n, seeds) in SIZES.items()
        for row, (label, layer) in ROWS.items()
    )


def smoke() -> tuple[TextConfig, ...]:
    """Three tiny rows, without mambapy."""
    tiny = {"size": 20_000, "n_layers": 1, "num_seeds": 1, "length": 16, "test_bytes": 256, "steps": 3, "batch": 2}
    names = ("default-small", "transformer-small", "gru-small")
    return tuple(replace(row, **tiny, eval_every=3, validation_windows=2) for row in rows() if row.name in names)


def make_model(config: TextConfig, width: int, seed: int = 0) -> SequenceModel:
    """The model of a row at a width, with the language preset and branches that start smaller in deeper models."""
    options: dict[str, Any] = {"vocab_size": 256, "n_heads": 2, "branch_init": "depth", "n_layers": config.n_layers}
    return config.model(seed, d_model=width, **options | PRESETS["language"])


def inner_parameters(model: SequenceModel) -> int:
    """Parameters without embedding and classifier."""
    return count_parameters(model) - count_parameters(model.embedding) - count_parameters(model.head)


def width_of(config: TextConfig) -> int:
    """The width whose model has the number of parameters closest to `config.size`; attention needs multiples of 4."""

    def size(width: int) -> int:
        with torch.device("meta"):
            return inner_parameters(make_model(config, width))

    widths = range(8, 1025, 4 if {"mixer", "attention_every"} & set(config.layer) else 2)
    place = bisect.bisect_left(widths, config.size, key=size)
    return min(widths[max(0, place - 1) : place + 1], key=lambda width: abs(size(width) - config.size))


def loss_of(model: SequenceModel, config: TextConfig, seed: int) -> Callable[[int], tuple[Tensor, int]]:
    """step -> (cross-entropy of the next byte, bytes in it)."""
    task = TextTask(length=config.length, corpus="library", seed=seed)

    def loss_at(step: int) -> tuple[Tensor, int]:
        text = task.batch(range(config.batch * step, config.batch * (step + 1)))
        return F.cross_entropy(model(text.tokens).flatten(0, 1), text.target.flatten()), text.tokens.numel()

    return loss_at


def validation_bits(model: SequenceModel, config: TextConfig) -> dict[str, float]:
    task = TextTask(length=config.length, corpus="library")
    return {"bits": task.evaluate(model, config.validation_windows, 16).bits_per_token}


@torch.no_grad()
def streamed_bits(model: SequenceModel, config: TextConfig, times: int) -> dict[str, float]:
    """Bits per byte of windows of `times` the training length, read in segments with the state carried on."""
    length = times * config.length
    task, count, total = TextTask(length=length, corpus="library"), config.test_bytes // length, 0.0
    segment, batch = length if config.layer.get("mixer") == "mamba" else config.length, max(1, 16 // times)
    for start in range(0, count, batch):
        text, state = task.batch(range(start, min(count, start + batch)), "test"), None
        for tokens, target in zip(text.tokens.split(segment, 1), text.target.split(segment, 1)):
            logits, state = model(tokens, state, output_state=True)
            total += float(bits(logits, target).sum())
    return {f"bits_{times}": total / (count * length), "state_kib": states.num_bytes(state) / 1024 / len(text.tokens)}


@torch.no_grad()
def decoding_speed(model: SequenceModel, num_tokens: int = 64) -> dict[str, float]:
    """Tokens per second of one sequence, one step per token; the best of three."""
    state, token, best = model.init_state(1), torch.zeros(1, dtype=torch.int64), math.inf
    for _ in range(4):
        begun = time.perf_counter()
        for _ in range(num_tokens):
            logits, state = model.step(token, state)
            token = logits.argmax(-1)
        best = min(best, time.perf_counter() - begun)
    return {"decoding": num_tokens / best}


def rate_bits(config: TextConfig, width: int, rate: float, session: lab.Session) -> float:
    """Bits on validation after a third of the steps at a learning rate; a file keeps them for the other seeds of the row."""
    name, folder = f"{config.name}.{rate:g}", session.checkpoint and session.checkpoint.parent.with_name("rates")
    if folder and (folder / f"{name}.json").exists():
        return read_json(folder / f"{name}.json")["bits"]
    model, steps = make_model(config, width, RATE_SEED), max(1, config.steps // 3)
    scores = {"end": partial(validation_bits, model, config)}
    trainee = Trainee(model, loss_of(model, config, RATE_SEED), scores, held_rate(steps, 0.0))
    own = lab.Session(session.unit, folder and folder / f"{name}.pt")
    found = fit(replace(config, learning_rate=rate, steps=steps, eval_every=steps), own, trainee).scores["end"]
    if folder:
        write_json(folder / f"{name}.json", found)
    return found["bits"]


def train(config: TextConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Choose the learning rate of a row, train one seed, and test it at three lengths."""
    (seed,) = seeds
    width = width_of(config)
    tried = {rate: rate_bits(config, width, rate, session) for rate in config.rates}
    rate = min(tried, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)
    model = make_model(config, width, seed)
    scores = {f"bits_{n}": partial(streamed_bits, model, config, n) for n in TIMES}
    scores |= {"decoding": partial(decoding_speed, model)}
    loss_at, evaluate = loss_of(model, config, seed), partial(validation_bits, model, config)
    trainee = Trainee(model, loss_at, scores, held_rate(config.steps, 0.0), evaluate)
    curves, known, notes = fit(replace(config, learning_rate=rate), session, trainee)
    found = {key: value for part in known.values() for key, value in part.items()}
    found |= {"training": notes["tokens_per_second"], "parameters": inner_parameters(model)}
    notes |= {"width": width, "learning_rate": rate, "tried": tried, "digest": digest("library")}
    return lab.RowResult({key: [value] for key, value in found.items()}, curves, notes)


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict | None:
    """Bits of the default against the others, at the same size; and its speed against Mamba's and the Transformer's."""
    kind, _, size = row.name.partition("-")
    ours, *rivals = (result.rows.get(f"{name}-{size}") for name in ("default", "mamba", "transformer"))
    if ours is None or None in rivals:
        return None
    if kind == "default":
        best, longest = min(rival.mean("bits_1") for rival in rivals if rival), row.mean("bits_16") / row.mean("bits_1")
        text = "not above the better of Mamba and Transformer; at 16 times the length at most 1.02 of its bits"
        return lab.Verdict(row.mean("bits_1") <= best and longest <= 1.02, text)
    if kind == "none":
        return lab.Verdict(ours.mean("bits_1") <= row.mean("bits_1"), "the right action does not cost bits")
    least = {"mamba": 4.0, "transformer": 0.6}.get(kind, 0.0)
    holds = ours.mean("training") >= least * row.mean("training")
    return lab.Verdict(holds, f"SHiPPO trains at {least:g} of its speed or more") if least else None


def figure(result: lab.Result, path: Path) -> None:
    """Bits on validation over bytes read and over seconds of training, small size."""
    drawing, (left, right) = new_figure(7, 6.4, rows=2)
    for row, colour in zip((row for row in result.rows.values() if row.name.endswith("-small")), SERIES * 2):
        read = [step * row.config["batch"] * row.config["length"] for step in row.curves["step"]]
        means = [statistics.fmean(values) for values in row.curves["bits"]]
        left.plot([count / 1e6 for count in read], means, color=colour, label=row.label.removesuffix(", small"))
        right.plot([count / row.mean("training") for count in read], means, color=colour)
    right.set_xscale("log")
    for axes, label in ((left, "million bytes read"), (right, "seconds of training, one core")):
        axes.set(xlabel=label, ylabel="bits per byte, validation")
    drawing.legend(loc="outside right center", fontsize=7, frameon=False)
    save(drawing, path)


EXPERIMENT = lab.Experiment(
    name="text",
    **lab.described(__doc__),
    presets={"full": rows, "smoke": smoke},
    train=train,
    columns=(
        *(lab.Column(key=f"bits_{n}", label=f"Bits, {256 * n:,}", format=".3f") for n in TIMES),
        lab.Column(key="training", label="Trains, tokens/s", better="higher", format=".0f"),
        lab.Column(key="decoding", label="Decodes, tokens/s", better="higher", format=".0f"),
        lab.Column(key="state_kib", label="State at 4,096, KiB", format=".0f"),
        lab.Column(key="parameters", label="Parameters", better="neither", format=".0f"),
    ),
    judge=judge,
    main=("bits_1", "bits_16", "training"),
    cost=lambda config: config.size,
    figure=figure,
)
