"""Transport-MQAR.

Claim: With operations before the query, right actions raise recall over no-right and static bases; it stays low.
Protocol: F_31, 13 operations; 4 layers of width 128; AdamW 5e-4, batch 16, length 512, 5,000 steps, 3 seeds
Time: 11 hours of one CPU core per seed

Paper: tab:transport-mqar-summary, tab:app-transport-mqar-primary, tab:app-transport-mqar-model-geometry.
`docs/results/mqar.md` has the protocol, the predictors beside the six models, and what the paper found.
"""

from dataclasses import replace
from functools import partial

import torch

from shippo_lab.experiments.mqar.ceilings import ceilings
from shippo_lab.experiments.mqar.figures import mqar_figure
from shippo_lab.experiments.mqar.model import MqarConfig, build_model, weights_folder
from shippo_lab.experiments.mqar.scoring import flatten_scores, scores_of_lengths, train_recall
from shippo_lab.harness import experiment as lab
from shippo_lab.tasks.mqar import MODULUS, WIDTH
from shippo_ssm.models import save_checkpoint

LENGTHS = (128, 512, 2048, 4096)
PAPER = MqarConfig(precision="auto")
SMOKE = MqarConfig(
    d_model=32, n_layers=1, d_state=8, length=64, steps=6, num_seeds=1, batch=4,
    eval_every=3, curve_examples=4, eval_examples=4, eval_lengths=(128, 512),
)  # fmt: skip
MODELS = {
    "gru": ("GRU", "gru", "none", 2),
    "transformer": ("Transformer", "transformer", "none", 2),
    "free-encdec": ("Free enc/dec", "free", "none", 2),
    "no-right": ("No-right", "shippo", "none", 2),
    "direct-single-exp": ("DirectGen-SingleExp", "shippo", "dense", 1),
    "struct-split": ("StructGen-Split", "shippo", "split", 2),
}
"""Row name -> label, mixer, right action, expansion e, in the order of the paper's table."""
COST = {"gru": 1.0, "transformer": 1.0, "dense": 1.3, "none": 2.9, "free": 2.9, "split": 3.5, "untouched": 0.1}
"""Mixer or right action -> time of a training step over that of the GRU, as the benchmark measured it."""


def model_row(base: MqarConfig, model: str, **changes) -> MqarConfig:
    """A row of one of the `MODELS`."""
    label, mixer, right, expand = MODELS[model]
    return replace(base, **{"name": model, "label": label, "mixer": mixer, "right": right, "expand": expand} | changes)


def rows(base: MqarConfig) -> tuple[MqarConfig, ...]:
    """The paper's six models and the predictor that knows untouched coordinates."""
    # torch's GRU gains nothing from products in bfloat16.
    models = [model_row(base, name, **({"precision": "float32"} if name == "gru" else {})) for name in MODELS]
    return (*models, replace(base, name="untouched", label="Untouched coordinates", mixer="untouched", steps=0))


def cost(config: MqarConfig) -> float:
    """Time of a training step over that of the GRU."""
    return COST[config.right if config.mixer == "shippo" else config.mixer]


def train(config: MqarConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Train one seed of a row, score it at all lengths, and keep its weights in the run's folder."""
    (seed,) = seeds
    if config.mixer == "untouched":
        return _untouched(config, seed)
    model = build_model(config, seed)
    result = train_recall(model, config, seed, session)
    if session.checkpoint is not None:
        folder = weights_folder(session.checkpoint.parents[1], config.name, seed)
        save_checkpoint(model, folder, notes={"row": config.name, "seed": seed, "steps": config.steps})
    return result


def _untouched(config: MqarConfig, seed: int) -> lab.RowResult:
    """The predictor's accuracies under the names of a model's, beside those of other predictors (`ceilings.py`)."""
    blank = torch.zeros(1).expand(WIDTH, MODULUS)
    parts = scores_of_lengths(config, seed, lambda tokens: blank.expand(*tokens.shape[:-1], -1, -1))
    metrics, profiles = (
        {name.removeprefix("untouched_"): numbers for name, numbers in found.items() if name.startswith("untouched_")}
        for found in flatten_scores({length: score() for length, score in parts.items()})
    )
    for length in config.eval_lengths:
        metrics |= {name: [number] for name, number in ceilings(config.task(seed, length), config.eval_examples).items()}
    return lab.RowResult(metrics, {"step": [], **profiles})


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict | None:
    """The paper's ordering: right actions above no-right, static bases not, attention last at long lengths."""
    name, found, plain = row.name, result.rows, result.rows.get("no-right")
    lengths = row.config["eval_lengths"]
    last = lengths[-1]

    def above(other: lab.FinishedRow, metric: str) -> bool:
        return all(row.mean(f"{metric}_{n}") > other.mean(f"{metric}_{n}") for n in lengths)

    if name == "struct-split" and plain is not None:
        holds = above(plain, "coordinate") and above(plain, "exact")
        return lab.Verdict(holds, "coordinate and exact above no-right at every length")
    if name == "direct-single-exp" and plain is not None:
        return lab.Verdict(above(plain, "exact"), "exact above no-right at every length")
    if name == "free-encdec" and plain is not None:
        holds = row.mean(f"exact_{last}") <= plain.mean(f"exact_{last}") + 0.005
        return lab.Verdict(holds, f"a static basis does not help: exact at {last} at most no-right + 0.005")
    if name == "transformer" and len(found) > 2:
        others = [other.mean(f"coordinate_{last}") for key, other in found.items() if key != name]
        return lab.Verdict(row.mean(f"coordinate_{last}") < min(others), f"lowest coordinate accuracy at {last}")
    if name in ("gru", "no-right"):
        bound = row.mean(f"untouched_exact_{last}") + 0.01
        text = f"transports nothing: exact at {last} at most the untouched-coordinates predictor + 0.01"
        return lab.Verdict(row.mean(f"exact_{last}") <= bound, text)
    return None


def columns(labels: dict[str, str], lengths: tuple[int, ...] = LENGTHS) -> tuple[lab.Column, ...]:
    """Columns of some accuracies (name -> label), each at every length."""
    return tuple(
        lab.Column(key=f"{key}_{length}", label=f"{label} {length}", better="higher", format=".4f")
        for key, label in labels.items()
        for length in lengths
    )


EXPERIMENT = lab.Experiment(
    name="mqar",
    **lab.described(__doc__),
    presets={"paper": partial(rows, PAPER), "smoke": partial(rows, SMOKE)},
    train=train,
    columns=columns({"coordinate": "Coord.", "exact": "Exact"}),
    judge=judge,
    tables=lab.paper_tables("mqar-coordinate", "mqar-exact"),
    main=("coordinate_4096", "exact_128", "exact_4096"),
    cost=cost,
    figure=mqar_figure,
    highlights=(
        lab.Highlight("no-right", "exact_4096", "Transport-MQAR at 4096 events, no right action: exact"),
        lab.Highlight("struct-split", "exact_4096", "the same, split right action: exact"),
    ),
)
