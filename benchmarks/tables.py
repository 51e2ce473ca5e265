"""The tables of a run: rows of text, read from its dictionary, shared by the terminal and the performance page.

Data path: the dictionary of `run.measure` (or of its JSON) -> `tables(run)`, a list of `Table` with a
title, a head, rows and notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TORCH = "torch.linalg.matrix_exp"
SIZES = {"order": "N", "width": "P", "groups": "G", "length": "T"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under a head; numbers are already written."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()
    page_only: int = 0
    """Last columns that are too wide for a terminal."""


def tables(run: dict[str, Any], *others: dict[str, Any]) -> list[Table]:
    """Every table that the run has the figures for; the first has those of runs on other machines beside them."""
    sections = run["sections"]
    made = [verdict_table(run, *others)]
    for key in ("scan", "scan_one_thread", "scan_odd_length"):
        if key in sections:
            made.append(scan_table(sections[key]))
    if sections.get("widths"):
        made.append(width_table(sections["widths"]))
    if sections.get("halves"):
        made.append(halves_table(sections["halves"]))
    if "memory" in sections:
        made.append(memory_table(sections["memory"]))
    if "sweeps" in sections:
        made += sweep_tables(sections["sweeps"])
    made += [expm_table(sections[key]) for key in ("expm", "expm_8", "expm_16", "expm_one_thread") if key in sections]
    made += [training_table(sections[key]) for key in ("training", "training_one_thread") if key in sections]
    made += [decoding_table(sections[key]) for key in ("decoding", "decoding_batch_16") if key in sections]
    if "projection" in sections:
        rows = [(name.removesuffix("_s").replace("_", " "), f"{value:.2f}") for name, value in sections["projection"].items()]
        made.append(Table(title="Compression of 100,000 samples of 16 channels, N = 64", head=("run", "seconds"), rows=rows))
    if "compilation" in sections:
        made.append(compilation_table(sections["compilation"]))
    if "against" in run:
        made.append(against_table(run["against"]))
    return made


def verdict_table(*runs: dict[str, Any]) -> Table:
    """Required, goal, and what each run reached."""
    rows = []
    for beside in zip(*(run["verdict"] for run in runs), strict=True):
        first = beside[0]
        sign = "≥" if first["at_least"] else "≤"
        cells = [first["what"], f"{sign} {first['required']:g}", f"{sign} {first['goal']:g}"]
        for row in beside:
            reached = "–" if row["reached"] is None else f"{row['reached']:.3g}"
            cells += [reached, row["result"] if row["reached"] is not None else f"not measured: {row['why']}"]
        rows.append(tuple(cells))
    names = [f", {run['machine']['simd']}" for run in runs] if len(runs) > 1 else [""]
    head = ("what", "required", "goal", *(word for name in names for word in (f"reached{name}", "status")))
    note = (
        "Ratios inside one run, B16 T512 N32, G P = 256, P = 4 where a row says nothing else, float32, two threads; where a row"
        " names several widths, the worst of them."
    )
    return Table(title="Targets", head=head, rows=rows, notes=(note,))


def compilation_table(section: dict[str, Any]) -> Table:
    """Kernels of every call in one row."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel in section["kernels"]:
        found.setdefault(kernel["of"], []).append(kernel)
    rows = []
    for name, kernels in found.items():
        slowest = max(kernels, key=lambda kernel: kernel["seconds"])
        seconds = [kernel["seconds"] for kernel in kernels]
        rows.append((name, str(len(kernels)), f"{sum(seconds):.1f}", f"{max(seconds):.1f}", slowest["kernel"].strip("_")))
    note = (
        "Both passes of each, in one process with nothing on disk, in this order: a kernel that an earlier row needed is not"
        " compiled again. Machine code is kept, so this is waited for once per machine and version."
    )
    head = ("first call of", "kernels", "seconds", "the slowest", "which is")
    return Table(title="Compiling the kernels", head=head, rows=rows, notes=(note,))


def scan_table(section: dict[str, Any]) -> Table:
    """All candidates of one scan."""
    ours = next((record for record in section["candidates"] if record["name"] == "shippo fused"), {})
    rows = []
    for record in section["candidates"]:
        if record["status"] == "full mode only":
            continue
        if record["status"] == "ok":
            figures = [_time(record.get(scan_pass)) for scan_pass in ("forward", "both")]
            figures += [_times_ours(record, ours, scan_pass) for scan_pass in ("forward", "both")]
            error = max(max(errors.values()) for errors in record["errors"].values())
            figures.append(f"{error:.0e}")
        else:
            figures = [record["status"], "", "", "", ""]
        rows.append((record["name"], *figures, _does(record)))
    roofs = section["roofs"]
    for scan_pass, label in (("forward", "forward"), ("both", "forward+backward")):
        limit = roofs[scan_pass]
        over = ours.get(scan_pass, {}).get("over_roof")
        times = "" if over is None else f"; shippo fused takes {over:.2f} times as long"
        rows.append((f"roof, {label}", *_roof_cells(scan_pass, limit), f"{limit['active']} is the active term{times}"))
    notes = [
        f"Roof of the {label}: {limit['bytes'] / 1e6:.0f} MB at {limit['bandwidth'] / 1e9:.1f} GB/s are "
        f"{limit['bandwidth_seconds'] * 1e3:.1f} ms; {limit['fma'] / 1e9:.2f} G multiply-adds at "
        f"{limit['fma_rate'] / 1e9:.0f} G/s are "
        f"{limit['fma_seconds'] * 1e3:.1f} ms."
        for limit, label in ((roofs["forward"], "forward pass"), (roofs["both"], "forward and backward pass"))
    ]
    notes.append(
        "Times are medians in ms with the 20 % and 80 % quantiles; error is the largest RMS error ratio of y and all gradients."
    )
    notes += [
        f"{record['name']}: {record['status']}, {record['reason']}."
        for record in section["candidates"]
        if record["status"] not in ("ok", "full mode only")
    ]
    left_out = [record["name"] for record in section["candidates"] if record["status"] == "full mode only"]
    if left_out:
        notes.append(f"In full mode only: {', '.join(left_out)}.")
    head = ("candidate", "forward", "forward+backward", "/ ours", "/ ours, f+b", "error", "what it does, what it cannot")
    title = f"One scan, {_shape(section['shape'])}, {_threads(section)}"
    return Table(title=title, head=head, rows=rows, notes=tuple(notes), page_only=1)


def width_table(section: dict[str, Any]) -> Table:
    """Widths at a constant number of channels."""
    rows = []
    for point in section["points"]:
        shape = point["shape"]
        rows.append((str(shape["width"]), str(shape["groups"]), *_point(point), *_beside_jax(point)))
    sizes = section["points"][0]["shape"]
    title = f"Widths at constant G P, B{sizes['batch']} T{sizes['length']} N{sizes['order']}, {_threads(section)}"
    head = ("P", "G", "forward", "over roof", "forward+backward", "over roof", "error", "ahead of jax.lax.scan", "f+b")
    return Table(title=title, head=head, rows=rows)


def halves_table(section: dict[str, Any]) -> Table:
    """bfloat16 operands beside float32 ones."""
    rows = []
    for name in ("float32", "bfloat16"):
        record = section[name]
        times = [_time(record[scan_pass]) for scan_pass in ("forward", "both")]
        over = [f"{record[key]['median'] / section['float32'][key]['median']:.2f}" for key in ("forward", "both")]
        rows.append((name, *times, *over, f"{record['error']:.0e}"))
    note = "Step and drift are float32 in both; both are held against the float64 reference on the same rounded operands."
    head = ("operands", "forward", "forward+backward", "/ float32", "/ float32, f+b", "error")
    title = f"bfloat16 operands, {_shape(section['shape'])}, {_threads(section)}"
    return Table(title=title, head=head, rows=rows, notes=(note,))


def against_table(section: dict[str, Any]) -> Table:
    """This checkout beside an earlier commit."""
    rows = []
    for name, record in section["cases"].items():
        if "failed" in record:
            reason = "; ".join(f"{who}: {why}" for who, why in record["failed"].items())
            rows.append((name, reason, "", "", ""))
        for scan_pass, label in (("forward", "forward"), ("both", "forward+backward")):
            if scan_pass in record:
                figures = record[scan_pass]
                times = [f"{1e3 * figures[who]:.4g}" for who in ("ours", "theirs")]
                rows.append((name, label, *times, f"{figures['ratio']:.2f}"))
    head = ("case", "pass", "now, ms", "then, ms", "now / then")
    note = "Both packages run under the same measuring code, in processes that take turns; medians over the turns."
    title = f"Beside commit {section['commit']}, {_threads(section)}"
    return Table(title=title, head=head, rows=rows, notes=(note,))


def memory_table(records: list[dict[str, Any]]) -> Table:
    """Peak memory."""
    rows = []
    for record in records:
        if record["status"] != "ok":
            rows.append((record["name"], record["status"], "", "", record["reason"]))
            continue
        megabytes = [f"{record[key] / 1e6:.0f}" for key in ("operands", "gradients", "extra")]
        rows.append((record["name"], *megabytes, f"{record['ratio']:.3f}"))
    head = ("candidate", "operands, MB", "gradients, MB", "extra, MB", "extra / (operands + gradients)")
    note = "Extra is the high-water mark of the process during both passes, less what was there before, y and the gradients."
    return Table(title="Peak memory of a forward and backward pass", head=head, rows=rows, notes=(note,))


def sweep_tables(section: dict[str, Any]) -> list[Table]:
    """Growth with T at constant B T, and with each of N, P, G, T alone."""
    exponent = section["exponent"]
    rows = [
        (str(point["shape"]["length"]), str(point["shape"]["batch"]), *_point(point)) for point in section["constant_tokens"]
    ]
    note = (
        f"Time per sequence grows as T^{exponent['forward']:.3f} forward and T^{exponent['both']:.3f} forward+backward "
        "(fit in the logarithms)."
    )
    head = ("T", "B", "forward", "over roof", "forward+backward", "over roof", "error")
    sizes = section["constant_tokens"][0]["shape"]
    title = f"Growth with T at constant B T, G{sizes['groups']} N{sizes['order']} P{sizes['width']}, {_threads(section)}"
    made = [Table(title=title, head=head, rows=rows, notes=(note,))]
    for key, letter in SIZES.items():
        if key not in section:
            continue
        rows = []
        for point in section[key]:
            rows.append((str(point["shape"][key]), *_point(point), *_beside_jax(point)))
        head = (letter, "forward", "over roof", "forward+backward", "over roof", "error", "ahead of jax.lax.scan", "f+b")
        others = ", ".join(
            f"{name} = {section[key][0]['shape'][size]}" for size, name in (("batch", "B"), *SIZES.items()) if size != key
        )
        made.append(Table(title=f"Growth with {letter} ({others})", head=head, rows=rows))
    return made


def expm_table(section: dict[str, Any]) -> Table:
    """Right actions of small width."""
    candidates, rows = section["candidates"], []
    for name, record in candidates.items():
        beside = candidates.get(record.get("beside", TORCH if name == "shippo expm" else ""))
        ahead = [f"{beside[key]['median'] / record[key]['median']:.3g} ×" if beside else "–" for key in ("forward", "both")]
        times = [_time(record[key]) for key in ("forward", "both")]
        rows.append((name, *times, *ahead, f"{max(record['errors'].values()):.0e}"))
    title = f"{section['num_matrices']:,} right actions {section['width']}x{section['width']}, {_threads(section)}"
    head = ("candidate", "forward", "forward+backward", "ahead of torch", "f+b", "error")
    return Table(title=title, head=head, rows=rows)


def training_table(section: dict[str, Any]) -> Table:
    """Training steps and the generator."""
    base = section["models"]["No-right"]["median"]
    rows = [
        (
            name,
            f"{record['parameters'] / 1e6:.2f} M",
            _time(record),
            f"{record['tokens_per_second']:,.0f}",
            f"{record['median'] / base:.2f}",
            f"{record['over_products']:.2f}" if "over_products" in record else "–",
            f"{record['error']:.0e}",
        )
        for name, record in section["models"].items()
    ]
    made = section["generator"]["tokens_per_second"]
    fastest = max(record["tokens_per_second"] for record in section["models"].values())
    note = f"The generator makes {made:,.0f} tokens/s, {made / fastest:.0f} times what the fastest of these models trains on."
    head = ("model", "parameters", "step", "tokens/s", "over No-right", "over its matrix products", "error")
    title = f"Training step on Transport-MQAR, B{section['batch']} T{section['length']}, {_threads(section)}"
    return Table(title=title, head=head, rows=rows, notes=(note,))


def decoding_table(section: dict[str, Any]) -> Table:
    """Tokens per second by context length."""
    contexts = sorted({rate["context"] for rate in section["rates"]})
    by_model: dict[str, dict[int, float]] = {}
    for rate in section["rates"]:
        by_model.setdefault(rate["model"], {})[rate["context"]] = rate["tokens_per_second"]
    rows = [(model, *(f"{rates[context]:,.0f}" for context in contexts)) for model, rates in by_model.items()]
    note = (
        "The Transformer's cache is allocated at the length of the context and filled with random keys and values instead of a "
        "prefill; it is written in place, so that a token does not copy it. The SHiPPO models are not prefilled either: their "
        "state has one size, and every context is timed from the same one."
    )
    title = f"Decoding, tokens/s, batch {section['batch']}, {_threads(section)}"
    return Table(title=title, head=("model", *(f"context {context:,}" for context in contexts)), rows=rows, notes=(note,))


def _time(timing: dict[str, Any] | None) -> str:
    if timing is None:
        return "–"
    middle, low, high = (1e3 * timing[key] for key in ("median", "p20", "p80"))
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _times_ours(record: dict[str, Any], ours: dict[str, Any], scan_pass: str) -> str:
    if scan_pass not in record or scan_pass not in ours:
        return "–"
    return f"{record[scan_pass]['median'] / ours[scan_pass]['median']:.3g} ×"


def _does(record: dict[str, Any]) -> str:
    cannot = f"; not: {record['cannot']}" if record["cannot"] else ""
    return f"{record['kind']}, {record['how']}{cannot}"


def _roof_cells(scan_pass: str, limit: dict[str, Any]) -> tuple[str, ...]:
    seconds = f"{1e3 * limit['seconds']:.2f}"
    return (seconds, "", "", "", "") if scan_pass == "forward" else ("", seconds, "", "", "")


def _point(point: dict[str, Any]) -> tuple[str, ...]:
    cells = []
    for scan_pass in ("forward", "both"):
        cells += [_time(point[scan_pass]), f"{point[scan_pass]['over_roof']:.2f}"]
    return (*cells, f"{point['errors']['shippo fused']:.0e}")


def _beside_jax(point: dict[str, Any]) -> list[str]:
    peer = point["peers"].get("jax.lax.scan", {"status": "–"})
    return [
        f"{peer[scan_pass]['median'] / point[scan_pass]['median']:.1f} ×" if peer["status"] == "ok" else peer["status"]
        for scan_pass in ("forward", "both")
    ]


def _shape(shape: dict[str, int]) -> str:
    letters = {"batch": "B", "length": "T", "groups": "G", "order": "N", "width": "P"}
    return " ".join(f"{letter}{shape[name]}" for name, letter in letters.items())


def _threads(section: dict[str, Any]) -> str:
    return "one thread" if section["threads"] == 1 else f"{section['threads']} threads"
