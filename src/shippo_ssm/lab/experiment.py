"""What an experiment is: a claim, a protocol, rows to train, and a verdict on what came out.

An experiment file builds frozen configurations, one per row of a table, as variants (`dataclasses.replace`) of one base
configuration, and gives a function that trains one row for some seeds. The runner (`runner.py`) cuts the rows into units, a
unit being a row and the seeds that are trained together, and hands each unit a `Session`, the only thing a training loop
knows of checkpoints and progress:

    state = session.restore()            # None, or (tensors, meta) of the last checkpoint
    session.save(tensors, meta)          # atomic; the run continues from here after a kill
    session.report(step, steps, nmse=...)

It returns a `RowResult` with one number per seed for every metric. The runner joins the units of a row, in the order of their
seeds, and `Experiment.result` reads what it wrote.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from shippo_ssm.lab import store

Kind = TypeVar("Kind")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConfig:
    """One row of a table: what every experiment's own configuration extends."""

    name: str = "base"
    """Short name, as in the paper's numbers and on the command line."""
    label: str = ""
    """The row's heading in a table."""
    steps: int = 20_000
    """Training steps; the last one is reported."""
    num_seeds: int = 5
    """Independent training runs; seeds are 0, 1, .., num_seeds - 1."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.num_seeds))

    def shared(self, kind: type[Kind], **others: Any) -> Kind:
        """A dataclass `kind` (a task, a geometry) with this row's values in the fields that both have, and `others`."""
        own = {entry.name for entry in fields(self)}
        names = own & {entry.name for entry in fields(kind)}  # pyright: ignore[reportArgumentType]
        return kind(**{name: getattr(self, name) for name in names} | others)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(RowConfig):
    """A row that is trained by AdamW."""

    batch: int = 128
    """Examples of a training step."""
    learning_rate: float = 3e-4
    weight_decay: float = 1e-2
    clip: float = 1.0
    """Largest norm of the gradient."""
    eval_every: int = 1000
    """Steps between evaluations."""


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
        return None if self.checkpoint is None else store.load_tensors(self.checkpoint)

    def save(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Keep tensors and JSON-able meta; replaces the last checkpoint in one step."""
        if self.checkpoint is not None:
            store.save_tensors(self.checkpoint, tensors, meta)

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


def accuracy(key: str, label: str) -> Column:
    """The column of a fraction that is better the higher it is."""
    return Column(key=key, label=label, better="higher", format=".3f")


class Highlight(NamedTuple):
    """A number that the README shows of an experiment: a row, one of its metrics, and the words for it."""

    row: str
    metric: str
    words: str


class PaperTable(NamedTuple):
    """A table of the paper: `rows[row][metric]` = (mean, sample standard deviation or None)."""

    label: str
    caption: str
    num_seeds: int
    rows: dict[str, dict[str, tuple[float, float | None]]]


def paper_row(tables: Iterable[PaperTable], row: str) -> dict[str, tuple[float, float | None]]:
    """The paper's numbers for one of our rows, gathered from the tables that have it; empty where none has."""
    found: dict[str, tuple[float, float | None]] = {}
    for table in tables:
        for metric, (mean, std) in table.rows.get(row, {}).items():
            found.setdefault(metric, (mean, std))
    return found


class Verdict(NamedTuple):
    """Whether a row shows what the paper claims of it, and in which words."""

    holds: bool
    text: str


class Part(dict[str, Any]):
    """Metrics, curves, notes or configuration of a row: to ask for what is not there is a `ValueError` that names the file."""

    def __init__(self, content: dict[str, Any], where: str) -> None:
        super().__init__(content)
        self.where = where

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self.where} has no {key!r}; expected what a run of this version writes; run the experiment again")


class FinishedRow(NamedTuple):
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
        """Mean over seeds."""
        values = self.metrics[key]
        # `statistics.fmean` refuses infinities of both signs and an overflow; a diverged run must still be printed.
        return sum(values) / len(values)

    def std(self, key: str) -> float:
        """Sample standard deviation over seeds; 0 for a single seed."""
        values = self.metrics[key]
        # `statistics.stdev` refuses what is not finite; a diverged run must still be printed.
        if not all(map(math.isfinite, values)):
            return math.nan
        return statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(slots=True)
class Result:
    """A result file: the rows that are finished, in the order of the experiment."""

    experiment: str
    preset: str
    rows: dict[str, FinishedRow]
    versions: dict[str, str]
    seconds: float
    source: str = ""

    @classmethod
    def from_json(cls, content: Any, source: str = "") -> Result:
        """A result file's content, checked: what is missing or of another type is a `ValueError` that names it."""
        facts = _fields(content, source, experiment=str, preset=str, rows=list, versions=dict, wall_seconds=(int, float))
        rows = {}
        for place, row in enumerate(facts["rows"]):
            found = _fields(row, f"{source}: row {place}", **ROW)
            where = f"{source}: row {found['name']!r}"
            if not found["seeds"]:
                raise ValueError(f"{where} has no seeds; expected at least one; run the experiment again")
            for key, values in found["metrics"].items():
                numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
                if not numbers or len(values) != len(found["seeds"]):
                    raise ValueError(
                        f"{where} has {values!r} as its metric {key!r}; expected {len(found['seeds'])} numbers, one per seed; "
                        "run the experiment again"
                    )
            if not isinstance(found["config"].get("steps", 0), int):
                raise ValueError(f"{where} has {found['config']['steps']!r} steps; expected a number; run the experiment again")
            parts: dict[str, Any] = {
                key: Part(value, f"{where}: `{key}`") for key, value in found.items() if isinstance(value, dict)
            }
            rows[found["name"]] = FinishedRow(**found | parts)
        versions = Part(facts["versions"], f"{source}: `versions`")
        return cls(facts["experiment"], facts["preset"], rows, versions, facts["wall_seconds"], source)

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result in a file; one of `results/` is named without the folders above."""
        return cls.from_json(store.read_json(path), f"results/{path.name}" if path.parent.name == "results" else str(path))


# What a row of a result file holds; a label is shown, a name is looked up.
ROW: dict[str, Any] = {
    "name": str,
    "label": str,
    "config": dict,
    "seeds": list,
    "metrics": dict,
    "curves": dict,
    "notes": dict,
    "seconds": (int, float),
}
_WORDS = {dict: "an object", list: "a list", str: "a text"}


def _fields(content: Any, where: str, **types: Any) -> dict[str, Any]:
    """The named fields of a JSON object, each of its type."""
    if not isinstance(content, dict):
        raise ValueError(
            f"{where} holds {_shown(content)}; expected an object with {', '.join(types)}; run the experiment again"
        )
    for key, kind in types.items():
        if key not in content:
            raise ValueError(f"{where} has no {key!r}; expected an object with {', '.join(types)}; run the experiment again")
        if not isinstance(content[key], kind) or isinstance(content[key], bool):
            expected = _WORDS.get(kind, "a number")
            raise ValueError(f"{where} has {_shown(content[key])} as {key!r}; expected {expected}; run the experiment again")
    return {key: content[key] for key in types}


def _shown(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= 40 else f"{text[:37]}..."


@contextmanager
def blame(source: Any) -> Iterator[None]:
    """What goes wrong while the content of a file is shown is a `ValueError` that names the file."""
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{source} holds what cannot be shown ({what}); expected what a run writes; make it again") from error


def by_row(judge: Callable[[FinishedRow, Result], Verdict | None]) -> Callable[[Result], dict[str, Verdict]]:
    """The `judge` of an experiment from the judgement of one row in its result; `None` is no verdict."""

    @functools.wraps(judge)
    def verdicts(result: Result) -> dict[str, Verdict]:
        found = {name: judge(row, result) for name, row in result.rows.items()}
        return {name: verdict for name, verdict in found.items() if verdict is not None}

    return verdicts


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One table of the paper, from its claim to the judgement of our numbers."""

    name: str
    title: str
    claim: str
    """What the paper says these numbers show."""
    protocol: str
    """How the numbers come about, in a sentence or two."""
    tables: tuple[PaperTable, ...]
    """The paper's tables whose rows stand beside ours."""
    wall_time: str
    """Measured, on two cores."""
    presets: dict[str, Callable[[], tuple[Any, ...]]]
    """Name -> function that builds the rows; the first is what `shippo run` takes."""
    train: Callable[[Any, tuple[int, ...], Session], RowResult]
    """A function at the top of its module: worker processes get it by its name."""
    columns: tuple[Column, ...]
    judge: Callable[[Result], dict[str, Verdict]]
    """Row name -> verdict, for the rows that are there."""
    stack: int = 64
    """At most this many seeds of a row train together in one unit."""
    cost: Callable[[Any], float] = lambda config: 1.0
    """Time of a row's step beside that of the others: the slowest rows begin first, so that workers end together."""
    figure: Callable[[Result, Path], None] | None = None
    highlights: tuple[Highlight, ...] = ()
    main: tuple[str, ...] = ()
    """Keys of the two or three columns that a narrow table keeps; by default the first three."""
    unjudged: tuple[str, ...] = ("smoke", "quick")
    """Presets that are over too soon to show anything: their rows get no verdict."""

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
            raise ValueError(f"{self.name}: `preset` is {preset!r}; expected one of {', '.join(self.presets)}")
        return self.presets[preset]()

    def verdicts(self, result: Result) -> dict[str, Verdict]:
        """Row name -> verdict; none at all for a preset that is not judged."""
        return {} if result.preset in self.unjudged else self.judge(result)

    def command(self, preset: str | None = None) -> str:
        """What a user types for a run of a preset."""
        return f"shippo run {self.name}" + ("" if preset in (None, self.default_preset) else f" --preset {preset}")

    def folder(self, preset: str | None = None) -> Path:
        """runs/NAME for the default preset, runs/NAME-PRESET for another: a smoke run never hides a full one."""
        return store.RUNS / (self.name if preset in (None, self.default_preset) else f"{self.name}-{preset}")

    def result(self, folder: Path | None = None, *, preset: str | None = None) -> Result:
        """What a run left: in `folder` (or a result file), else in `runs/` here, else the result that comes with the package.

        Raises:
            FileNotFoundError: there is none; the message names the command that makes one.
            ValueError: the file is damaged, of another experiment, or without a finished row.
        """
        if folder is not None:
            places = [folder if folder.suffix == ".json" else folder / "result.json"]
        else:
            places = [self.folder(preset) / "result.json"]
            if preset in (None, self.default_preset):
                places.append(store.committed() / f"{self.name}.json")
        path = next((place for place in places if place.exists()), None)
        if path is None:
            looked = " or ".join(map(str, places))
            raise FileNotFoundError(f"no result of {self.name!r} in {looked}; make one with `{self.command(preset)}`")
        result = Result.read(path)
        if result.experiment != self.name:
            raise ValueError(f"{path} is a result of {result.experiment!r}, not of {self.name!r}; choose another --out")
        if not result.rows:
            raise ValueError(f"{path} has no finished row yet; continue the run with `{self.command(preset)} --resume`")
        return result
