"""The picture of the quarter turns, drawn from the result file alone, with R -> I beside each model."""

from __future__ import annotations

import statistics
from pathlib import Path

from shippo_ssm.experiments.mqar.figures import KNOWN, against_length, against_operations, coloured, name_axes
from shippo_ssm.lab.experiment import Result
from shippo_ssm.lab.plots import new_figure, save


def rotation_figure(result: Result, path: Path) -> None:
    """Learning curves, exact accuracy against length, and against operations since the binding at the longest length."""
    models = coloured(result)
    first = models[0][0]
    lengths = first.config["eval_lengths"]
    figure, (learning, by_length, by_operations) = new_figure(12, 3.6, 3)
    for row, colour in models:
        means = [statistics.fmean(numbers) for numbers in row.curves["exact"]]
        learning.plot(row.curves["step"], means, color=colour, label=row.label)
        against_length(by_length, row, "exact", color=colour, label=row.label)
        against_operations(by_operations, row, f"exact_{lengths[-1]}", color=colour)
        if row.name != "none":
            style = {"color": colour, "linestyle": ":", "label": f"{row.label}, R -> I"}
            against_length(by_length, row, "identity_exact", **style)
            against_operations(by_operations, row, f"identity_exact_{lengths[-1]}", **style)
    against_length(by_length, first, "untouched_exact", **KNOWN)
    against_operations(by_operations, first, f"untouched_exact_{lengths[-1]}", **KNOWN)
    learning.set_title(f"exact accuracy, length {first.config['curriculum'][-1][1]}")
    learning.set_xlabel("training step")
    by_length.set_title("exact accuracy after training")
    by_operations.set_title(f"exact accuracy, length {lengths[-1]}")
    name_axes(by_length, lengths, by_operations)
    for axes in (learning, by_length, by_operations):
        axes.set_ylim(-0.02, 1.02)
    by_length.legend(fontsize=6.5, frameon=False)
    save(figure, path)
