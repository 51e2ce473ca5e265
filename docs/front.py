"""What the first pages show of results: the marked parts of README.md and docs/index.md, and the picture on both.

A part stands between `<!-- NAME -->` and `<!-- end of NAME -->`. Its numbers come from the committed files of `results/`.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from shippo_ssm.lab.pages import renew

PAGES = {"README.md": "docs/", "docs/index.md": ""}
"""Page -> what links to other pages begin with."""
PICTURE = "docs/_static/front.svg"
TURNS = (24, 48, 96, 192, 384, 768)


def load(root: Path, name: str) -> dict[str, Any]:
    path = root / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def metric(result: dict[str, Any], row: str, key: str) -> float | None:
    """The mean over seeds of one number of an experiment; `None` where it is not there."""
    found = next((entry for entry in result.get("rows", ()) if entry["name"] == row), None)
    return mean(found["metrics"][key]) if found and key in found["metrics"] else None


def shown(value: float | None) -> str:
    """A number in three digits."""
    return "–" if value is None else f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"


def speed(root: Path, to: str) -> str:
    """One sentence: ahead of whom, and how far from what the memory of the machine allows."""
    scan = load(root, "bench")["sections"]["scan"]
    both = {record["name"]: record["both"]["median"] for record in scan["candidates"] if "both" in record}
    ours, shape = both["shippo fused"], scan["shape"]
    return (
        f"One scan with its gradients ({shape['batch']} sequences of {shape['length']}, {shape['groups']} groups, two cores) "
        f"takes {1e3 * ours:.0f} ms: {both['jax.lax.scan'] / ours:.0f} times ahead of `jax.lax.scan`, "
        f"{both['mambapy pscan'] / ours:.0f} times ahead of mambapy's scan of an easier recurrence, and "
        f"{100 * scan['roofs']['both']['seconds'] / ours:.0f} % of the speed at which the machine can stream the operands "
        f"([performance]({to}performance.md)).\n"
    )


def results(root: Path, to: str) -> str:
    """Four results, without a right action and with one."""
    paired, rotation, words = (load(root, name) for name in ("paired", "rotation", "words"))
    body = next(
        row
        for row in load(root, "body-frame")["recordings"]["x-IMU"]["errors"]
        if (row["theta"], row["N"], row["stretch"], row["sensor"]) == (1.0, 32, "turning", "both")
    )
    a5 = metric(words, "none", "prefix_256"), metric(words, "orthogonal", "prefix_256")
    if a5[1] is None:
        a5 = None, metric(load(root, "start"), "words", "words_256")
    rows = [
        (
            "two operations in either order: error of their difference",
            metric(paired, "no-right-r8", "pair_nmse"),
            metric(paired, "selective", "pair_nmse"),
            f"[`shippo run paired`]({to}results.md)",
        ),
        (
            "recall through quarter turns, trained on 24 events, asked at 768: exact",
            metric(rotation, "none", "exact_768"),
            metric(rotation, "split", "exact_768"),
            f"[`shippo run rotation`]({to}results.md)",
        ),
        (
            "products in the group A5, trained on words of 16, asked at 256: accuracy",
            *a5,
            f"[`shippo run {'words' if words else 'start'}`]({to}results.md)",
        ),
        (
            "the last second of a real, turning sensor, in its present frame: error",
            body["fixed"],
            body["lifted"],
            f"[body frame]({to}body-frame.md)",
        ),
    ]
    lines = ["| what | memory that only writes | with a right action | how |", "|---|---|---|---|"]
    lines += [f"| {what} | {shown(without)} | **{shown(with_)}** | {how} |" for what, without, with_, how in rows]
    return "\n".join(lines) + "\n"


def parts(root: Path, to: str) -> dict[str, str]:
    """The generated parts of a page, by name; `to` leads from it to the other pages."""
    return {"speed": speed(root, to), "results": results(root, to)}


def draw(root: Path) -> None:
    """Accuracy against length: recall through quarter turns, and products in S4."""
    from shippo_ssm.lab.plots import OURS, PLAIN, SERIES, new_figure, save

    rotation, beside = load(root, "rotation"), load(root, "beside-mamba")
    figure, (turns, words) = new_figure(9.0, 3.4, 2)
    for row, label, colour in (("split", "SHiPPO", OURS), ("none", "SHiPPO without right action", PLAIN)):
        turns.plot(TURNS, [metric(rotation, row, f"exact_{n}") or 0.0 for n in TURNS], marker="o", color=colour, label=label)
    turns.set_title("a key's value, after quarter turns acted on it", fontsize=10)
    turns.set_xlabel("events (trained on 24)")
    colours = {"SHiPPO": OURS, "SHiPPO without right action": PLAIN, "Mamba": SERIES[2], "Transformer": SERIES[4]}
    for name, runs in beside["runs"].items():
        means = [mean(run["accuracy"][str(n)] for run in runs) for n in beside["lengths"]]
        words.plot(beside["lengths"], means, marker="o", color=colours[name], label=name)
    words.set_title("the product of a word of turns of a cube", fontsize=10)
    words.set_xlabel("length of the word (trained up to 16)")
    for axes, lengths in ((turns, TURNS), (words, beside["lengths"])):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, labels=map(str, lengths))
        axes.set_ylabel("accuracy")
        axes.set_ylim(-0.03, 1.05)
        axes.legend(fontsize=8)
    save(figure, root / PICTURE)


def write(root: Path) -> None:
    """Both pages and the picture, in the checkout `root`."""
    draw(root)
    for name, to in PAGES.items():
        renew(root / name, parts(root, to))
