"""Tables: our numbers over the paper's, with a verdict per row, as text, Markdown or plain data.

A result and the paper's numbers become a list of `Line`s, two per row, "ours" and "paper"; the renderers lay them out.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shippo_lab.harness.experiment import Column, Experiment, FinishedRow, Result, Verdict, paper_row


def number(value: Sequence[Any] | None, spec: str) -> str:
    """mean ± std, the deviation with two digits; a dash for `None`."""
    if value is None:
        return "–"
    mean, std = value
    return f"{mean:{spec}}" if std is None else f"{mean:{spec}} ± {std:.2g}"


def our_number(row: FinishedRow, column: Column) -> str:
    """A row's number in a column; with a deviation for several seeds."""
    if column.key not in row.metrics:
        return "–"
    return number((row.mean(column.key), row.std(column.key) if len(row.seeds) > 1 else None), column.format)


class Line(NamedTuple):
    """One line of a table."""

    label: str
    source: str
    cells: tuple[str, ...]
    verdict: Verdict | None


def columns_of(experiment: Experiment, result: Result) -> list[Column]:
    """The columns that have a number: presets may be scored at other lengths."""
    known = {name for row in result.rows.values() for name in row.metrics}
    return [column for column in experiment.columns if column.key in known]


def lines(experiment: Experiment, result: Result, columns: Sequence[Column] | None = None) -> list[Line]:
    """Two lines per finished row: ours with its verdict, then the paper's; by default with all `columns_of`."""
    verdicts, found = experiment.verdicts(result), []
    columns = columns_of(experiment, result) if columns is None else columns
    for name, row in result.rows.items():
        label = f"{row.label} (diverged: {row.notes['diverged_at']})" if "diverged_at" in row.notes else row.label
        found.append(Line(label, "ours", tuple(our_number(row, column) for column in columns), verdicts.get(name)))
        if paper := paper_row(experiment.tables, name):
            theirs = tuple(number(paper.get(column.key), column.format) for column in columns)
            found.append(Line("", "paper", theirs, None))
    return found


def heading(column: Column) -> str:
    return column.label + {"lower": " ↓", "higher": " ↑", "neither": ""}[column.better]


def budget(result: Result) -> str:
    """Preset, steps, seeds and time of a result; where rows differ, those of most rows and the exceptions."""
    labels: dict[str, list[str]] = {}
    for row in result.rows.values():
        if steps := row.config.get("steps", 0):
            seeds = len(row.seeds)
            labels.setdefault(f"{steps:,} steps, {seeds} seed{'s' * (seeds != 1)}", []).append(row.label)
    most = max(labels, key=lambda words: len(labels[words]), default="")
    others = "; ".join(f"{' / '.join(names)}: {words}" for words, names in labels.items() if words != most)
    return f"preset {result.preset}, {most}{others and f' (but {others})'}, {result.seconds / 60:.1f} minutes"


def facts(experiment: Experiment, result: Result) -> str:
    """Where the numbers come from, in one line."""
    spread = "; mean ± sample standard deviation" if any(len(row.seeds) > 1 for row in result.rows.values()) else ""
    paper = f"; paper: {', '.join(table.label for table in experiment.tables)}" if experiment.tables else ""
    early = "; too short to be judged" if result.preset in experiment.unjudged else ""
    return f"{result.source}: {budget(result)}, torch {result.versions['torch']}{spread}{paper}{early}"


def as_markdown(experiment: Experiment, result: Result, cell: Callable[[str], str] = str, note: bool = True) -> str:
    """A Markdown table; `cell` changes the numbers, `note` adds where they come from."""
    head = ["Model", "", *map(heading, columns_of(experiment, result)), "Verdict"]
    body = [head, ["---"] * len(head)]
    for line in lines(experiment, result):
        verdict = "" if line.verdict is None else f"{'holds' if line.verdict.holds else 'DOES NOT HOLD'}: {line.verdict.text}"
        body.append([line.label, line.source, *map(cell, line.cells), verdict])
    rows = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in body)
    return "\n".join(f"| {row} |" for row in rows) + (f"\n\n{facts(experiment, result)}" if note else "")


def as_text(experiment: Experiment, result: Result, *, narrow: bool = False) -> Table:
    """A rich table of every column: numbers with their spread, and what a verdict is about.

    With `narrow` it has at most 80 columns of text: the main numbers without their spread, and whether they hold.
    """
    columns, caption = columns_of(experiment, result), facts(experiment, result)
    if narrow:
        columns = [column for column in columns if column.key in experiment.main] or columns[:3]
        caption += "\n--wide shows every column, the spread, and what a verdict is about"
    found = lines(experiment, result, columns)
    if narrow:
        found = [line._replace(cells=tuple(cell.split(" ±")[0] for cell in line.cells)) for line in found]
    # `Text`, since brackets in titles and labels are not markup.
    title, caption = Text(experiment.title), Text(caption)
    table = Table(title=title, caption=caption, caption_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("Model", min_width=19)
    table.add_column("", min_width=5)
    for column, *cells in zip(columns, *(line.cells for line in found)):
        name = heading(column).replace(" ↓", "↓").replace(" ↑", "↑")
        # Without a minimum rich cuts numbers where the terminal is narrow.
        least = max(map(len, [*(name.split() if narrow else [name]), *cells]))
        table.add_column(name, justify="right", min_width=least, max_width=max(10, least))
    table.add_column("Verdict", min_width=13 if narrow else 24, max_width=13 if narrow else 44)
    for line in found:
        cells = [Text(line.label), Text(line.source), *map(Text, line.cells)]
        if line.verdict is not None:
            word = Text("holds", "green") if line.verdict.holds else Text("does not hold", "bold red")
            cells.append(word if narrow else word.append(f": {line.verdict.text}", "not bold default"))
        table.add_row(*cells, style=None if line.source == "ours" else "dim")
    return table


def show(console: Console, experiment: Experiment, result: Result, *, wide: bool = False) -> None:
    """Print every column where it fits, with `wide`, and into a file; elsewhere the main columns."""
    table = as_text(experiment, result)
    least = console.measure(table, options=console.options.update(width=10_000)).minimum
    if wide or least <= console.width or not console.is_terminal:
        console.print(table, width=max(console.width, least), crop=False, soft_wrap=True)
    else:
        console.print(as_text(experiment, result, narrow=True))


def as_data(experiment: Experiment, result: Result) -> dict[str, Any]:
    """The table as plain data for `--json`."""
    verdicts, rows = experiment.verdicts(result), []
    for name, row in result.rows.items():
        keys = [column.key for column in experiment.columns if column.key in row.metrics]
        ours = {key: [row.mean(key), row.std(key)] for key in keys}
        facts = {"name": name, "label": row.label, "seeds": len(row.seeds), "ours": ours}
        holds, words = verdicts.get(name, (None, None))
        rows.append(facts | {"paper": paper_row(experiment.tables, name), "holds": holds, "verdict": words})
    return {"experiment": experiment.name, "preset": result.preset, "source": result.source, "rows": rows}
