"""Figures without `pyplot`: no display, no global state; matplotlib is imported when a picture is drawn.

`overview` draws the idea itself, the lift from HiPPO to SHiPPO.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    # For annotations alone.
    Axes = Figure = Any

OURS, PAPER, PLAIN, BOUND = "#1b6ca8", "#8c8c8c", "#c44e52", "#4c9f70"
SERIES = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee")


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure in inches and its axes, row by row; up to 8 inches wide its letters can be read on a telephone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def legend_below(axes: Axes, columns: int = 2) -> None:
    """A legend under the label of the x axis: it covers no curve."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=8, ncols=columns, frameon=False)


def save(figure: Figure, path: Path) -> None:
    """Write a picture; its ending chooses the format. The same picture is the same file."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "shippo"}):
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def blank(axes: Axes) -> None:
    """A drawing board: coordinates from 0 to 1, no axes shown."""
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_axis_off()


PANELS = {
    "HiPPO: fixed coordinates": r"$\dot C=A_LC+B_Lf^\top$",
    "SHiPPO: the frame moves": r"$\dot C=A_LC+B_Lf^\top+C\,A_R$",
    "Selective cell: small groups, exact scan": r"$H_t=L_tH_{t-1}R_t+U_t,\quad y_t=c_t^\top H_t$",
}


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = "black") -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": color, "lw": 1.2})


def overview(path: Path) -> None:
    """The lift: HiPPO in fixed channel coordinates, SHiPPO in a moving frame, the selective cell. The frames are computed."""
    import torch
    from matplotlib.patches import Rectangle

    figure, panels = new_figure(6.5, 8, rows=3)
    for axes, (title, equation) in zip(panels, PANELS.items()):
        blank(axes)
        axes.set_title(title, fontsize=12)
        axes.text(0.5, 0.06, equation, ha="center", fontsize=13)
    turn = torch.tensor([[0.0, 0.35], [-0.35, -0.12]])
    for axes, generator in ((panels[0], torch.zeros(2, 2)), (panels[1], turn)):
        for step in range(5):
            frame = torch.linalg.matrix_exp(step * generator)
            x, y = 0.12 + 0.19 * step, 0.55
            for row, color in zip(frame.tolist(), (OURS, PLAIN)):
                _arrow(axes, (x, y), (x + 0.12 * row[0], y + 0.26 * row[1]), color)
            axes.text(x, 0.3, f"$t_{step}$", ha="center", fontsize=10)
        axes.text(0.5, 0.9, "channel frame of the stored history", ha="center", fontsize=9)
    cell = panels[2]
    for x, name in ((0.16, "t-1"), (0.84, "t")):
        for row in range(4):
            for column in range(3):
                corner, alpha = (x - 0.09 + 0.06 * column, 0.42 + 0.08 * row), 0.25 + 0.15 * ((row + 2 * column) % 4)
                cell.add_patch(Rectangle(corner, 0.055, 0.07, facecolor=OURS, alpha=alpha, edgecolor="white"))
        cell.text(x, 0.34, f"$H_{{{name}}}$", ha="center", fontsize=11)
    _arrow(cell, (0.28, 0.58), (0.72, 0.58))
    cell.text(0.5, 0.63, r"$L_t\,\cdot\,R_t$", ha="center", fontsize=12)
    cell.text(0.5, 0.48, r"$+\;b_tx_t^\top$", ha="center", fontsize=11)
    cell.text(0.5, 0.88, "left: diagonal decay of N orders; right: action on P channels", ha="center", fontsize=9)
    save(figure, path)
