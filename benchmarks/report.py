"""What a page and a terminal show of benchmark runs; `python -m benchmarks.report` prints the committed ones, draws the figure.

Data path: `results/bench.json`, and `results/bench-*.json` of other machines -> `machines`, `targets`, `details` as Markdown,
which `docs/fill.py` puts into `docs/performance.md`, and `figure(run, path)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_line
from benchmarks.tables import Table, against_table, tables
from shippo_lab.harness.plots import legend_below

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "bench.json"
FIGURE = ROOT / "docs" / "_static" / "performance.svg"
# Beginnings of the titles of the tables that the page shows; `python -m benchmarks.report` prints all of them.
SHOWN = ("One scan, B16 T512", "Peak memory", "Training step", "Decoding")


def machines(*runs: dict[str, Any]) -> str:
    """Where and when the runs were made."""
    return "".join(f"- {_measured(run)}.\n" for run in runs)


def targets(*runs: dict[str, Any]) -> str:
    """The table of targets, with what each run reached."""
    return "\n".join(_body(tables(*runs)[0]))


def details(*runs: dict[str, Any]) -> str:
    """The tables that most readers ask for, folded: of the first run several, of others the scan; then what failed."""
    parts = []
    for run in runs:
        wanted = SHOWN if run is runs[0] else SHOWN[:1]
        parts.append(f"### {run['machine']['simd']}, `shippo bench{' --full' if run['mode'] == 'full' else ''}`\n")
        shown = (table for table in tables(run)[1:] if table.title.startswith(wanted) and "one thread" not in table.title)
        parts += [_folded(table) for table in shown]
        parts += [f"Failed: {name}: {error.splitlines()[-1]}\n" for name, error in run["errors"].items()]
    return "\n".join(parts)


def _measured(run: dict[str, Any]) -> str:
    """Where and when."""
    again = [f"{name} on {date}" for name, date in run.get("again", {}).items()]
    after = f". Measured again by itself, after the run: {', '.join(again)}" if again else ""
    return f"{machine_line(run['machine'])}; on {run['date']}{after}"


def print_run(run: dict[str, Any]) -> None:
    """The tables of a run on the terminal."""
    _show(run["machine"], tables(run))


def print_against(compared: dict[str, Any]) -> None:
    """A comparison with a commit on the terminal."""
    _show(compared["machine"], [against_table(compared)])


def _show(machine: dict[str, Any], shown_tables: list[Table]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    console.print(machine_line(machine))
    for table in shown_tables:
        columns = len(table.head) - table.page_only
        shown = RichTable(*table.head[:columns], title=table.title, title_justify="left")
        for row in table.rows:
            shown.add_row(*row[:columns])
        console.print(shown)
        for note in table.notes:
            console.print(note, style="dim")


def figure(run: dict[str, Any], path: Path) -> None:
    """Two panels, one below the other: time over the roof of each candidate, and time per sequence against T."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "shippo"
    drawing, (left, right) = plt.subplots(2, 1, figsize=(7, 9), height_ratios=(3, 2), layout="constrained")
    records = [record for record in run["sections"]["scan"]["candidates"] if record["status"] == "ok"]
    records.sort(key=lambda record: record.get("both", record["forward"])["median"], reverse=True)
    for offset, scan_pass, label in ((0.2, "forward", "forward"), (-0.2, "both", "forward+backward")):
        drawn = [(index, record) for index, record in enumerate(records) if scan_pass in record]
        places = [index + offset for index, _ in drawn]
        left.barh(places, [record[scan_pass]["over_roof"] for _, record in drawn], height=0.38, label=label)
    left.set_yticks(range(len(records)), [record["name"] for record in records])
    left.set_xscale("log")
    left.axvline(1, color="black", linewidth=1)
    left.set_xlabel(f"time over the roof (active: {run['sections']['scan']['roofs']['forward']['active']} forward)")
    legend_below(left)
    sweep = run["sections"].get("sweeps")
    if sweep is not None:
        for scan_pass, label in (("forward", "forward"), ("both", "forward+backward")):
            points = sweep["constant_tokens"]
            lengths = [point["shape"]["length"] for point in points]
            seconds = [point[scan_pass]["median"] / point["shape"]["batch"] for point in points]
            right.loglog(lengths, seconds, marker="o", label=f"{label}, T^{sweep['exponent'][scan_pass]:.3f}")
        right.set_xlabel("T")
        right.set_ylabel("seconds per sequence")
        legend_below(right)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def load(results: Path = RESULTS) -> list[dict[str, Any]]:
    """The run in a file, and those on other machines beside it."""
    beside = sorted(results.parent.glob(f"{results.stem}-*.json"))
    return [json.loads(path.read_text()) for path in (results, *beside)]


def _body(table: Table) -> list[str]:
    lines = [_line(table.head), _line(("---",) * len(table.head)), *map(_line, table.rows), ""]
    for note in table.notes:
        lines += [note, ""]
    return lines


def _folded(table: Table) -> str:
    """A table that opens when its title is clicked; a heading inside would cut the fold in two."""
    return "\n".join(["<details>", f"<summary>{table.title}</summary>", "", *_body(table), "</details>", ""])


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    for committed in load():
        print_run(committed)
    figure(load()[0], FIGURE)
