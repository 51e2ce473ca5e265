"""The command `shippo`: tables, figures, checks and benchmarks.

Commands import what they need when they run, so that `shippo --help` is quick. Errors that a user can repair (a
`ValueError`, a file that cannot be read or written, a missing extra) are one line with the remedy and exit code 2;
Ctrl-C is 130.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from shippo_lab.harness.experiment import Experiment, Result

app = typer.Typer(
    name="shippo",
    help="Transported recurrent memory: the paper's evidence, theory and benchmarks, one command each.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What typer raises for a wrong command line; it has no public name.
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
START, EVIDENCE, CHECK = "Start here", "The paper's evidence", "Theory, speed, your own models"

Name = Annotated[str, typer.Argument(metavar="NAME", help="An experiment; `shippo list` names them.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Preset = Annotated[str | None, typer.Option(help="Which size of the experiment; `shippo list` names them.")]
Wide = Annotated[bool, typer.Option("--wide", help="Every column, also where the terminal is narrow.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="The same rows in seconds, for a first look (preset smoke).")]
Rows = Annotated[list[str] | None, typer.Option("--rows", "--row", help="Only these, with commas between; may be repeated.")]
Where = Annotated[Path | None, typer.Option(help="Folder of the run, or a result file.")]
# Terminal width from which `list` and `verify` print all columns.
WIDE = 110
Format = enum.StrEnum("Format", ["text", "markdown"])
Device = enum.StrEnum("Device", ["cpu", "cuda"])


def command(panel: str, example: str, name: str | None = None) -> Callable[[Any], Any]:
    """Register a function as a command, in a panel of the help, with an example below its docstring."""

    def register(function: Any) -> Any:
        function.__doc__ = f"{function.__doc__}\n\nExample: [bold]{example}[/]"
        return app.command(name, rich_help_panel=panel)(function)

    return register


def _console() -> Console:
    """A console as wide as the terminal; 200 columns for a pipe or a log."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _version(asked: bool) -> None:
    if asked:
        from shippo_ssm import __version__

        print(f"shippo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def _preset(preset: str | None, smoke: bool) -> str | None:
    """The preset, where --smoke stands for one."""
    if smoke and preset not in (None, "smoke"):
        raise ValueError(f"--smoke and --preset {preset} exclude each other; give one of them")
    return "smoke" if smoke else preset


def _result(name: str, preset: str | None, out: Path | None) -> tuple[Experiment, Result]:
    from shippo_lab.experiments import get

    experiment = get(name)
    return experiment, experiment.result(out, preset=preset)


@command(START, "shippo demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: seconds instead of minutes.")] = False,
    wide: Wide = False,
) -> None:
    """Train a memory that only writes and one that also transports, and see the difference."""
    from shippo_lab.experiments.paired.demo import main

    main(out, console=_console(), quick=quick, wide=wide)


@command(START, "shippo list", name="list")
def list_experiments(as_json: Json = False, wide: Wide = False) -> None:
    """What can be run: experiments, what each shows, how many of its verdicts hold, and how long it takes."""
    from shippo_lab.experiments import all_experiments
    from shippo_lab.harness.store import as_user_error, committed

    console, rows = _console(), []
    every = wide or console.width >= WIDE
    table = Table("Name", "What it shows", Column("Time", min_width=12), *["Protocol", "Presets"] * every, show_lines=True)
    table.caption = None if every else "--wide shows protocols and presets as well"
    for e in all_experiments():
        path = committed() / f"{e.name}.json"
        with as_user_error(path):
            outcome = e.outcome(e.result(path)) if path.exists() else "no committed result"
        words = {"name": e.name, "title": e.title, "claim": e.claim, "protocol": e.protocol, "wall_time": e.wall_time}
        rows.append(words | {"presets": list(e.presets), "outcome": outcome})
        more = (e.protocol, ", ".join(e.presets)) if every else ()
        table.add_row(f"[bold]{e.name}", f"{e.claim}\n[dim]{outcome}", e.wall_time, *more)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        console.print(table, width=max(console.width, WIDE) if wide else None)


@command(EVIDENCE, "shippo run paired --smoke")
def run(
    name: Name,
    smoke: Smoke = False,
    preset: Preset = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds instead of the protocol's.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes; by default one per core.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoints.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run that the folder holds.")] = False,
    rows: Rows = None,
    wide: Wide = False,
) -> None:
    """Train an experiment and write its result; --resume continues a run or adds rows and seeds to it."""
    from shippo_lab.experiments import get
    from shippo_lab.harness.malloc import keep_freed_memory
    from shippo_lab.harness.runner import run as run_experiment
    from shippo_lab.harness.tables import show

    experiment = get(name)
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs is {jobs}; expected 1 or more")
    if jobs == 1:
        # One job runs in this process.
        keep_freed_memory()
    only, preset = tuple(name for part in rows or () for name in part.split(",")), _preset(preset, smoke)
    try:
        result = run_experiment(experiment, preset, seeds=seeds, jobs=jobs, out=out, resume=resume, force=force, only=only)
    except KeyboardInterrupt:
        again = " ".join(word for word in sys.argv[1:] if word not in ("--resume", "--force"))
        typer.echo(f"interrupted; continue with `shippo {again} --resume`", err=True)
        raise
    show(_console(), experiment, result, wide=wide)
    typer.echo(f"written: {result.source}")


@command(EVIDENCE, "shippo table paired --format markdown")
def table(
    name: Name,
    format: Annotated[Format, typer.Option(help="Layout.")] = Format.text,
    out: Where = None,
    preset: Preset = None,
    smoke: Smoke = False,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Our numbers over the paper's, with a verdict per row; from your run, else from the results that come with the package."""
    from shippo_lab.harness import store, tables

    experiment, result = _result(name, _preset(preset, smoke), out)
    with store.as_user_error(result.source):
        if as_json:
            print(json.dumps(tables.as_data(experiment, result), indent=1))
        elif format is Format.text:
            tables.show(_console(), experiment, result, wide=wide)
        else:
            print(tables.as_markdown(experiment, result))


@command(EVIDENCE, "shippo figure paired --out paired.pdf")
def figure(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment with a figure, or `overview`.")],
    out: Annotated[Path | None, typer.Option(help="Picture to write; its ending chooses png, pdf or svg.")] = None,
    run_folder: Annotated[Path | None, typer.Option("--run", help="Folder of the run, or a result file.")] = None,
    preset: Preset = None,
    smoke: Smoke = False,
) -> None:
    """Draw a figure of the paper: `overview` (the lift), or that of an experiment."""
    path = out or Path(f"{name}.png")
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--out is {path}; expected a name that ends in .png, .pdf or .svg")
    if name == "overview":
        from shippo_lab.harness.plots import overview

        overview(path)
    else:
        from shippo_lab.harness.store import as_user_error

        experiment, result = _result(name, _preset(preset, smoke), run_folder)
        if experiment.figure is None:
            raise ValueError(f"{name} has a table but no figure; see `shippo table {name}`")
        with as_user_error(result.source):
            experiment.figure(result, path)
    typer.echo(f"written: {path}")


@command(EVIDENCE, "shippo report --out report.html")
def report(out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html")) -> None:
    """One self-contained page: theory checks, tables, figures, benchmarks."""
    from shippo_lab.experiments import all_experiments
    from shippo_lab.harness.report import write

    write(out, all_experiments())
    typer.echo(f"written: {out}")


@command(CHECK, "shippo verify")
def verify(
    out: Annotated[Path | None, typer.Option(help="Write the checks and their residuals as JSON.")] = None,
    only: Annotated[str | None, typer.Option(help="Only the checks whose name contains this.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every statement with its residual, not a summary.")] = False,
    wide: Wide = False,
) -> None:
    """Check the paper's propositions, lemmas and theorems numerically: a summary by section, or residuals with --all."""
    from shippo_lab.theory import verify as check

    console = _console()
    raise typer.Exit(check(out=out, only=only, every=every, console=console, wide=wide or console.width >= WIDE))


@command(CHECK, "shippo bench --out bench.json")
def bench(
    full: Annotated[bool, typer.Option("--full", help="All peers and sweeps: a quarter of an hour, not two minutes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the measurements as JSON.")] = None,
    device: Annotated[Device, typer.Option(help="The CPU, or our GPU kernels on a GPU.")] = Device.cpu,
    against: Annotated[
        str, typer.Option(metavar="REV", help="Compare with this commit in one run: that alone, or after a --full one.")
    ] = "",
) -> None:
    """Measure our scans beside peers and the machine's limits; needs a source checkout."""
    import importlib

    from shippo_lab.harness.store import checkout

    root = checkout()
    if root is None or not (root / "benchmarks" / "run.py").exists():
        raise ValueError("the benchmarks folder is missing; run `shippo bench` from a source checkout (pip install -e .)")
    sys.path.insert(0, str(root))
    if device == Device.cuda:
        raise typer.Exit(importlib.import_module("benchmarks.device").main(full, out))
    raise typer.Exit(importlib.import_module("benchmarks.run").main(not full, out, against=against))


@command(START, "shippo warmup --right orthogonal --right dissipative")
def warmup(
    d_model: Annotated[int, typer.Option(help="Width of the layer.")] = 128,
    d_state: Annotated[int | None, typer.Option(help="State order N; the layer's default without it.")] = None,
    group_width: Annotated[int | None, typer.Option(help="Group width P; the layer's default without it.")] = None,
    right: Annotated[list[str] | None, typer.Option(help="Right action; may be given several times.")] = None,
) -> None:
    """Compile the CPU kernels of a layer now, so that no later process waits for them."""
    from shippo_ssm import warmup as fill
    from shippo_ssm.engine import cache_directory

    for name in right or [None]:
        options: dict[str, Any] = {"d_state": d_state, "group_width": group_width, "right": name}
        seconds = fill(d_model, **{key: value for key, value in options.items() if value is not None})
        typer.echo(f"{name or 'default layer'}: {seconds:.1f} s, kept in {cache_directory()}")


@command(CHECK, "shippo inspect runs/mqar/weights/struct-split.s0")
def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="The folder of a saved model.")],
    as_json: Json = False,
) -> None:
    """Read a trained model's right actions: do they collapse to a fixed mixing and smaller blocks?"""
    import dataclasses

    from shippo_lab.experiments.mqar.model import inspect as inspect_folder

    rows = [dataclasses.asdict(row) for row in inspect_folder(checkpoint)]
    if as_json:
        return print(json.dumps(rows, indent=1))
    if not rows:
        raise ValueError(f"{checkpoint} has no layer with a right action; there is nothing to inspect")
    grid = Table(*rows[0], title=Text(f"Right actions of {checkpoint}"))
    for row in rows:
        grid.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    _console().print(grid)


def _fail(message: str) -> NoReturn:
    print(f"shippo: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Run the command line; errors that a user can repair are one line on stderr and exit code 2."""
    try:
        # With standalone_mode=False typer raises usage errors and returns exit codes.
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        _fail(f"{error}; install the extras with `pip install 'shippo-ssm[plot,hf]'`")
    except USAGE_ERROR as error:
        command = "shippo" if error.ctx is None else error.ctx.command_path
        _fail(f"{error.format_message()} `{command} --help` says what it takes")
    except BrokenPipeError:
        # The reader of the pipe has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (ValueError, OSError) as error:
        _fail(str(error))
    raise SystemExit(code or 0)


if __name__ == "__main__":
    main()
