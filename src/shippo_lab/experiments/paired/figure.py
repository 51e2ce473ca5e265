"""Pictures of the paired task: the paper's main figure in four panels, and the errors of the demonstration as they fall."""

from pathlib import Path
from typing import Any

from shippo_lab.harness.experiment import Result, paper_row, paper_tables
from shippo_lab.harness.plots import BOUND, OURS, PAPER, PLAIN, SERIES, Axes, blank, legend_below, new_figure, save

TABLES = paper_tables("paired", "right-transport")


def _token(axes: Axes, x: float, y: float, text: str, color: str, width: float = 0.24) -> None:
    from matplotlib.patches import FancyBboxPatch

    style: dict[str, Any] = {"boxstyle": "round,pad=0.012", "facecolor": color, "edgecolor": "none"}
    axes.add_patch(FancyBboxPatch((x - width / 2, y - 0.06), width, 0.12, **style))
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color="white")


def _schematic(axes: Axes) -> None:
    blank(axes)
    a, b = (r"OP$_a(\alpha)$", BOUND), (r"OP$_b(\beta)$", PLAIN)
    for y, first, second, answer in ((0.72, a, b, r"$v^\top R_aR_b$"), (0.44, b, a, r"$v^\top R_bR_a$")):
        _token(axes, 0.13, y, "WRITE $v$", OURS)
        _token(axes, 0.42, y, *first)
        _token(axes, 0.71, y, *second)
        axes.text(0.86, y, answer, va="center", fontsize=10)
    axes.text(0.5, 0.2, r"$\Delta=v^\top(R_aR_b-R_bR_a)=\alpha\beta\,v_1e_3^\top$", ha="center", fontsize=11)
    axes.text(0.5, 0.06, "operations write nothing: only a right action\ncan move what is stored", ha="center", fontsize=8)


def _by_rank(axes: Axes, result: Result, key: str, label: str) -> None:
    found = [row for name, row in result.rows.items() if name.startswith("no-right")]
    ranks = [row.config["rank"] for row in found]
    axes.errorbar(ranks, [row.mean(key) for row in found], [row.std(key) for row in found], fmt="o-", color=OURS, label="ours")
    paper, spread = zip(*(paper_row(TABLES, row.name)[key] for row in found))
    axes.errorbar(ranks, paper, [std or 0.0 for std in spread], fmt="s--", color=PAPER, label="paper", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, map(str, ranks))
    axes.set(xlabel="write rank r", ylabel=label)


def main_evidence(result: Result, path: Path) -> None:
    """The paper's main figure: task, NMSE by rank, pair NMSE by rank, right actions with and without R -> I."""
    blind = [name for name in result.rows if name.startswith("no-right")]
    right = [row for row in result.rows.values() if "identity_pair_nmse" in row.metrics]
    if not blind or not right:
        raise ValueError(f"{result.source} lacks no-right or right-transport rows; run all rows with `shippo run paired`")
    figure, (task, ordinary, pair, transported) = new_figure(8, 6, 2, 2)
    _schematic(task)
    _by_rank(ordinary, result, "nmse", "Eval NMSE")
    bound = result.rows[blind[0]].mean("order_averaged_bound")
    ordinary.axhline(bound, color=BOUND, ls=":", label="order-averaged bound")
    ordinary.set_yscale("log")
    legend_below(ordinary)
    _by_rank(pair, result, "pair_nmse", r"Pair $\Delta$ NMSE")
    pair.set_ylim(0, 1.2)
    legend_below(pair)
    kinds = (-0.12, "pair_nmse", OURS, "trained"), (0.12, "identity_pair_nmse", PLAIN, r"$R_t\to I$")
    for offset, key, color, label in kinds:
        for place, row in enumerate(right):
            transported.plot([place + offset] * 2, [min(row.metrics[key]), max(row.metrics[key])], color=color, lw=1)
            transported.plot(place + offset, row.mean(key), "o", color=color, label=None if place else label)
    for place, row in enumerate(right):
        if paper := paper_row(TABLES, row.name).get("pair_nmse"):
            transported.plot(place - 0.12, paper[0], "s", color=PAPER, markersize=4, label=None if place else "paper")
    transported.set(yscale="log", ylabel=r"Pair $\Delta$ NMSE")
    names = [row.label.replace("SHiPPO ", "").replace(" (", "\n(") for row in right]
    transported.set_xticks(range(len(right)), names, fontsize=7)
    legend_below(transported, 3)
    for axes, letter in zip((task, ordinary, pair, transported), "abcd"):
        axes.set_title(f"({letter})", loc="left", fontsize=10)
    save(figure, path)


def falling_errors(result: Result, path: Path) -> None:
    """The task, and the errors of every row while it trains: of the answer, and of the order, which one cannot learn."""
    figure, (task, *panels) = new_figure(13.5, 3.8, 3)
    _schematic(task)
    for axes, key, label in zip(panels, ("nmse", "pair_nmse"), ("Error of the answer", "Error of ab against ba")):
        for row, color in zip(result.rows.values(), SERIES):
            steps, curves = row.curves["step"], row.curves[key]
            axes.plot(steps, [sum(seeds) / len(seeds) for seeds in curves], color=color, label=row.label)
            axes.fill_between(steps, list(map(min, curves)), list(map(max, curves)), color=color, alpha=0.2)
        axes.set(yscale="log", xlabel="training step", ylabel=label)
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    save(figure, path)
