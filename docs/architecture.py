"""The page "Architecture" and its picture, made from the code: what the rooms import, and what a call of the layer runs.

`python docs/generate.py` writes both; `tests/test_architecture.py` compares them with the code, and `tests/test_imports.py`
walks the same graph. Run by itself, `python docs/architecture.py` prints the path of a call and its length.
"""

from __future__ import annotations

import ast
import importlib
import sys
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import shippo_ssm

PACKAGE = Path(shippo_ssm.__file__).parent
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")) + ["cli"]
PAGE, PICTURE = "docs/architecture.md", "docs/_static/rooms.svg"
# Where the paper speaks of what a room holds.
SECTIONS = {
    "projection": "section 2, appendices A and B",
    "scan": "section 3.2",
    "actions": "section 3.4, appendix C",
    "collapse": "section 3.3",
    "layers": "section 3",
    "models": "section 4",
    "tasks": "section 4, appendix D",
    "experiments": "section 4, appendices D and E",
    "theory": "sections 2 and 3, appendices A to C",
}
HEAD = """# Architecture

A folder of `src/shippo_ssm` is a room, and a room is an idea of the paper. This page is made from the code by
`python docs/generate.py`, and a test compares it with the code.

## Rooms

![The rooms of the package; an arrow points from a room to one that it imports](_static/rooms.svg)

Imports point one way, down. Arrows that follow from others are left out.

| room | what it holds | paper | imports |
|---|---|---|---|
"""
NOUNS = """
## Three nouns

- **`Recurrence`** (`scan/algebra.py`) is the operands of the scan as one record, with the words of the
  [notation](notation.md). It is checked and normalised once, at the door; a backend is one function of it.
- **`Mixer`** (`layers/mixer.py`) is what a sequence layer is: it runs a segment from a state and gives the outputs and the
  state after it. Blocks, stacks, experiments and audits know only this.
- **`ShippoSpec`** (`layers/spec.py`) is the options of the layer, each written once, with its docstring. The layer, the
  models of the experiments and the Hugging Face configuration take it from there.

## The path of a tensor

What `Shippo(128)(x)` runs from the call to machine code and back, with gradients on: every function of the package once, set
in below the one that calls it first. It is recorded with `sys.setprofile` on one thread and a second call, when the kernels
are compiled.

"""


class Call(NamedTuple):
    """A function of ours that a call runs: how many of ours it stands inside of, its file below the package, its name."""

    depth: int
    file: str
    name: str


def room_of(path: Path) -> str:
    """The room that a file of the package stands in; the name of the file where it stands in none."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    """Every room that `source` imports, anywhere in it, lazily or not; what only type checkers read is no import."""
    names = []
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room they come from"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    parts = [name.split(".") for name in names if name]
    return {part[1] for part in parts if part[0] == "shippo_ssm" and len(part) > 1} & set(ROOMS)


def import_graph() -> dict[str, set[str]]:
    """Room -> the other rooms that its files import."""
    graph: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in PACKAGE.rglob("*.py"):
        if (room := room_of(path)) in graph:
            graph[room] |= imported_rooms(path.read_text(encoding="utf-8")) - {room}
    return graph


def arranged(graph: dict[str, set[str]]) -> tuple[list[list[Any]], list[list[Any]]]:
    """The rows of a picture of a graph, the lowest first, and its lines, each a list of places in neighbouring rows.

    A room stands above all that it imports. A line that passes a row has a place of its own there, so that it meets no room.
    """

    @cache
    def level(room: str) -> int:
        return 1 + max(map(level, graph[room]), default=-1)

    @cache
    def reached(room: str) -> set[str]:
        return graph[room].union(*map(reached, graph[room]))

    rows: list[list[Any]] = [[room for room in graph if level(room) == height] for height in range(1 + max(map(level, graph)))]
    lines = []
    for upper, below in graph.items():
        for lower in sorted(below - set().union(*map(reached, below))):
            passed = [(upper, lower, height) for height in range(level(upper) - 1, level(lower), -1)]
            lines.append([upper, *passed, lower])
            for place in passed:
                rows[place[2]].append(place)
    # Each row in turn is put in the order of the mean place of its neighbours: few lines cross.
    for height in [*range(1, len(rows)), *range(len(rows) - 2, -1, -1), *range(1, len(rows))]:
        where = {place: (index + 0.5) / len(row) for row in rows for index, place in enumerate(row)}
        met: dict[Any, list[float]] = {place: [] for place in rows[height]}
        for line in lines:
            for first, second in pairwise(line):
                for one, other in ((first, second), (second, first)):
                    if one in met:
                        met[one].append(where[other])
        rows[height].sort(key=lambda place: sum(met[place]) / len(met[place]) if met[place] else where[place])
    return rows, lines


def picture() -> str:
    """The rooms and the direction of their imports, as SVG."""
    rows, lines = arranged(import_graph())
    width, step, box, tall = 640, 74, 108, 32
    x = {place: width * (index + 0.5) / len(row) for row in rows for index, place in enumerate(row)}
    y = {place: step * (len(rows) - height - 0.5) for height, row in enumerate(rows) for place in row}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {step * len(rows)}" font-family="sans-serif">',
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for line in lines:
        points = [(x[line[0]], y[line[0]] + tall / 2)]
        for place in line[1:-1]:
            points += [(x[place], y[place] - tall / 2), (x[place], y[place] + tall / 2)]
        points.append((x[line[-1]], y[line[-1]] - tall / 2))
        drawn = " ".join(f"{left:.0f},{top:.0f}" for left, top in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="#555" marker-end="url(#tip)"/>')
    for room in ROOMS:
        corner = f'x="{x[room] - box / 2:.0f}" y="{y[room] - tall / 2:.0f}"'
        parts.append(f'<rect {corner} width="{box}" height="{tall}" rx="6" fill="#eef3fb" stroke="#2f5d9b"/>')
        parts.append(f'<text x="{x[room]:.0f}" y="{y[room] + 5:.0f}" text-anchor="middle" font-size="15">{escape(room)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def path_of_a_call() -> list[Call]:
    """The functions of ours that `Shippo(128)(x)` runs on its second call, each once, below the one that calls it first."""
    import torch

    from shippo_ssm import Shippo

    before, threads = sys.getprofile(), torch.get_num_threads()
    torch.set_num_threads(1)
    layer, u = Shippo(128), torch.randn(2, 100, 128)
    layer(u)
    path: list[Call] = []
    inside: list[tuple[str, str]] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        if event == "call":
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            name = frame.f_code.co_qualname.replace(".<locals>", "")
            known = [call[1:] for call in path]
            if (file, name) not in known:
                # Behind all that its caller has called so far.
                caller = known.index(inside[-1]) if inside else -1
                depth = path[caller].depth + 1 if inside else 0
                place = next((at for at in range(caller + 1, len(path)) if path[at].depth < depth), len(path))
                path.insert(place, Call(depth, file, name))
            inside.append((file, name))
        elif event == "return":
            inside.pop()

    sys.setprofile(look)
    try:
        layer(u)
    finally:
        sys.setprofile(before)
        torch.set_num_threads(threads)
    return path


def path_as_text(path: list[Call]) -> str:
    """One line per function, set in by its depth, with its file; then how many there are."""
    lines = [f"{'  ' * call.depth + call.name:<44}{call.file}" for call in path]
    return "\n".join([*lines, "", f"{len(path)} functions in {len({call.file for call in path})} files"])


def page() -> str:
    """docs/architecture.md."""
    graph, rows = import_graph(), arranged(import_graph())[0]
    table = ""
    for room in [room for row in reversed(rows) for room in row if room in graph]:
        document = importlib.import_module(f"shippo_ssm.{room}").__doc__ or ""
        sentence = " ".join(document.split("\n\n")[0].split())
        imports = ", ".join(f"`{other}`" for other in sorted(graph[room])) or "none"
        table += f"| `{room}` | {sentence} | {SECTIONS.get(room, '')} | {imports} |\n"
    return f"{HEAD}{table}{NOUNS}```text\n{path_as_text(path_of_a_call())}\n```\n"


def write(root: Path) -> None:
    """The page and its picture, in the checkout `root`."""
    (root / PAGE).write_text(page(), encoding="utf-8")
    (root / PICTURE).write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    print(path_as_text(path_of_a_call()))
