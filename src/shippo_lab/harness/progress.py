"""Progress of a run, with an estimate of the time left."""

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
    """The running units and a sum: rewritten lines on a terminal, one every few seconds in logs and pipes; silent by default.

    The time left assumes that every step takes its row's share of the cost.
    """

    def __init__(self, console: Console | None = None, every: float = 10.0) -> None:
        self.console, self.every = console, every
        self.live = Live(console=console) if console is not None and console.is_terminal else None
        self.lines: dict[int, str] = {}
        self.printed: dict[int, float] = {}

    @contextmanager
    def show(self, name: str, units: list[Any], open_units: set[int]) -> Iterator[None]:
        self.name, self.units = name, {unit.index: unit for unit in units}
        self.whole = {unit.index: float(unit.config.steps * unit.cost) for unit in units}
        self.done = len(units) - len(open_units)
        # Unit -> the work that is left of it, and of all of them when the first one reported.
        self.work, self.first = {index: self.whole[index] for index in open_units}, None
        with self.live or nullcontext():
            yield

    def progress(self, progress: Progress) -> None:
        unit, now = self.units[progress.unit], time.monotonic()
        self.work[progress.unit] = self.whole[progress.unit] * (1 - progress.step / progress.steps)
        if self.first is None:
            self.first = now, sum(self.work.values())
        numbers = "  ".join(f"{name} {value:.3g}" for name, value in progress.metrics.items())
        self.lines[progress.unit] = line = f"{unit.name}  step {progress.step}/{progress.steps}  {numbers}"
        self._refresh()
        due = now - self.printed.get(progress.unit, 0.0) >= self.every or progress.step == progress.steps
        if self.console is not None and self.live is None and due:
            self.printed[progress.unit] = now
            self.console.print(f"{line}  [{self._sum()}]", highlight=False, markup=False, soft_wrap=True)

    def finished(self, unit: int) -> None:
        self.work[unit], self.done = 0.0, self.done + 1
        self.lines.pop(unit, None)
        self._refresh()

    def left(self) -> str:
        if self.first is None:
            return ""
        (since, before), ahead = self.first, sum(self.work.values())
        return "" if ahead >= before else f"about {clock((time.monotonic() - since) * ahead / (before - ahead))} left"

    def _sum(self) -> str:
        return f"{self.done}/{len(self.units)} done, {self.left()}"

    def _refresh(self) -> None:
        if self.live is not None:
            filled = round(BAR * (1 - sum(self.work.values()) / max(sum(self.whole.values()), 1)))
            lines = [*self.lines.values(), f"{self.name}: {'█' * filled}{'░' * (BAR - filled)} {self._sum()}"]
            self.live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))
