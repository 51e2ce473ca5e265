"""Pictures of recall, drawn from result files alone: accuracy against length and against operations since the binding."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shippo_ssm.lab.experiment import FinishedRow, Result
from shippo_ssm.lab.plots import PAPER, SERIES, new_figure, save
from shippo_ssm.tasks.mqar import OPERATION_BINS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KNOWN: dict[str, Any] = {"color": PAPER, "linestyle": "--", "label": "untouched coordinates known"}
"""How the predictor that knows untouched coordinates is drawn."""


def profile(row: FinishedRow, key: str) -> tuple[list[int], list[float]]:
    """Operations since the binding (lower edges of the bins that have queries) and the mean over seeds of an accuracy."""
    edges, means = [], []
    for edge, numbers in zip(OPERATION_BINS, row.curves[f"{key}_by_operations"]):
        found = [number for number in numbers if number is not None]
        if found:
            edges.append(edge)
            means.append(statistics.fmean(found))
    return edges, means


def against_length(axes: Axes, row: FinishedRow, key: str, **style: Any) -> None:
    """A line with the spread over seeds."""
    lengths = row.config["eval_lengths"]
    means = [row.mean(f"{key}_{length}") for length in lengths]
    spread = [row.std(f"{key}_{length}") for length in lengths]
    axes.errorbar(lengths, means, yerr=spread if any(spread) else None, marker="o", markersize=3, capsize=2, **style)


def against_operations(axes: Axes, row: FinishedRow, key: str, **style: Any) -> None:
    """A line by the operations since the binding."""
    edges, means = profile(row, key)
    # The axis is logarithmic and has no zero: every count stands one to the right, and the labels say so.
    axes.plot([edge + 1 for edge in edges], means, marker=".", markersize=4, **style)


def _log_axis(axes: Axes, ticks: list[int], label: str, shift: int = 0) -> None:
    axes.set_xscale("log")
    axes.set_xticks([tick + shift for tick in ticks], [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)


def name_axes(by_length: Axes, lengths: list[int], by_operations: Axes) -> None:
    """Logarithmic axes of a panel by length and one by operations."""
    _log_axis(by_length, lengths, "length (events)")
    _log_axis(by_operations, [0, 1, 3, 7, 15, 31, 63, 127], "operations since the binding", shift=1)


def _ceilings(axes: Axes, row: FinishedRow | None, key: str) -> None:
    """What predictors score that carry out one, two and three operations; a result of before they were counted has none."""
    for count in (1, 2, 3):
        if row is not None and f"within_{count}_{key}_{row.config['eval_lengths'][0]}" in row.metrics:
            label = "and all after at most 1, 2, 3 operations" if count == 1 else None
            against_length(axes, row, f"within_{count}_{key}", color=PAPER, linestyle=":", linewidth=1, label=label)


def coloured(result: Result) -> list[tuple[FinishedRow, str]]:
    """The paper's models of a result, each with its colour; what stands beside them is in the table alone."""
    rows = [row for name, row in result.rows.items() if name != "untouched" and not row.config.get("slots")]
    return list(zip(rows, SERIES))


def mqar_figure(result: Result, path: Path) -> None:
    """Coordinate and exact accuracy against length (top) and operations since the binding (bottom)."""
    models = coloured(result)
    if not models:
        raise ValueError("the result has no model yet; train one with `shippo run mqar --resume`")
    first = models[0][0]
    lengths, trained = first.config["eval_lengths"], first.config["length"]
    shown = trained if trained in lengths else lengths[0]
    figure, panels = new_figure(9, 6.4, 2, 2)
    for column, (key, label) in enumerate((("coordinate", "coordinate accuracy"), ("exact", "exact accuracy"))):
        top, bottom = panels[column], panels[2 + column]
        for row, colour in models:
            against_length(top, row, key, color=colour, label=row.label)
            against_operations(bottom, row, f"{key}_{shown}", color=colour)
        against_length(top, first, f"untouched_{key}", **KNOWN)
        _ceilings(top, result.rows.get("untouched"), key)
        against_operations(bottom, first, f"untouched_{key}_{shown}", **KNOWN)
        name_axes(top, lengths, bottom)
        top.set_title(label)
        bottom.set_title(f"{label}, length {shown}")
        for axes in (top, bottom):
            axes.set_ylim(bottom=0)
    panels[1].legend(fontsize=7, frameon=False)
    figure.suptitle(f"Transport-MQAR, preset {result.preset}")
    save(figure, path)
