"""One way to draw: a figure without `pyplot`, so that drawing needs no display and leaves no global state behind.

matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, PAPER, PLAIN, BOUND = "#1b6ca8", "#8c8c8c", "#c44e52", "#4c9f70"
SERIES = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee")
"""Colours of models that stand side by side."""


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure in inches and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save(figure: Figure, path: Path) -> None:
    """Write a picture; its ending chooses the format. The same picture is the same file."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "shippo"}):
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def blank(axes: Axes) -> None:
    """A drawing board: coordinates from 0 to 1, no axes shown."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
