"""Run an experiment: cut it into units, train them in one or several processes, keep what is finished, show how far it is.

A unit is a row and the seeds that train together. Units are handed to `jobs` worker processes as they become free; a
worker writes its own checkpoints and its own result file and sends progress back. The numbers depend on neither the
number of workers nor on interruptions.

`run` returns the result it wrote to `result.json`. Ctrl-C ends the workers; what they had saved is where
`resume=True` continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import queue
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shippo_ssm.lab.experiment import Experiment, Progress, Result, RowResult, Session
from shippo_ssm.lab.memory import keep_freed_memory
from shippo_ssm.lab.progress import Display, make_display
from shippo_ssm.lab.store import as_json, read_json, remove_halves, versions, write_json

Train = Callable[[Any, tuple[int, ...], Session], RowResult]


class Unit(NamedTuple):
    """A row and the seeds of it that train together."""

    index: int
    config: Any
    seeds: tuple[int, ...]
    cost: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.config.name}.s{self.seeds[0]}-s{self.seeds[-1]}"

    def file(self, folder: Path) -> Path:
        """Where a run keeps the result of the unit."""
        return folder / "units" / f"{self.name}.json"


class Failure(NamedTuple):
    """A unit that raised, with its traceback as text; what the system refused (a full disk) needs none."""

    unit: Unit
    error: str
    trace: str
    of_system: bool


def cut(rows: tuple[Any, ...], experiment: Experiment) -> list[Unit]:
    """Rows -> units of at most `experiment.stack` seeds."""
    units = []
    for config in rows:
        for start in range(0, config.num_seeds, experiment.stack):
            seeds = config.seeds[start : start + experiment.stack]
            units.append(Unit(len(units), config, seeds, experiment.cost(config)))
    return units


def finish_unit(train: Train, unit: Unit, folder: Path, notify: Callable[[Progress], None]) -> None:
    """Train one unit to the end and write its result file; the checkpoint goes when the file is there."""
    checkpoint = folder / "checkpoints" / f"{unit.name}.safetensors"
    begun = time.monotonic()
    result = train(unit.config, unit.seeds, Session(unit.index, checkpoint, notify))
    for name, values in result.metrics.items():
        if len(values) != len(unit.seeds):
            raise ValueError(
                f"metric {name!r} of row {unit.config.name!r} has {len(values)} numbers for {len(unit.seeds)} seeds"
            )
    seconds = result.notes.pop("train_seconds", time.monotonic() - begun)
    write_json(unit.file(folder), {"seconds": seconds, **dataclasses.asdict(result)})
    checkpoint.unlink(missing_ok=True)


def _end_with_parent() -> None:
    # A parent that is killed cannot end its workers; they would go on for hours and write into a folder that is resumed.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(train: Train, folder: Path, threads: int, tasks, events) -> None:
    # Ctrl-C reaches the whole process group; only the parent answers it, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    keep_freed_memory()
    for unit in iter(tasks.get, None):
        try:
            finish_unit(train, unit, folder, events.put)
            events.put(unit)
        except Exception as error:
            events.put(Failure(unit, str(error), traceback.format_exc(), isinstance(error, OSError)))
            return


def _serial(experiment: Experiment, units: list[Unit], folder: Path, display: Display) -> None:
    for unit in units:
        finish_unit(experiment.train, unit, folder, display.progress)
        display.finished(unit.index)


def _parallel(experiment: Experiment, units: list[Unit], folder: Path, display: Display, jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    tasks, events = context.Queue(), context.Queue()
    for unit in sorted(units, key=lambda unit: unit.cost, reverse=True):
        tasks.put(unit)
    for _ in range(jobs):
        tasks.put(None)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    workers = [
        context.Process(target=_work, args=(experiment.train, folder, threads, tasks, events), daemon=True) for _ in range(jobs)
    ]
    for worker in workers:
        worker.start()
    left = len(units)
    try:
        while left:
            try:
                event = events.get(timeout=1.0)
            except queue.Empty:
                if not any(worker.is_alive() for worker in workers):
                    raise RuntimeError(
                        "the worker processes ended before their work was done; run again with --resume"
                    ) from None
                continue
            if isinstance(event, Failure) and event.of_system:
                raise OSError(f"row {event.unit.config.name!r}: {event.error}; continue with --resume")
            if isinstance(event, Failure):
                raise RuntimeError(f"row {event.unit.config.name!r} failed: {event.error}\n{event.trace}")
            if isinstance(event, Progress):
                display.progress(event)
            else:
                display.finished(event.index)
                left -= 1
    finally:
        for worker in workers:
            if left:
                worker.terminate()
            worker.join()


def assemble(
    experiment: Experiment, rows: tuple[Any, ...], units: list[Unit], folder: Path, manifest: dict[str, Any]
) -> Result:
    """Join the finished units into rows and write `result.json`; a row stands there with the seeds that are finished."""
    finished = []
    for config in rows:
        own = [unit for unit in units if unit.config.name == config.name and unit.file(folder).exists()]
        if not own:
            continue
        parts = [read_json(unit.file(folder)) for unit in own]
        joined = RowResult(**{key: parts[0][key] for key in ("metrics", "curves", "notes")})
        for part in parts[1:]:
            for name, values in part["metrics"].items():
                joined.metrics[name] = joined.metrics[name] + values
            for name, evaluations in part["curves"].items():
                # A seed that diverged has fewer evaluations than the others, or none; the curve is what all have.
                if name != "step" and name in joined.curves:
                    joined.curves[name] = [a + b for a, b in zip(joined.curves[name], evaluations)]
        ended = [(unit, part["notes"].get("diverged_at")) for unit, part in zip(own, parts)]
        if any(place for _, place in ended):
            joined.notes["diverged_at"] = "; ".join(f"seed {unit.seeds[0]}: {place}" for unit, place in ended if place)
        seconds = sum(part["seconds"] for part in parts)
        seeds = [seed for unit in own for seed in unit.seeds]
        row = {"name": config.name, "label": config.label, "config": as_json(config), "seeds": seeds}
        finished.append({**row, "seconds": seconds, **dataclasses.asdict(joined)})
    complete = all(unit.file(folder).exists() for unit in units)
    content = {**manifest, "complete": complete, "rows": finished}
    write_json(folder / "result.json", content)
    return Result.from_json(content, str(folder / "result.json"))


def unpack(experiment: Experiment, known: tuple[Any, ...], content: dict[str, Any], folder: Path) -> None:
    """The reverse of `assemble`: lay the finished rows of a result out as a run's folder, so that it can be added to.

    A result may be older than an option of its rows; what it does not speak of is then as it is by default.
    """
    rows, configs = {row["name"]: row for row in content["rows"]}, []
    for config in known:
        row = rows.pop(config.name, None)
        if row is None:
            continue
        now = as_json(config)
        if any(now.get(key) != value for key, value in row["config"].items() if key != "num_seeds"):
            raise ValueError(f"row {config.name!r} of the result has another configuration than it has today; train it again")
        configs.append(now | {"num_seeds": len(row["seeds"])})
        ends = dict(end.split(": ", 1) for end in row["notes"].pop("diverged_at", "").split("; ") if end)
        for unit in cut((dataclasses.replace(config, num_seeds=len(row["seeds"])),), experiment):
            at = [row["seeds"].index(seed) for seed in unit.seeds]
            metrics = {name: [values[k] for k in at] for name, values in row["metrics"].items()}
            curves = {
                name: evaluations if name == "step" else [[values[k] for k in at] for values in evaluations]
                for name, evaluations in row["curves"].items()
            }
            ended = {"diverged_at": ends[f"seed {unit.seeds[0]}"]} if f"seed {unit.seeds[0]}" in ends else {}
            part = {"metrics": metrics, "curves": curves, "notes": row["notes"] | ended}
            write_json(unit.file(folder), {"seconds": row["seconds"] * len(at) / len(row["seeds"]), **part})
    if rows:
        raise ValueError(f"the result has rows that {experiment.name} does not know: {', '.join(rows)}")
    kept = {key: content[key] for key in ("experiment", "preset", "versions", "wall_seconds")}
    write_json(folder / "manifest.json", kept | {"configs": configs})


def _joined(folder: Path, held: list[dict[str, Any]], asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that a folder holds and those asked for; a row may get more seeds, nothing else of it may change."""
    found = {config["name"]: config for config in held}
    for config in asked:
        earlier = found.get(config["name"], config)
        most = max(earlier["num_seeds"], config["num_seeds"])
        if earlier | {"num_seeds": most} != config | {"num_seeds": most}:
            raise ValueError(
                f"{folder} holds row {config['name']!r} with another configuration; continue it with the same options, or "
                "choose another --out"
            )
        found[config["name"]] = config | {"num_seeds": most}
    return list(found.values())


def _open_folder(folder: Path, manifest: dict[str, Any], resume: bool, force: bool) -> dict[str, Any]:
    """The manifest to go on with, rows added; refuses to mix two runs or to overwrite one unasked."""
    path = folder / "manifest.json"
    if path.exists() and not force:
        if not resume:
            raise ValueError(
                f"{folder} holds a run already; continue it with --resume, replace it with --force, or choose --out"
            )
        earlier = read_json(path)
        for key in ("experiment", "preset"):
            if earlier[key] != manifest[key]:
                raise ValueError(
                    f"{folder} holds a run with another {key}; continue it with the same options, or choose another --out"
                )
        manifest = earlier | {"configs": _joined(folder, earlier["configs"], manifest["configs"])}
    elif force:
        for name in ("units", "checkpoints"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "result.json").unlink(missing_ok=True)
    write_json(path, manifest)
    return manifest


def run(
    experiment: Experiment,
    preset: str | None = None,
    *,
    seeds: int | None = None,
    jobs: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    earlier: Path | None = None,
    only: tuple[str, ...] = (),
    display: Display | None = None,
) -> Result:
    """Train the rows of an experiment and write `result.json`.

    Args:
        preset: a name of `experiment.presets`; by default the first.
        seeds: number of seeds, instead of the preset's.
        jobs: worker processes; by default one per core, at most one per unit. One job runs in this process.
        out: folder of the run; by default runs/NAME, or runs/NAME-PRESET.
        resume: continue what the folder holds; rows and seeds that are new are added to it.
        force: replace what the folder holds.
        earlier: a result file whose finished rows the run begins with, in a new folder.
        only: names of the rows to train; by default all.
        display: where progress goes; by default a live bar on a terminal and plain lines elsewhere.

    Returns:
        The result, also on disk.

    Raises:
        ValueError: unknown preset or row, or a folder that holds another run.
    """
    preset = preset or experiment.default_preset
    known = experiment.rows(preset)
    unknown = set(only) - {row.name for row in known}
    if unknown:
        names = ", ".join(row.name for row in known)
        raise ValueError(f"{experiment.name}: `only` names {', '.join(sorted(unknown))}; expected rows among {names}")
    rows = tuple(row for row in known if not only or row.name in only)
    if seeds is not None:
        if seeds < 1:
            raise ValueError(f"{experiment.name}: `seeds` is {seeds}; expected a number of seeds, 1 or more")
        rows = tuple(dataclasses.replace(row, num_seeds=seeds) for row in rows)
    folder = out or experiment.folder(preset)
    manifest = {
        "experiment": experiment.name,
        "preset": preset,
        "configs": [as_json(row) for row in rows],
        "versions": versions(),
        "wall_seconds": 0.0,
    }
    if earlier is not None:
        if (folder / "manifest.json").exists():
            raise ValueError(f"{folder} holds a run already; expected a new folder for the rows of {earlier}; choose --out")
        unpack(experiment, known, read_json(earlier), folder)
    manifest = _open_folder(folder, manifest, resume or earlier is not None, force)
    seeds_of = {config["name"]: config["num_seeds"] for config in manifest["configs"]}
    held = tuple(dataclasses.replace(row, num_seeds=seeds_of[row.name]) for row in known if row.name in seeds_of)
    units = cut(rows, experiment)
    open_units = [unit for unit in units if not unit.file(folder).exists()]
    jobs = min(jobs or os.cpu_count() or 1, max(1, len(open_units)))
    display = display or make_display()
    begun, before = time.monotonic(), manifest["wall_seconds"]
    try:
        with display.show(experiment.name, units, {unit.index for unit in open_units}, jobs):
            if jobs == 1:
                _serial(experiment, open_units, folder, display)
            elif open_units:
                _parallel(experiment, open_units, folder, display, jobs)
    finally:
        manifest["wall_seconds"] = before + time.monotonic() - begun
        write_json(folder / "manifest.json", manifest)
        remove_halves(folder)
        with contextlib.suppress(OSError):
            (folder / "checkpoints").rmdir()
        result = assemble(experiment, held, cut(held, experiment), folder, manifest)
    return result
