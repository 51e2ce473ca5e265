"""What an experiment is: a claim, a protocol, rows to train, and a verdict on what came out.

An experiment file builds frozen configurations, one per row of a table, as variants (`dataclasses.replace`) of one
base configuration, and gives a function that trains one row for some seeds. The runner (`runner.py`) cuts the rows
into units, a unit being a row and the seeds that are trained together, and hands each unit a `Session`, the only
thing a training loop knows of checkpoints and progress:

    state = session.restore()            # None, or (tensors, meta) of the last checkpoint
    session.save(tensors, meta)          # atomic; the run continues from here after a kill
    session.report(step, steps, nmse=...)

It returns a `RowResult` with one number per seed for every metric. The runner joins the units of a row, in the order
of their seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from shippo_ssm.experiments.store import load_checkpoint, save_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConfig:
    """One row of a table: what every experiment's own configuration extends."""

    name: str = "base"
    """Short name, as in the paper-number file and on the command line."""
    label: str = ""
    """The row's heading in a table."""
    steps: int = 20_000
    """Training steps; the last one is reported."""
    num_seeds: int = 5
    """Independent training runs; seeds are 0, 1, .., num_seeds - 1."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.num_seeds))


@dataclass(slots=True)
class RowResult:
    """What training a row gave: `metrics[name][i]` is the number of the i-th seed, `curves[name][j][i]` its j-th evaluation."""

    metrics: dict[str, list[float]]
    curves: dict[str, list[Any]] = field(default_factory=dict)
    """Must hold "step", the steps of the evaluations, where it holds anything."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Further facts of a row that are not per seed (a bound, a parameter count)."""


class Progress(NamedTuple):
    """One report of a training loop."""

    unit: int
    step: int
    steps: int
    metrics: dict[str, float]


@dataclass(slots=True)
class Session:
    """A training loop's line to the runner; the default keeps nothing and says nothing."""

    unit: int = 0
    checkpoint: Path | None = None
    notify: Callable[[Progress], None] = lambda progress: None

    def restore(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint as (tensors, meta), or `None` at the start."""
        return None if self.checkpoint is None else load_checkpoint(self.checkpoint)

    def save(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Keep tensors and JSON-able meta; replaces the last checkpoint in one step."""
        if self.checkpoint is not None:
            save_checkpoint(self.checkpoint, tensors, meta)

    def report(self, step: int, steps: int, **metrics: float) -> None:
        """Tell how far training is; `metrics` are shown beside the bar."""
        self.notify(Progress(self.unit, step, steps, metrics))


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A metric as a table shows it."""

    key: str
    label: str
    better: Literal["lower", "higher", "neither"] = "lower"
    format: str = ".3g"


class Verdict(NamedTuple):
    """Whether a row shows what the paper claims of it, and in which words."""

    holds: bool
    text: str


class Row(NamedTuple):
    """A finished row, as `Result` reads it from the result file."""

    name: str
    label: str
    config: dict[str, Any]
    seeds: list[int]
    metrics: dict[str, list[float]]
    curves: dict[str, list[Any]]
    notes: dict[str, Any]
    seconds: float

    def mean(self, key: str) -> float:
        return statistics.fmean(self.metrics[key])

    def std(self, key: str) -> float:
        """Sample standard deviation over seeds; 0 for a single seed."""
        values = self.metrics[key]
        return statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(slots=True)
class Result:
    """A result file: the rows that are finished, in the order of the experiment."""

    experiment: str
    preset: str
    rows: dict[str, Row]
    versions: dict[str, str]
    seconds: float
    source: str = ""

    @classmethod
    def from_json(cls, content: dict[str, Any], source: str = "") -> Result:
        rows = {}
        for row in content["rows"]:
            rows[row["name"]] = Row(*(row[key] for key in Row._fields))
        return cls(content["experiment"], content["preset"], rows, content["versions"], content["wall_seconds"], source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One table of the paper, from its claim to the judgement of our numbers."""

    name: str
    title: str
    claim: str
    """What the paper says these numbers show."""
    protocol: str
    """How the numbers come about, in a sentence or two."""
    tables: tuple[str, ...]
    """Keys of `paper_numbers.json` whose rows stand beside ours."""
    wall_time: str
    """Measured, on two cores."""
    presets: dict[str, Callable[[], tuple[Any, ...]]]
    """Name -> function that builds the rows; the first is what `shippo run` takes."""
    train: Callable[[Any, tuple[int, ...], Session], RowResult]
    columns: tuple[Column, ...]
    judge: Callable[[Result], dict[str, Verdict]]
    """Row name -> verdict, for the rows that are there."""
    stack: int = 64
    """At most this many seeds of a row train together in one unit."""
    cost: Callable[[Any], float] = lambda config: 1.0
    """Time of a row's step beside that of the others: the slowest rows begin first, so that workers end together."""
    figure: Callable[[Result, Path], None] | None = None

    @property
    def default_preset(self) -> str:
        return next(iter(self.presets))

    def rows(self, preset: str | None = None) -> tuple[Any, ...]:
        """The row configurations of a preset.

        Raises:
            ValueError: there is no such preset.
        """
        preset = preset or self.default_preset
        if preset not in self.presets:
            raise ValueError(f"{self.name} has no preset {preset!r}; it has {', '.join(self.presets)}")
        return self.presets[preset]()
