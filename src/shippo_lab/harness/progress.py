"""Progress of a run, with an estimate of the time left: a bar and lines that are rewritten on a terminal, a log elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shippo_lab.harness.experiment import Progress

# Characters of the progress bar.
BAR = 24


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours}:{minutes:02d}:{round(seconds) % 60:02d}" if hours else f"{minutes}:{round(seconds) % 60:02d}"


class Display:
    """Counts what is done and shows nothing. The time left assumes that every step takes its row's share of the cost."""

    @contextmanager
    def show(self, name: str, units: list[Any], open_units: set[int]) -> Iterator[None]:
        self.name = name
        self.units = {unit.index: unit for unit in units}
        self.done = len(units) - len(open_units)
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


class Lines(Display):
    """One line per unit: the running ones and a sum on a terminal, every few seconds one in logs and pipes."""

    def __init__(self, console: Console, every: float = 10.0) -> None:
        self.console, self.every = console, every
        self.live = Live(console=console) if console.is_terminal else None
        self.lines: dict[int, str] = {}
        self.printed: dict[int, float] = {}

    @contextmanager
    def show(self, name: str, units: list[Any], open_units: set[int]) -> Iterator[None]:
        with super().show(name, units, open_units), self.live or nullcontext():
            yield

    def progress(self, progress: Progress) -> None:
        super().progress(progress)
        numbers = "  ".join(f"{name} {value:.3g}" for name, value in progress.metrics.items())
        line = f"{self.units[progress.unit].name}  step {progress.step}/{progress.steps}  {numbers}"
        self.lines[progress.unit] = line
        self._refresh()
        now = time.monotonic()
        due = now - self.printed.get(progress.unit, 0.0) >= self.every or progress.step == progress.steps
        if self.live is None and due:
            self.printed[progress.unit] = now
            self.console.print(f"{line}  [{self._sum()}]", highlight=False, markup=False, soft_wrap=True)

    def finished(self, unit: int) -> None:
        super().finished(unit)
        self.lines.pop(unit, None)
        self._refresh()

    def _sum(self) -> str:
        return f"{self.done}/{len(self.units)} done, {self.left()}"

    def _refresh(self) -> None:
        if self.live is not None:
            total = sum(unit.config.steps * unit.cost for unit in self.units.values())
            filled = round(BAR * (1 - sum(self.work.values()) / max(total, 1)))
            bar = "█" * filled + "░" * (BAR - filled)
            lines = [*self.lines.values(), f"{self.name}: {bar} {self._sum()}"]
            self.live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))
