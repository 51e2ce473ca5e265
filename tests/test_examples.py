"""The examples run, in smoke form, and do what their heads say."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def run(name: str, arguments: list[str], monkeypatch):
    """Load an example and call its `main` with these arguments; returns the module."""
    path = next(path for path in EXAMPLES if path.stem == name)
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    module.main()
    return module


def test_every_example_is_tested():
    names = ["body_frame", "lift_legs", "mqar_your_model", "stream", "train_characters", "train_distributed"]
    names.append("train_language_model")
    assert [path.stem for path in EXAMPLES] == names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_how_to_run_it(path):
    assert f"python examples/{path.name}" in path.read_text()


def test_lift_legs(monkeypatch, capsys):
    """At speed 20 the fixed frame has lost the signal and the lifted memory has not; without a turn they are the same."""
    module = run("lift_legs", ["--smoke"], monkeypatch)
    assert "fixed frame" in capsys.readouterr().out
    still, turning = module.compare(0.0, 100), module.compare(20.0, 100)
    assert still["fixed"] == pytest.approx(still["lifted"])
    assert turning["lifted"] < 1e-6 < 0.5 < turning["fixed"]
    assert turning["lifted online"] < 1e-6


@pytest.mark.parametrize("layer", ["gru", "shippo"])
def test_mqar_your_model(layer, monkeypatch, capsys):
    run("mqar_your_model", ["--smoke", "--layer", layer], monkeypatch)
    out = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step")]
    assert len(losses) == 3
    assert all(2 < loss < 6 for loss in losses)
    queries, exact, known = out.splitlines()[-1].split()[1:]
    assert int(queries) > 50
    assert 0 <= float(exact) <= 1
    assert 0 < float(known) <= 1


def test_train_characters(monkeypatch, capsys, tmp_path):
    module = run("train_characters", ["--smoke", "--out", str(tmp_path / "model")], monkeypatch)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"model.safetensors", "config.json"}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["config"]["vocab_size"] == 128
    assert "The import statement " in capsys.readouterr().out
    text = module.corpus()
    assert len(text) > 100_000
    assert 0 <= text.min() <= text.max() < 128


def test_a_language_model_of_own_files_resumes_where_it_stopped(monkeypatch, capsys, tmp_path):
    """At a learning rate of zero, since the schedule of a shorter run is another: weights, optimiser and step are kept."""
    pytest.importorskip("transformers")
    from safetensors.torch import load_file

    text = tmp_path / "notes.txt"
    text.write_text("the frame moves, and what is stored moves with it. " * 30)
    sizes = ["--hidden", "16", "--layers", "2", "--attention-every", "2", "--batch", "2", "--length", "32"]
    sizes += ["--rate", "0", "--prompt", "the"]
    found = []
    for name, ends in (("whole", ["4"]), ("parts", ["2", "4"])):
        for index, steps in enumerate(ends):
            arguments = [str(text), "--out", str(tmp_path / name), "--steps", steps, *sizes, *["--resume"] * index]
            run("train_language_model", arguments, monkeypatch)
        found.append(load_file(tmp_path / name / "model.safetensors"))
        assert torch.load(tmp_path / name / "optimizer.pt", weights_only=True)["step"] == 4
    out = capsys.readouterr().out
    assert out.count("held out") == 3
    assert "\nthe" in out
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_stream_goes_on_after_it_was_killed(monkeypatch, capsys, tmp_path):
    whole = "--tokens", "120"
    run("stream", [*whole], monkeypatch)
    expected = capsys.readouterr().out.splitlines()[-1]
    file = str(tmp_path / "session.safetensors")
    script = next(path for path in EXAMPLES if path.stem == "stream")
    command = [sys.executable, str(script), *whole, "--state", file, "--stop-after", "70"]
    killed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert killed.startswith("killed at token 70")
    run("stream", [*whole, "--state", file], monkeypatch)
    first, last = capsys.readouterr().out.splitlines()
    assert first == "goes on at token 50"
    assert last == expected


def launched(arguments: list[str], *, ranks: int, restarts: int) -> str:
    """What `train_distributed` prints under torchrun."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    script = next(path for path in EXAMPLES if path.stem == "train_distributed")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, str(script), *arguments], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_train_distributed_survives_a_killed_rank(tmp_path, monkeypatch, capsys):
    """Two ranks that share a sequence, one of them killed after step 3: the run goes on from step 2 and ends as one process."""
    run("train_distributed", ["--smoke", "--out", str(tmp_path / "alone")], monkeypatch)
    alone = capsys.readouterr().out
    killed = launched(["--smoke", "--out", str(tmp_path / "killed"), "--kill-at", "3"], ranks=2, restarts=3)
    assert (tmp_path / "killed" / "killed").exists()
    assert "resumed after step 2" in killed
    assert "resumed" not in alone
    assert "tokens per second" in alone
    losses = [float(re.findall(r"final loss ([0-9.]+)", out)[-1]) for out in (alone, killed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] < 5
