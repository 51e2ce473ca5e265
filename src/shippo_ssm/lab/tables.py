"""Tables: our numbers over the paper's, with a verdict per row, as text, Markdown, LaTeX or plain data.

Data path: a `Result` (from the result file) and the paper's numbers (`paper_numbers.json`) become a list of `Line`s,
two per row, "ours" and "paper"; the renderers only lay them out.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any, NamedTuple

from shippo_ssm.experiments.core import Column, Experiment, Result, Verdict


@functools.cache
def paper_numbers() -> dict[str, Any]:
    """The tables of the paper: key -> label, caption, num_seeds, rows[row][metric] = [mean, std]."""
    text = resources.files("shippo_ssm.experiments").joinpath("paper_numbers.json").read_text()
    return json.loads(text)["tables"]


def paper_row(tables: tuple[str, ...], row: str) -> dict[str, tuple[float, float | None]]:
    """The paper's numbers for one of our rows, gathered from the tables that have it; empty where none has."""
    found: dict[str, tuple[float, float | None]] = {}
    for key in tables:
        if key not in paper_numbers():
            raise ValueError(f"paper_numbers.json has no table {key!r}; it has {', '.join(paper_numbers())}")
        for metric, (mean, std) in paper_numbers()[key]["rows"].get(row, {}).items():
            found.setdefault(metric, (mean, std))
    return found


def number(mean: float, std: float | None, spec: str) -> str:
    """mean +- std; the deviation with two digits, left out where there is none."""
    return f"{mean:{spec}}" if std is None else f"{mean:{spec}} ± {std:.2g}"


class Line(NamedTuple):
    """One line of a table."""

    label: str
    source: str
    cells: tuple[str, ...]
    verdict: Verdict | None


def lines(experiment: Experiment, result: Result) -> list[Line]:
    """Two lines per finished row: ours with its verdict, then the paper's."""
    verdicts = experiment.judge(result)
    found = []
    for name, row in result.rows.items():
        several = len(row.seeds) > 1
        ours = [
            number(row.mean(column.key), row.std(column.key) if several else None, column.format)
            if column.key in row.metrics
            else "–"
            for column in experiment.columns
        ]
        paper = paper_row(experiment.tables, name)
        theirs = [number(*paper[column.key], column.format) if column.key in paper else "–" for column in experiment.columns]
        found.append(Line(row.label, "ours", tuple(ours), verdicts.get(name)))
        if paper:
            found.append(Line("", "paper", tuple(theirs), None))
    return found


def heading(column: Column) -> str:
    return column.label + {"lower": " ↓", "higher": " ↑", "neither": ""}[column.better]


def budget(result: Result) -> str:
    """Preset, steps, seeds and time of a result, in words."""
    steps = max((row.config.get("steps", 0) for row in result.rows.values()), default=0)
    seeds = max((len(row.seeds) for row in result.rows.values()), default=0)
    return f"preset {result.preset}, {steps:,} steps, {seeds} seed{'s' * (seeds != 1)}, {result.seconds / 60:.1f} minutes"


def facts(experiment: Experiment, result: Result) -> str:
    """Where the numbers come from, in one line."""
    tables = ", ".join(paper_numbers()[key]["label"] for key in experiment.tables)
    spread = "; mean ± sample standard deviation" if any(len(row.seeds) > 1 for row in result.rows.values()) else ""
    paper = f"; paper: {tables}" if tables else ""
    return f"{result.source}: {budget(result)}, torch {result.versions['torch']}{spread}{paper}"


def as_markdown(experiment: Experiment, result: Result) -> str:
    """A Markdown table."""
    head = ["Model", "", *(heading(column) for column in experiment.columns), "Verdict"]
    body = [head, ["---"] * len(head)]
    for line in lines(experiment, result):
        verdict = "" if line.verdict is None else f"{'holds' if line.verdict.holds else 'DOES NOT HOLD'}: {line.verdict.text}"
        body.append([line.label, line.source, *line.cells, verdict])
    return "\n".join("| " + " | ".join(row) + " |" for row in body) + f"\n\n{facts(experiment, result)}"


_LATEX = {"±": r"$\pm$", "–": "--", "↓": r"$\downarrow$", "↑": r"$\uparrow$", "->": r"$\to$", "<=": r"$\le$", "^2": "$^2$"}


def as_latex(experiment: Experiment, result: Result) -> str:
    """A LaTeX tabular (booktabs)."""

    def plain(text: str) -> str:
        for mark in "&%_#":
            text = text.replace(mark, "\\" + mark)
        for mark, code in _LATEX.items():
            text = text.replace(mark, code)
        return text

    columns = "ll" + "c" * len(experiment.columns)
    out = [rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}", r"\toprule"]
    head = ["Model", "", *(plain(heading(column)) for column in experiment.columns)]
    out += [" & ".join(head) + r" \\", r"\midrule"]
    out += [
        " & ".join([plain(line.label), line.source, *map(plain, line.cells)]) + r" \\" for line in lines(experiment, result)
    ]
    out += [r"\bottomrule", r"\end{tabular}", f"% {facts(experiment, result)}"]
    return "\n".join(out)


def as_text(experiment: Experiment, result: Result):
    """A rich table for the terminal."""
    from rich.table import Table

    table = Table(title=experiment.title, caption=facts(experiment, result), caption_justify="left")
    table.add_column("Model")
    table.add_column("")
    for column in experiment.columns:
        table.add_column(heading(column), justify="right", no_wrap=True)
    table.add_column("Verdict", max_width=44)
    for line in lines(experiment, result):
        style = None if line.source == "ours" else "dim"
        verdict = ""
        if line.verdict is not None:
            mark = "[green]holds[/]" if line.verdict.holds else "[bold red]does not hold[/]"
            verdict = f"{mark}: {line.verdict.text}"
        table.add_row(line.label, line.source, *line.cells, verdict, style=style)
    return table


def as_data(experiment: Experiment, result: Result) -> dict[str, Any]:
    """The table as plain data for `--json`."""
    verdicts = experiment.judge(result)
    rows = []
    for name, row in result.rows.items():
        keys = [column.key for column in experiment.columns if column.key in row.metrics]
        verdict = verdicts.get(name)
        rows.append(
            {
                "name": name,
                "label": row.label,
                "seeds": len(row.seeds),
                "ours": {key: [row.mean(key), row.std(key)] for key in keys},
                "paper": {key: list(value) for key, value in paper_row(experiment.tables, name).items()},
                "holds": None if verdict is None else verdict.holds,
                "verdict": None if verdict is None else verdict.text,
            }
        )
    return {"experiment": experiment.name, "preset": result.preset, "source": result.source, "rows": rows}
