"""The wheel in an environment of its own, without extras: its commands in a terminal of 80 columns, read from the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import sysconfig
import termios
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

pyte = pytest.importorskip("pyte")
for needed in ("hatchling", "build", "twine"):
    pytest.importorskip(needed)

from shippo_lab.experiments import get, names  # noqa: E402
from shippo_ssm import __version__  # noqa: E402

ROOT = Path(__file__).parents[1]
COLUMNS = 80
# Nothing is downloaded: dependencies are those of this environment, and what only the extras bring is hidden.
HIDDEN = (
    "matplotlib",
    "transformers",
    "peft",
    "accelerate",
    "lightning",
    "triton",
    "jax",
    "sphinx",
    "onnx",
    "pytest",
    "selenium",
)
BLOCKER = f"""
import sys
from importlib.machinery import PathFinder
class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {HIDDEN!r} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Visible
"""


class Shown(NamedTuple):
    """What a command left on the screen, and all that it wrote."""

    code: int
    lines: list[str]
    raw: str


class Installed:
    """A fresh environment with the wheel in it, and an empty folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        wheels = folder / "wheels"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(wheels), str(ROOT)]
        subprocess.run(build, check=True, cwd=folder, capture_output=True)
        self.distributions = sorted(wheels.iterdir())
        venv.create(folder / "env", symlinks=True)
        self.bin = folder / "env" / "bin"
        (wheel,) = wheels.glob("shippo_ssm-*.whl")
        python = ["--python", str(self.bin / "python")]
        subprocess.run([*pip, *python, "install", "--no-deps", "--no-index", str(wheel)], check=True, cwd=folder)
        (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        (packages / "sitecustomize.py").write_text(BLOCKER)
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COLUMNS", "NO_COLOR")}
        self.environment = kept | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}

    def shippo(self, line: str) -> Shown:
        """`shippo LINE` in a terminal of 80 columns."""
        inside, outside = pty.openpty()
        fcntl.ioctl(outside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        command = [str(self.bin / "shippo"), *line.split()]
        place = {"cwd": self.work, "env": self.environment, "start_new_session": True}
        process = subprocess.Popen(command, stdin=outside, stdout=outside, stderr=outside, **place)
        os.close(outside)
        raw = b""
        # A terminal whose last process has ended cannot be read any more.
        try:
            while part := os.read(inside, 4096):
                raw += part
        except OSError:
            pass
        os.close(inside)
        screen = pyte.Screen(COLUMNS, 400)
        pyte.ByteStream(screen).feed(raw)
        return Shown(process.wait(), [line.rstrip() for line in screen.display], raw.decode())

    def python(self, code: str) -> str:
        """The output of a script in the environment, to a pipe."""
        command = [str(self.bin / "python"), "-c", code]
        done = subprocess.run(command, cwd=self.work, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("wheel"))


def line_with(shown: Shown, start: str) -> int:
    """The place of the line that begins with these words."""
    return next(place for place, line in enumerate(shown.lines) if line.strip().startswith(start))


def test_the_wheel_itself_runs(installed):
    shown = installed.shippo("--version")
    assert (shown.code, shown.lines[0]) == (0, f"shippo {__version__}")
    where = installed.python("import shippo_ssm; print(shippo_ssm.__file__)")
    assert "site-packages" in where
    assert str(ROOT) not in where


def test_the_distributions_can_be_uploaded(installed):
    """`twine check`: metadata and README are what a package index takes; source distribution and wheel are both there."""
    wheel, source = sorted(installed.distributions, key=lambda path: path.suffix == ".gz")
    assert (wheel.suffix, source.suffix) == (".whl", ".gz")
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_demo_runs_to_its_end(installed):
    shown = installed.shippo("demo --quick")
    text = "\n".join(shown.lines)
    assert shown.code == 0, text
    assert "Traceback" not in text
    assert "SHiPPO in a few seconds." in text
    # While it trains there is a bar, whichever steps were drawn; afterwards a table whose every column is whole.
    assert re.search(r"\.s0-s1 +step \d+/60", shown.raw)
    assert re.search(r"█{2,}░* \d/\d done", shown.raw)
    row = line_with(shown, "SHiPPO selective")
    assert re.fullmatch(r" *SHiPPO selective( R)? +ours +0\.\d+ +\d\.?\d* +1", shown.lines[row])
    assert re.fullmatch(r" *(R )? *paper +0\.00123 +5\.58e-05 +1", shown.lines[row + 1])
    assert "too short to be judged" in text
    assert "no picture: matplotlib is not installed" in text
    assert "next:  shippo table paired" in text
    assert (installed.work / "runs" / "demo" / "result.json").exists()


def commands_of(page: str) -> list[str]:
    """The commands in the bash blocks of a page, without comments, and `shippo ..` inside its sentences."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line] + [" ".join(words.split()) for words in re.findall(r"`(shippo\s[^`]+)`", prose)]


def test_every_command_of_the_readme_runs(installed):
    """Commands of the package run in the fresh environment; of those that install, make says what it would run."""
    short = {
        "shippo verify": "shippo verify --only rotation_example",
        "shippo warmup": "shippo warmup --d-model 16 --d-state 8",
    }
    found = commands_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {"make demo", "make test", "pip install ."} <= set(found)
    for command in found:
        program, *words = short.get(command, command).split()
        if program == "make":
            # The steps that make would run; the demo and the tests themselves run elsewhere in this suite.
            done = subprocess.run(["make", "--dry-run", "-C", str(ROOT), *words], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert {"demo": "bin/shippo demo", "test": "-m pytest"}[words[0]] in done.stdout
        elif program == "pip":
            # `Installed` has installed the same checkout, as a wheel.
            assert words == ["install", "."]
        else:
            shown = installed.shippo(" ".join(words))
            assert shown.code == 0, "\n".join(shown.lines)


def test_a_table_is_readable_in_80_columns(installed):
    shown = installed.shippo("table paired")
    assert shown.code == 0
    head = line_with(shown, "Model")
    assert shown.lines[head].split() == ["Model", "Eval", "NMSE↓", "NMSE↓", "NMSE", "Verdict"]
    for name, numbers, verdict in (
        ("No-right r = 8", r"ours +0\.000236 +1 +–", "holds"),
        ("SHiPPO selective", r"(R )? *ours +4\.2e-05 +1\.29e-05 +1", "holds"),
    ):
        place = line_with(shown, name)
        assert re.fullmatch(rf" *{name} +{numbers} +{verdict}", shown.lines[place]), shown.lines[place]
        assert "paper" in shown.lines[place + 1].split()[:2]
    text = " ".join(shown.lines)
    assert "results/paired.json" in text
    assert "--wide shows every column" in text


def test_the_list_is_readable_in_80_columns(installed):
    shown = installed.shippo("list")
    assert shown.code == 0
    for name in names():
        _, first, claim, time, _ = shown.lines[line_with(shown, f"│ {name} ")].split("│")
        assert first.strip() == name
        assert len(claim.split()) >= 3
        assert time.strip()


def test_verify_is_readable_in_80_columns(installed):
    shown = installed.shippo("verify --only rotation_example")
    assert shown.code == 0
    assert [word for word in re.split(r"[┃ ]+", shown.lines[1]) if word] == ["statement", "residual", "bound", "holds"]
    assert any(re.search(r"e-1\d │ ≤ 1e-\d\d │ +yes +│$", line) for line in shown.lines)
    assert any(line.startswith("1 statements in") and line.endswith("all hold") for line in shown.lines)


def test_piped_output_is_plain_and_the_report_is_whole(installed):
    """All tables and the page with everything, from the results inside the wheel."""
    script = """
import sys
from shippo_lab import cli
for words in (*(["table", name] for name in NAMES), ["report", "--out", "report.html"]):
    sys.argv = ["shippo", *words]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
""".replace("NAMES", repr([name for name in names() if (ROOT / "results" / f"{name}.json").exists()]))
    out = installed.python(script)
    assert "\x1b" not in out
    assert "±" in out
    assert "holds: blind to order" in out
    assert "written: report.html" in out
    page = (installed.work / "report.html").read_text(encoding="utf-8")
    assert "Paired noncommutative transport" in page
    assert "Not run here yet" not in page.split('id="mqar"')[0]
    assert "reaches the goal" in page
    # Every figure comes as a file of the wheel: none has to be drawn, which needs matplotlib.
    drawn = [name for name in names() if (ROOT / "results" / f"{name}.json").exists() and get(name).figure is not None]
    assert page.count("data:image/svg+xml") == len(drawn) + 1
    assert "draw it with" not in page
