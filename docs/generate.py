"""Write what the pages show of results: `docs/results.md`, the table in the README, and the pictures in `docs/_static`.

Numbers come from the committed files of `results/` through the experiments' own tables, never by hand; the tests
compare both pages with what this file renders. Run it again after a result has changed:

    python docs/generate.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from shippo_ssm.experiments import get, names
from shippo_ssm.experiments.core import Experiment, Result, Row
from shippo_ssm.experiments.store import read_json
from shippo_ssm.experiments.tables import as_markdown, budget, number, paper_row

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
STATIC = ROOT / "docs" / "_static"
MARKS = ("<!-- results -->\n", "<!-- end of results -->")

# What the README shows of an experiment: a row, one of its metrics, and the words for it.
HIGHLIGHTS = {
    "paired": [
        ("no-right-r8", "pair_nmse", "order of two operations, writing only (rank 8): error"),
        ("selective", "pair_nmse", "the same, selective right action: error"),
        ("selective", "identity_pair_nmse", "the same model with R replaced by I: error"),
    ],
    "projection": [
        ("no-right", "nmse", "transported coefficients, rank-4 source: error"),
        ("learned-true", "nmse", "transported coefficients, learned right action: error"),
    ],
    "groups": [("oracle-g2", "pair_nmse", "true right action cut into groups of 2: error")],
    "mqar": [
        ("no-right", "exact_4096", "Transport-MQAR at 4096 events, no right action: exact"),
        ("struct-split", "exact_4096", "the same, split right action: exact"),
    ],
    "suffix": [("zeroed", "exact_4096", "the same weights, right coordinates zeroed: exact")],
    "rotation": [
        ("none", "exact_24", "recall through quarter turns, no right action: exact"),
        ("split", "exact_24", "recall through quarter turns, split right action: exact"),
    ],
}


def committed(name: str) -> tuple[Experiment, Result] | None:
    """An experiment and its committed result, or `None`."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    return get(name), Result.from_json(read_json(path), f"results/{path.name}")


def anchor(title: str) -> str:
    """The anchor that Sphinx and code forges give a heading."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")


HEAD = """# Results

Our numbers over the paper's, with a verdict per row. This page is made by `python docs/generate.py` from the files in
`results/`, which `shippo run NAME` writes (as `runs/NAME/result.json`); `shippo table NAME` prints the same tables. Where a row
says *does not hold*, it does not.

| experiment | committed result | budget | make it again |
|---|---|---|---|"""


def results_page() -> str:
    """docs/results.md."""
    parts = [HEAD]
    sections = []
    for name in names():
        found, experiment = committed(name), get(name)
        where, size = ("none yet", "") if found is None else (f"`results/{name}.json`", budget(found[1]))
        link, again = f"[{experiment.title}](#{anchor(experiment.title)})", f"`shippo run {name}` ({experiment.wall_time})"
        parts.append(f"| {link} | {where} | {size} | {again} |")
        body = f"No result is committed; `shippo run {name}` makes one." if found is None else as_markdown(*found)
        picture = ""
        if (STATIC / f"{name}.png").exists():
            picture = f"\n![{experiment.title}](_static/{name}.png)\n"
        sections.append(f"\n## {experiment.title}\n\n{experiment.claim}\n\n*{experiment.protocol}.*\n\n{body}\n{picture}")
    return "\n".join(parts) + "\n" + "".join(sections)


def share(experiment: Experiment, row: Row) -> str:
    """How many of the paper's steps a row took, where an experiment has a preset of the paper's size and this is less."""
    if "paper" not in experiment.presets:
        return ""
    whole = next(config.steps for config in experiment.rows("paper") if config.name == row.name)
    steps = row.config["steps"]
    return f" ({steps:,} of {whole:,} steps)" if steps < whole else ""


def readme_table() -> str:
    """The table of results in the README."""
    lines = ["| what | ours | paper | how |", "|---|---|---|---|"]
    for name, chosen in HIGHLIGHTS.items():
        found, experiment = committed(name), get(name)
        formats = {column.key: column.format for column in experiment.columns}
        for row, metric, words in chosen:
            paper = paper_row(experiment.tables, row).get(metric)
            theirs = "–" if paper is None else number(*paper, formats[metric])
            ours = "not committed"
            if found is not None and row in found[1].rows and metric in found[1].rows[row].metrics:
                entry = found[1].rows[row]
                ours = number(entry.mean(metric), entry.std(metric) if len(entry.seeds) > 1 else None, formats[metric])
                ours += share(experiment, entry)
            lines.append(f"| {words} | {ours} | {theirs} | [`shippo run {name}`](docs/results.md#{anchor(experiment.title)}) |")
    return "\n".join(lines) + "\n"


def with_table(readme: str, table: str) -> str:
    """The README with `table` between its marks."""
    before, rest = readme.split(MARKS[0])
    return before + MARKS[0] + table + MARKS[1] + rest.split(MARKS[1])[1]


def reconstruction(path: Path) -> None:
    """A signal seen by a turning sensor, read back from twelve coefficients in a fixed and in a turning frame."""
    from shippo_ssm.projection import LegS, ProjectionMemory, Transport
    from shippo_ssm.projection.plots import plot_reconstruction

    def turning(t: float) -> np.ndarray:
        slow = np.array([0.5 + np.sin(1.5 * t), 1.2 * np.cos(t) - 0.3 * t])
        cos, sin = np.cos(10 * t), np.sin(10 * t)
        return slow @ np.array([[cos, -sin], [sin, cos]])

    memory = ProjectionMemory(LegS(12), Transport(np.array([[0.0, -10.0], [10.0, 0.0]]), 2))
    plot_reconstruction(memory, turning, 2.0).savefig(path, dpi=110)


def pictures() -> dict[str, Callable[[Path], object]]:
    """File name -> what draws it; figures of experiments only where a result is committed."""
    from shippo_ssm.experiments.figures import overview

    drawn: dict[str, Callable[[Path], object]] = {"reconstruction.png": reconstruction, "overview.png": overview}
    for name in names():
        found = committed(name)
        if found is not None and found[0].figure is not None:
            draw, result = found[0].figure, found[1]
            drawn[f"{name}.png"] = lambda path, draw=draw, result=result: draw(result, path)
    return drawn


def main() -> None:
    STATIC.mkdir(exist_ok=True)
    for name, draw in pictures().items():
        draw(STATIC / name)
    PAGE.write_text(results_page(), encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8"), readme_table()), encoding="utf-8")


if __name__ == "__main__":
    main()
