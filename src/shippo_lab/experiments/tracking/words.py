"""State tracking: words over finite groups.

Claim: One layer that may act on its memory multiplies in A5 and S5 far beyond its training lengths.
Protocol: one layer, width 64; words up to 16 or 40 elements by a curriculum, 3,000 or 9,000 steps, 3 seeds
Time: 2 to 5 minutes per row and seed on one CPU core

The task is that of Merrill et al., Grazzi et al. and PD-SSM. `docs/results/words.md` has the protocol, how recipes were
chosen, and how the learned actions are compared with the group (`learned.py`).
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shippo_lab.experiments.tracking import learned
from shippo_lab.experiments.tracking.curriculum import WORD_TOKENS, LayerConfig, held_rate, word_loss
from shippo_lab.harness import experiment as lab
from shippo_lab.harness.plots import OURS, PAPER, SERIES, Axes, legend_below, new_figure, save
from shippo_lab.harness.training import Trainee, fit
from shippo_lab.tasks.words import WordTask, named_group
from shippo_ssm.collapse import exact_right
from shippo_ssm.layers import identity_right

# Lengths tested, in elements. Up to NEAR by `eval_words` words, beyond that by fewer.
LENGTHS = (16, 64, 256, 1024, 4096, 16_384)
NEAR, FAR_WORDS = 4096, 32
PUBLISHED = 256
# Mixers without right actions of their own.
OTHERS = ("gru", "lstm", "transformer")


@dataclass(frozen=True, kw_only=True, slots=True)
class WordsConfig(LayerConfig):
    """A row: a group, what words are made of, and a layer."""

    group: str = "A5"
    elements: int | str = "all"
    """What words are made of, as in `WordTask`."""
    train_length: int = 16
    """Longest word in training."""
    tokens: int = WORD_TOKENS
    pairs: bool = False
    """Whether words of two elements alone come first (`curriculum.word_stages`)."""
    lengths: tuple[int, ...] = LENGTHS
    """Where accuracy is reported."""
    eval_words: int = 256
    steps: int = 9000

    def task(self, seed: int) -> WordTask:
        return WordTask(group=self.group, elements=self.elements, length=self.train_length, seed=seed)


# Names, labels and layers of the comparison on A5.
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "orthogonal": ("SHiPPO, orthogonal", {}),
    "dissipative": ("SHiPPO, dissipative", {"right": "dissipative"}),
    "none": ("SHiPPO, no right action", {"right": "none"}),
    "gru": ("GRU", {"mixer": "gru"}),
    "lstm": ("LSTM", {"mixer": "lstm"}),
    "transformer": ("Transformer", {"mixer": "transformer"}),
}
# Where every token is an element, a convolution can only memorise pairs.
BARE: dict[str, Any] = {"d_conv": 1}
WIDE: dict[str, Any] = BARE | {"d_model": 60, "group_width": 5}


def rows(base: WordsConfig) -> tuple[WordsConfig, ...]:
    """A5 with every layer; then longer training words, fewer elements, and S5, with and without a right action."""
    bare = replace(base, layer=BARE, pairs=True, tokens=2 * base.tokens)
    few = replace(bare, train_length=40, steps=base.steps // 3)
    mixed = replace(few, group="S5", layer=WIDE)
    wide = replace(bare, group="S5", layer=WIDE)
    none = {"right": "none"}
    return (
        *base.variants(LAYERS),
        replace(few, name="a5-40", label="A5, trained to 40"),
        replace(few, name="a5-12", label="A5 from 12 elements, trained to 40", elements=12),
        replace(few, name="a5-12-none", label="A5 from 12 elements, no right action", elements=12, layer=BARE | none),
        replace(mixed, name="s5-4", label="S5 from 4 elements, trained to 40", elements=4),
        replace(mixed, name="s5-8", label="S5 from 8 elements, trained to 40", elements=8),
        replace(wide, name="s5", label="S5, all 120 elements"),
        replace(wide, name="s5-none", label="S5, all 120, no right action", layer=WIDE | none),
    )


SMOKE = WordsConfig(steps=4, num_seeds=1, train_length=4, lengths=(16, 256), eval_words=8, eval_every=4)


def train(config: WordsConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Train one seed of a row; score it at all lengths, with exact actions and with R -> I, and compare its actions with the
    group."""
    (seed,) = seeds
    task = config.task(seed)
    model = config.model(seed, d_model=64, n_layers=1, d_state=16, vocab_size=task.vocab_size)
    has_right = config.layer.get("mixer") not in OTHERS and config.layer.get("right") != "none"
    longest, near = config.lengths[-1], min(NEAR, config.lengths[-1])

    def score(count: int, length: int) -> dict[str, Any]:
        scores = task.evaluate(model, count, max(1, NEAR * 4 // length), length=length)
        return {"by_position": scores.by_position, "horizon_99": scores.horizon(0.99), "horizon_50": scores.horizon(0.5)}

    def score_identity() -> dict[str, Any]:
        with identity_right(model):
            return {"identity": task.evaluate(model, config.eval_words).prefix}

    def score_rounded() -> dict[str, Any]:
        with exact_right(model, task.batch(range(16), length=NEAR // 64).tokens) as found:
            right = np.array(score(min(config.eval_words, FAR_WORDS), longest)["by_position"])
        exact = sum(rep is not None for rep in next(iter(found.values())))
        return {f"rounded_{n}": float(right[:n].mean()) for n in config.lengths} | {"exact_groups": float(exact)}

    scores: dict[str, Callable[[], dict[str, Any]]] = {
        "near": partial(score, config.eval_words, near),
        "far": partial(score, min(config.eval_words, FAR_WORDS), longest),
    }
    if has_right:
        scores |= {"identity": score_identity, "rounded": score_rounded}
    if has_right and config.elements == "all":
        scores["learned"] = partial(learned.report, model, task)
    loss_at, rate = word_loss(model, task, config.steps, config.tokens, config.pairs), held_rate(config.steps)
    trainee = Trainee(model, loss_at, scores, rate, lambda: {"prefix": task.evaluate(model, 64).prefix})
    curves, known, notes = fit(config, session, trainee)
    close, far = (np.array(known[name]["by_position"]) for name in ("near", "far"))
    metrics = {f"prefix_{n}": float((close if n <= near else far)[:n].mean()) for n in config.lengths}
    metrics[f"last_{PUBLISHED}"] = float(close[PUBLISHED - 1])
    metrics |= {name: float(known["near"][name]) for name in ("horizon_99", "horizon_50")}
    metrics |= known.get("identity", {}) | known.get("rounded", {})
    if "learned" in known:
        metrics |= learned.summary(known["learned"])
        notes["learned"] = known["learned"]
    # Every position up to 32, then means of about 16 stretches to the doubling: enough to draw.
    ends = np.unique(np.concatenate([np.arange(33), np.geomspace(33, longest, 16 * 9).astype(int)]))
    both, notes["positions"] = np.concatenate([close, far[near:]]), ends[1:].tolist()
    curves["by_position"] = [[float(both[start:end].mean())] for start, end in itertools.pairwise(ends)]
    return lab.RowResult({name: [number] for name, number in metrics.items()}, curves, notes)


def words_figure(result: lab.Result, path: Path) -> None:
    """Accuracy by position on A5 and on the harder sets, and the characters of what was learned."""
    rows = result.rows.values()
    compared = [row for row in rows if row.config["group"] == "A5" and row.config["elements"] == "all"]
    compared = [row for row in compared if row.config["train_length"] == min(r.config["train_length"] for r in compared)]
    figure, (left, middle, right) = new_figure(7, 10, rows=3)
    _by_position(left, compared, "A5, all elements")
    _by_position(middle, [row for row in rows if row not in compared], "longer words, fewer elements, S5")
    for row in [row for row in rows if "learned" in row.notes][:1]:
        _characters(right, row)
    save(figure, path)


def _by_position(axes: Axes, rows: list[lab.FinishedRow], title: str) -> None:
    for row, colour in zip(rows, SERIES * 2):
        means = [statistics.fmean(numbers) for numbers in row.curves["by_position"]]
        dashed = "--" if row.config["layer"].get("right") == "none" else "-"
        axes.plot(row.notes["positions"], means, color=colour, linestyle=dashed, label=row.label)
        axes.axvline(row.config["train_length"], color=PAPER, linewidth=0.6, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set(ylim=(-0.02, 1.02), xlabel="elements read (dotted: longest in training)", title=f"product right: {title}")
    legend_below(axes)


def _characters(axes: Axes, row: lab.FinishedRow) -> None:
    """The trace of every group of channels that holds a representation, over the true characters; the other groups in grey."""
    group, found = named_group(row.config["group"]), row.notes["learned"]
    traces, close = np.array(found["traces"]), np.array(found["distance"]) < learned.CLOSE
    sizes = [len(own) for own in group.classes]
    places = np.arange(len(sizes))
    counts = np.array(found["multiplicities"])[close].round().astype(int)
    axes.plot(places, traces[~close].T, ".", color=PAPER, markersize=3, alpha=0.4)
    for count in np.unique(counts, axis=0):
        axes.plot(places, count @ group.characters, color=PAPER, linewidth=0.8)
        held = [str(irrep.shape[-1]) for irrep, times in zip(group.irreps, count) for _ in range(times)]
        axes.annotate(" + ".join(held), (places[-1] + 0.1, (count @ group.characters)[-1]), fontsize=7, va="center")
    axes.plot(places, traces[close].T, ".", color=OURS, markersize=6)
    axes.set_xticks(places, map(str, sizes))
    title = f"trace of R, {close.sum()} of {len(close)} groups hold a representation"
    axes.set(xlim=(-0.3, len(sizes) - 0.3), xlabel="conjugacy class (number of elements)", title=title)


# Row -> bounds that every seed has to reach.
BARS: dict[str, dict[str, float]] = {
    "orthogonal": {"prefix_256": 0.99, "prefix_1024": 0.95},
    "a5-12": {"prefix_256": 0.999},
    "s5-4": {"prefix_256": 0.999},
    "s5-8": {"prefix_256": 0.999},
    "s5": {"prefix_16": 0.99, "prefix_64": 0.97, "prefix_256": 0.9},
}


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict | None:
    """The bars of the rows that have one, for every seed; without a right action a layer must not track.

    A row without the numbers of its bars, as results of an earlier protocol have them, is not judged.
    """
    labels, bars = {column.key: column.label for column in EXPERIMENT.columns}, BARS.get(row.name, {})
    if not bars.keys() <= row.metrics.keys():
        return None
    if bars:
        text = "every seed: " + ", ".join(f"{labels[key]} >= {bar:g}" for key, bar in bars.items())
        return lab.Verdict(all(min(row.metrics[key]) >= bar for key, bar in bars.items()), text)
    if row.config["layer"].get("right") == "none":
        return lab.Verdict(max(row.metrics["prefix_256"]) <= 0.5, "no seed above 0.5 at 256")
    return None


EXPERIMENT = lab.Experiment(
    name="words",
    **lab.described(__doc__),
    presets={"full": partial(rows, WordsConfig()), "smoke": partial(rows, SMOKE)},
    train=train,
    columns=(
        *(lab.accuracy(f"prefix_{n}", f"at {n:,}") for n in LENGTHS),
        lab.accuracy(f"last_{PUBLISHED}", f"last at {PUBLISHED}"),
        lab.Column(key="horizon_99", label="Horizon .99", better="higher", format=".0f"),
        lab.Column(key="horizon_50", label="Horizon .5", better="higher", format=".0f"),
        *(lab.accuracy(f"rounded_{n}", f"exact R, {n:,}") for n in LENGTHS[3:]),
        lab.Column(key="identity", label="R -> I", better="neither", format=".3f"),
        lab.Column(key="distance", label="R(a)R(b) - R(ab)", format=".3f"),
        lab.Column(key="representations", label="Groups below 0.1", better="neither", format=".1f"),
    ),
    judge=judge,
    main=("prefix_256", "prefix_1024", "horizon_99"),
    cost=lambda config: config.steps * config.tokens / WORD_TOKENS,
    figure=words_figure,
)
