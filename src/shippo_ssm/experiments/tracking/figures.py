"""Pictures of state tracking, drawn from result files alone: how far layers multiply, and what they learned of a group."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

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
    """Every group's trace on every class, over the characters of all sums of irreducible representations of that width."""
    group, traces = named_group(row.config["group"]), np.array(row.notes["learned"]["traces"])
    sizes = [len(own) for own in group.classes]
    places = np.arange(len(sizes))
    counts = np.array(row.notes["learned"]["multiplicities"]).round().astype(int)
    for count in np.unique(counts, axis=0):
        axes.plot(places, count @ group.characters, color=PAPER, linewidth=0.8)
    axes.plot(places, traces.T, ".", color=OURS, markersize=4, alpha=0.6)
    axes.set_xticks(places, [f"{size}" for size in sizes])
    axes.set_xlabel("conjugacy class (number of elements)")
    axes.set_title(f"trace of R: {row.label}, seed {row.seeds[0]} (lines: true)", fontsize=9)
