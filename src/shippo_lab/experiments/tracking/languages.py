"""State tracking: formal languages.

Claim: A right action is the permutation that a letter makes: it holds for sentences far longer than in training.
Protocol: the published suite: train on 3 to 40 tokens, test on 40 to 256; two blocks of width 64, 800 to 2,500 steps
Time: 15 minutes per row and seed on one CPU core

The suite is that of SLiCE and PD-SSM. `docs/state-tracking.md` says which part of the cell does the work,
`docs/results/languages.md` has the protocol.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from shippo_lab.experiments.mqar.scoring import query_loss
from shippo_lab.experiments.tracking.curriculum import SMOOTHING, LayerConfig, Stages, drawn_lengths, held_rate
from shippo_lab.experiments.tracking.words import LAYERS
from shippo_lab.harness import experiment as lab
from shippo_lab.harness.training import Trainee, fit_each
from shippo_lab.tasks.languages import LanguageTask

# The four of the published average.
LANGUAGES = ("cycle", "even-pairs", "arithmetic", "parity")
STAGES: Stages = ((0.15, 3, 8), (0.3, 3, 16), (0.6, 3, 40), (1.0, 20, 40))
# Training steps. Arithmetic has to find two layers that work together; the others are learned at once and then made exact.
BUDGET = {"cycle": 800, "even-pairs": 800, "arithmetic": 2500, "parity": 800}
LENGTHS = (3, 40)
TEST = (40, 256)
ROWS = ("orthogonal", "none", "gru", "lstm", "transformer")


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguagesConfig(LayerConfig):
    """A row: a layer, and the languages it is tried on, with a model for each."""

    budget: dict[str, int] = field(default_factory=lambda: dict(BUDGET))
    """Language -> training steps."""
    eval_sentences: int = 512
    steps: int = sum(BUDGET.values())
    tokens: int = 1024


def rows(base: LanguagesConfig) -> tuple[LanguagesConfig, ...]:
    """Layers with and without a right action, and others for scale."""
    return base.variants({name: LAYERS[name] for name in ROWS})


SMOKE = LanguagesConfig(budget=dict.fromkeys(LANGUAGES, 2), steps=2 * len(LANGUAGES), num_seeds=1, tokens=64, eval_sentences=8)


def language(config: LanguagesConfig, seed: int, name: str, steps: int) -> Trainee:
    """A model of one language, its loss at every token that has an answer, and its accuracy at the end of long sentences."""
    test = LanguageTask(name=name, min_length=TEST[0], max_length=TEST[1], seed=seed)
    model = config.model(seed, d_model=64, n_layers=2, d_state=16, vocab_size=test.vocab_size)
    lengths = drawn_lengths(STAGES, seed, steps)

    def loss_at(step: int) -> tuple[Tensor, int]:
        length, first = lengths[step], config.tokens * step
        task = LanguageTask(name=name, min_length=length, max_length=length, every=True, seed=seed)
        sentences = task.batch(range(first, first + config.tokens // length))
        return query_loss(model, sentences, SMOOTHING), sentences.tokens.numel()

    def score() -> dict[str, float]:
        near = replace(test, min_length=LENGTHS[0], max_length=LENGTHS[1])
        scores = {name: test, f"{name}_40": near}
        return {key: task.evaluate(model, config.eval_sentences, 64) for key, task in scores.items()}

    return Trainee(model, loss_at, {"end": score}, held_rate(steps))


def train(config: LanguagesConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Train a model per language, one after another; one seed."""
    (seed,) = seeds
    result = fit_each(config, seed, session, config.budget, partial(language, config, seed))
    result.metrics["average"] = [sum(result.metrics[name][0] for name in config.budget) / len(config.budget)]
    return result


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict | None:
    """The average of the default layer."""
    return lab.Verdict(row.mean("average") >= 0.9, "average >= 0.9") if row.name == "orthogonal" else None


EXPERIMENT = lab.Experiment(
    name="languages",
    **lab.described(__doc__),
    presets={"full": partial(rows, LanguagesConfig()), "smoke": partial(rows, SMOKE)},
    train=train,
    columns=tuple(lab.accuracy(name, name) for name in (*LANGUAGES, "average")),
    judge=judge,
)
