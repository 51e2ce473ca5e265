"""Plain recall (MQAR).

Claim: Where nothing acts on what is stored, the layer recalls as well with a right action as without one.
Protocol: zoology's task at a vocabulary of 256: 64 tokens, 4 to 16 pairs; two blocks of width 64, 600 steps
Time: 8 minutes on two cores

A right action should cost nothing where it is not needed. `docs/results/mqar-plain.md` has the protocol and the start.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from shippo_lab.experiments.mqar.scoring import query_loss
from shippo_lab.experiments.tracking.curriculum import LayerConfig, held_rate
from shippo_lab.experiments.tracking.words import LAYERS
from shippo_lab.harness import experiment as lab
from shippo_lab.harness.training import Trainee, fit
from shippo_lab.tasks.plain_mqar import MQAR

START: dict[str, Any] = {"conv_init": "staggered", "read_init": "next", "right_std": 0.0, "head_init": "embedding"}
# (tokens, pairs).
TRAIN = ((64, 4), (64, 8), (64, 16))
TEST = (*TRAIN, (128, 32))
ROWS = ("orthogonal", "none", "gru", "transformer")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainMqarConfig(LayerConfig):
    """A row: a layer that has to remember pairs."""

    vocab_size: int = 256
    eval_examples: int = 256
    right_rate: float = 0.1
    """Learning rate of right actions over that of the rest."""
    steps: int = 600
    batch: int = 16
    weight_decay: float = 1e-2
    eval_every: int = 200

    def task(self, seed: int, length: int, num_pairs: int) -> MQAR:
        return MQAR(vocab_size=self.vocab_size, length=length, num_pairs=num_pairs, seed=seed)


SMOKE = PlainMqarConfig(steps=3, num_seeds=1, batch=4, eval_examples=8, eval_every=3, vocab_size=128)


def rows(base: PlainMqarConfig) -> tuple[PlainMqarConfig, ...]:
    """With and without a right action, and two other layers for scale."""
    return base.variants({name: LAYERS[name] for name in ROWS})


def train(config: PlainMqarConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Train one seed of a row, and score it at every length and number of pairs."""
    (seed,) = seeds
    model = config.model(seed, d_model=64, n_layers=2, vocab_size=config.vocab_size, **START)
    tasks = [config.task(seed, *size) for size in TRAIN]

    def loss_at(step: int) -> tuple[Tensor, int]:
        task = tasks[step % len(tasks)]
        pairs = task.batch(range(config.batch * step, config.batch * (step + 1)))
        return query_loss(model, pairs), pairs.tokens.numel()

    def recall(length: int, num_pairs: int) -> dict[str, float]:
        return {"recall": config.task(seed, length, num_pairs).evaluate(model, config.eval_examples, 32)}

    scores = {f"recall_{n}_{k}": partial(recall, n, k) for n, k in TEST}
    evaluate, rate = partial(recall, *TRAIN[-1]), held_rate(config.steps)
    fitted = fit(config, session, Trainee(model, loss_at, scores, rate, evaluate, config.right_rate))
    return lab.RowResult({name: [found["recall"]] for name, found in fitted.scores.items()}, fitted.curves, fitted.notes)


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict | None:
    """A right action must not cost recall."""
    plain, key = result.rows.get("none"), "recall_{}_{}".format(*TRAIN[-1])
    if row.name != "orthogonal" or plain is None:
        return None
    return lab.Verdict(row.mean(key) >= plain.mean(key) - 0.05, "within 0.05 of the layer without a right action, or above")


EXPERIMENT = lab.Experiment(
    name="mqar-plain",
    **lab.described(__doc__),
    presets={"full": partial(rows, PlainMqarConfig()), "smoke": partial(rows, SMOKE)},
    train=train,
    columns=tuple(lab.accuracy(f"recall_{n}_{k}", f"{n} tokens, {k} pairs") for n, k in TEST),
    judge=judge,
)
