"""The parts of the report as HTML: evidence (claim, table, figure per experiment), theory checks, speed targets, panel data.

The panel has a signal f: [0, 1] -> R^2 as LegS coefficients C [24, 2]. The page turns the frame by a rotation and a
shear, in either order, with product R. A transported memory holds C R, one that only writes still holds C.
"""

import base64
import html
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shippo_lab.harness.experiment import Experiment, Result
from shippo_lab.harness.store import RUNS, as_user_error, committed, figures, read_json
from shippo_lab.harness.tables import facts, heading, lines
from shippo_lab.theory.registry import CheckResult, by_section

# Result of a target in the file -> CSS class and status.
STATUS = {
    "goal": ("holds", "reaches the goal"),
    "required": ("holds", "reaches what is required"),
    "missed": ("fails", "falls short"),
}
ORDER = 24
GRID = 201


def text(value: object) -> str:
    """Escaped text; words in backticks become code, and a number such as 1e-5 has a hyphen that does not break."""
    whole = re.sub(r"(?<=\de)-(?=\d)", "\N{NON-BREAKING HYPHEN}", html.escape(str(value)))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", whole)


def _cell(cell: str) -> str:
    plain = re.sub(r"<[^>]*>", "", cell).strip()
    number = re.match(r"[-−+]?[\d.]|–", plain) and len(plain) < 60
    return f'<td class="number">{cell}</td>' if number else f"<td>{cell}</td>"


def table(label: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself on a narrow screen; cells are HTML, the first of a row is its heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(f'<tr><th scope="row">{first}</th>{"".join(map(_cell, rest))}</tr>' for first, *rest in rows)
    # `tabindex` lets the keyboard reach what scrolls.
    box = f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(label, quote=True)}">'
    return f"{box}<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def missing(message: str) -> str:
    """A note for a missing result; `message` names the command that makes it."""
    return f'<p class="missing">{text(message)}</p>'


def verdict(holds: bool, words: str) -> str:
    """Whether it holds, in words and colour."""
    mark, word = ("holds", "holds") if holds else ("fails", "does not hold")
    return f'<span class="{mark}">{word}</span>' + (f": {text(words)}" if words else "")


def picture(name: str, title: str, drawing: str | None = None) -> str:
    """An SVG as an inline image: `drawing`, or the figure `name` that comes with the package."""
    path = figures() / f"{name}.svg"
    if drawing is None and not path.exists():
        return missing(f"{title}: draw it with `shippo figure {name}`, which needs `pip install 'shippo-ssm[plot]'`.")
    data = base64.b64encode((drawing or path.read_text(encoding="utf-8")).encode()).decode()
    return (
        f'<figure class="picture"><div class="wide" role="region" tabindex="0" aria-label="{text(title)}">'
        f'<img alt="{text(title)}" src="data:image/svg+xml;base64,{data}"></div>'
        f"<figcaption>{text(f'Drawn by `shippo figure {name}`.')}</figcaption></figure>"
    )


def evidence(experiment: Experiment) -> str:
    """Claim, protocol, table and figure of an experiment; without a result, the command that makes it."""
    head = f'<h3 id="{experiment.name}">{text(experiment.title)}</h3><p>{text(experiment.claim)}</p>'
    head += f'<p class="note">{text(experiment.protocol)}</p>'
    try:
        result = experiment.result()
    except FileNotFoundError:
        return head + missing(f"Not run here yet; make it with `{experiment.command()}` ({experiment.wall_time}).")
    with as_user_error(result.source):
        figure = "" if experiment.figure is None else picture(experiment.name, experiment.title, _drawn(experiment, result))
        return f'{head}{_table(experiment, result)}<p class="note">{text(facts(experiment, result))}</p>{figure}'


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


def theory(found: list[CheckResult]) -> str:
    """A sentence with the count, and one table per section of the paper, open only if a statement in it does not hold."""
    page = (
        "<p>Each proposition, lemma, theorem and example of the paper is a function that computes both of its sides and "
        "measures how far they are apart, or how far apart they must be. "
        f"<strong>{_count(found)}</strong> Open a section to see its residuals.</p>"
    )
    for name, members in by_section(found).items():
        body = []
        for row in members:
            statement = f"{text(row.statement)}<br><small>{text(row.place)}</small>"
            bound = f'<span class="bound">{row.limit.replace(" ", "&nbsp;")}</span>'
            body.append([statement, text(row.measured), f"{row.residual:.1e}", bound, verdict(row.holds, "")])
        grid = table(f"{name}: statements and their residuals", ["Statement", "Measured", "Residual", "Bound", ""], body)
        shown = "" if all(row.holds for row in members) else " open"
        page += f"<details{shown}><summary><strong>{name}</strong> {_count(members)}</summary>{grid}</details>"
    return page


def _count(found: list[CheckResult]) -> str:
    failed = sum(not row.holds for row in found)
    return f"All {len(found)} hold." if not failed else f"{failed} of {len(found)} do not hold."


def speed() -> str:
    """The targets of `runs/bench.json`, else of the committed benchmark; the page "Performance" of the docs has the rest."""
    lead = (
        "<p>A speed counts only if the output and every gradient agree with the reference loop in float64. The limit is the "
        "time that moving the operands once, or the multiply-adds, takes at the rates this machine reaches.</p>"
    )
    path = next((place for place in (RUNS / "bench.json", committed() / "bench.json") if place.exists()), None)
    if path is None:
        words = "make it with `shippo bench --out runs/bench.json` (two minutes; `--full`: a quarter of an hour)."
        return lead + missing(f"No benchmark here yet; {words}")
    run = read_json(path)
    with as_user_error(path):
        machine, rows = run["machine"], []
        note = f"{machine['processor']}, {machine['cores']} cores, {machine['simd']}; {run['mode']} mode, {run['date']}."
        for row in run["verdict"]:
            sign = "at least" if row["at_least"] else "at most"
            reached = "–" if row["reached"] is None else f"{row['reached']:.3g}"
            mark, status = STATUS.get(row["result"], ("note", "not measured"))
            wanted = [text(f"{sign} {row[key]:g}") for key in ("required", "goal")]
            rows.append([text(row["what"]), reached, *wanted, f'<span class="{mark}">{status}</span>'])
        targets = table("Speed targets", ["Ratio inside one run", "Reached", "Required", "Goal", "Status"], rows)
        return f'{lead}<p class="note">{text(note)}</p>{targets}'


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
