"""What an experiment is: a claim, a protocol, rows to train, and a verdict on the result.

An experiment builds one frozen configuration per row of a table and gives a function that trains a row for some seeds.
The runner splits rows into units (a row and the seeds that train together), gives each unit a `Session` for its
checkpoints, joins their `RowResult`s in the order of the seeds, and writes the result file, which `Experiment.result`
reads.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from shippo_lab.harness import store
from shippo_lab.harness.store import AGAIN, NUMBER, checked_fields

Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConfig:
    """One row of a table; every experiment extends it."""

    name: str = "base"
    """Short name, as in the paper's numbers and on the command line."""
    label: str = ""
    steps: int = 20_000
    """Training steps; the last one is reported."""
    num_seeds: int = 5
    """Independent training runs; seeds are 0, 1, .., num_seeds - 1."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.num_seeds))

    def shared(self, kind: type[Kind], **others: Any) -> Kind:
        """Build the dataclass `kind` from the fields it shares with this row, and `others`."""
        own = {entry.name for entry in fields(self)}
        names = own & {entry.name for entry in fields(kind)}  # pyright: ignore[reportArgumentType]
        return kind(**{name: getattr(self, name) for name in names} | others)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(RowConfig):
    """A row that is trained by AdamW."""

    batch: int = 128
    learning_rate: float = 3e-4
    weight_decay: float = 1e-2
    clip: float = 1.0
    """Largest norm of the gradient."""
    eval_every: int = 1000


@dataclass(slots=True)
class RowResult:
    """Result of training a row: `metrics[name][i]` belongs to the i-th seed, `curves[name][j][i]` to its j-th evaluation."""

    metrics: dict[str, list[float]]
    curves: dict[str, list[Any]] = field(default_factory=dict)
    """Empty, or with "step", the steps of the evaluations."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Other facts of a row that are not per seed (a bound, a parameter count)."""


class Progress(NamedTuple):
    """One report of a training loop."""

    unit: int
    step: int
    steps: int
    metrics: dict[str, float]


@dataclass(slots=True)
class Session:
    """Checkpoints and progress of one unit; by default nothing is saved or reported."""

    unit: int = 0
    checkpoint: Path | None = None
    notify: Callable[[Progress], None] = lambda progress: None

    def restore(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The last checkpoint as (tensors, meta), or `None` at the start."""
        return None if self.checkpoint is None else store.load_checkpoint(self.checkpoint)

    def save(self, tensors: dict[str, Any], meta: dict[str, Any]) -> None:
        """Replace the checkpoint atomically; `tensors` may hold state dictionaries, `meta` must be JSON-able."""
        if self.checkpoint is not None:
            store.save_checkpoint(self.checkpoint, tensors, meta)

    def report(self, step: int, steps: int, **metrics: float) -> None:
        """Report progress; `metrics` are shown beside the bar."""
        self.notify(Progress(self.unit, step, steps, metrics))


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A metric as a table shows it."""

    key: str
    label: str
    better: Literal["lower", "higher", "neither"] = "lower"
    format: str = ".3g"


def accuracy(key: str, label: str) -> Column:
    """The column of a fraction; higher is better."""
    return Column(key=key, label=label, better="higher", format=".3f")


class Highlight(NamedTuple):
    """A number shown at the head of the results page: a row, one of its metrics, and a description."""

    row: str
    metric: str
    words: str


class PaperTable(NamedTuple):
    """A table of the paper: `rows[row][metric]` = [mean, sample standard deviation or None]."""

    label: str
    caption: str
    num_seeds: int
    rows: dict[str, dict[str, Sequence[Any]]]


def paper_row(tables: Sequence[PaperTable], row: str) -> dict[str, Sequence[Any]]:
    """The paper's numbers for one of our rows, from the first table that has each metric."""
    return {metric: value for table in reversed(tables) for metric, value in table.rows.get(row, {}).items()}


@functools.cache
def paper_numbers() -> dict[str, PaperTable]:
    """The paper's own numbers, from the one file that holds them: its tables by key."""
    text = resources.files("shippo_lab.experiments").joinpath("paper_numbers.json").read_text()
    return {key: PaperTable(**table) for key, table in json.loads(text)["tables"].items()}


def paper_tables(*keys: str) -> tuple[PaperTable, ...]:
    """The paper's tables of these keys."""
    return tuple(paper_numbers()[key] for key in keys)


class Verdict(NamedTuple):
    """Whether a row shows what the paper claims, and in which words."""

    holds: bool
    text: str


class FinishedRow(NamedTuple):
    """A finished row of a result file."""

    name: str
    label: str
    config: dict[str, Any]
    seeds: list[int]
    metrics: dict[str, list[float]]
    curves: dict[str, list[Any]]
    notes: dict[str, Any]
    seconds: float

    @classmethod
    def from_json(cls, content: Any, where: str) -> FinishedRow:
        """Validate a row of a result file; a missing or wrong field is a `ValueError` that names it and `where`."""
        types: dict[str, Any] = dict.fromkeys(("config", "metrics", "curves", "notes"), dict)
        found = checked_fields(content, where, name=str, label=str, seeds=list, seconds=NUMBER, **types)
        where, count = f"{where} {found['name']!r}", len(found["seeds"])
        if not count:
            raise ValueError(f"{where} has no seeds; expected at least one; {AGAIN}")
        for key, values in found["metrics"].items():
            if not isinstance(values, list) or len(values) != count or any(type(value) not in NUMBER for value in values):
                raise ValueError(f"{where} has {values!r} as metric {key!r}; expected {count} numbers, one per seed; {AGAIN}")
        if not isinstance(found["config"].get("steps", 0), int):
            raise ValueError(f"{where} has {found['config']['steps']!r} steps; expected a number; {AGAIN}")
        return cls(**found)

    def mean(self, key: str) -> float:
        """Mean over seeds; unlike `statistics.fmean` it accepts infinities of both signs."""
        values = self.metrics[key]
        return sum(values) / len(values)

    def std(self, key: str) -> float:
        """Sample standard deviation over seeds; 0 for a single seed, NaN if a value is not finite."""
        values = self.metrics[key]
        if not all(map(math.isfinite, values)):
            return math.nan
        return statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(slots=True)
class Result:
    """A result file: the finished rows, in the order of the experiment."""

    experiment: str
    preset: str
    rows: dict[str, FinishedRow]
    versions: dict[str, str]
    seconds: float
    source: str = ""

    @classmethod
    def from_json(cls, content: Any, source: str = "") -> Result:
        """Validate the content of a result file; a missing or wrong field is a `ValueError` that names it."""
        facts = checked_fields(content, source, experiment=str, preset=str, rows=list, versions=dict, wall_seconds=NUMBER)
        rows = [FinishedRow.from_json(row, f"{source}: row {place}") for place, row in enumerate(facts["rows"])]
        named = {row.name: row for row in rows}
        return cls(facts["experiment"], facts["preset"], named, facts["versions"], facts["wall_seconds"], source)

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a result file; one of `results/` is named without the folders above."""
        return cls.from_json(store.read_json(path), f"results/{path.name}" if path.parent.name == "results" else str(path))


def by_row(judge: Callable[[FinishedRow, Result], Verdict | None]) -> Callable[[Result], dict[str, Verdict]]:
    """Build the `judge` of an experiment from a function that judges one row; `None` is no verdict."""

    @functools.wraps(judge)
    def verdicts(result: Result) -> dict[str, Verdict]:
        found = {name: judge(row, result) for name, row in result.rows.items()}
        return {name: verdict for name, verdict in found.items() if verdict is not None}

    return verdicts


def described(docstring: str | None) -> dict[str, Any]:
    """Title, claim, protocol and wall time of an experiment from the head of its module's docstring, one line each."""
    if docstring is None:
        # `python -OO` has none.
        return dict.fromkeys(("title", "claim", "protocol", "wall_time"), "")
    title, _, *lines = docstring.splitlines()
    words = dict(line.split(": ", 1) for line in lines[:3])
    return {"title": title[:-1], "claim": words["Claim"], "protocol": words["Protocol"], "wall_time": words["Time"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One table of the paper, from its claim to the verdicts on our numbers."""

    name: str
    title: str
    claim: str
    """What the paper says these numbers show."""
    protocol: str
    """How the numbers are made, in a sentence or two."""
    wall_time: str
    """Measured, on two cores."""
    presets: dict[str, Callable[[], tuple[Any, ...]]]
    """Name -> function that builds the rows; the first is the default."""
    train: Callable[[Any, tuple[int, ...], Session], RowResult]
    """A top-level function of its module, since worker processes import it by name."""
    columns: tuple[Column, ...]
    judge: Callable[[Result], dict[str, Verdict]]
    """Row name -> verdict, for the rows of the result."""
    tables: tuple[PaperTable, ...] = ()
    """The paper's tables whose rows are shown beside ours."""
    stack: int = 1
    """Largest number of seeds of a row that train together in one unit."""
    cost: Callable[[Any], float] = lambda config: 1.0
    """Relative time of a row's step: the slowest rows begin first, so that workers end together."""
    figure: Callable[[Result, Path], None] | None = None
    highlights: tuple[Highlight, ...] = ()
    main: tuple[str, ...] = ()
    """Keys of the two or three columns of a narrow table; by default the first three."""
    unjudged: tuple[str, ...] = ("smoke", "quick")
    """Presets that are too short for a verdict."""

    @property
    def default_preset(self) -> str:
        return next(iter(self.presets))

    def rows(self, preset: str | None = None) -> tuple[Any, ...]:
        """The row configurations of a preset; an unknown one is a `ValueError`."""
        preset = preset or self.default_preset
        if preset not in self.presets:
            raise ValueError(f"{self.name}: `preset` is {preset!r}; expected one of {', '.join(self.presets)}")
        return self.presets[preset]()

    def verdicts(self, result: Result) -> dict[str, Verdict]:
        """Row name -> verdict; empty for a preset that is not judged."""
        return {} if result.preset in self.unjudged else self.judge(result)

    def outcome(self, result: Result) -> str:
        """How many verdicts hold, and which rows do not."""
        verdicts = self.verdicts(result)
        failed = [result.rows[name].label for name, verdict in verdicts.items() if not verdict.holds]
        count = f"{len(verdicts) - len(failed)} of {len(verdicts)} verdicts hold"
        return count + (f", not: {'; '.join(failed)}" if failed else "") if verdicts else "not judged"

    def command(self, preset: str | None = None) -> str:
        """The command that runs a preset."""
        return f"shippo run {self.name}" + ("" if preset in (None, self.default_preset) else f" --preset {preset}")

    def folder(self, preset: str | None = None) -> Path:
        """runs/NAME for the default preset, runs/NAME-PRESET for another."""
        return store.RUNS / (self.name if preset in (None, self.default_preset) else f"{self.name}-{preset}")

    def result(self, folder: Path | None = None, *, preset: str | None = None) -> Result:
        """The result in `folder` (or a result file), else in `runs/`, else the one that comes with the package.

        A missing one is a `FileNotFoundError` that names the command; a damaged or wrong one is a `ValueError`.
        """
        places = [(folder or self.folder(preset)) / "result.json"]
        if folder is not None and (folder.suffix == ".json" or folder.is_file()):
            places = [folder]
        elif folder is None and preset in (None, self.default_preset):
            places.append(store.committed() / f"{self.name}.json")
        path = next((place for place in places if place.exists()), None)
        if path is None:
            # An unknown preset is an error of its own.
            self.rows(preset)
            looked = " or ".join(map(str, places))
            raise FileNotFoundError(f"no result of {self.name!r} in {looked}; make one with `{self.command(preset)}`")
        result = Result.read(path)
        if result.experiment != self.name:
            raise ValueError(f"{path} is a result of {result.experiment!r}, not of {self.name!r}; choose another file")
        if not result.rows:
            raise ValueError(f"{path} has no finished row yet; continue the run with `{self.command(preset)} --resume`")
        return result
