"""Plain recall: zoology's MQAR at one state size, scaled to a CPU, with and without a right action.

Claim. A right action costs nothing where it is not needed: without operations between writing and asking, the layer recalls as
well with one as without.

Protocol. zoology's, scaled down: a vocabulary of 256 instead of 8,192; 64 tokens with 4, 8 and 16 pairs in training, in turn,
and a test at those and at 128 tokens with 32 pairs; two blocks of width 64 with N = 16 (a state of 2,048 numbers per layer);
600 steps of 16 sequences; AdamW 3e-3, 3 seeds.

Start. Values and answers share a vocabulary, so the classifiers of all rows begin as the embedding. SHiPPO layers have
`LANGUAGE_START` and read what was written after a key (`read_init="next"`); right actions begin at the identity and learn at a
tenth of the rate. On seed 10, after 300 steps, the layer without a right action then has 0.70 of 16 pairs, and 0.06 where a key
reads what it wrote itself; with a right action at the full rate nothing is learned in that time, since it moves what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shippo_ssm.experiments.tracking.training import held_rate
from shippo_ssm.experiments.tracking.words import LAYERS
from shippo_ssm.lab.experiment import (
    Experiment,
    FinishedRow,
    Result,
    RowResult,
    Session,
    TrainConfig,
    Verdict,
    accuracy,
    by_row,
)
from shippo_ssm.lab.training import Score, fit
from shippo_ssm.layers import LANGUAGE_START
from shippo_ssm.models import SequenceConfig, SequenceModel
from shippo_ssm.tasks.recall import MQAR

START: dict[str, Any] = LANGUAGE_START | {"read_init": "next", "right_std": 0.0, "head_init": "embedding"}
# (tokens, pairs).
TRAIN = ((64, 4), (64, 8), (64, 16))
TEST = (*TRAIN, (128, 32))
ROWS = ("orthogonal", "none", "gru", "transformer")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallConfig(TrainConfig):
    """A row: a layer that has to remember pairs."""

    layer: dict[str, Any] = field(default_factory=dict)
    """Fields of `SequenceConfig` that differ from their defaults."""
    vocab_size: int = 256
    eval_examples: int = 256
    right_rate: float = 0.1
    """Learning rate of right actions over that of the rest."""
    steps: int = 600
    num_seeds: int = 3
    batch: int = 16
    learning_rate: float = 3e-3
    eval_every: int = 200

    def task(self, seed: int, length: int, num_pairs: int) -> MQAR:
        return MQAR(vocab_size=self.vocab_size, length=length, num_pairs=num_pairs, seed=seed)


def rows(base: RecallConfig | None = None) -> tuple[RecallConfig, ...]:
    """With and without a right action, and two other layers for scale."""
    base = base or RecallConfig()
    return tuple(replace(base, name=name, label=LAYERS[name][0], layer=LAYERS[name][1]) for name in ROWS)


SMOKE = RecallConfig(steps=3, num_seeds=1, batch=4, eval_examples=8, eval_every=3, vocab_size=128)


def train(config: RecallConfig, seeds: tuple[int, ...], session: Session) -> RowResult:
    """Train one seed of a row, and ask it at every length and number of pairs."""
    (seed,) = seeds
    geometry: dict[str, Any] = {"d_model": 64, "n_layers": 2, "d_state": 16, "vocab_size": config.vocab_size} | START
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = SequenceModel(SequenceConfig(**geometry | config.layer))
    tasks = [config.task(seed, *size) for size in TRAIN]

    def loss_at(step: int) -> tuple[Tensor, int]:
        task = tasks[step % len(tasks)]
        pairs = task.batch(range(config.batch * step, config.batch * (step + 1)))
        logits = model.head(model.features(pairs.tokens, pairs.asked))
        return F.cross_entropy(logits, pairs.target[pairs.asked]), pairs.tokens.numel()

    def right(length: int, num_pairs: int) -> float:
        return config.task(seed, length, num_pairs).evaluate(model, config.eval_examples, 32).accuracy

    fitted = fit(
        model,
        config,
        session,
        loss_at=loss_at,
        evaluate=lambda: {"recall": right(*TRAIN[-1])},
        scores=tuple(
            Score(f"recall_{n}_{pairs}", n, lambda report, n=n, pairs=pairs: {"recall": right(n, pairs)}) for n, pairs in TEST
        ),
        score_steps=max(1, config.eval_examples * sum(n for n, _ in TEST) // (3 * config.batch * 64)),
        rate=held_rate(config.steps),
        right_rate=config.right_rate,
    )
    return RowResult(
        metrics={name: [found["recall"]] for name, found in fitted.scores.items()}, curves=fitted.curves, notes=fitted.notes
    )


@by_row
def judge(row: FinishedRow, result: Result) -> Verdict | None:
    """A right action must not cost recall."""
    plain, key = result.rows.get("none"), f"recall_{TRAIN[-1][0]}_{TRAIN[-1][1]}"
    if row.name != "orthogonal" or plain is None:
        return None
    return Verdict(row.mean(key) >= plain.mean(key) - 0.05, "within 0.05 of the layer without a right action, or above")


EXPERIMENT = Experiment(
    name="mqar-plain",
    title="Plain recall (MQAR)",
    claim="Where nothing acts on what is stored, the layer recalls as well with a right action as without one.",
    protocol="zoology's task at a vocabulary of 256: 64 tokens, 4 to 16 pairs; two blocks of width 64, N 16, 600 steps",
    tables=(),
    wall_time="8 minutes on two cores",
    presets={"full": rows, "smoke": partial(rows, SMOKE)},
    train=train,
    columns=tuple(accuracy(f"recall_{n}_{k}", f"{n} tokens, {k} pairs") for n, k in TEST),
    judge=judge,
    stack=1,
)
