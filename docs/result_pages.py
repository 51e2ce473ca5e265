"""What the docs show of experiments: the overview `docs/results.md`, one page each in `docs/results/`, and their figures.

Numbers come from the committed files of `results/` through the experiments' own tables; `docs/fill.py` puts them into pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from shippo_lab.harness import plots
from shippo_lab.harness.experiment import Experiment, FinishedRow, Result, paper_row
from shippo_lab.harness.tables import as_markdown, facts, number, our_number
from shippo_ssm.projection import LegS, ProjectionMemory, Transport


def unbroken(cell: str) -> str:
    """A number that no browser breaks: hyphens and spaces that do not end a line."""
    return cell.replace("-", "\u2011").replace(" ", "\u00a0")


def share(experiment: Experiment, row: FinishedRow) -> str:
    """How many of the paper's steps a row took, if an experiment has a preset of the paper's size and these are fewer."""
    if "paper" not in experiment.presets:
        return ""
    whole = next(config.steps for config in experiment.rows("paper") if config.name == row.name)
    steps = row.config["steps"]
    return f" ({steps:,} of {whole:,} steps)" if steps < whole else ""


def reconstruction(path: Path) -> None:
    """A signal seen by a turning sensor, read back from twelve coefficients in a fixed and in a turning frame."""

    def turning(t: float) -> np.ndarray:
        slow = np.array([0.5 + np.sin(1.5 * t), 1.2 * np.cos(t) - 0.3 * t])
        cos, sin = np.cos(10 * t), np.sin(10 * t)
        return slow @ np.array([[cos, -sin], [sin, cos]])

    memory = ProjectionMemory(LegS(12), Transport(np.array([[0.0, -10.0], [10.0, 0.0]]), 2))
    fixed, tau = ProjectionMemory(memory.measure), np.linspace(0.0, 2.0, 400)
    curves = [
        ("signal", np.array([turning(t) for t in tau]), "0.2", "-"),
        ("HiPPO", fixed.reconstruct(fixed.project(turning, 2.0), 2.0, tau), "tab:orange", "--"),
        ("SHiPPO", memory.reconstruct(memory.project(turning, 2.0), 2.0, tau), "tab:blue", ":"),
    ]
    figure, axes = plots.new_figure(7.0, 3.6, rows=2)
    for channel, axis in enumerate(axes):
        for name, values, color, style in curves:
            axis.plot(tau, values[:, channel], label=name, lw=1.6, color=color, ls=style)
        axis.set_ylabel(f"channel {channel + 1}")
    axes[0].set_title(f"{memory.measure!r} read at t = 2", fontsize=10)
    axes[0].tick_params(labelbottom=False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=3, frameon=False)
    axes[-1].set_xlabel("tau")
    figure.savefig(path, dpi=110)


@dataclass(frozen=True)
class Pages:
    """The generated parts of pages, and the pictures, of the checkout in `root`."""

    root: Path
    experiments: tuple[Experiment, ...]

    def found(self) -> Iterable[tuple[Experiment, Result | None]]:
        """Every experiment and its committed result, or `None`."""
        for experiment in self.experiments:
            path = self.root / "results" / f"{experiment.name}.json"
            yield experiment, Result.read(path) if path.exists() else None

    def overview(self) -> str:
        """Table of all experiments: what each is about, and how many of its verdicts hold."""
        lines = ["| experiment | what it shows | verdicts |", "|---|---|---|"]
        for experiment, result in self.found():
            outcome = "no result yet" if result is None else experiment.outcome(result)
            link = f"[{experiment.title}](results/{experiment.name}.md)"
            lines.append(f"| {link} (`{experiment.name}`) | {experiment.claim} | {outcome} |")
        return "\n".join(lines) + "\n"

    def contents(self) -> str:
        """The pages of all experiments, for Sphinx."""
        names = "\n".join(f"results/{experiment.name}" for experiment in self.experiments)
        return f"```{{toctree}}\n:hidden:\n\n{names}\n```\n"

    def page(self, name: str) -> str:
        """The page of one experiment: claim, table, where the numbers come from, figure, command."""
        experiment, result = next((e, result) for e, result in self.found() if e.name == name)
        title = experiment.title
        command = f"`{experiment.command(result and result.preset)}` repeats it: {experiment.wall_time}."
        parts = [f"# {title}", experiment.claim, f"{experiment.outcome(result)}." if result else "No result is committed yet."]
        if result is not None:
            parts += [as_markdown(experiment, result, unbroken, note=False), f"Source: {facts(experiment, result)}."]
        if result is not None and experiment.figure is not None:
            parts.append(f"![{title}](../_static/figures/{name}.svg)")
        return "\n\n".join([*parts, f"Setup: {experiment.protocol}.", command]) + "\n"

    def highlights(self) -> str:
        """Table of the main numbers, ours and the paper's."""
        lines = ["| what | ours | paper | page |", "|---|---|---|---|"]
        for experiment, result in self.found():
            columns = {column.key: column for column in experiment.columns}
            for name, metric, words in experiment.highlights:
                theirs = number(paper_row(experiment.tables, name).get(metric), columns[metric].format)
                row = None if result is None else result.rows.get(name)
                ours = "not committed"
                if row is not None and metric in row.metrics:
                    ours = unbroken(our_number(row, columns[metric])) + share(experiment, row)
                lines.append(f"| {words} | {ours} | {unbroken(theirs)} | [{experiment.name}](results/{experiment.name}.md) |")
        return "\n".join(lines) + "\n"

    def pictures(self) -> dict[str, Callable[[Path], object]]:
        """Path in `docs/_static` -> what draws it; figures of experiments, which the wheel has too, only with a result."""
        drawn: dict[str, Callable[[Path], object]] = {
            "reconstruction.png": reconstruction,
            "figures/overview.svg": plots.overview,
        }
        for experiment, result in self.found():
            if result is not None and experiment.figure is not None:
                drawn[f"figures/{experiment.name}.svg"] = partial(experiment.figure, result)
                # Further presets whose results are committed as well, `results/NAME-PRESET.json`.
                for path in sorted(self.root.glob(f"results/{experiment.name}-*.json")):
                    if path.stem.removeprefix(f"{experiment.name}-") in experiment.presets:
                        drawn[f"figures/{path.stem}.svg"] = partial(experiment.figure, Result.read(path))
        return drawn
