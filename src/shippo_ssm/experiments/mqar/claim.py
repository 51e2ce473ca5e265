"""Transport-MQAR (paper: tab:transport-mqar-summary, tab:app-transport-mqar-primary, tab:app-transport-mqar-model-geometry).

Claim. In autoregressive recall with operations between bindings and queries, a structured right action raises coordinate
accuracy over the same memory without one and over a static change of basis, and a dense right action raises exact accuracy
most; attention does not carry over to longer sequences. The paper reads this as complementary evidence: accuracies stay low,
because an operation of F_31 is not a real-linear map of an embedded value.

Protocol. The nonreducible library (13 operations that generate GL(4, F_31)), 256 keys of which 32 are active; models of width
128 with 4 layers; AdamW 5e-4, weight decay 0.01, batch 16, length 512, gradient norm clipped at 1.0, evaluation at the
training length every 250 steps; final evaluation at 128, 512, 2048 and 4096 events on 640 examples. Preset `paper`: 5,000
steps, 3 seeds, from the start that learns (`MqarConfig.start`), the same for every row as far as it has the part; `quick`:
1,000 steps, 1 seed, from the start of a Mamba-style layer; `early`: the first 300 steps of `paper`, for a look.

Beside the six models stands a predictor that knows every coordinate no operation has touched since its binding and guesses
the others: what a model can score without transporting anything; and predictors that carry out one, two or three operations
(`ceilings.py`). Accuracies are also kept by the number of operations since the binding.

Expected (paper, length 4096, exact): GRU 0.016, Transformer 0.002, Free enc/dec 0.009, No-right 0.016, DirectGen 0.036,
StructGen-Split 0.033; predictor 0.015.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from shippo_ssm.experiments.mqar.ceilings import by_active_keys, by_length
from shippo_ssm.experiments.mqar.figures import mqar_figure
from shippo_ssm.experiments.mqar.model import MqarConfig, build_model, weights_folder
from shippo_ssm.experiments.mqar.recall import flatten_scores, query_loss, scores_of_lengths, train_recall
from shippo_ssm.experiments.paper import paper_tables
from shippo_ssm.lab.experiment import Column, Experiment, FinishedRow, Highlight, Result, RowResult, Session, Verdict, by_row
from shippo_ssm.lab.training import measure
from shippo_ssm.models import SequenceModel, save_checkpoint
from shippo_ssm.tasks.mqar import MODULUS, WIDTH

LENGTHS = (128, 512, 2048, 4096)
# The paper's protocol, in the precision that pays; the first steps of such a run, to see that every row learns; a fifth of the
# steps and one seed, from the start of the first version; small models for a few steps, in seconds.
PAPER = MqarConfig(precision="auto")
EARLY = replace(PAPER, steps=300, num_seeds=1, eval_every=50, eval_examples=64)
QUICK = MqarConfig(steps=1000, num_seeds=1, start="paper")
SMOKE = MqarConfig(
    d_model=32, n_layers=1, d_state=8, length=64, steps=6, num_seeds=1, batch=4,
    eval_every=3, curve_examples=4, eval_examples=4, eval_lengths=(128, 512),
)  # fmt: skip
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


def rows(base: MqarConfig | None = None) -> tuple[MqarConfig, ...]:
    """The paper's six models, a GRU that starts as a memory before and after training, and the predictor that knows untouched
    coordinates."""
    base = base or MqarConfig()
    models = [
        # torch's GRU gains nothing from products in bfloat16.
        replace(
            base, name=name, label=label, mixer=mixer, expand=expand, **({"precision": "float32"} if mixer == "gru" else {})
        )
        for name, (label, mixer, expand) in MODELS.items()
    ]
    if base.start == "unit":
        slots = replace(models[0], name="gru-slots", label="GRU, slots at the start", slots=8)
        models += [slots, replace(slots, name="gru-slots-untrained", label="GRU, slots, untrained", steps=0)]
    return (*models, replace(base, name="untouched", label="Untouched coordinates", mixer="untouched", steps=0))


def train_model(model: SequenceModel, config: MqarConfig, seed: int, session: Session) -> RowResult:
    """Train a model in place and score it at all lengths."""
    return train_recall(
        model,
        config,
        session,
        train_task=lambda step: config.task(seed),
        task_of=lambda length: config.task(seed, length),
        train_length=config.length,
        loss_of=lambda events: query_loss(model, events),
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
    """The predictor's accuracies under the names of a model's, beside those of other predictors (`ceilings.py`)."""
    blank = torch.zeros(1).expand(WIDTH, MODULUS)
    parts = scores_of_lengths(
        config, lambda length: config.task(seed, length), lambda tokens: blank.expand(*tokens.shape[:-1], -1, -1)
    )
    metrics, profiles = (
        {name.removeprefix("untouched_"): numbers for name, numbers in found.items() if name.startswith("untouched_")}
        for found in flatten_scores(measure(parts))
    )
    known = by_length(lambda length: config.task(seed, length), config.eval_lengths, config.eval_examples)
    keys = by_active_keys(config.task(seed), config.eval_lengths, max(1, config.eval_examples // 4))
    metrics |= {name: [number] for name, number in known.items()}
    return RowResult(metrics=metrics, curves={"step": [], **profiles}, notes={"active_keys": keys})


@by_row
def judge(row: FinishedRow, result: Result) -> Verdict | None:
    """The paper's ordering: right actions above no-right, static bases not, attention last at long lengths."""
    name, found, plain = row.name, result.rows, result.rows.get("no-right")
    lengths = row.config["eval_lengths"]
    last = lengths[-1]

    def above(other: FinishedRow, metric: str) -> bool:
        return all(row.mean(f"{metric}_{n}") > other.mean(f"{metric}_{n}") for n in lengths)

    if name == "struct-split" and plain is not None:
        return Verdict(
            above(plain, "coordinate") and above(plain, "exact"), "coordinate and exact above no-right at every length"
        )
    if name == "direct-single-exp" and plain is not None:
        return Verdict(above(plain, "exact"), "exact above no-right at every length")
    if name == "free-encdec" and plain is not None:
        holds = row.mean(f"exact_{last}") <= plain.mean(f"exact_{last}") + 0.005
        return Verdict(holds, f"a static basis does not help: exact at {last} at most no-right + 0.005")
    if name == "transformer" and len(found) > 2:
        others = [other.mean(f"coordinate_{last}") for key, other in found.items() if key != name]
        return Verdict(row.mean(f"coordinate_{last}") < min(others), f"lowest coordinate accuracy at {last}")
    if name in ("gru", "no-right"):
        bound = row.mean(f"untouched_exact_{last}") + 0.01
        text = f"transports nothing: exact at {last} at most the untouched-coordinates predictor + 0.01"
        return Verdict(row.mean(f"exact_{last}") <= bound, text)
    if name.startswith("gru-slots"):
        holds = all(row.mean(f"coordinate_{n}") >= 0.9 * row.mean(f"untouched_coordinate_{n}") for n in lengths)
        return Verdict(holds, "coordinate at least 0.9 of the untouched-coordinates predictor at every length")
    return None


COLUMNS = tuple(
    Column(key=f"{key}_{length}", label=f"{label} {length}", better="higher", format=".4f")
    for key, label in {"coordinate": "Coord.", "exact": "Exact"}.items()
    for length in LENGTHS
)

EXPERIMENT = Experiment(
    name="mqar",
    title="Transport-MQAR",
    claim="With operations before the query, right actions raise recall over no-right and static bases; it stays low.",
    protocol="F_31, 13 operations; AdamW 5e-4, batch 16, length 512; quick 1,000 steps, 1 seed; paper 5,000 steps, 3 seeds",
    tables=paper_tables("mqar-coordinate", "mqar-exact"),
    wall_time="quick: 3.6 hours on two cores; paper: 11 hours of one busy core per seed",
    presets={
        "quick": partial(rows, QUICK),
        "paper": partial(rows, PAPER),
        "early": partial(rows, EARLY),
        "smoke": partial(rows, SMOKE),
    },
    train=train,
    columns=COLUMNS,
    judge=judge,
    main=("coordinate_4096", "exact_128", "exact_4096"),
    stack=1,
    cost=lambda config: COST[config.mixer],
    figure=mqar_figure,
    highlights=(
        Highlight("no-right", "exact_4096", "Transport-MQAR at 4096 events, no right action: exact"),
        Highlight("struct-split", "exact_4096", "the same, split right action: exact"),
    ),
)
