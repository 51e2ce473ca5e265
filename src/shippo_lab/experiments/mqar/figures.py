"""Figures of recall, drawn from result files alone: accuracy against length and against operations since the binding."""

import statistics
from pathlib import Path
from typing import Any

from shippo_lab.harness.experiment import FinishedRow, Result
from shippo_lab.harness.plots import PAPER, SERIES, Axes, new_figure, save
from shippo_lab.tasks.mqar import OPERATION_BINS

# Style of the predictor that knows untouched coordinates.
KNOWN: dict[str, Any] = {"color": PAPER, "linestyle": "--", "label": "untouched coordinates known"}


def against_length(axes: Axes, row: FinishedRow, key: str, **style: Any) -> None:
    """A line with the spread over seeds."""
    lengths = row.config["eval_lengths"]
    means, spread = ([of(f"{key}_{length}") for length in lengths] for of in (row.mean, row.std))
    axes.errorbar(lengths, means, yerr=spread if any(spread) else None, marker="o", markersize=3, capsize=2, **style)


def against_operations(axes: Axes, row: FinishedRow, key: str, minimum: int = 0, **style: Any) -> None:
    """A line by the operations since the binding, `minimum` or more, over the bins that have queries."""
    found = [pair for pair in zip(OPERATION_BINS, row.curves[f"{key}_by_operations"]) if pair[0] >= minimum]
    known = [(edge, [number for number in numbers if number is not None]) for edge, numbers in found]
    means = {edge: statistics.fmean(numbers) for edge, numbers in known if numbers}
    # The logarithmic axis has no zero: every count is plotted one to the right, and the labels correct for it.
    axes.plot([edge + 1 for edge in means], list(means.values()), marker=".", markersize=4, **style)


def _log_axis(axes: Axes, ticks: list[int], label: str, shift: int = 0) -> None:
    axes.set(xscale="log", xlabel=label)
    axes.set_xticks([tick + shift for tick in ticks], map(str, ticks))
    axes.minorticks_off()


def name_axes(by_length: Axes, lengths: list[int], by_operations: Axes) -> None:
    """Logarithmic axes of a panel by length and one by operations."""
    _log_axis(by_length, lengths, "length (events)")
    _log_axis(by_operations, [0, 1, 3, 7, 15, 31, 63, 127], "operations since the binding", shift=1)


def lengths_of(row: FinishedRow) -> tuple[list[int], int]:
    """Lengths of the evaluation, and the one whose operations are shown: that of training, if it is among them."""
    lengths, trained = row.config["eval_lengths"], row.config["length"]
    return lengths, trained if trained in lengths else lengths[0]


def mqar_figure(result: Result, path: Path) -> None:
    """Coordinate and exact accuracy against length (top) and operations since the binding (bottom)."""
    models, untouched = [row for name, row in result.rows.items() if name != "untouched"], result.rows.get("untouched")
    if not models:
        raise ValueError("the result has no model yet; train one with `shippo run mqar --resume`")
    first, (lengths, shown) = models[0], lengths_of(models[0])
    figure, panels = new_figure(7.5, 6.4, 2, 2)
    for column, (key, label) in enumerate((("coordinate", "coordinate accuracy"), ("exact", "exact accuracy"))):
        top, bottom = panels[column], panels[2 + column]
        for row, colour in zip(models, SERIES):
            against_length(top, row, key, color=colour, label=row.label)
            against_operations(bottom, row, f"{key}_{shown}", color=colour)
        against_length(top, first, f"untouched_{key}", **KNOWN)
        if untouched is not None:
            for count, words in ((1, "and all after at most 1, 2, 3 operations"), (2, None), (3, None)):
                against_length(top, untouched, f"within_{count}_{key}", color=PAPER, linestyle=":", linewidth=1, label=words)
        against_operations(bottom, first, f"untouched_{key}_{shown}", **KNOWN)
        name_axes(top, lengths, bottom)
        for axes, title in ((top, label), (bottom, f"{label}, length {shown}")):
            axes.set_title(title)
            axes.set_ylim(bottom=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=3, frameon=False)
    figure.suptitle(f"Transport-MQAR, preset {result.preset}")
    save(figure, path)


def depth_figure(result: Result, path: Path) -> None:
    """Exact accuracy by operations since the binding, one panel per depth, with and without a right action."""
    depths = sorted({row.config["n_layers"] for row in result.rows.values()})
    figure, panels = new_figure(6.5, 3.2 * len(depths), rows=len(depths))
    for axes, depth in zip(panels, depths):
        rows = [row for row in result.rows.values() if row.config["n_layers"] == depth]
        shown = lengths_of(rows[0])[1]
        for row, colour in zip(rows, SERIES):
            against_operations(axes, row, f"exact_{shown}", 1, color=colour, label=row.label)
        against_operations(axes, rows[0], f"untouched_exact_{shown}", 1, **KNOWN)
        _log_axis(axes, [1, 2, 3, 5, 7, 15, 31], "operations since the binding", shift=1)
        axes.set(title=f"{depth} layer{'s' * (depth > 1)}, {shown} events", ylabel="exact accuracy")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, frameon=False)
    save(figure, path)


def rotation_figure(result: Result, path: Path) -> None:
    """Quarter turns: learning curves, exact accuracy against length, and by operations at the longest length."""
    first = next(iter(result.rows.values()))
    lengths, trained = first.config["eval_lengths"], first.config["curriculum"][-1][1]
    figure, (learning, by_length, by_operations) = new_figure(6.5, 8, rows=3)
    for row, colour in zip(result.rows.values(), SERIES):
        means = [statistics.fmean(numbers) for numbers in row.curves["exact"]]
        learning.plot(row.curves["step"], means, color=colour, label=row.label)
        against_length(by_length, row, "exact", color=colour, label=row.label)
        against_operations(by_operations, row, f"exact_{lengths[-1]}", color=colour)
        if not row.name.endswith("none"):
            style: dict[str, Any] = {"color": colour, "linestyle": ":", "label": f"{row.label}, R -> I"}
            against_length(by_length, row, "identity_exact", **style)
            against_operations(by_operations, row, f"identity_exact_{lengths[-1]}", **style)
    against_length(by_length, first, "untouched_exact", **KNOWN)
    against_operations(by_operations, first, f"untouched_exact_{lengths[-1]}", **KNOWN)
    learning.set_xlabel("training step")
    name_axes(by_length, lengths, by_operations)
    titles = {learning: f", length {trained}", by_length: " after training", by_operations: f", length {lengths[-1]}"}
    for axes, title in titles.items():
        axes.set(title=f"exact accuracy{title}", ylim=(-0.02, 1.02))
    figure.legend(*by_length.get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=2, frameon=False)
    save(figure, path)
