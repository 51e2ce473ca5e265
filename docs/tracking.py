"""The tables of the page "State tracking": published numbers beside ours, and what each language needs of the cell."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from shippo_ssm.experiments.tracking.languages import LANGUAGES
from shippo_ssm.lab.pages import renew
from shippo_ssm.tasks.languages import LanguageTask

PAGE = Path("docs", "state-tracking.md")
PUBLISHED = Path("src", "shippo_ssm", "experiments", "tracking", "published.json")
# Column of the published table of words -> our row of it.
WORD_ROWS = {"A5, 12": "a5-12", "S5, 4": "s5-4", "S5, 8": "s5-8"}


def rows_of(root: Path, name: str) -> dict[str, dict[str, Any]]:
    """The rows of a committed result by name; none where there is no result."""
    path = root / "results" / f"{name}.json"
    return {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]} if path.exists() else {}


def percent(row: dict[str, Any] | None, key: str) -> str:
    """The mean over seeds and the worst seed, in percent; a dash where it was not measured."""
    if row is None or key not in row["metrics"]:
        return "–"
    numbers = row["metrics"][key]
    return f"{100 * mean(numbers):.1f} ({100 * min(numbers):.1f})"


def table(head: list[str], body: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)) + "\n"


def words(root: Path) -> str:
    """Words of few elements: published columns that we have as well."""
    published, ours = json.loads((root / PUBLISHED).read_text(encoding="utf-8"))["words"], rows_of(root, "words")
    places = [published["columns"].index(column) for column in WORD_ROWS]
    body = [[name, *(str(numbers[place]) for place in places)] for name, numbers in published["rows"].items()]
    body.append(["**SHiPPO**", *(percent(ours.get(row), "prefix_256") for row in WORD_ROWS.values())])
    bare = [percent(ours.get(f"{row}-none"), "prefix_256") for row in WORD_ROWS.values()]
    body.append(["the same, no right action", *bare])
    source = f"Published: {published['source']}."
    return table(["", *(f"{column} elements" for column in WORD_ROWS)], body) + f"\n{source}\n"


def languages(root: Path) -> str:
    """Languages: every published row, and ours."""
    published, ours = json.loads((root / PUBLISHED).read_text(encoding="utf-8"))["languages"], rows_of(root, "languages")
    body = [[name, *map(str, numbers)] for name, numbers in published["rows"].items()]
    for row in ours.values():
        name = f"**{row['label']}**, {row['config']['steps']:,} steps in all, seeds {', '.join(map(str, row['seeds']))}"
        body.append([name, *(percent(row, key) for key in published["columns"])])
    return table(["", *published["columns"]], body) + f"\nPublished: {published['source']}.\n"


def needs() -> str:
    """Which part of the cell does the work, from `task.needs`."""
    return "".join(f"- **{name}**: {LanguageTask(name=name).needs}\n" for name in LANGUAGES)


def parts(root: Path) -> dict[str, str]:
    """The generated parts of the page, by name."""
    return {"words": words(root), "languages": languages(root), "needs": needs()}


def write(root: Path) -> None:
    """Renew the tables of the page."""
    renew(root / PAGE, parts(root))
