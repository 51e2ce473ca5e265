"""The page "Train it on your own data" as a notebook, and its picture, which the page's own code draws.

`python docs/generate.py` writes the notebook. `python docs/notebook.py` runs the page and keeps the picture of the losses.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

PAGE, NOTEBOOK, PICTURE = "docs/train-your-own.md", "examples/train_your_own.ipynb", "docs/_static/train-your-own.svg"


def cells(page: str) -> list[tuple[str, str]]:
    """(kind, text) of the page's parts: "markdown", and "code" for its Python blocks."""
    found = []
    for index, part in enumerate(re.split(r"^```python\n(.*?)^```\n", page, flags=re.DOTALL | re.MULTILINE)):
        # Links to other pages and the picture stay behind: the notebook draws its own.
        text = part if index % 2 else re.sub(r"^!\[.*\n|\{doc\}", "", part, flags=re.MULTILINE)
        if text.strip():
            found.append(("code" if index % 2 else "markdown", text.strip()))
    return found


def notebook(root: Path) -> str:
    """The notebook, without outputs."""
    made: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells((root / PAGE).read_text(encoding="utf-8"))):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"part-{number}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def write(root: Path) -> None:
    """The notebook, in the checkout `root`."""
    (root / NOTEBOOK).write_text(notebook(root), encoding="utf-8")


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        namespace: dict[str, Any] = {"__name__": "notebook"}
        for kind, text in cells((here / PAGE).read_text(encoding="utf-8")):
            if kind == "code":
                exec(compile(text, kind, "exec"), namespace)
        (here / PICTURE).write_bytes(Path("loss.svg").read_bytes())
