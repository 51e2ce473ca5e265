"""The command line: help, commands, and errors of one line."""

import json
import re
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from shippo_lab import cli
from shippo_lab.experiments import names

COMMANDS = ("demo", "list", "warmup", "run", "table", "figure", "report", "verify", "bench", "inspect")


def call(monkeypatch, capsys, *words):
    """Run `shippo WORDS` as the console script does: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["shippo", *words])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out, err = capsys.readouterr()
    code = exit.value.code
    return (0 if code is None else code), out, err


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory):
    """A folder with a smoke run of two rows of `paired`."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    words = ["run", "paired", "--smoke", "--jobs", "1", "--out", str(folder), "--row", "no-right-r1", "--row", "oracle"]
    outcome = CliRunner().invoke(cli.app, words)
    assert outcome.exit_code == 0, outcome.output
    assert "No-right r = 1" in outcome.output
    return folder


def test_help_is_a_table_of_contents(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "--help")
    assert code == 0
    places = [out.index(panel) for panel in ("Start here", "The paper's evidence", "Theory, speed, your own models")]
    assert places == sorted(places)
    assert all(re.search(rf"\b{command}\b", out) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(monkeypatch, capsys, command):
    code, out, _ = call(monkeypatch, capsys, command, "--help")
    assert code == 0
    assert f"Example: shippo {command}" in " ".join(out.split())


def test_list_names_the_experiments(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "list", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == list(names())
    code, out, _ = call(monkeypatch, capsys, "list")
    assert code == 0
    assert "paired" in out


@pytest.mark.parametrize(("format", "expected"), [("text", "Pair-Delta NMSE"), ("markdown", "| Model |")])
def test_table_layouts(monkeypatch, capsys, smoke_run, format, expected):
    code, out, _ = call(monkeypatch, capsys, "table", "paired", "--out", str(smoke_run), "--format", format)
    assert code == 0
    assert expected in out
    assert "2.44e-07" in out


def test_table_for_machines(monkeypatch, capsys, smoke_run):
    code, out, _ = call(monkeypatch, capsys, "table", "paired", "--out", str(smoke_run), "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [row["name"] for row in rows] == ["no-right-r1", "oracle"]
    assert rows[0]["ours"]["pair_nmse"][0] == pytest.approx(1, abs=1e-5)
    # A smoke run is too short to be judged.
    assert rows[0]["holds"] is None
    assert not rows[1]["holds"]


def test_figures(monkeypatch, capsys, smoke_run, tmp_path):
    code, out, _ = call(monkeypatch, capsys, "figure", "paired", "--run", str(smoke_run), "--out", str(tmp_path / "a.png"))
    assert (code, "a.png" in out) == (0, True)
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_second_run_needs_a_word(monkeypatch, capsys, smoke_run):
    words = ("run", "paired", "--smoke", "--jobs", "1", "--out", str(smoke_run), "--row", "no-right-r1", "--row", "oracle")
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2
    assert "--resume" in err
    code, out, _ = call(monkeypatch, capsys, *words, "--resume")
    assert code == 0
    assert "written" in out


def test_ctrl_c_says_how_to_continue(monkeypatch, capsys, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("shippo_lab.harness.runner.run", interrupted)
    code, _, err = call(monkeypatch, capsys, "run", "paired", "--seeds", "2", "--out", str(tmp_path))
    assert code == 130
    assert "shippo run paired --seeds 2" in err
    assert "--resume" in err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("run", "nothing"), "expected one of paired"),
        (("run", "paired", "--preset", "huge"), "expected one of full, smoke"),
        (("run", "paired", "--smoke", "--row", "nothing"), "expected rows among"),
        (("run", "paired", "--smoke", "--jobs", "0"), "1 or more"),
        (("run", "paired", "--smoke", "--preset", "full"), "give one of them"),
        (("table", "paired", "--out", "missing"), "shippo run paired"),
        (("table", "paired", "--smoke"), "--preset smoke"),
        (("table", "paired", "--preset", "huge"), "expected one of full, smoke"),
        (("figure", "paired", "--out", "picture.docx"), ".png"),
        (("figure", "nothing"), "expected one of"),
        (("inspect", "missing"), "folder of save_checkpoint"),
        (("run", "paired", "--no-such-option"), "shippo run --help"),
        (("frobnicate",), "shippo --help"),
    ],
)
def test_errors_are_one_line_with_the_remedy(monkeypatch, capsys, tmp_path, words, remedy):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2
    assert err.startswith("shippo: ")
    assert err.count("\n") == 1
    assert remedy in err
    assert "Traceback" not in err


def test_bench_outside_a_checkout_says_so(monkeypatch, capsys):
    monkeypatch.setattr("shippo_lab.harness.store.checkout", lambda: None)
    code, _, err = call(monkeypatch, capsys, "bench")
    assert code == 2
    assert "source checkout" in err


def test_bench_on_a_gpu_needs_one(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = call(monkeypatch, capsys, "bench", "--device", "cuda")
    assert code == 2
    assert "no GPU here" in err


def test_bench_runs_the_folder_of_the_checkout(monkeypatch, capsys, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "run.py").touch()
    run = ModuleType("benchmarks.run")
    run.main = lambda quick, out, against: print("measured", quick, out, against) or 3  # pyright: ignore[reportAttributeAccessIssue]
    # Taken back after the test: other tests import the real module in this process.
    monkeypatch.setitem(sys.modules, "benchmarks.run", run)
    monkeypatch.setattr("shippo_lab.harness.store.checkout", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out, _ = call(monkeypatch, capsys, "bench")
    assert (code, out) == (3, "measured True None \n")
    code, out, _ = call(monkeypatch, capsys, "bench", "--full", "--against", "HEAD")
    assert (code, out) == (3, "measured False None HEAD\n")


def test_verify_returns_the_code_of_the_checks(monkeypatch, capsys, tmp_path):
    seen = {}

    def verify(*, out, only, every, console, wide):
        seen.update(out=out, only=only, every=every)
        return 1

    monkeypatch.setattr("shippo_lab.theory.verify", verify)
    code, _, _ = call(monkeypatch, capsys, "verify", "--only", "gauge", "--out", str(tmp_path / "a.json"))
    assert code == 1
    assert seen == {"out": tmp_path / "a.json", "only": "gauge", "every": False}
    call(monkeypatch, capsys, "verify", "--all")
    assert seen["every"]


def test_inspect_prints_the_collapse_of_every_group(monkeypatch, capsys, tmp_path):
    from shippo_ssm.models import SequenceConfig, SequenceModel, save_checkpoint

    folder = save_checkpoint(SequenceModel(SequenceConfig(d_model=8, n_layers=2, d_state=4, vocab_size=5)), tmp_path / "tokens")
    code, out, _ = call(monkeypatch, capsys, "inspect", str(folder))
    assert code == 0
    assert "layers.1.mixer" in out
    folder = save_checkpoint(SequenceModel(SequenceConfig(d_model=8, n_layers=1, d_state=4)), tmp_path / "vectors")
    code, out, _ = call(monkeypatch, capsys, "inspect", str(folder), "--json")
    assert code == 0
    rows = json.loads(out)
    assert len(rows) == 4
    assert {"layer", "group", "blocks", "status", "commutator", "effective_rank"} <= set(rows[0])


def test_inspect_shows_a_recall_model_its_own_task(monkeypatch, capsys, tmp_path):
    from shippo_lab.experiments.mqar.model import MqarConfig, build_model
    from shippo_ssm.models import save_checkpoint

    model = build_model(MqarConfig(name="split", right="split", d_model=16, n_layers=1, d_state=4), 0)
    folder = save_checkpoint(model, tmp_path, notes={"row": "split", "seed": 0, "steps": 0})
    code, out, _ = call(monkeypatch, capsys, "inspect", str(folder), "--json")
    assert code == 0
    assert len(json.loads(out)) == 8


def test_the_demo_goes_without_matplotlib_and_judges_its_full_length(monkeypatch, capsys, tmp_path):
    from shippo_lab.experiments.paired import demo
    from shippo_lab.harness.experiment import FinishedRow, Result

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, _ = call(monkeypatch, capsys, "demo", "--quick", "--out", str(tmp_path))
    assert code == 0
    assert "no picture: matplotlib is not installed" in out
    row = FinishedRow("no-right-r8", "", {}, [0], {"pair_nmse": [1.0]}, {}, {}, 1.0)
    result = Result("demo", "demo", {row.name: row}, {}, 1.0)
    assert demo.experiment(3000).verdicts(result)["no-right-r8"] == (True, "cannot tell ab from ba")


def test_demo_in_short(monkeypatch, capsys, tmp_path):
    code, out, _ = call(monkeypatch, capsys, "demo", "--quick", "--out", str(tmp_path))
    assert code == 0
    assert "too short to be judged" in out
    assert "does not hold" not in out
    assert "R_t -> I: 1.0000" in out
    assert "trained in 0:" in out
    assert (tmp_path / "demo.png").exists()
    assert "shippo table paired" in out
