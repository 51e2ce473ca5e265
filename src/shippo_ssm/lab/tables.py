"""Tables: our numbers over the paper's, with a verdict per row, as text, Markdown, LaTeX or plain data.

Data path: a `Result` (from the result file) and the paper's numbers (the experiment's `tables`) become a list of `Line`s, two
per row, "ours" and "paper"; the renderers only lay them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shippo_ssm.lab.experiment import Column, Experiment, FinishedRow, Result, Verdict, paper_row

if TYPE_CHECKING:
    from rich.table import Table


def number(value: tuple[float, float | None] | None, spec: str) -> str:
    """mean +- std; the deviation with two digits, left out where there is none; a dash for no number at all."""
    if value is None:
        return "–"
    mean, std = value
    return f"{mean:{spec}}" if std is None else f"{mean:{spec}} ± {std:.2g}"


def our_number(row: FinishedRow, column: Column) -> str:
    """A row's number in a column; a deviation only where there are several seeds."""
    if column.key not in row.metrics:
        return "–"
    return number((row.mean(column.key), row.std(column.key) if len(row.seeds) > 1 else None), column.format)


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
        paper = paper_row(experiment.tables, name)
        ours = tuple(our_number(row, column) for column in experiment.columns)
        label = f"{row.label} (diverged: {row.notes['diverged_at']})" if "diverged_at" in row.notes else row.label
        found.append(Line(label, "ours", ours, verdicts.get(name)))
        if paper:
            found.append(Line("", "paper", tuple(number(paper.get(c.key), c.format) for c in experiment.columns), None))
    return found


def heading(column: Column) -> str:
    return column.label + {"lower": " ↓", "higher": " ↑", "neither": ""}[column.better]


def budget(result: Result) -> str:
    """Preset, steps, seeds and time of a result, in words; by row where rows differ."""
    labels: dict[str, list[str]] = {}
    for row in result.rows.values():
        steps, seeds = row.config.get("steps", 0), len(row.seeds)
        # A row without training belongs to any budget.
        if steps:
            labels.setdefault(f"{steps:,} steps, {seeds} seed{'s' * (seeds != 1)}", []).append(row.label)
    by_row = "by row: " + "; ".join(f"{words} ({', '.join(names)})" for words, names in labels.items())
    return f"preset {result.preset}, {by_row if len(labels) > 1 else ''.join(labels)}, {result.seconds / 60:.1f} minutes"


def facts(experiment: Experiment, result: Result) -> str:
    """Where the numbers come from, in one line."""
    tables = ", ".join(table.label for table in experiment.tables)
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


def as_text(experiment: Experiment, result: Result) -> Table:
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
