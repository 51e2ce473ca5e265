"""Run an experiment: split it into units, train them in one or several processes, write the result, show progress.

A unit is a row and the seeds that train together. `jobs` worker processes take units one by one; a worker writes its
own checkpoints and result file and sends progress back. The numbers depend neither on the number of workers nor on
interruptions. Ctrl-C ends the workers, and `resume=True` continues from their last checkpoints.
"""

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
from rich.console import Console

from shippo_lab.harness.experiment import Experiment, Progress, Result, RowResult, Session
from shippo_lab.harness.malloc import keep_freed_memory
from shippo_lab.harness.progress import Display
from shippo_lab.harness.store import NUMBER, as_json, as_user_error, checked_fields, locked, read_json, versions, write_json

Train = Callable[[Any, tuple[int, ...], Session], RowResult]
MAX_SEEDS = 10_000
SAME_RUN = "continue it with the same options, or choose another --out"


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
        """The result file of the unit."""
        return folder / "units" / f"{self.name}.json"


def split_into_units(rows: tuple[Any, ...], experiment: Experiment) -> list[Unit]:
    """Rows -> units of at most `experiment.stack` seeds."""
    size = experiment.stack
    parts = [(config, config.seeds[i : i + size]) for config in rows for i in range(0, config.num_seeds, size)]
    return [Unit(index, config, seeds, experiment.cost(config)) for index, (config, seeds) in enumerate(parts)]


def finish_unit(train: Train, unit: Unit, folder: Path, notify: Callable[[Progress], None]) -> None:
    """Train one unit to the end, write its result file, then delete its checkpoint."""
    checkpoint = folder / "checkpoints" / f"{unit.name}.pt"
    begun = time.monotonic()
    result = train(unit.config, unit.seeds, Session(unit.index, checkpoint, notify))
    for name, values in result.metrics.items():
        if len(values) != len(unit.seeds):
            row, count = unit.config.name, len(unit.seeds)
            raise ValueError(f"metric {name!r} of row {row!r} has {len(values)} numbers for {count} seeds")
    seconds = result.notes.pop("train_seconds", time.monotonic() - begun)
    write_json(unit.file(folder), {"seconds": seconds, **dataclasses.asdict(result)})
    checkpoint.unlink(missing_ok=True)


def _work(train: Train, folder: Path, threads: int, tasks, events) -> None:
    def end_with_parent() -> None:
        # A killed parent cannot end its workers, which would keep writing into the folder.
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    # Ctrl-C reaches the whole process group; only the parent handles it, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    keep_freed_memory()
    for unit in iter(tasks.get, None):
        try:
            finish_unit(train, unit, folder, events.put)
            events.put(unit)
        except (OSError, ValueError) as error:
            # What the user can repair: a full disk, a damaged file.
            events.put(ValueError(f"row {unit.config.name!r}: {error}; continue with --resume"))
            return
        except Exception as error:
            events.put(RuntimeError(f"row {unit.config.name!r} failed: {error}\n{traceback.format_exc()}"))
            return


def _parallel(experiment: Experiment, units: list[Unit], folder: Path, display: Display, jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    tasks, events = context.Queue(), context.Queue()
    for task in (*sorted(units, key=lambda unit: unit.cost, reverse=True), *[None] * jobs):
        tasks.put(task)
    arguments = (experiment.train, folder, max(1, (os.cpu_count() or 1) // jobs), tasks, events)
    workers = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    left = len(units)
    try:
        while left:
            try:
                event = events.get(timeout=1.0)
            except queue.Empty:
                # A worker may report and end between the time-out and this line.
                if not any(worker.is_alive() for worker in workers) and events.empty():
                    raise RuntimeError("all worker processes ended early; run again with --resume") from None
                continue
            if isinstance(event, Progress):
                display.progress(event)
            elif isinstance(event, Unit):
                display.finished(event.index)
                left -= 1
            else:
                raise event
    finally:
        for worker in workers:
            if left:
                worker.terminate()
            worker.join()


def assemble(experiment: Experiment, rows: tuple[Any, ...], folder: Path, manifest: dict[str, Any]) -> Result:
    """Join the finished units into rows and write `result.json`; a row has the seeds that are finished."""
    units = split_into_units(rows, experiment)
    types: dict[str, Any] = {"seconds": NUMBER, "metrics": dict, "curves": dict, "notes": dict}
    finished = []
    for config in rows:
        own = [unit for unit in units if unit.config.name == config.name and unit.file(folder).exists()]
        if not own:
            continue
        parts = [checked_fields(read_json(file), str(file), **types) for file in (unit.file(folder) for unit in own)]
        joined: dict[str, Any] = parts[0] | {"seconds": sum(part["seconds"] for part in parts)}
        for part in parts[1:]:
            for name, values in part["metrics"].items():
                joined["metrics"][name] = joined["metrics"][name] + values
            for name, evaluations in part["curves"].items():
                # A seed that diverged has fewer evaluations than the others, or none: keep what all have.
                if name != "step" and name in joined["curves"]:
                    joined["curves"][name] = [a + b for a, b in zip(joined["curves"][name], evaluations)]
        ends = ((unit.seeds[0], part["notes"].get("diverged_at")) for unit, part in zip(own, parts))
        if diverged := "; ".join(f"seed {seed}: {place}" for seed, place in ends if place):
            joined["notes"]["diverged_at"] = diverged
        seeds = [seed for unit in own for seed in unit.seeds]
        finished.append({"name": config.name, "label": config.label, "config": as_json(config), "seeds": seeds, **joined})
    content = manifest | {"complete": all(unit.file(folder).exists() for unit in units), "rows": finished}
    write_json(folder / "result.json", content)
    return Result.from_json(content, str(folder / "result.json"))


def _check_seeds(where: str, seeds: int) -> None:
    if not 1 <= seeds <= MAX_SEEDS:
        raise ValueError(f"{where} is {seeds}; expected a number of seeds from 1 to {MAX_SEEDS}")


def _joined(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest at `path` with the rows of `manifest` added; a row may get more seeds, nothing else of it may change."""
    types: dict[str, Any] = {"configs": list, "versions": dict, "wall_seconds": NUMBER}
    earlier = checked_fields(read_json(path), str(path), experiment=str, preset=str, **types)
    for key in ("experiment", "preset"):
        if earlier[key] != manifest[key]:
            raise ValueError(f"{path.parent} holds a run with another {key}; {SAME_RUN}")
    for place, config in enumerate(earlier["configs"]):
        found = checked_fields(config, f"{path}: configuration {place}", name=str, num_seeds=int)
        _check_seeds(f"{path}: `num_seeds`", found["num_seeds"])
    configs = {config["name"]: config for config in earlier["configs"]}
    for config in manifest["configs"]:
        held = configs.get(config["name"], config)
        most = {"num_seeds": max(held["num_seeds"], config["num_seeds"])}
        if held | most != config | most:
            raise ValueError(f"{path.parent} holds row {config['name']!r} with another configuration; {SAME_RUN}")
        configs[config["name"]] = config | most
    return earlier | {"configs": list(configs.values())}


def _open_folder(folder: Path, manifest: dict[str, Any], resume: bool, force: bool) -> dict[str, Any]:
    """The manifest to continue with, rows added; refuses to mix two runs, or to overwrite one without `force`."""
    path = folder / "manifest.json"
    if force:
        for name in ("units", "checkpoints"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "result.json").unlink(missing_ok=True)
    elif path.exists():
        if not resume:
            raise ValueError(f"{folder} holds a run already; use --resume to continue, --force to replace it, or another --out")
        manifest = _joined(path, manifest)
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
    only: tuple[str, ...] = (),
    display: Display | None = None,
) -> Result:
    """Train the rows of an experiment and write `result.json`, whatever happens; returns it.

    Args:
        preset: a name of `experiment.presets`; by default the first. seeds: their number, instead of the preset's.
        jobs: worker processes; by default one per core, at most one per unit. One job runs in this process.
        out: folder of the run; by default runs/NAME, or runs/NAME-PRESET.
        resume: continue the run in the folder; new rows and seeds are added to it. force: replace it.
        only: names of the rows to train; by default all.
    """
    preset = preset or experiment.default_preset
    known = experiment.rows(preset)
    if unknown := set(only) - {row.name for row in known}:
        names = ", ".join(row.name for row in known)
        raise ValueError(f"{experiment.name}: `only` names {', '.join(sorted(unknown))}; expected rows among {names}")
    rows = tuple(row for row in known if not only or row.name in only)
    if seeds is not None:
        _check_seeds(f"{experiment.name}: `seeds`", seeds)
        rows = tuple(dataclasses.replace(row, num_seeds=seeds) for row in rows)
    folder, display = out or experiment.folder(preset), display or Display(Console(stderr=True))
    manifest = {"experiment": experiment.name, "preset": preset, "configs": [as_json(row) for row in rows]}
    manifest |= {"versions": versions(), "wall_seconds": 0.0}
    with locked(folder):
        manifest = _open_folder(folder, manifest, resume, force)
        units = split_into_units(rows, experiment)
        open_units = [unit for unit in units if not unit.file(folder).exists()]
        jobs = min(jobs or os.cpu_count() or 1, max(1, len(open_units)))
        begun, before = time.monotonic(), manifest["wall_seconds"]
        try:
            with display.show(experiment.name, units, {unit.index for unit in open_units}):
                if jobs > 1:
                    _parallel(experiment, open_units, folder, display, jobs)
                else:
                    for unit in open_units:
                        finish_unit(experiment.train, unit, folder, display.progress)
                        display.finished(unit.index)
        finally:
            manifest["wall_seconds"] = before + time.monotonic() - begun
            write_json(folder / "manifest.json", manifest)
            for half_written in folder.rglob(".*.tmp"):
                half_written.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (folder / "checkpoints").rmdir()
            num_seeds = {config["name"]: config["num_seeds"] for config in manifest["configs"]}
            held = tuple(dataclasses.replace(row, num_seeds=num_seeds[row.name]) for row in known if row.name in num_seeds)
            with as_user_error(folder / "units"):
                result = assemble(experiment, held, folder, manifest)
    return result
