"""Transport-MQAR by depth.

Claim: With one layer only a right action carries stored values through operations.
Protocol: `mqar` with 1 and 2 layers, 5,000 steps; 3 seeds and 1; toy: 4 of 8 keys, 64 events, 3,000 steps
Time: paper: 10 to 90 minutes of one CPU core per row and seed of one layer; toy: 30 minutes on two cores

With more layers a model begins to replay operations at the query. `docs/results/mqar-depth.md` has the protocol, and
the verdicts, stated before the runs.
"""

from dataclasses import replace
from functools import partial

from shippo_lab.experiments.mqar.experiment import MODELS, PAPER, SMOKE, columns, cost, model_row
from shippo_lab.experiments.mqar.figures import depth_figure
from shippo_lab.experiments.mqar.model import MqarConfig, build_model
from shippo_lab.experiments.mqar.scoring import add_scores, scores_of_lengths, train_recall
from shippo_lab.harness import experiment as lab
from shippo_lab.harness.training import products_in
from shippo_ssm.layers import identity_right, zero_right_suffix

ROWS = ("no-right", "direct-single-exp", "struct-split")
RIGHT_RATE = 0.3
TOY = MqarConfig(
    d_model=64, d_state=16, length=64, num_keys=8, num_active=4, steps=3000, learning_rate=1e-3, eval_every=750,
    eval_lengths=(64, 256), eval_examples=256,
)  # fmt: skip
ACCURACIES = {"exact": "Exact", "untouched_exact": "Predictor", "zeroed_exact": "Zeroed", "identity_exact": "R -> I"}


def rows(base: MqarConfig, *, deep_seeds: int, plain: bool = False) -> tuple[MqarConfig, ...]:
    """Three models with one and with two layers, and, if `plain`, two with one layer and random values."""
    base, found = replace(base, right_rate=RIGHT_RATE), []
    for depth, seeds in ((1, base.num_seeds), (2, deep_seeds)):
        for model in ROWS:
            label = f"{MODELS[model][0]}, {depth} layer{'s' * (depth > 1)}"
            found.append(model_row(base, model, name=f"{model}-{depth}", label=label, n_layers=depth, num_seeds=seeds))
    for model in ("no-right", "struct-split") if plain else ():
        label = f"{MODELS[model][0]}, 1 layer, plain start"
        found.append(model_row(base, model, name=f"{model}-1-plain", label=label, n_layers=1, num_seeds=1, start="plain"))
    return tuple(found)


def train(config: MqarConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Train one seed of a row; score a one-layer split model with and without its right action."""
    (seed,) = seeds
    model = build_model(config, seed)
    result = train_recall(model, config, seed, session)
    if config.right == "split" and config.n_layers == 1:
        scores = scores_of_lengths(config, seed, model)
        for prefix, intervention in (("zeroed_", zero_right_suffix), ("identity_", identity_right)):
            with intervention(model), products_in(config.precision):
                add_scores(result, scores, prefix)
    return result


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict | None:
    """The separation at one layer, at every length and on every seed of the result."""
    if row.config["n_layers"] > 1:
        return None
    metrics, lengths = row.metrics, row.config["eval_lengths"]
    count = len(metrics[f"exact_{lengths[0]}"])
    seeds = f"{count} seed{'s' * (count > 1)}"

    def margins(prefix: str = "") -> list[float]:
        pairs = (zip(metrics[f"{prefix}exact_{n}"], metrics[f"untouched_exact_{n}"]) for n in lengths)
        return [exact - known for pair in pairs for exact, known in pair]

    if row.name.startswith("no-right"):
        return lab.Verdict(max(margins()) <= 0.005, f"exact at most the predictor + 0.005 at every length ({seeds})")
    holds, text = min(margins()) > 0, f"exact above the predictor at every length ({seeds})"
    if f"zeroed_exact_{lengths[0]}" in metrics:
        holds = holds and max(margins("zeroed_")) <= 0.005
        text = f"exact above the predictor at every length, not with zeroed coordinates ({seeds})"
    return lab.Verdict(holds, text)


EXPERIMENT = lab.Experiment(
    name="mqar-depth",
    **lab.described(__doc__),
    presets={
        "paper": partial(rows, PAPER, deep_seeds=1, plain=True),
        "toy": partial(rows, TOY, deep_seeds=3),
        "smoke": partial(rows, SMOKE, deep_seeds=1),
    },
    train=train,
    columns=columns(ACCURACIES, tuple(sorted({*TOY.eval_lengths, *PAPER.eval_lengths}))),
    judge=judge,
    main=("exact_4096", "untouched_exact_4096"),
    cost=lambda config: cost(config) * config.n_layers,
    figure=depth_figure,
)
