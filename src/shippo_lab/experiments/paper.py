"""The paper's own numbers, from the one file that holds them, `paper_numbers.json`."""

import functools
import json
from importlib import resources

from shippo_lab.harness.experiment import PaperTable


@functools.cache
def paper_numbers() -> dict[str, PaperTable]:
    """The tables of the paper by key."""
    text = resources.files("shippo_lab.experiments").joinpath("paper_numbers.json").read_text()
    tables = json.loads(text)["tables"]
    for table in tables.values():
        for row in table["rows"].values():
            row.update({metric: tuple(pair) for metric, pair in row.items()})
    return {key: PaperTable(**table) for key, table in tables.items()}


def paper_tables(*keys: str) -> tuple[PaperTable, ...]:
    """The tables of these keys."""
    return tuple(paper_numbers()[key] for key in keys)
