"""Tables: our numbers over the paper's, with a verdict per row, as text, Markdown, LaTeX or plain data.

A result and the paper's numbers become a list of `Line`s, two per row, "ours" and "paper"; the renderers lay them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from shippo_lab.harness.experiment import Column, Experiment, FinishedRow, Result, Verdict, paper_row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def number(value: tuple[float, float | None] | None, spec: str) -> str:
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


def label(row: FinishedRow) -> str:
    """The heading of a row; says whether it diverged."""
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
    """Preset, steps, seeds and time of a result; by row where rows differ."""
    labels: dict[str, list[str]] = {}
    for row in result.rows.values():
        steps, seeds = row.config.get("steps", 0), len(row.seeds)
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


def as_markdown(experiment: Experiment, result: Result, cell: Callable[[str], str] = str, note: bool = True) -> str:
    """A Markdown table; `cell` changes the numbers, `note` adds where they come from."""
    head = ["Model", "", *(heading(column) for column in experiment.columns), "Verdict"]
    body = [head, ["---"] * len(head)]
    for line in lines(experiment, result):
        verdict = "" if line.verdict is None else f"{'holds' if line.verdict.holds else 'DOES NOT HOLD'}: {line.verdict.text}"
        body.append([line.label, line.source, *map(cell, line.cells), verdict])
    rows = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in body)
    return "\n".join(f"| {row} |" for row in rows) + (f"\n\n{facts(experiment, result)}" if note else "")


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


def _mark(verdict: Verdict | None) -> Text:
    from rich.text import Text

    if verdict is None:
        return Text("")
    return Text("holds", "green") if verdict.holds else Text("does not hold", "bold red")


def _begin(experiment: Experiment, caption: str, **style: Any) -> Table:
    from rich.table import Table
    from rich.text import Text

    # `Text`, since brackets in titles and labels are not markup.
    table = Table(title=Text(experiment.title), caption=Text(caption), caption_justify="left", **style)
    table.add_column("Model", min_width=19)
    table.add_column("", min_width=5)
    return table


def as_text(experiment: Experiment, result: Result, places: Iterable[int] | None = None, *, verdict: bool = True) -> Table:
    """A rich table of every column, or those at `places`: numbers with their spread, and what a verdict is about."""
    from rich.text import Text

    table, found = _begin(experiment, facts(experiment, result) if verdict else ""), lines(experiment, result)
    places = range(len(experiment.columns)) if places is None else list(places)
    for place in places:
        # Without a minimum rich cuts numbers where the terminal is narrow.
        name = heading(experiment.columns[place])
        table.add_column(name, justify="right", min_width=max(len(name), *(len(line.cells[place]) for line in found)))
    if verdict:
        table.add_column("Verdict", min_width=24, max_width=44)
    for line in found:
        cells = [Text(line.label), Text(line.source), *(Text(line.cells[place]) for place in places)]
        if verdict:
            cells.append(_mark(line.verdict))
            if line.verdict is not None:
                cells[-1].append(f": {line.verdict.text}", "not bold default")
        table.add_row(*cells, style=None if line.source == "ours" else "dim")
    return table


def as_narrow_text(experiment: Experiment, result: Result) -> Table:
    """A rich table of at most 80 columns: the main numbers without their spread over the paper's, and the verdict."""
    from rich.box import SIMPLE
    from rich.text import Text

    columns = [column for column in experiment.columns if column.key in experiment.main] or list(experiment.columns[:3])
    verdicts = experiment.verdicts(result)
    caption = f"{facts(experiment, result)}\n--wide shows every column, the spread, and what a verdict is about"
    table = _begin(experiment, caption, box=SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(heading(column).replace(" ↓", "↓").replace(" ↑", "↑"), justify="right", min_width=9, max_width=10)
    table.add_column("Verdict", width=len("does not hold"))
    for name, row in result.rows.items():
        paper = paper_row(experiment.tables, name)
        cells = []
        for column in columns:
            ours = number((row.mean(column.key), None), column.format) if column.key in row.metrics else "–"
            theirs = paper.get(column.key)
            cells.append(Text(ours).append(f"\n{number(theirs and (theirs[0], None), column.format)}" if paper else "", "dim"))
        source = Text("ours").append("\npaper" if paper else "", "dim")
        table.add_row(Text(label(row)), source, *cells, _mark(verdicts.get(name)))
    return table


def _blocks(console: Console, experiment: Experiment, result: Result) -> Iterator[Table]:
    """Every column in tables below one another, as many columns in each as fit; the verdicts are the last one."""
    everything = console.options.update(width=10_000)
    block: list[int] = []
    for place in range(len(experiment.columns)):
        table = as_text(experiment, result, [*block, place], verdict=False)
        if block and console.measure(table, options=everything).minimum > console.width:
            yield as_text(experiment, result, block, verdict=False)
            block = []
        block.append(place)
    yield as_text(experiment, result, block, verdict=False)
    yield as_text(experiment, result, ())


def show(console: Console, experiment: Experiment, result: Result, *, wide: bool = False) -> None:
    """Print every column where it fits, or into a file; with `wide` in several tables that fit; else the main columns."""
    table = as_text(experiment, result)
    least = console.measure(table, options=console.options.update(width=10_000)).minimum
    if least <= console.width or not console.is_terminal:
        console.print(table, width=max(console.width, least), crop=False, soft_wrap=True)
    elif wide:
        console.print(*_blocks(console, experiment, result))
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
