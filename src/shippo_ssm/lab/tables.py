"""Tables: our numbers over the paper's, with a verdict per row, as text, Markdown, LaTeX or plain data.

Data path: a `Result` (from the result file) and the paper's numbers (the experiment's `tables`) become a list of `Line`s, two
per row, "ours" and "paper"; the renderers only lay them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shippo_ssm.lab.experiment import Column, Experiment, FinishedRow, Result, Verdict, paper_row

if TYPE_CHECKING:
    from rich.console import Console
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


def label(row: FinishedRow) -> str:
    """What a table calls a row; a diverged one is called so."""
    return f"{row.label} (diverged: {row.notes['diverged_at']})" if "diverged_at" in row.notes else row.label


class Line(NamedTuple):
    """One line of a table."""

    label: str
    source: str
    cells: tuple[str, ...]
    verdict: Verdict | None


def lines(experiment: Experiment, result: Result) -> list[Line]:
    """Two lines per finished row: ours with its verdict, then the paper's."""
    verdicts = experiment.verdicts(result)
    found = []
    for name, row in result.rows.items():
        paper = paper_row(experiment.tables, name)
        ours = tuple(our_number(row, column) for column in experiment.columns)
        found.append(Line(label(row), "ours", ours, verdicts.get(name)))
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
    early = "; too short to be judged" if result.preset in experiment.unjudged else ""
    return f"{result.source}: {budget(result)}, torch {result.versions['torch']}{spread}{paper}{early}"


def as_markdown(experiment: Experiment, result: Result) -> str:
    """A Markdown table."""
    head = ["Model", "", *(heading(column) for column in experiment.columns), "Verdict"]
    body = [head, ["---"] * len(head)]
    for line in lines(experiment, result):
        verdict = "" if line.verdict is None else f"{'holds' if line.verdict.holds else 'DOES NOT HOLD'}: {line.verdict.text}"
        body.append([line.label, line.source, *line.cells, verdict])
    rows = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in body)
    return "\n".join(f"| {row} |" for row in rows) + f"\n\n{facts(experiment, result)}"


_LATEX = {"±": r"$\pm$", "–": "--", "↓": r"$\downarrow$", "↑": r"$\uparrow$", "->": r"$\to$", "<=": r"$\le$", "^2": "$^2$"}


def as_latex(experiment: Experiment, result: Result) -> str:
    """A LaTeX tabular (booktabs)."""

    def plain(text: str) -> str:
        text = text.replace("\\", r"\textbackslash ")
        for mark in "&%_#${}":
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
    """A rich table for the terminal, with every column."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(experiment.title), caption=Text(facts(experiment, result)), caption_justify="left")
    found = lines(experiment, result)
    table.add_column("Model", min_width=16)
    table.add_column("", min_width=5)
    for place, column in enumerate(experiment.columns):
        # Numbers do not wrap; rich has to be told, or it cuts them where the terminal is narrow.
        width = max(len(heading(column)), *(len(line.cells[place]) for line in found))
        table.add_column(heading(column), justify="right", min_width=width)
    table.add_column("Verdict", min_width=24, max_width=44)
    for line in found:
        verdict = Text("")
        if line.verdict is not None:
            verdict = _mark(line.verdict).append(f": {line.verdict.text}", "not bold default")
        style = None if line.source == "ours" else "dim"
        # Labels come from a file: their brackets are brackets.
        table.add_row(*map(Text, (line.label, line.source, *line.cells)), verdict, style=style)
    return table


def as_narrow_text(experiment: Experiment, result: Result) -> Table:
    """The same for a narrow terminal: name, the numbers that matter without their spread, the paper's below, the verdict."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    columns = [column for column in experiment.columns if column.key in experiment.main] or list(experiment.columns[:3])
    verdicts = experiment.verdicts(result)
    caption = Text(f"{facts(experiment, result)}\n--wide shows every column, the spread, and what a verdict is about")
    table = Table(title=Text(experiment.title), caption=caption, caption_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("Model", min_width=20)
    table.add_column("")
    for column in columns:
        table.add_column(heading(column).replace(" ↓", "↓").replace(" ↑", "↑"), justify="right", min_width=9, max_width=12)
    table.add_column("Verdict", min_width=8)
    for name, row in result.rows.items():
        paper = paper_row(experiment.tables, name)
        cells = []
        for column in columns:
            ours = number((row.mean(column.key), None), column.format) if column.key in row.metrics else "–"
            theirs = paper.get(column.key)
            cells.append(Text(ours).append(f"\n{number(theirs and (theirs[0], None), column.format)}" if paper else "", "dim"))
        source = Text("ours").append("\npaper" if paper else "", "dim")
        verdict = _mark(verdicts[name]) if name in verdicts else Text("")
        table.add_row(Text(label(row)), source, *cells, verdict)
    return table


def _mark(verdict: Verdict) -> Any:
    from rich.text import Text

    return Text("holds", "green") if verdict.holds else Text("does not hold", "bold red")


def show(console: Console, experiment: Experiment, result: Result, *, wide: bool = False) -> None:
    """Print the table: every column where there is room for it, `wide` asks for it or a file gets it; else the narrow one."""
    table = as_text(experiment, result)
    least = console.measure(table, options=console.options.update(width=10_000)).minimum
    if least <= console.width or wide or not console.is_terminal:
        console.print(table, width=max(console.width, least), crop=False, soft_wrap=True)
    else:
        console.print(as_narrow_text(experiment, result))


def as_data(experiment: Experiment, result: Result) -> dict[str, Any]:
    """The table as plain data for `--json`."""
    verdicts = experiment.verdicts(result)
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
