"""Progress of a run: a live bar on a terminal, plain lines elsewhere, both with an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column

from shippo_lab.harness.experiment import Progress


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours}:{minutes:02d}:{round(seconds) % 60:02d}" if hours else f"{minutes}:{round(seconds) % 60:02d}"


class Display:
    """Silent; the base class of the other two. The time left assumes that every step takes its row's share of the cost."""

    @contextmanager
    def show(self, name: str, units: list[Any], open_units: set[int], jobs: int) -> Iterator[None]:
        self.units = {unit.index: unit for unit in units}
        self.done, self.total = len(units) - len(open_units), len(units)
        # Unit -> the work that is left of it, and of all of them when the first one reported.
        self.work = {index: float(self.units[index].config.steps * self.units[index].cost) for index in open_units}
        self.first: tuple[float, float] | None = None
        yield

    def progress(self, progress: Progress) -> None:
        unit = self.units[progress.unit]
        self.work[progress.unit] = unit.config.steps * unit.cost * (1 - progress.step / progress.steps)
        if self.first is None:
            self.first = time.monotonic(), sum(self.work.values())

    def finished(self, unit: int) -> None:
        self.work[unit] = 0.0
        self.done += 1

    def left(self) -> str:
        if self.first is None:
            return ""
        (since, before), ahead = self.first, sum(self.work.values())
        return "" if ahead >= before else f"about {clock((time.monotonic() - since) * ahead / (before - ahead))} left"


def _numbers(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3g}" for name, value in metrics.items())


class Lines(Display):
    """One line per unit every few seconds, for logs and pipes."""

    def __init__(self, console: Console, every: float = 10.0) -> None:
        self.console, self.every, self.printed = console, every, {}

    def progress(self, progress: Progress) -> None:
        super().progress(progress)
        now = time.monotonic()
        if now - self.printed.get(progress.unit, 0.0) < self.every and progress.step < progress.steps:
            return
        self.printed[progress.unit] = now
        name, numbers = self.units[progress.unit].name, _numbers(progress.metrics)
        line = f"{name}  step {progress.step}/{progress.steps}  {numbers}  [{self.done}/{self.total} done, {self.left()}]"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class Live(Display):
    """A bar per running unit and one for the whole, on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def show(self, name: str, units: list[Any], open_units: set[int], jobs: int) -> Iterator[None]:
        # Widths that add up to the terminal's; otherwise rich shrinks the bar first.
        widths = 24, min(40, max(10, self.console.width // 5)), 13
        rest = max(1, self.console.width - sum(widths) - 3)

        def cut(width: int) -> Column:
            return Column(max_width=width, no_wrap=True, overflow="ellipsis")

        columns = (
            TextColumn("{task.description}", markup=False, table_column=cut(widths[0])),
            BarColumn(widths[1]),
            MofNCompleteColumn(table_column=cut(widths[2])),
            TextColumn("{task.fields[note]}", style="dim", markup=False, table_column=cut(rest)),
        )
        with super().show(name, units, open_units, jobs), Bars(*columns, console=self.console) as self.bars:
            self.whole = self.bars.add_task(name, total=self.total, completed=self.done, note="")
            self.tasks: dict[int, Any] = {}
            yield

    def progress(self, progress: Progress) -> None:
        super().progress(progress)
        if progress.unit not in self.tasks:
            self.tasks[progress.unit] = self.bars.add_task(self.units[progress.unit].name, total=progress.steps, note="")
        self.bars.update(self.tasks[progress.unit], completed=progress.step, note=_numbers(progress.metrics))
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
