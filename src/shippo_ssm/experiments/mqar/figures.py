"""Pictures of the recall experiments, drawn from result files alone.

`mqar_figure`: accuracy against length, and against operations since the binding, for every model. `rotation_figure`: the same
for the quarter turns, with R -> I. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shippo_ssm.experiments.core import Result, Row
from shippo_ssm.tasks.mqar import OPERATION_BINS

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee")
GREY = "#777777"


def profile(row: Row, key: str) -> tuple[list[int], list[float]]:
    """Operations since the binding (lower edges of the bins that have queries) and the mean over seeds of an accuracy."""
    edges, means = [], []
    for edge, numbers in zip(OPERATION_BINS, row.curves[f"{key}_by_operations"]):
        found = [number for number in numbers if number is not None]
        if found:
            edges.append(edge)
            means.append(statistics.fmean(found))
    return edges, means


def _against_length(axes: Any, row: Row, key: str, **style: Any) -> None:
    lengths = row.config["eval_lengths"]
    means = [row.mean(f"{key}_{length}") for length in lengths]
    spread = [row.std(f"{key}_{length}") for length in lengths]
    axes.errorbar(lengths, means, yerr=spread if any(spread) else None, marker="o", markersize=3, capsize=2, **style)


def _against_operations(axes: Any, row: Row, key: str, **style: Any) -> None:
    edges, means = profile(row, key)
    # The axis is logarithmic and has no zero: every count stands one to the right, and the labels say so.
    axes.plot([edge + 1 for edge in edges], means, marker=".", markersize=4, **style)


def _operations_axis(axes: Any, counts: Iterable[int] = (0, 1, 3, 7, 15, 31, 63, 127)) -> None:
    counts = list(counts)
    axes.set_xscale("log")
    axes.set_xticks([count + 1 for count in counts], [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("operations since the binding")


def _length_axis(axes: Any, lengths: list[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length (events)")


def _models(result: Result) -> list[tuple[Row, str]]:
    rows = [row for name, row in result.rows.items() if name != "untouched"]
    return list(zip(rows, COLOURS))


def mqar_figure(result: Result, path: Path) -> None:
    """Coordinate and exact accuracy against length (top) and operations since the binding (bottom)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = _models(result)
    if not models:
        raise ValueError("the result has no model yet; train one with `shippo run mqar --resume`")
    first = models[0][0]
    lengths, trained = first.config["eval_lengths"], first.config["length"]
    shown = trained if trained in lengths else lengths[0]
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    for column, (key, label) in enumerate((("coordinate", "coordinate accuracy"), ("exact", "exact accuracy"))):
        top, bottom = panels[0][column], panels[1][column]
        for row, colour in models:
            _against_length(top, row, key, color=colour, label=row.label)
            _against_operations(bottom, row, f"{key}_{shown}", color=colour)
        known = {"color": GREY, "linestyle": "--", "label": "untouched coordinates known"}
        _against_length(top, first, f"untouched_{key}", **known)
        _against_operations(bottom, first, f"untouched_{key}_{shown}", **known)
        _length_axis(top, lengths)
        _operations_axis(bottom)
        top.set_title(label)
        bottom.set_title(f"{label}, length {shown}")
        for axes in (top, bottom):
            axes.set_ylim(bottom=0)
    panels[0][1].legend(fontsize=7, frameon=False)
    figure.suptitle(f"Transport-MQAR, preset {result.preset}")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def rotation_figure(result: Result, path: Path) -> None:
    """Learning curves, exact accuracy against length, and against operations since the binding at the longest length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = _models(result)
    first = models[0][0]
    lengths = first.config["eval_lengths"]
    figure, (learning, by_length, by_operations) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for row, colour in models:
        means = [statistics.fmean(numbers) for numbers in row.curves["exact"]]
        learning.plot(row.curves["step"], means, color=colour, label=row.label)
        _against_length(by_length, row, "exact", color=colour, label=row.label)
        _against_operations(by_operations, row, f"exact_{lengths[-1]}", color=colour)
        if row.name != "none":
            style = {"color": colour, "linestyle": ":", "label": f"{row.label}, R -> I"}
            _against_length(by_length, row, "identity_exact", **style)
            _against_operations(by_operations, row, f"identity_exact_{lengths[-1]}", **style)
    known = {"color": GREY, "linestyle": "--", "label": "untouched coordinates known"}
    _against_length(by_length, first, "untouched_exact", **known)
    _against_operations(by_operations, first, f"untouched_exact_{lengths[-1]}", **known)
    learning.set_title(f"exact accuracy, length {first.config['curriculum'][-1][1]}")
    learning.set_xlabel("training step")
    by_length.set_title("exact accuracy after training")
    by_operations.set_title(f"exact accuracy, length {lengths[-1]}")
    _length_axis(by_length, lengths)
    _operations_axis(by_operations)
    for axes in (learning, by_length, by_operations):
        axes.set_ylim(-0.02, 1.02)
    by_length.legend(fontsize=6.5, frameon=False)
    figure.savefig(path, dpi=160)
    plt.close(figure)
