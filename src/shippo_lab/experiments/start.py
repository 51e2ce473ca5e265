"""How the layer starts.

Claim: The default layer learns to multiply in A5 and to recall through turns; other rows change parts of its start.
Protocol: four probes, AdamW 3e-3, 3 seeds; 9 starts for 100 to 500 steps; words for 4,500 and turns for 3,000 to the end
Time: about 25 minutes on two cores, by the times of its parts

`docs/results/start.md` has the protocol and how the recipes were chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shippo_lab.experiments.mqar.scoring import query_loss
from shippo_lab.experiments.rotation import RotationConfig, general_model
from shippo_lab.experiments.tracking.curriculum import LayerConfig, held_rate, word_loss
from shippo_lab.harness import experiment as lab
from shippo_lab.harness.training import Trainee, fit_each
from shippo_lab.tasks.plain_mqar import MQAR
from shippo_lab.tasks.streams import NO_TARGET
from shippo_lab.tasks.text import TextTask
from shippo_lab.tasks.words import WordTask
from shippo_ssm.layers import PAPER_GEOMETRY, PAPER_START

BUDGET = {"recall": 300, "turns": 200, "words": 500, "text": 100}


@dataclass(frozen=True, kw_only=True, slots=True)
class StartConfig(LayerConfig):
    """A row: a start, and the probes it is tried on."""

    budget: dict[str, int] = field(default_factory=lambda: dict(BUDGET))
    """Probe -> training steps."""
    word_lengths: tuple[int, ...] = (6, 16)
    turn_lengths: tuple[int, ...] = (24,)
    steps: int = sum(BUDGET.values())


def token_probe(
    config: StartConfig, task: Any, steps: int, batch: int, score: Callable[[nn.Module], dict[str, float]]
) -> Trainee:
    """Two layers of width 64 on a token task."""
    model = config.model(task.seed, d_model=64, n_layers=2, vocab_size=task.vocab_size, conv_init="staggered")

    def loss_at(step: int) -> tuple[Tensor, int]:
        tokens, target = task.batch(range(batch * step, batch * (step + 1)))
        return F.cross_entropy(model(tokens).flatten(0, 1), target.flatten(), ignore_index=NO_TARGET), tokens.numel()

    return Trainee(model, loss_at, {"end": lambda: score(model)}, held_rate(steps))


def recall(config: StartConfig, seed: int, steps: int) -> Trainee:
    """Plain associative recall: 32 tokens, 4 pairs of 31 keys and 32 values."""
    task = MQAR(vocab_size=64, length=32, num_pairs=4, seed=seed)
    return token_probe(config, task, steps, 32, lambda model: {"recall": task.evaluate(model, 256, 64)})


def text(config: StartConfig, seed: int, steps: int) -> Trainee:
    """The next byte of Python's own documentation, 128 at a time."""
    task = TextTask(length=128, seed=seed)

    def score(model: nn.Module) -> dict[str, float]:
        return {"text": task.evaluate(model, 64, split="test").bits_per_character}

    return token_probe(config, task, steps, 16, score)


def words(config: StartConfig, seed: int, steps: int) -> Trainee:
    """Products of elements of A5 at every position: one layer of width 64."""
    task = WordTask(group="A5", length=16, seed=seed)
    model = config.model(seed, d_model=64, n_layers=1, vocab_size=task.vocab_size)

    def score() -> dict[str, float]:
        return {f"words_{n}": task.evaluate(model, max(32, 8192 // n), 32, length=n).prefix for n in config.word_lengths}

    return Trainee(model, word_loss(model, task, steps), {"end": score}, held_rate(steps))


def turns(config: StartConfig, seed: int, steps: int) -> Trainee:
    """Recall of values that quarter turns have moved: one layer of width 128."""
    protocol = RotationConfig(steps=steps)
    model = general_model(config.layer, protocol.task(seed))

    def loss_at(step: int) -> tuple[Tensor, int]:
        events = protocol.task_at(seed, step).batch(range(protocol.batch * step, protocol.batch * (step + 1)))
        return query_loss(model, events), events.kind.numel()

    def score() -> dict[str, float]:
        found: dict[str, float] = {}
        for n in config.turn_lengths:
            scores = protocol.task(seed, n).evaluate(model, max(64, 16384 // n), 32)
            found |= {f"turns_{n}": scores.exact, f"turns_coordinate_{n}": scores.coordinate}
        return found

    return Trainee(model, loss_at, {"end": score}, held_rate(steps, 0.5))


PROBES = {"recall": recall, "turns": turns, "words": words, "text": text}
# Row -> label, and what is changed of the start.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "new": ("New start (orthogonal)", {}),
    "previous": ("Previous start (split)", PAPER_START | {"frame_init": "random"}),
    "no-unit-time": ("without unit time", {name: PAPER_START[name] for name in ("dt_min", "dt_max", "drift_init")}),
    "random-conv": ("a random convolution", {"conv_init": "random"}),
    "no-identity-in": ("without the identity in-projection", {"in_init": "random"}),
    "no-identity-frame": ("without identity projections around it", {"frame_init": "random"}),
    "exact-identity": ("right action exactly the identity", {"right_std": 0.0}),
    "none": ("Right action: none", {"right": "none"}),
    "gru": ("GRU", {"mixer": "gru"}),
}
# Row -> label and steps of what is trained to the end.
SOLVED = {"words": ("A5 words, to the end", 4500), "turns": ("Quarter turns, to the end", 3000)}
SMOKE = StartConfig(budget=dict.fromkeys(BUDGET, 2), steps=2 * len(BUDGET), num_seeds=1, word_lengths=(6,))


def compared(base: StartConfig) -> tuple[StartConfig, ...]:
    """The default start, the previous one, the default with parts changed, no right action, and a GRU for scale."""
    return base.variants({name: (label, PAPER_GEOMETRY | layer) for name, (label, layer) in VARIANTS.items()})


def rows() -> tuple[StartConfig, ...]:
    """The default start, trained until it solves words and turns; then the comparison."""
    long = StartConfig(layer=PAPER_GEOMETRY, word_lengths=(16, 64, 256, 1024), turn_lengths=(24, 96, 768))
    solved = (replace(long, name=k, label=label, budget={k: n}, steps=n) for k, (label, n) in SOLVED.items())
    return (*solved, *compared(StartConfig()))


def train(config: StartConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Train a model per probe, one after another; one seed."""
    (seed,) = seeds
    return fit_each(config, seed, session, config.budget, lambda probe, steps: PROBES[probe](config, seed, steps))


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict | None:
    """What is trained to the end must solve its task; the new start must not be worse than the previous one anywhere."""
    if row.name == "words":
        holds = min(row.metrics["words_16"]) >= 0.99 and min(row.metrics["words_256"]) >= 0.95
        return lab.Verdict(holds, "every seed: 0.99 at length 16, 0.95 at 256")
    if row.name == "turns":
        return lab.Verdict(min(row.metrics["turns_24"]) >= 0.9, "every seed: 0.9 exact at 24 events")
    old = result.rows.get("previous")
    if row.name != "new" or old is None:
        return None
    gains = [row.mean(key) - old.mean(key) for key in ("recall", "turns_coordinate_24", "words_6")]
    holds = all(gain >= 0 for gain in gains) and row.mean("text") <= old.mean("text")
    return lab.Verdict(holds, "at least as good as the previous start on every probe")


EXPERIMENT = lab.Experiment(
    name="start",
    **lab.described(__doc__),
    presets={"full": rows, "smoke": lambda: compared(SMOKE)},
    train=train,
    columns=(
        lab.accuracy("recall", "Recall"),
        lab.accuracy("turns_coordinate_24", "Turns coord."),
        *(lab.accuracy(f"turns_{n}", f"Turns {n}") for n in (24, 768)),
        *(lab.accuracy(f"words_{n}", f"Words {n}") for n in (6, 16, 256, 1024)),
        lab.Column(key="text", label="Text bits", format=".3f"),
    ),
    judge=judge,
    main=("recall", "turns_24", "words_256"),
)
