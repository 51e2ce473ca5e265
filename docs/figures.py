"""Figures of the pages, from the committed files of `results/`."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from docs.fill import MEMORIES, lab_pages, load, rows_of

STATIC = "docs/_static"
TURNS = (24, 48, 96, 192, 384, 768)


def front(root: Path) -> None:
    """Accuracy against length: recall through quarter turns, and products in S4."""
    from shippo_lab.harness.plots import OURS, PLAIN, SERIES, new_figure, save

    rotation, beside = rows_of(root, "rotation"), load(root, "beside-mamba")
    figure, (turns, words) = new_figure(6.5, 5.6, rows=2)
    for row, colour in (("split", OURS), ("none", PLAIN)):
        turns.plot(TURNS, [mean(rotation[row]["metrics"][f"exact_{n}"]) for n in TURNS], marker="o", color=colour)
    turns.set_title("a key's value, after quarter turns acted on it", fontsize=10)
    turns.set_xlabel("events (trained on 24)")
    colours = {"SHiPPO": OURS, "SHiPPO without right action": PLAIN, "Mamba": SERIES[2], "Transformer": SERIES[4]}
    for name, found in beside["tasks"]["words"].items():
        means = [mean(run["scores"][str(n)] for run in found["runs"]) for n in beside["lengths"]]
        words.plot(
            beside["lengths"], means, marker="o", color=colours[name], label=name, linestyle="--" if name == "Mamba" else "-"
        )
    words.set_title("the product of a word of turns of a cube", fontsize=10)
    words.set_xlabel("length of the word (trained up to 16)")
    for axes, lengths in ((turns, TURNS), (words, beside["lengths"])):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, labels=map(str, lengths))
        axes.set_ylabel("accuracy")
        axes.set_ylim(-0.03, 1.05)
    figure.legend(*words.get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=2, frameon=False)
    save(figure, root / STATIC / "front.svg")


def body_frame(root: Path) -> None:
    """What is remembered at one moment, and errors over age and speed."""
    from shippo_lab.harness.plots import BOUND, OURS, PLAIN, new_figure, save

    colours = {"fixed": PLAIN, "lifted": OURS, "limit": BOUND}
    result = load(root, "body-frame")
    figure, (axes,) = new_figure(7.5, 3.2)
    ages, lines = result["trace"]["ages"], result["trace"]["lines"]
    axes.plot(ages, lines["measured"], ":", color="0.5", label="as measured, in the body frame of then")
    axes.plot(ages, lines["wanted"], "-", color="black", lw=2.5, label="wanted: in the body frame of now")
    for name in MEMORIES:
        axes.plot(ages, lines[name], "--" if name == "limit" else "-", color=colours[name], label=MEMORIES[name])
    axes.invert_xaxis()
    axes.set_xlabel("seconds ago")
    axes.set_ylabel("field, first axis")
    # Below the axes: a legend must not cover curves.
    figure.legend(loc="outside lower center", fontsize=8, ncols=3)
    save(figure, root / STATIC / "body-frame-past.svg")
    figure, panels = new_figure(6.5, 5.6, rows=2)
    found = result["recordings"]["x-IMU"]
    for name in MEMORIES:
        style = "--" if name == "limit" else "-"
        panels[0].plot(
            [row["age"] for row in found["ages"]],
            [row[name] for row in found["ages"]],
            style,
            color=colours[name],
            label=MEMORIES[name],
        )
        middle = [(row["from"] + row["to"]) / 2 for row in found["speeds"]]
        panels[1].plot(middle, [row[name] for row in found["speeds"]], style, marker="o", color=colours[name])
    panels[0].set_xlabel("age of what is remembered, seconds")
    panels[1].set_xlabel("mean turning speed, degrees per second")
    for axes, title in zip(panels, ("x-IMU, turning stretches, 2 s, N = 16", "x-IMU, by speed, 1 s, N = 16")):
        axes.set_title(title, fontsize=9)
        axes.set_ylabel("relative error")
        axes.set_ylim(0)
    figure.legend(loc="outside lower center", fontsize=8, ncols=3)
    save(figure, root / STATIC / "body-frame-errors.svg")


def draw(root: Path) -> None:
    """All figures of the pages but that of the benchmarks, which `python -m benchmarks.report` draws."""
    front(root)
    body_frame(root)
    for name, picture in lab_pages(root).pictures().items():
        picture(root / STATIC / name)
