"""The whole benchmark: `shippo bench`, or `python -m benchmarks.run [--full] [--only SECTION] [--against REV] [--out FILE]`.

Data path: `plan(quick)` lists sections with their threads and arguments; each runs in a process of its own (`spawn`), one after
another, so that no library's threads disturb another section's; the dictionaries make one run, the verdict is drawn from it,
tables are printed and everything is written as JSON. The quick mode takes about two minutes on an idle machine with two cores,
the full one a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    # Loaded from its file by the command line, this module still finds the others.
    sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe  # noqa: E402
from benchmarks.problem import Shape  # noqa: E402
from benchmarks.verdict import verdict  # noqa: E402

MODELS = ("StructGen-Split", "No-right", "DirectGen-SingleExp", "Free enc/dec", "GRU", "Transformer")
DEFAULT_OUT, DEFAULT_AGAINST = Path("runs", "bench.json"), Path("runs", "against.json")


def plan(quick: bool) -> list[tuple[str, str, int, dict[str, Any]]]:
    """Key in the run, section, threads and arguments of everything a mode measures, in order."""
    effort = {"rounds": 9, "budget": 1.0} if quick else {"rounds": 15, "budget": 2.5}
    shape = asdict(Shape())
    models = list(MODELS[:2] if quick else MODELS)
    steps = {"rounds": 2, "budget": 10.0} if quick else {"rounds": 5, "budget": 30.0}
    contexts = [128, 4096, 65536]
    alone = ("shippo fused",) if quick else None
    remembered = (
        ("shippo fused",) if quick else ("shippo fused", "jax.lax.scan", "PyTorch loop", "mambapy pscan, from inputs to y")
    )
    work: list[tuple[str, str, int, dict[str, Any]]] = [
        ("scan", "scan", 2, {"shape": shape, "quick": quick, **effort}),
        ("scan_one_thread", "scan", 1, {"shape": shape, "quick": True, "names": alone, **effort}),
        ("halves", "halves", 2, {"shape": shape, **effort}),
        ("expm", "expm", 2, effort),
        *(("memory", "memory", 2, {"shape": shape, "name": name}) for name in remembered),
        ("training", "training", 2, {"names": models, "batch": 16, "length": 512, **steps}),
        ("decoding", "decoding", 2, {"contexts": contexts, **effort}),
    ]
    if not quick:
        odd = asdict(Shape(length=500))
        work += [
            ("widths", "widths", 2, effort),
            ("sweeps", "sweeps", 2, effort),
            ("scan_odd_length", "scan", 2, {"shape": odd, "quick": True, **effort}),
            ("expm_8", "expm", 2, {"width": 8, "num_matrices": 32768, **effort}),
            ("expm_16", "expm", 2, {"width": 16, "num_matrices": 8192, **effort}),
            ("expm_one_thread", "expm", 1, effort),
            ("training_one_thread", "training", 1, {"names": models[:3], "batch": 16, "length": 512, **steps}),
            ("decoding_batch_16", "decoding", 2, {"contexts": contexts[:2], "batch": 16, **effort}),
            ("projection", "projection", 2, {}),
            ("compilation", "compilation", 2, {}),
        ]
    return work


def spawn(section: str, threads: int, arguments: dict[str, Any], source: Path = ROOT / "src") -> dict[str, Any]:
    """The dictionary of one section, measured in a fresh process on `threads` cores with the package in `source`.

    Raises:
        RuntimeError: the section failed; the message ends with the last lines it printed.
    """
    options = json.dumps({"section": section, "threads": threads, "arguments": arguments})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "section.json")
        command = [sys.executable, "-m", "benchmarks.child", options, str(out)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}")
        return json.loads(out.read_text())


def measure(quick: bool, earlier: dict[str, Any] | None = None, only: str = "") -> dict[str, Any]:
    """A whole run: machine, mode, sections, errors and verdict; or an `earlier` one with the section `only` measured again."""
    begin = time.perf_counter()
    today = datetime.now(UTC).date().isoformat()
    run: dict[str, Any] = earlier or {
        "mode": "quick" if quick else "full",
        "date": today,
        "machine": describe(),
        "sections": {},
        "errors": {},
        "again": {},
        "seconds": 0.0,
    }
    work = [row for row in plan(quick) if not only or row[0] == only]
    if not work:
        raise ValueError(f"the {run['mode']} mode has no section {only!r}")
    if only:
        run["again"][only] = today
        for part in ("sections", "errors"):
            run[part].pop(only, None)
    for number, (key, section, threads, arguments) in enumerate(work, 1):
        started = time.perf_counter()
        try:
            result = spawn(section, threads, arguments)
        except RuntimeError as error:
            run["errors"][key] = str(error)
            print(f"{key}: failed\n{error}", file=sys.stderr, flush=True)
            continue
        if key == "memory":
            run["sections"].setdefault(key, []).append(result)
        else:
            run["sections"][key] = result
        seconds, so_far = time.perf_counter() - started, time.perf_counter() - begin
        print(f"{number} of {len(work)}, {key}: {seconds:.0f} s; {so_far:.0f} s so far", file=sys.stderr, flush=True)
    run["verdict"] = verdict(run)
    run["seconds"] += time.perf_counter() - begin
    return run


def main(quick: bool = True, out: Path | None = None, only: str = "", against: str = "") -> int:
    """Measure, print the tables, write the JSON.

    Args:
        quick: about two minutes; otherwise all peers, sweeps over N, P and G, and more repeats.
        out: where the JSON goes; `runs/bench.json` by default.
        only: a section to measure again in the run that `out` holds, in that run's mode.
        against: a commit to compare with: in the quick mode that alone, and then `out` is `runs/against.json` by default.

    Returns:
        0, or 1 where a section failed or one of our own backends was rejected.
    """
    from benchmarks.against import measure as compare
    from benchmarks.against import resolve
    from benchmarks.report import print_against, print_run

    if against:
        # Before anything is measured: a word that means no commit should not cost a quarter of an hour.
        resolve(against)
    if against and quick:
        compared = {"date": datetime.now(UTC).date().isoformat(), "machine": describe(), **compare(against, spawn)}
        return _write(out or DEFAULT_AGAINST, compared, print_against)
    out = DEFAULT_OUT if out is None else out
    earlier = json.loads(out.read_text()) if only else None
    run = measure(quick if earlier is None else earlier["mode"] == "quick", earlier, only)
    if against:
        begin = time.perf_counter()
        run["against"] = compare(against, spawn, quick=False)
        run["seconds"] += time.perf_counter() - begin
    _write(out, run, print_run)
    print(f"{run['seconds']:.0f} s")
    rejected = [
        record["name"]
        for section in run["sections"].values()
        if isinstance(section, dict) and isinstance(section.get("candidates"), list)
        for record in section["candidates"]
        if record["kind"] == "ours" and record["status"] == "rejected"
    ]
    return 1 if run["errors"] or rejected else 0


def _write(out: Path, result: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> int:
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside it first: a run that is stopped here leaves the earlier file whole.
    part = out.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(out)
    show(result)
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure our scans beside peers and the machine's limits.")
    parser.add_argument("--full", action="store_true", help="all peers and sweeps")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--only", default="", help="measure this section again in the run that --out holds")
    parser.add_argument("--against", default="", help="compare with this commit; alone without --full")
    options = parser.parse_args()
    sys.exit(main(not options.full, options.out, options.only, options.against))
