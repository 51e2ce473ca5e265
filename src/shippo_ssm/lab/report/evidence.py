"""The evidence of the report: for every experiment its claim, our table over the paper's, and its figure.

Reads result files as the tables do; draws figures with the experiments' own functions, as SVG, and embeds them as data.
"""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from shippo_ssm.lab import pictures
from shippo_ssm.lab.experiment import Experiment, Result, blame
from shippo_ssm.lab.report.html import missing, table, text, verdict
from shippo_ssm.lab.tables import facts, heading, lines


def section(experiments: Iterable[Experiment]) -> str:
    """All experiments, one after another."""
    return "".join(map(_experiment, experiments))


def _experiment(experiment: Experiment) -> str:
    name = experiment.name
    head = f'<h3 id="{name}">{text(experiment.title)}</h3><p>{text(experiment.claim)}</p>'
    head += f'<p class="note">{text(experiment.protocol)}</p>'
    try:
        result = experiment.result()
    except FileNotFoundError:
        return head + missing(f"Not run here yet; make it with `{experiment.command()}` ({experiment.wall_time}).")
    figure = ""
    with blame(result.source):
        if experiment.figure is not None:
            figure = picture(partial(experiment.figure, result), experiment.title, f"Drawn by `shippo figure {name}`.")
        return f'{head}{_table(experiment, result)}<p class="note">{text(facts(experiment, result))}</p>{figure}'


def _table(experiment: Experiment, result: Result) -> str:
    """One row per model: our number over the paper's in each cell, the verdict last."""
    rows = []
    for line in lines(experiment, result):
        if line.source == "ours":
            rows.append([text(line.label), *map(text, line.cells), "" if line.verdict is None else verdict(*line.verdict)])
            continue
        for place, cell in enumerate(line.cells, start=1):
            if cell != "–":
                rows[-1][place] += f'<span class="paper">paper {text(cell)}</span>'
    head = ["Model", *(text(heading(column)) for column in experiment.columns), "Verdict"]
    return table(f"{experiment.title}: our numbers and the paper's", head, rows)


def overview() -> str:
    """The paper's picture of the lift, where matplotlib is there to draw it."""
    return picture(
        pictures.overview, "Overview of the lift from HiPPO to SHiPPO", "The lift. Drawn by `shippo figure overview`."
    )


def picture(draw: Callable[[Path], object], title: str, caption: str) -> str:
    """What `draw(path)` draws, as an image inside the page."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        try:
            draw(path)
        except ModuleNotFoundError as error:
            return missing(f"{title}: {error}; install it with `pip install 'shippo-ssm[plot]'`.")
        # The metadata block names when and by what the file was made; a page written twice should be the same.
        drawing = re.sub(r"<metadata>.*?</metadata>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    data = base64.b64encode(drawing.encode()).decode()
    return (
        f'<figure class="picture"><div class="wide" role="region" tabindex="0" aria-label="{text(title)}">'
        f'<img alt="{text(title)}" src="data:image/svg+xml;base64,{data}"></div>'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )
