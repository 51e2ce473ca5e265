"""The generated regions of the page "Architecture": what each folder holds and imports, and what a call of the layer runs.

`python docs/architecture.py` prints the path of a call, forward and backward, and its length.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import shippo_lab
import shippo_ssm

LIBRARY, LAB = Path(shippo_ssm.__file__).parent, Path(shippo_lab.__file__).parent
SOURCE = LIBRARY.parent


class Call(NamedTuple):
    """A function of ours that a call runs: how many of ours it is called through, its file in the package, its name."""

    depth: int
    file: str
    name: str


def module_of(path: Path) -> str:
    """The folder of a package, or the module directly inside the package, that a source file belongs to."""
    package, *inside = path.relative_to(SOURCE).with_suffix("").parts
    return f"{package}.{inside[0]}"


def modules() -> list[str]:
    """All folders and top modules of both packages, `__init__` and private modules excepted."""
    found = {module_of(path) for package in (LIBRARY, LAB) for path in package.rglob("*.py")}
    return sorted(name for name in found if not name.split(".")[1].startswith("_"))


def imported(source: str) -> set[str]:
    """Everything of both packages that `source` imports, lazily or not, as `package.folder`, except for type checkers."""
    names: list[str] = []
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the folder they come from"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    parts = (name.split(".") for name in names)
    return {f"{part[0]}.{part[1]}" for part in parts if part[0] in (LIBRARY.name, LAB.name) and len(part) > 1}


def import_graph() -> dict[str, set[str]]:
    """Folder or top module -> the others that its files import."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for package in (LIBRARY, LAB):
        for path in package.rglob("*.py"):
            if (name := module_of(path)) in graph:
                graph[name] |= imported(path.read_text(encoding="utf-8")) & graph.keys() - {name}
    return graph


def folders(package: str) -> str:
    """Table of a package: each folder or top module, what it holds, what it imports."""
    graph = import_graph()
    table = "| module | what it holds | imports |\n| --- | --- | --- |\n"
    for name in sorted((name for name in graph if name.startswith(f"{package}.")), key=lambda name: (len(graph[name]), name)):
        document = importlib.import_module(name).__doc__ or ""
        sentence = " ".join(document.split("\n\n")[0].split())
        imports = ", ".join(f"`{other.removeprefix(f'{package}.')}`" for other in sorted(graph[name])) or "none"
        table += f"| `{name.removeprefix(f'{package}.')}` | {sentence} | {imports} |\n"
    return table


def decisions() -> str:
    """The dispatcher's decision table, from its docstring."""
    from shippo_ssm import dispatch

    return "".join(f"{line}\n" for line in (dispatch.__doc__ or "").splitlines() if line.startswith("|"))


def recorded(run: Callable[[], object]) -> list[Call]:
    """The functions of ours that `run` calls, each once, below the one that calls it first."""
    path: list[Call] = []
    inside: list[tuple[str, str]] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        # Comprehensions are part of their function; Python 3.12 makes no frames for most of them.
        if not frame.f_code.co_filename.startswith(str(LIBRARY)) or frame.f_code.co_name.endswith(("comp>", "genexpr>")):
            return
        if event == "call":
            file = Path(frame.f_code.co_filename).relative_to(LIBRARY).as_posix()
            name = frame.f_code.co_qualname.replace(".<locals>", "")
            known = [call[1:] for call in path]
            if (file, name) not in known:
                # After everything that its caller has called so far.
                caller = known.index(inside[-1]) if inside else -1
                depth = path[caller].depth + 1 if inside else 0
                place = next((at for at in range(caller + 1, len(path)) if path[at].depth < depth), len(path))
                path.insert(place, Call(depth, file, name))
            inside.append((file, name))
        elif event == "return":
            inside.pop()

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(before)
    return path


def call_paths() -> tuple[list[Call], list[Call]]:
    """What `Shippo(128)(x)` runs forward and what `backward` runs, on one thread, once the kernels are compiled."""
    import torch

    from shippo_ssm import Shippo

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layer, u = Shippo(128), torch.randn(2, 100, 128)
        layer(u).sum().backward()
        outputs: list[torch.Tensor] = []
        forward = recorded(lambda: outputs.append(layer(u)))
        return forward, recorded(lambda: outputs[0].sum().backward())
    finally:
        torch.set_num_threads(threads)


def as_text(path: list[Call]) -> str:
    """One line per function, indented by its depth, with its file; then how many there are."""
    lines = [f"{'  ' * call.depth + call.name:<44}{call.file}" for call in path]
    return "\n".join([*lines, "", f"{len(path)} functions in {len({call.file for call in path})} files"])


def call_path(direction: str) -> str:
    """The path of a call, `forward` or `backward`, as a block of text."""
    return f"```text\n{as_text(call_paths()[direction == 'backward'])}\n```\n"


if __name__ == "__main__":
    print(*(as_text(path) for path in call_paths()), sep="\n\n")
