"""What the docs show of experiments: `docs/results.md` and the pictures in `docs/_static`.

Numbers come from the committed files of `results/` through the experiments' own tables, never by hand; the tests compare the
page with what this file renders. `python docs/generate.py` writes it again after a result has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shippo_ssm.lab.experiment import Experiment, FinishedRow, Result, paper_row
from shippo_ssm.lab.pictures import overview, reconstruction
from shippo_ssm.lab.tables import as_markdown, budget, number, our_number

PAGE, STATIC = "docs/results.md", "docs/_static"
HEAD = """# Results

Our numbers over the paper's, with a verdict per row. This page is made by `python docs/generate.py` from the files in
`results/`, which `shippo run NAME` writes (as `runs/NAME/result.json`); `shippo table NAME` prints the same tables. Where a row
says *does not hold*, it does not.

## In short

{short}
Errors are normalised (1 is no better than a constant), accuracies are fractions; mean ± standard deviation over seeds.

| experiment | committed result | budget | make it again |
|---|---|---|---|"""


def with_parts(page: str, parts: Mapping[str, str]) -> str:
    """A page written by hand with its generated parts renewed.

    Example:
        >>> print(with_parts("Seen:\\n<!-- generated: count -->\\n6\\n<!-- end -->\\n", {"count": "7\\n"}))
        Seen:
        <!-- generated: count -->
        7
        <!-- end -->
        <BLANKLINE>
    """
    for name, text in parts.items():
        before, rest = page.split(mark := f"<!-- generated: {name} -->\n")
        page = before + mark + text + rest[rest.index("<!-- end -->\n") :]
    return page


def renew(path: Path, parts: Mapping[str, str]) -> None:
    """Write a page again with its generated parts renewed."""
    path.write_text(with_parts(path.read_text(encoding="utf-8"), parts), encoding="utf-8")


def anchor(title: str) -> str:
    """The anchor that Sphinx and code forges give a heading."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")


def share(experiment: Experiment, row: FinishedRow) -> str:
    """How many of the paper's steps a row took, where an experiment has a preset of the paper's size and this is less."""
    if "paper" not in experiment.presets:
        return ""
    whole = next(config.steps for config in experiment.rows("paper") if config.name == row.name)
    steps = row.config["steps"]
    return f" ({steps:,} of {whole:,} steps)" if steps < whole else ""


@dataclass(frozen=True)
class Pages:
    """The pages of a checkout.

    Args:
        root: its folder.
        experiments: what the pages show, in order.
    """

    root: Path
    experiments: tuple[Experiment, ...]

    def found(self) -> Iterable[tuple[Experiment, Result | None]]:
        """Every experiment and its committed result, or `None`."""
        for experiment in self.experiments:
            path = self.root / "results" / f"{experiment.name}.json"
            yield experiment, Result.read(path) if path.exists() else None

    def results_page(self) -> str:
        """docs/results.md."""
        parts, sections = [HEAD.format(short=self.highlights())], []
        for experiment, result in self.found():
            name, title = experiment.name, experiment.title
            where, size = ("none yet", "") if result is None else (f"`results/{name}.json`", budget(result))
            command = experiment.command(result and result.preset)
            parts.append(f"| [{title}](#{anchor(title)}) | {where} | {size} | `{command}` ({experiment.wall_time}) |")
            missing = f"No result is committed; `{command}` makes one."
            body = missing if result is None else as_markdown(experiment, result)
            picture = f"\n![{title}](_static/{name}.png)\n" if (self.root / STATIC / f"{name}.png").exists() else ""
            sections.append(f"\n## {title}\n\n{experiment.claim}\n\n*{experiment.protocol}.*\n\n{body}\n{picture}")
        return "\n".join(parts) + "\n" + "".join(sections)

    def highlights(self) -> str:
        """The table at the head of the page."""
        lines = ["| what | ours | paper | how |", "|---|---|---|---|"]
        for experiment, result in self.found():
            columns = {column.key: column for column in experiment.columns}
            how = f"[{experiment.title}](#{anchor(experiment.title)})"
            for name, metric, words in experiment.highlights:
                theirs = number(paper_row(experiment.tables, name).get(metric), columns[metric].format)
                row = None if result is None else result.rows.get(name)
                ours = "not committed"
                if row is not None and metric in row.metrics:
                    ours = our_number(row, columns[metric]) + share(experiment, row)
                lines.append(f"| {words} | {ours} | {theirs} | {how} |")
        return "\n".join(lines) + "\n"

    def pictures(self) -> dict[str, Callable[[Path], object]]:
        """File name -> what draws it; figures of experiments only where a result is committed."""
        drawn: dict[str, Callable[[Path], object]] = {"reconstruction.png": reconstruction, "overview.png": overview}
        for experiment, result in self.found():
            if result is not None and experiment.figure is not None:
                drawn[f"{experiment.name}.png"] = partial(experiment.figure, result)
        return drawn

    def write(self) -> None:
        """Draw the pictures and write the page."""
        for name, draw in self.pictures().items():
            draw(self.root / STATIC / name)
        (self.root / PAGE).write_text(self.results_page(), encoding="utf-8")
