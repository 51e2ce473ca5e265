"""Pictures of state tracking, drawn from result files alone: how far layers multiply, and what they learned of a group."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shippo_ssm.experiments.tracking.learned import CLOSE
from shippo_ssm.lab.experiment import FinishedRow, Result
from shippo_ssm.lab.plots import OURS, PAPER, SERIES, new_figure, save
from shippo_ssm.tasks.words import named_group

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def words_figure(result: Result, path: Path) -> None:
    """Accuracy by position on A5 and on the harder sets, and the characters of what was learned."""
    compared = [row for row in result.rows.values() if row.config["group"] == "A5" and row.config["elements"] == "all"]
    compared = [row for row in compared if row.config["train_length"] == min(r.config["train_length"] for r in compared)]
    others = [row for row in result.rows.values() if row not in compared]
    figure, (left, middle, right) = new_figure(13, 3.8, 3)
    _by_position(left, compared, "A5, all elements")
    _by_position(middle, others, "longer words, fewer elements, S5")
    known = next((row for row in result.rows.values() if "learned" in row.notes), None)
    if known is not None:
        _characters(right, known)
    save(figure, path)


def _by_position(axes: Axes, rows: list[FinishedRow], title: str) -> None:
    for row, colour in zip(rows, SERIES * 2):
        means = [statistics.fmean(numbers) for numbers in row.curves["by_position"]]
        dashed = "--" if row.config["layer"].get("right") == "none" else "-"
        axes.plot(row.notes["positions"], means, color=colour, linestyle=dashed, label=row.label)
        axes.axvline(row.config["train_length"], color=PAPER, linewidth=0.6, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("elements read (dotted: longest in training)")
    axes.set_title(f"product right: {title}")
    axes.legend(fontsize=6, frameon=False)


def _characters(axes: Axes, row: FinishedRow) -> None:
    """The trace of every group of channels that holds a representation, over the true characters; the other groups in grey."""
    group, found = named_group(row.config["group"]), row.notes["learned"]
    traces, close = np.array(found["traces"]), np.array(found["distance"]) < CLOSE
    sizes = [len(own) for own in group.classes]
    places = np.arange(len(sizes))
    counts = np.array(found["multiplicities"])[close].round().astype(int)
    axes.plot(places, traces[~close].T, ".", color=PAPER, markersize=3, alpha=0.4)
    for count in np.unique(counts, axis=0):
        axes.plot(places, count @ group.characters, color=PAPER, linewidth=0.8)
        held = [str(irrep.shape[-1]) for irrep, times in zip(group.irreps, count) for _ in range(times)]
        axes.annotate(" + ".join(held), (places[-1] + 0.1, (count @ group.characters)[-1]), fontsize=7, va="center")
    axes.plot(places, traces[close].T, ".", color=OURS, markersize=6)
    axes.set_xlim(-0.3, len(sizes) - 0.3)
    axes.set_xticks(places, [f"{size}" for size in sizes])
    axes.set_xlabel("conjugacy class (number of elements)")
    axes.set_title(f"trace of R, {close.sum()} of {len(close)} groups hold a representation", fontsize=9)
