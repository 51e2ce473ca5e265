"""Every `shippo` command that the README and the docs print runs: as it stands, or in a cheap form on the same code path.

Commands are collected from the bash blocks of the pages. Each must be a key of `CHEAP`, or the test fails: a command
that nobody runs cannot be printed. A value of `None` runs the command as printed; otherwise the words given are added.
They run one after another in one empty folder, in the order of `CHEAP`, so that what one writes another may read."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shippo_lab import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
SMALL = "--smoke --row solver --row no-right-r8 --row oracle --jobs 1"

REAL_RUN = subprocess.run

# Printed command -> words that make it cheap.
CHEAP = {
    "shippo list": None,
    "shippo list --json": None,
    "shippo warmup": "--d-model 16 --d-state 8",
    "shippo demo": "--quick",
    "shippo run paired --smoke": "--row solver --row no-right-r8 --row oracle --jobs 1",
    "shippo run paired": f"{SMALL} --out runs/paired",
    "shippo run paired --resume": f"{SMALL} --out runs/paired",
    "shippo run paired --seeds 2 --jobs 2 --out runs/two-seeds": "--smoke --row solver --row no-right-r8",
    "shippo table paired": None,
    "shippo table paired --smoke": None,
    "shippo table paired --format markdown": None,
    "shippo table paired --json": None,
    "shippo figure paired --out paired.pdf": None,
    "shippo figure overview --out overview.png": None,
    "shippo verify": "--only rotation_example",
    "shippo verify --all": "--only rotation_example",
    "shippo verify --out runs/verify.json": "--only rotation_example",
    "shippo bench": None,
    "shippo bench --full --out runs/bench.json": None,
    "shippo inspect runs/characters": None,
    "shippo report --out report.html": None,
}


def printed() -> dict[str, str]:
    """Every `shippo` command in a bash block -> the page that prints it."""
    found = {}
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                command = line.split("#")[0].strip()
                if command.startswith("shippo"):
                    found.setdefault(command, str(page.relative_to(ROOT)))
    return found


def run(command: str, monkeypatch) -> int | str:
    """The exit code, or the last words, of a `shippo` command line, run in this process."""
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    try:
        cli.main()
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One empty folder for all commands."""
    return tmp_path_factory.mktemp("commands")


def shipped_sections(command, **options):
    """What the benchmark's child process would measure, from the committed runs; other processes are none of its business."""
    if "benchmarks.child" not in command:
        return REAL_RUN(command, **options)
    request, out = json.loads(command[-2]), Path(command[-1])
    runs = [json.loads(path.read_text()) for path in (ROOT / "results").glob("bench*.json")]
    section = next(run["sections"][request["section"]] for run in runs if request["section"] in run["sections"])
    # A record that a quick run leaves out is stood in for by another: what is tested is the command around them.
    if isinstance(section, list):
        name = request["arguments"]["name"]
        section = next((record for record in section if record["name"] == name), section[0])
    out.write_text(json.dumps(section))
    return subprocess.CompletedProcess(command, 0, "", "")


def prepare(command: str, monkeypatch) -> None:
    """What a command needs before it: a saved model to inspect, measurements for the benchmark, few checks for the report."""
    if command.startswith("shippo report"):
        from shippo_lab import theory

        monkeypatch.setattr(theory, "CHECKS", {"rotation_example": theory.CHECKS["rotation_example"]})
    if command.startswith("shippo bench"):
        monkeypatch.setattr(subprocess, "run", shipped_sections)
    if command.startswith("shippo inspect"):
        from shippo_ssm.models import SequenceConfig, SequenceModel, save_checkpoint

        save_checkpoint(SequenceModel(SequenceConfig(vocab_size=128, d_model=16, n_layers=1, d_state=8)), "runs/characters")


def test_every_printed_command_is_covered():
    assert {command: page for command, page in printed().items() if command not in CHEAP} == {}
    assert set(CHEAP) <= set(printed()), "a command here is printed nowhere any more"


@pytest.mark.parametrize("command", CHEAP)
def test_a_printed_command_runs(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    prepare(command, monkeypatch)
    if command == "shippo run paired":
        shutil.rmtree("runs/paired", ignore_errors=True)
    code = run(f"{command} {CHEAP[command] or ''}", monkeypatch)
    shown = capsys.readouterr()
    assert code == 0, shown.err or shown.out
    assert "Traceback" not in shown.err
    words = shlex.split(command)
    if "--out" in words:
        assert Path(words[words.index("--out") + 1]).exists()
    if "--json" in words:
        assert json.loads(shown.out)
    elif "report" not in words:
        assert len(shown.out.split()) > 1


def test_a_broken_command_is_found(folder, monkeypatch, capsys):
    """The test above can fail: a wrong word is one line on stderr and exit code 2."""
    monkeypatch.chdir(folder)
    assert run("shippo table nothing", monkeypatch) == 2
    assert run("shippo table paired --frobnicate", monkeypatch) == 2
    assert "nothing" in capsys.readouterr().err


def test_make_targets_call_commands_that_exist():
    """`make demo` and `make bench` are `shippo demo` and `shippo bench`."""
    text = (ROOT / "Makefile").read_text()
    commands = set(re.findall(r"^\t\S+/shippo ([a-z]+)", text, re.M))
    assert {"demo", "bench"} <= commands <= {command.split()[1] for command in CHEAP}


def test_the_command_is_installed():
    path = Path(sys.executable).parent / "shippo"
    assert path.exists()
    assert os.access(path, os.X_OK)
