"""The benchmark in the report: what was to be reached, and one scan beside its peers with the roof drawn in.

Reads the JSON of `shippo bench`: a file that was named, else `runs/bench.json` here, else the committed
`results/bench.json` that comes with the package. Bars are logarithmic: a tenth of the width is a fixed factor in time, and the
dashed line is the least time the machine allows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from shippo_ssm.lab.experiment import blame
from shippo_ssm.lab.report.html import missing, table, text
from shippo_ssm.lab.store import RUNS, committed, read_json

PASSES = {"forward": "Forward", "both": "Forward and backward"}
LETTERS = {"batch": "B", "length": "T", "groups": "G", "order": "N", "width": "P"}


def find(bench: Path | None) -> Path | None:
    """The benchmark file to show, or `None`."""
    if bench is not None:
        return bench
    places = (RUNS / "bench.json", committed() / "bench.json")
    return next((place for place in places if place.exists()), None)


def section(bench: Path | None) -> str:
    """The whole section; says how to make the file where there is none."""
    lead = (
        "<p>A speed counts only if the output and every gradient agree with the reference loop in float64. The roof is the "
        "time that moving the operands once, or the multiply-adds, takes at the rates this machine reaches.</p>"
    )
    path = find(bench)
    if path is None:
        return lead + missing(
            "No benchmark here yet; make it with `shippo bench --out runs/bench.json` (two minutes; `--full`: a quarter of an "
            "hour)."
        )
    run = read_json(path)
    with blame(path):
        machine = run["machine"]
        facts = f"{machine['processor']}, {machine['cores']} cores, {machine['simd']}; {run['mode']} mode, {run['date']}."
        return f'{lead}<p class="note">{text(facts)}</p>' + _verdict(run["verdict"]) + _scan(run["sections"].get("scan"))


def _verdict(targets: list[dict[str, Any]]) -> str:
    rows = []
    for row in targets:
        sign = "at least" if row["at_least"] else "at most"
        reached = "–" if row["reached"] is None else f"{row['reached']:.3g}"
        mark = {"aim": "holds", "must": "holds", "missed": "fails"}.get(row["result"], "note")
        words = {"aim": "reaches the aim", "must": "reaches what it must", "missed": "falls short"}.get(
            row["result"], "not measured"
        )
        wanted = [f"{sign} {row[key]:g}" for key in ("must", "aim")]
        rows.append([text(row["what"]), reached, *map(text, wanted), f'<span class="{mark}">{words}</span>'])
    return table("What the engine was to reach", ["Ratio inside one run", "Reached", "Must", "Aim", ""], rows)


def _scan(scan: dict[str, Any] | None) -> str:
    if scan is None:
        return ""
    shape = " ".join(f"{letter}{scan['shape'][name]}" for name, letter in LETTERS.items())
    parts = [f"<h3>One scan, {text(shape)}, {scan['threads']} threads</h3>"]
    for key, label in PASSES.items():
        records = [record for record in scan["candidates"] if record["status"] == "ok" and key in record]
        if not records:
            continue
        records.sort(key=lambda record: record[key]["median"])
        roof = scan["roofs"][key]
        bars = "".join(_bar(record, record[key]["median"], roof["seconds"], records[-1][key]["median"]) for record in records)
        limit = (
            f"The dashed line is the roof, {1e3 * roof['seconds']:.1f} ms, set by {text(roof['active'])}; logarithmic scale."
        )
        parts.append(f'<h4>{label}</h4><div class="bars">{bars}</div><p class="note">{limit}</p>')
    return "".join(parts)


def _bar(record: dict[str, Any], seconds: float, roof: float, longest: float) -> str:
    """One candidate; the axis runs from a third of the roof to the slowest."""
    low = roof / 3
    share = [100 * math.log(max(value, low) / low) / math.log(longest / low) for value in (seconds, roof)]
    ours, kind = (" ours", "") if record["kind"] == "ours" else ("", f" <small>{text(record['kind'])}</small>")
    time, times = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (1e3 * seconds, seconds / roof))
    return (
        f'<div class="bar{ours}"><span>{text(record["name"])}{kind}</span><span class="track">'
        f'<span class="fill" style="width:{share[0]:.1f}%"></span>'
        f'<span class="roof" style="left:{share[1]:.1f}%"></span></span>'
        f'<span class="value">{time} ms, {times} × the roof</span></div>'
    )
