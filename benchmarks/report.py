"""The performance page and its figure, from the JSON of runs: `python -m benchmarks.report`.

Data path: `results/bench.json`, and `results/bench-*.json` of other machines -> `render(run, *others)` -> docs/performance.md,
and `figure(run, path)` -> the figure beside it. The page is a function of the files alone, so that a test can tell whether
they still belong together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_line
from benchmarks.tables import Table, against_table, tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "bench.json"
PAGE = ROOT / "docs" / "performance.md"
FIGURE = ROOT / "docs" / "_static" / "performance.svg"

_HEAD = """# Performance

How fast the scan and the models are, beside what one would use instead and what the machine allows. All of it is one run of
`shippo bench {mode}` on each machine; this page is made from their files, `results/bench*.json`, by
`python -m benchmarks.report`.

**Machine.** {machine}.
"""

_FIGURE = "![Times of the candidates over the roof, and growth with T](_static/performance.svg)\n"

_LIMITS = """## What holds it back

- **The scan at P = 4** is bound by memory with AVX-512, and with AVX2 as much by arithmetic: on two multiply-add units of eight
  lanes, counted, with N = 32 a forward cell is 64 vector multiply-adds for H R, 48 for decay, source and answer and about 32
  for the exponentials, 72 cycles at best, beside 356 bytes. That is as long as a copy of those bytes takes, so the roof asks
  for both at once with nothing lost. The operands are asked for sixteen cells ahead, so that they lie in the first cache when
  they are used; other distances and levels of the prefetch, and blocks of groups whose states stay in the first cache, are no
  better.
- **At P = 8** a product is two tiles of four columns; the same cell takes 352 vector multiply-adds, 176 cycles.
- **The moving frame** runs the backward pass of rotations at P = 8 and 16 (the table above has both ways). At P = 4 it gains
  nothing, and in the forward pass it was as slow or slower at every width: a P x P product per position, and the proof that the
  right actions are rotations, cost about what they save there. What is no rotation is found out and takes the direct way; a
  frame for it would need an inverse per position, which costs as much as the product with the state that it would save.
- **bfloat16 operands** save bytes, not arithmetic, and the backward pass is arithmetic for the most part: half the bytes cannot
  take a quarter of its time. Conversions come on top: a widening load and a shift, and a rounding that is one instruction with
  AVX512_BF16 and eight of integer arithmetic elsewhere. What is splat number by number is widened a position ahead: a number
  that was stored a moment ago as part of a vector is slow to load.
- **expm** writes its results through the caches: stores past them were tried, of half and of whole lines, and were slower.
"""

_METHOD = """## How it is measured

- **Correctness first.** Every output and every gradient is held against the reference loop in float64; what is off by an RMS
  error ratio of more than 2e-5 gets no time. In sweeps, one row and two groups are checked at every shape, long sequences on
  their first and last 4,096 positions; a whole model against itself in float64 on the reference scan, to 1e-3, on two sequences
  of 48; decoding against the same model's whole forward pass in float32. The quick mode, and the run on one thread, check the
  first and the last row of the batch, and so not the gradient of the drift, which is a sum over rows.
- **The roof** is max(compulsory bytes / bandwidth, multiply-adds / rate). Forward bytes per position and group are step, write,
  read, value, right and y; the backward pass reads them again with dy and writes their gradients. The bandwidth is that of a
  compiled copy with the same reads and writes, on buffers of the operands' sizes that were touched before, on the same threads,
  in turn with the candidates. The multiply-adds are those of the cheaper of two ways, the recurrence as written and the moving
  frame; the rate is that of the best matrix product on one thread, times the threads.
- **Times** are taken in turn, candidate after candidate and round after round, once everything has been called; inputs lie
  ready, compilation is not counted, allocating the results is. Discretisation and frames are inside. A slow candidate takes
  part in fewer rounds; one that compiles nothing and whose checked call takes longer than all rounds may is not called again.
  The sweep of T cuts the same tokens into sequences of every length and takes the lengths in turn.
- **bfloat16 operands** are those of the scan but step and drift; results in bfloat16 are held to 1e-2 against the reference on
  the same rounded operands.
- **A training step's own matrix products** are those of its forward and backward pass, noted once and done again by themselves
  on operands of the same sizes and layouts.
- **Another commit** (`shippo bench --against REV`) is checked out beside this one; both packages run under this measuring code,
  in processes that take turns.
- **Threads.** Each thread count is a process of its own, bound to that many cores, so that XLA keeps to it too.
- Ratios hold inside one run; absolute times are those of this machine on that day.
"""


def render(run: dict[str, Any], *others: dict[str, Any]) -> str:
    """The performance page as Markdown: one run in full, and what runs on other machines have to add."""
    mode = "--full" if run["mode"] == "full" else ""
    command = f"shippo bench {mode}".strip()
    head = _HEAD.replace("`shippo bench {mode}`", f"`{command}`")
    parts = [head.format(machine=_measured(run))]
    parts += [f"**Another machine.** {_measured(other)}.\n" for other in others]
    parts.append(_FIGURE)
    headline, *rest = tables(run, *others)
    parts.append(_markdown(headline))
    parts.append("## Everything that was measured\n")
    parts += [_folded(table) for table in rest]
    for other in others:
        parts.append(f"## The same with {other['machine']['simd']}\n")
        parts += [_folded(table) for table in tables(other)[1:]]
    failures = {name: error for one in (run, *others) for name, error in one["errors"].items()}
    if failures:
        failed = "\n".join(f"- {name}: {error.splitlines()[-1]}" for name, error in failures.items())
        parts.append(f"## Sections that failed\n\n{failed}\n")
    parts += [_LIMITS, _METHOD]
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
    """Two panels: time over the roof of each candidate, and time per sequence against T."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "shippo"
    drawing, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), width_ratios=(3, 2), layout="constrained")
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
    left.legend(loc="upper right")
    sweep = run["sections"].get("sweeps")
    if sweep is not None:
        for scan_pass, label in (("forward", "forward"), ("both", "forward+backward")):
            points = sweep["constant_tokens"]
            lengths = [point["shape"]["length"] for point in points]
            seconds = [point[scan_pass]["median"] / point["shape"]["batch"] for point in points]
            right.loglog(lengths, seconds, marker="o", label=f"{label}, T^{sweep['exponent'][scan_pass]:.3f}")
        right.set_xlabel("T")
        right.set_ylabel("seconds per sequence")
        right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def load(results: Path = RESULTS) -> list[dict[str, Any]]:
    """The run in a file, and those on other machines beside it."""
    beside = sorted(results.parent.glob(f"{results.stem}-*.json"))
    return [json.loads(path.read_text()) for path in (results, *beside)]


def main(results: Path = RESULTS, page: Path = PAGE, drawing: Path = FIGURE) -> None:
    """Write page and figure from a file of results."""
    runs = load(results)
    page.write_text(render(*runs))
    figure(runs[0], drawing)


def _body(table: Table) -> list[str]:
    lines = [_line(table.head), _line(("---",) * len(table.head)), *map(_line, table.rows), ""]
    for note in table.notes:
        lines += [note, ""]
    return lines


def _markdown(table: Table) -> str:
    return "\n".join([f"## {table.title}", "", *_body(table)])


def _folded(table: Table) -> str:
    """A table that opens when its title is clicked; a heading inside would cut the fold in two."""
    return "\n".join(["<details>", f"<summary>{table.title}</summary>", "", *_body(table), "</details>", ""])


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write docs/performance.md and its figure from the JSON of a run.")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args()
    main(options.json, options.page, options.figure)
