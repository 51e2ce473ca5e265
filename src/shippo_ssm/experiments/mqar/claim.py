"""Transport-MQAR (paper: tab:transport-mqar-summary, tab:app-transport-mqar-primary, tab:app-transport-mqar-model-geometry).

Claim. In autoregressive recall with operations between bindings and queries, a structured right action raises coordinate
accuracy over the same memory without one and over a static change of basis, and a dense right action raises exact accuracy
most; attention does not carry over to longer sequences. The paper reads this as complementary evidence: accuracies stay low,
because an operation of F_31 is not a real-linear map of an embedded value.

Protocol. The nonreducible library (13 operations that generate GL(4, F_31)), 256 keys of which 32 are active; models of width
128 with 4 layers; AdamW 5e-4, weight decay 0.01, batch 16, length 512, gradient norm clipped at 1.0, evaluation at the
training length every 250 steps; final evaluation at 128, 512, 2048 and 4096 events on 640 examples. Preset `paper`: 5,000
steps, 3 seeds; `quick`: 1,000 steps, 1 seed.

Beside the six models stands a predictor that knows every coordinate no operation has touched since its binding and guesses
the others: what a model can score without transporting anything. Accuracies are also kept by the number of operations since
the binding.

Expected (paper, length 4096, exact): GRU 0.016, Transformer 0.002, Free enc/dec 0.009, No-right 0.016, DirectGen 0.036,
StructGen-Split 0.033; predictor 0.015.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shippo_ssm.experiments.core import Column, Experiment, Result, RowResult, Session, Verdict
from shippo_ssm.experiments.recall import RecallConfig, fit, flatten_scores, score_lengths
from shippo_ssm.models import SequenceConfig, SequenceModel, load_checkpoint, save_checkpoint
from shippo_ssm.tasks.mqar import MODULUS, WIDTH, Events, TransportMQAR

LENGTHS = (128, 512, 2048, 4096)
MODELS = {
    "gru": ("GRU", "gru", 2),
    "transformer": ("Transformer", "transformer", 2),
    "free-encdec": ("Free enc/dec", "free", 2),
    "no-right": ("No-right", "none", 2),
    "direct-single-exp": ("DirectGen-SingleExp", "dense", 1),
    "struct-split": ("StructGen-Split", "split", 2),
}
"""Row name -> label, mixer, expansion e, in the order of the paper's table."""
COST = {"gru": 1.0, "transformer": 1.0, "dense": 1.3, "none": 2.9, "free": 2.9, "split": 3.5, "untouched": 0.1}
"""Mixer -> time of a training step over that of the GRU, as the benchmark measured it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MqarConfig(RecallConfig):
    """A row of the table; defaults are the paper's protocol."""

    mixer: str = "split"
    """A mixer of `SequenceModel`, or "untouched" for the predictor that has nothing to train."""
    expand: float = 2
    d_model: int = 128
    n_layers: int = 4
    d_state: int = 32
    group_width: int = 4
    library: str = "nonreducible"
    length: int = 512
    """Training length."""
    num_keys: int = 256
    num_active: int = 32
    steps: int = 5000
    num_seeds: int = 3

    def task(self, seed: int, length: int | None = None) -> TransportMQAR:
        """The task at a length, by default that of training."""
        return TransportMQAR(
            library=self.library,
            length=length or self.length,
            num_keys=self.num_keys,
            num_active=self.num_active,
            seed=seed,
        )


class EventEmbedding(nn.Module):
    """The sum of type, key, operation and per-coordinate value embeddings: tokens [.., 7] -> [.., d_model].

    One table holds 3 types, the keys, 13 operations and 4 x 31 values, and a last row of zeros for what an event does not have.
    """

    def __init__(self, task: TransportMQAR, d_model: int) -> None:
        super().__init__()
        sizes = [3, task.num_keys, task.num_operations] + [MODULUS] * WIDTH
        num_rows = sum(sizes)
        self.sizes: Tensor
        self.offsets: Tensor
        self.table = nn.EmbeddingBag(num_rows + 1, d_model, mode="sum", padding_idx=num_rows)
        self.absent = num_rows
        self.register_buffer("sizes", torch.tensor(sizes), persistent=False)
        self.register_buffer("offsets", torch.tensor([0, *sizes[:-1]]).cumsum(0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = torch.where(tokens < self.sizes, tokens + self.offsets, self.absent)
        return self.table(rows.flatten(0, -2)).unflatten(0, tokens.shape[:-1])


def build_model(config: MqarConfig, seed: int) -> SequenceModel:
    """The model of a row, a function of configuration and seed: tokens [B, T, 7] -> logits [B, T, 4, 31]."""
    geometry = SequenceConfig(
        mixer=config.mixer,
        d_model=config.d_model,
        n_layers=config.n_layers,
        d_state=config.d_state,
        expand=config.expand,
        group_width=config.group_width,
        num_outputs=WIDTH,
        num_classes=MODULUS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SequenceModel(geometry, embedding=EventEmbedding(config.task(seed), config.d_model))


def rows(base: MqarConfig | None = None) -> tuple[MqarConfig, ...]:
    """The paper's six models, and the predictor that knows untouched coordinates."""
    base = base or MqarConfig()
    models = [
        replace(base, name=name, label=label, mixer=mixer, expand=expand) for name, (label, mixer, expand) in MODELS.items()
    ]
    return (*models, replace(base, name="untouched", label="Untouched coordinates", mixer="untouched", steps=0))


def quick() -> tuple[MqarConfig, ...]:
    """A fifth of the steps, one seed."""
    return rows(MqarConfig(steps=1000, num_seeds=1))


def smoke() -> tuple[MqarConfig, ...]:
    """Small models for a few steps, in seconds."""
    small = MqarConfig(d_model=32, n_layers=1, d_state=8, length=64, steps=6, num_seeds=1, batch=4)
    return rows(replace(small, eval_every=3, curve_examples=4, eval_examples=4, eval_lengths=(128, 512)))


def weights_folder(run: Path, row: str, seed: int) -> Path:
    """Where a run keeps the trained weights of a row, for interventions."""
    return run / "weights" / f"{row}.s{seed}"


def load_model(folder: Path, config: MqarConfig, seed: int) -> SequenceModel:
    """A trained model of a run, from its folder of weights."""
    return load_checkpoint(folder, embedding=EventEmbedding(config.task(seed), config.d_model))


def train_model(model: SequenceModel, config: MqarConfig, seed: int, session: Session) -> RowResult:
    """Train a model in place and score it at all lengths."""

    def events(step: int) -> Events:
        return config.task(seed).batch(range(step * config.batch, (step + 1) * config.batch))

    return fit(
        model,
        config,
        session,
        events=events,
        task_of=lambda length: config.task(seed, length),
        train_length=config.length,
    )


def train(config: MqarConfig, seeds: tuple[int, ...], session: Session) -> RowResult:
    """Train one seed of a row, score it at all lengths, and keep its weights in the run's folder."""
    (seed,) = seeds
    if config.mixer == "untouched":
        return _untouched(config, seed)
    model = build_model(config, seed)
    result = train_model(model, config, seed, session)
    if session.checkpoint is not None:
        folder = weights_folder(session.checkpoint.parents[1], config.name, seed)
        save_checkpoint(model, folder, notes={"row": config.name, "seed": seed, "steps": config.steps})
    return result


def _untouched(config: MqarConfig, seed: int) -> RowResult:
    """The predictor's accuracies under the names of a model's."""
    known: dict[str, dict[str, Any]] = {}
    blank = torch.zeros(1).expand(WIDTH, MODULUS)
    score_lengths(
        config, lambda length: config.task(seed, length), lambda tokens: blank.expand(*tokens.shape[:-1], -1, -1), known
    )
    metrics, profiles = flatten_scores(known)
    kept = {name: numbers for name, numbers in metrics.items() if name.startswith("untouched_")}
    shown = {name: numbers for name, numbers in profiles.items() if name.startswith("untouched_")}
    return RowResult(
        metrics={name.removeprefix("untouched_"): numbers for name, numbers in kept.items()},
        curves={"step": [], **{name.removeprefix("untouched_"): numbers for name, numbers in shown.items()}},
    )


def judge(result: Result) -> dict[str, Verdict]:
    """The paper's ordering: right actions above no-right, static bases not, attention last at long lengths."""
    verdicts = {}
    found = result.rows
    for name, row in found.items():
        lengths = row.config["eval_lengths"]
        last = lengths[-1]

        def above(other: str, metric: str, row=row, lengths=lengths) -> bool:
            return all(row.mean(f"{metric}_{n}") > found[other].mean(f"{metric}_{n}") for n in lengths)

        if name == "struct-split" and "no-right" in found:
            holds = above("no-right", "coordinate") and above("no-right", "exact")
            verdicts[name] = Verdict(holds, "coordinate and exact above no-right at every length")
        elif name == "direct-single-exp" and "no-right" in found:
            verdicts[name] = Verdict(above("no-right", "exact"), "exact above no-right at every length")
        elif name == "free-encdec" and "no-right" in found:
            holds = row.mean(f"exact_{last}") <= found["no-right"].mean(f"exact_{last}") + 0.005
            verdicts[name] = Verdict(holds, f"a static basis does not help: exact at {last} at most no-right + 0.005")
        elif name == "transformer" and len(found) > 2:
            others = [other.mean(f"coordinate_{last}") for key, other in found.items() if key != name]
            verdicts[name] = Verdict(row.mean(f"coordinate_{last}") < min(others), f"lowest coordinate accuracy at {last}")
        elif name in ("gru", "no-right"):
            bound = row.mean(f"untouched_exact_{last}") + 0.01
            text = f"transports nothing: exact at {last} at most the untouched-coordinates predictor + 0.01"
            verdicts[name] = Verdict(row.mean(f"exact_{last}") <= bound, text)
    return verdicts


def _figure(result: Result, path: Path) -> None:
    from shippo_ssm.experiments.recall_figures import mqar_figure

    mqar_figure(result, path)


def _columns() -> tuple[Column, ...]:
    names = {"coordinate": "Coord.", "exact": "Exact"}
    return tuple(
        Column(key=f"{key}_{length}", label=f"{label} {length}", better="higher", format=".4f")
        for key, label in names.items()
        for length in LENGTHS
    )


COLUMNS = _columns()

EXPERIMENT = Experiment(
    name="mqar",
    title="Transport-MQAR",
    claim="With operations before the query, right actions raise recall over no-right and static bases; it stays low.",
    protocol="F_31, 13 operations; AdamW 5e-4, batch 16, length 512; quick 1,000 steps, 1 seed; paper 5,000 steps, 3 seeds",
    tables=("mqar-coordinate", "mqar-exact"),
    wall_time="quick: 3.6 hours on two cores",
    presets={"quick": quick, "paper": rows, "smoke": smoke},
    train=train,
    columns=COLUMNS,
    judge=judge,
    stack=1,
    cost=lambda config: COST[config.mixer],
    figure=_figure,
)
