"""How far a run is: a live bar on a terminal, plain lines elsewhere, both with an estimate of the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column

from shippo_ssm.lab.experiment import Progress


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Estimate:
    """Time left of a set of units that run `jobs` at a time.

    A unit that has begun has its own speed; one that has not is taken to be as fast as the others, by its steps and their
    cost. What a unit counts while it runs (steps, tokens) is its own affair: only the fraction that is done enters.
    """

    def __init__(self, units: list[Any], open_units: set[int], jobs: int) -> None:
        self.left = {unit.index: 1.0 for unit in units if unit.index in open_units}
        self.work: dict[int, float] = {unit.index: unit.config.steps * unit.cost for unit in units}
        self.first: dict[int, tuple[float, float]] = {}
        self.whole: dict[int, float] = {}
        self.jobs = jobs

    def update(self, progress: Progress, now: float) -> None:
        done = progress.step / progress.steps
        self.left[progress.unit] = 1 - done
        since, before = self.first.setdefault(progress.unit, (now, done))
        if done > before:
            self.whole[progress.unit] = (now - since) / (done - before)

    def seconds(self) -> float | None:
        """Seconds left, or `None` while no speed is known."""
        if not self.whole:
            return None
        pace = sum(self.whole.values()) / max(sum(self.work[index] for index in self.whole), 1e-9)
        ahead = [part * self.whole.get(index, pace * self.work[index]) for index, part in self.left.items()]
        return max([sum(ahead) / self.jobs, *ahead], default=0.0)


class Display:
    """Keeps quiet; the base of the other two."""

    @contextmanager
    def show(self, name: str, units: list[Any], open_units: set[int], jobs: int) -> Iterator[None]:
        self.units = {unit.index: unit for unit in units}
        self.estimate = Estimate(units, open_units, jobs)
        self.done, self.total = len(units) - len(open_units), len(units)
        yield

    def progress(self, progress: Progress) -> None:
        self.estimate.update(progress, time.monotonic())

    def finished(self, unit: int) -> None:
        self.estimate.left[unit] = 0.0
        self.done += 1

    def left(self) -> str:
        seconds = self.estimate.seconds()
        return "" if seconds is None else f"about {clock(seconds)} left"

    @staticmethod
    def numbers(metrics: dict[str, float]) -> str:
        return "  ".join(f"{name} {value:.3g}" for name, value in metrics.items())


class Lines(Display):
    """One line per unit every few seconds, for logs and pipes."""

    def __init__(self, console: Console, every: float = 10.0) -> None:
        self.console, self.every, self.told = console, every, {}

    def progress(self, progress: Progress) -> None:
        super().progress(progress)
        now = time.monotonic()
        if now - self.told.get(progress.unit, 0.0) < self.every and progress.step < progress.steps:
            return
        self.told[progress.unit] = now
        name, numbers = self.units[progress.unit].name, self.numbers(progress.metrics)
        line = f"{name}  step {progress.step}/{progress.steps}  {numbers}  [{self.done}/{self.total} done, {self.left()}]"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class Live(Display):
    """A bar per running unit and one for the whole, on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def show(self, name: str, units: list[Any], open_units: set[int], jobs: int) -> Iterator[None]:
        # Widths that add up to the terminal's: otherwise rich takes the room from the bar first.
        name_width, bar_width, count_width = 24, min(40, max(10, self.console.width // 5)), 13
        room = max(1, self.console.width - name_width - bar_width - count_width - 3)
        cut = {"no_wrap": True, "overflow": "ellipsis"}
        columns = (
            TextColumn("{task.description}", markup=False, table_column=Column(max_width=name_width, **cut)),
            BarColumn(bar_width),
            MofNCompleteColumn(table_column=Column(max_width=count_width, **cut)),
            TextColumn("{task.fields[note]}", style="dim", markup=False, table_column=Column(max_width=room, **cut)),
        )
        with super().show(name, units, open_units, jobs), Bars(*columns, console=self.console) as self.bars:
            self.whole = self.bars.add_task(name, total=self.total, completed=self.done, note="")
            self.tasks: dict[int, Any] = {}
            yield

    def progress(self, progress: Progress) -> None:
        super().progress(progress)
        if progress.unit not in self.tasks:
            self.tasks[progress.unit] = self.bars.add_task(self.units[progress.unit].name, total=progress.steps, note="")
        self.bars.update(self.tasks[progress.unit], completed=progress.step, note=self.numbers(progress.metrics))
        self.bars.update(self.whole, note=self.left())

    def finished(self, unit: int) -> None:
        super().finished(unit)
        if unit in self.tasks:
            self.bars.remove_task(self.tasks.pop(unit))
        self.bars.update(self.whole, completed=self.done, note=self.left())


def make_display(console: Console | None = None) -> Display:
    """A live bar on a terminal, plain lines elsewhere."""
    console = console or Console(stderr=True)
    return Live(console) if console.is_terminal else Lines(console)
