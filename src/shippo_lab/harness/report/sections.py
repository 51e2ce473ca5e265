"""The parts of the report as HTML: evidence (claim, table, figure per experiment), theory checks, speed targets, panel data.

`assets/parts.html` has their markup. The panel has a signal f: [0, 1] -> R^2 as LegS coefficients C [24, 2]. The page
turns the frame by a rotation and a shear, in either order, with product R. A transported memory holds C R, one that
only writes still holds C.
"""

import base64
import re
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape

from shippo_lab.harness.experiment import Experiment, Result
from shippo_lab.harness.store import RUNS, as_user_error, committed, figures, read_json
from shippo_lab.harness.tables import columns_of, facts, heading, lines
from shippo_lab.theory.registry import CheckResult, by_section

ORDER = 24
GRID = 201


def text(value: object) -> Markup:
    """Escaped text; words in backticks become code, and a number such as 1e-5 has a hyphen that does not break."""
    whole = re.sub(r"(?<=\de)-(?=\d)", "\N{NON-BREAKING HYPHEN}", str(escape(value)))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", whole))


def shown_as_number(cell: str) -> bool:
    """Whether a cell is short and begins with a number."""
    plain = Markup(cell).striptags()
    return bool(re.match(r"[-−+]?[\d.]|–", plain)) and len(plain) < 60


ENVIRONMENT = jinja2.Environment(loader=jinja2.PackageLoader(__package__ or "", "assets"), autoescape=True)
ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
ENVIRONMENT.filters["text"], ENVIRONMENT.tests["shown_as_number"] = text, shown_as_number
PARTS: Any = ENVIRONMENT.get_template("parts.html").module


def asset(name: str) -> Markup:
    """A file of `assets` as it is: its braces are no template."""
    return Markup(resources.files(__package__ or "").joinpath("assets", name).read_text(encoding="utf-8"))


def picture(name: str, title: str, drawing: str | None = None) -> str:
    """An SVG as an inline image: `drawing`, or the figure `name` that comes with the package."""
    path = figures() / f"{name}.svg"
    if drawing is None and path.exists():
        drawing = path.read_text(encoding="utf-8")
    return PARTS.picture(name, title, drawing and base64.b64encode(drawing.encode()).decode())


def evidence(experiment: Experiment) -> str:
    """Claim, protocol, table and figure of an experiment; without a result, the command that makes it."""
    try:
        result = experiment.result()
    except FileNotFoundError:
        return PARTS.evidence(experiment)
    with as_user_error(result.source):
        figure = "" if experiment.figure is None else picture(experiment.name, experiment.title, _drawn(experiment, result))
        head = ["Model", *map(heading, columns_of(experiment, result)), "Verdict"]
        return PARTS.evidence(experiment, head, _rows(experiment, result), facts(experiment, result), figure)


def _drawn(experiment: Experiment, result: Result) -> str | None:
    """The figure of a result of one's own; `None` for a committed result, whose figure is committed, or without matplotlib."""
    if result.source.startswith("results/") or experiment.figure is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        try:
            experiment.figure(result, path)
        except ModuleNotFoundError:
            return None
        return path.read_text(encoding="utf-8")


def _rows(experiment: Experiment, result: Result) -> list[list[str]]:
    """One row per model: our number over the paper's in each cell, the verdict last."""
    rows = []
    for line in lines(experiment, result):
        if line.source == "ours":
            rows.append([line.label, *line.cells, "" if line.verdict is None else PARTS.verdict(*line.verdict)])
            continue
        for place, cell in enumerate(line.cells, start=1):
            if cell != "–":
                rows[-1][place] = escape(rows[-1][place]) + PARTS.paper(cell)
    return rows


def theory(found: list[CheckResult]) -> str:
    """A sentence with the count, and one table per section of the paper, open only if a statement in it does not hold."""
    return PARTS.theory(found, by_section(found))


def speed() -> str:
    """The targets of `runs/bench.json`, else of the committed benchmark; the page "Performance" of the docs has the rest."""
    path = next((place for place in (RUNS / "bench.json", committed() / "bench.json") if place.exists()), None)
    if path is None:
        return PARTS.speed(None)
    with as_user_error(path):
        run = read_json(path)
        return PARTS.speed({key: run[key] for key in ("machine", "mode", "date", "verdict")})


def signal(t: Any) -> np.ndarray:
    """A growing spiral with a tremor, [.., 2]; its two channels differ, so that a rotation shows."""
    t = np.asarray(t, dtype=float)
    radius, angle = 0.25 + 0.8 * t, 1.0 + 9.5 * t
    return np.stack([radius * np.cos(angle) + 0.1 * np.sin(41 * t), 0.7 * radius * np.sin(angle)], axis=-1)


def panel_data() -> dict[str, Any]:
    """What the page embeds as JSON: `coefficients` [24][2] and `signal` [201][2] on an even grid of [0, 1]."""
    from shippo_ssm.projection import LegS, ProjectionMemory

    coefficients = ProjectionMemory(LegS(ORDER)).project(signal, 1.0)
    return {"coefficients": coefficients.round(9).tolist(), "signal": signal(np.linspace(0.0, 1.0, GRID)).round(9).tolist()}
