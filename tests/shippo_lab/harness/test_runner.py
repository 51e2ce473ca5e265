"""The runner: units, processes, interruption, refusal to mix runs."""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from shippo_lab.experiments import get
from shippo_lab.experiments.paired import experiment as paired
from shippo_lab.harness.experiment import Progress, RowConfig, RowResult, Session
from shippo_lab.harness.progress import Display, clock
from shippo_lab.harness.runner import Unit, run, split_into_units
from shippo_lab.harness.store import locked, read_json
from shippo_lab.harness.tables import budget

CHOSEN = ("no-right-r1", "learned-zero")


def small(name="paired", **changes):
    """The paired experiment with a preset of a few steps."""
    base = paired.PairedConfig(steps=12, num_seeds=2, batch=8, eval_batches=1, eval_every=4)
    return replace(get(name), presets={"full": lambda: paired.rows(base)}, **changes)


def numbers(result):
    return {name: (row.metrics, row.curves) for name, row in result.rows.items()}


def test_a_result_says_where_it_comes_from(tmp_path):
    result = run(small(), out=tmp_path, jobs=1, only=CHOSEN, display=Display())
    content = read_json(tmp_path / "result.json")
    assert content["complete"]
    assert content["experiment"] == "paired"
    assert set(content["versions"]) >= {"torch", "numpy", "python", "shippo_ssm"}
    assert content["wall_seconds"] > 0
    row = content["rows"][0]
    assert row["name"] == "no-right-r1"
    assert row["config"]["learning_rate"] == 3e-4
    assert row["seeds"] == [0, 1]
    assert row["curves"]["step"] == [4, 8, 12]
    assert len(row["metrics"]["nmse"]) == 2
    assert row["seconds"] > 0
    assert list(result.rows) == list(CHOSEN)
    assert not (tmp_path / "checkpoints").exists()


def test_seeds_cut_into_units_give_the_rows_of_a_stack(tmp_path):
    assert [unit.seeds for unit in split_into_units(get("paired").rows()[:1], small(stack=2))] == [(0, 1), (2, 3), (4,)]
    together = run(small(), out=tmp_path / "a", jobs=1, only=CHOSEN, display=Display())
    apart = run(small(stack=1), out=tmp_path / "b", jobs=1, only=CHOSEN, display=Display())
    for name, row in together.rows.items():
        assert apart.rows[name].seeds == row.seeds
        for metric, values in row.metrics.items():
            assert apart.rows[name].metrics[metric] == pytest.approx(values, rel=1e-4, abs=1e-6)
        assert len(apart.rows[name].curves["nmse"][0]) == 2


def test_an_interrupted_run_resumes_to_the_same_numbers(tmp_path):
    whole = run(small(), out=tmp_path / "whole", jobs=1, only=CHOSEN, display=Display())

    class Stop(Display):
        def progress(self, progress):
            super().progress(progress)
            if progress.unit == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small(), out=tmp_path / "cut", jobs=1, only=CHOSEN, display=Stop())
    partial = read_json(tmp_path / "cut" / "result.json")
    assert not partial["complete"]
    assert [row["name"] for row in partial["rows"]] == ["no-right-r1"]
    with pytest.raises(ValueError, match="--resume"):
        run(small(), out=tmp_path / "cut", jobs=1, only=CHOSEN, display=Display())
    resumed = run(small(), out=tmp_path / "cut", jobs=1, only=CHOSEN, resume=True, display=Display())
    assert numbers(resumed) == numbers(whole)


def test_a_folder_holds_one_run(tmp_path):
    run(small(), out=tmp_path, jobs=1, only=CHOSEN[:1], display=Display())
    longer = paired.PairedConfig(steps=13, num_seeds=2, batch=8, eval_batches=1, eval_every=4)
    other = replace(small(), presets={"full": lambda: paired.rows(longer)})
    with pytest.raises(ValueError, match="'no-right-r1' with another configuration"):
        run(other, out=tmp_path, jobs=1, only=CHOSEN[:1], resume=True, display=Display())
    replaced = run(other, out=tmp_path, jobs=1, only=CHOSEN[:1], seeds=3, force=True, display=Display())
    assert replaced.rows["no-right-r1"].seeds == [0, 1, 2]


def test_rows_and_seeds_are_added_to_a_run(tmp_path):
    whole = run(small(stack=1), out=tmp_path / "whole", jobs=1, only=CHOSEN, display=Display())
    last, first = CHOSEN[::-1]
    run(small(stack=1), out=tmp_path / "grown", jobs=1, only=(last,), seeds=1, display=Display())
    both = run(small(stack=1), out=tmp_path / "grown", jobs=1, only=(first,), resume=True, display=Display())
    assert {name: row.seeds for name, row in both.rows.items()} == {first: [0, 1], last: [0]}
    assert "(but " in budget(both)
    grown = run(small(stack=1), out=tmp_path / "grown", jobs=1, only=(last,), resume=True, display=Display())
    assert numbers(grown) == numbers(whole)
    assert read_json(tmp_path / "grown" / "result.json")["complete"]
    # Fewer seeds than there are take none away.
    again = run(small(stack=1), out=tmp_path / "grown", jobs=1, only=(last,), seeds=1, resume=True, display=Display())
    assert numbers(again) == numbers(whole)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`name` is 'nothing'"):
        get("nothing")
    with pytest.raises(ValueError, match="`preset` is 'huge'"):
        run(small(), "huge", out=tmp_path)
    with pytest.raises(ValueError, match="`only` names nothing"):
        run(small(), out=tmp_path, only=("nothing",))
    with pytest.raises(ValueError, match="`seeds` is 0"):
        run(small(), out=tmp_path, seeds=0)


def test_a_metric_needs_a_number_per_seed(tmp_path):
    def train(config, seeds, session: Session):
        return RowResult(metrics={"nmse": [1.0]})

    with pytest.raises(ValueError, match="1 numbers for 2 seeds"):
        run(small(train=train), out=tmp_path, jobs=1, only=("no-right-r1",), display=Display())


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_killed_at_any_moment_leave_a_run_that_resumes(tmp_path):
    """Two processes, killed without warning; what they finish later equals an undisturbed run in one process."""
    whole = run(get("paired"), "smoke", out=tmp_path / "whole", jobs=1, only=CHOSEN, display=Display())
    command = [sys.executable, "-m", "shippo_lab.cli", "run", "paired", "--smoke", "--out", str(tmp_path / "cut")]
    command += [word for row in CHOSEN for word in ("--row", row)]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        limit = time.monotonic() + 120
        while time.monotonic() < limit and not (tmp_path / "cut" / "checkpoints").exists() and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        process.wait()
        # The workers see that, and leave the group of the process empty.
        while time.monotonic() < limit and group_lives(process.pid):
            time.sleep(0.05)
        assert not group_lives(process.pid)
    done = subprocess.run([*command, "--resume", "--jobs", "2"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    resumed = read_json(tmp_path / "cut" / "result.json")
    for row in resumed["rows"]:
        assert row["metrics"] == whole.rows[row["name"]].metrics
        assert row["curves"] == whole.rows[row["name"]].curves
    assert [row["name"] for row in resumed["rows"]] == list(CHOSEN)


def test_a_folder_is_locked_by_one_process_and_free_after_a_kill(tmp_path):
    # The full preset: it trains for minutes, longer than the second process takes to start on a busy machine.
    command = [sys.executable, "-m", "shippo_lab.cli", "run", "paired", "--jobs", "1", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as first:
        limit = time.monotonic() + 120
        while time.monotonic() < limit and not (tmp_path / "manifest.json").exists() and first.poll() is None:
            time.sleep(0.02)
        try:
            second = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=100, check=False)
            running = first.poll() is None
        finally:
            first.kill()
    assert running, "the first run ended before the second began"
    assert second.returncode == 2
    assert second.stderr.count("\n") == 1
    assert second.stderr.startswith(f"shippo: another process is running in {tmp_path}")
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("per_step", [1, 8192])
def test_time_left_counts_units_that_have_not_begun(per_step, monkeypatch):
    units = [Unit(i, RowConfig(steps=100), (0,), cost=1.2 if i == 3 else 1.0) for i in range(4)]
    display, now = Display(), iter([0.0, 1.0, 5.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with display.show("paired", units, {1, 2, 3}):
        assert display.left() == ""
        # A unit may count something else than steps.
        display.progress(Progress(1, 10 * per_step, 100 * per_step, {}))
        display.progress(Progress(1, 60 * per_step, 100 * per_step, {}))
        # 0.1 s a step: 40 steps left here, 100 as slow and 100 slower by a fifth to come.
        assert display.left() == "about 0:26 left"
    assert [clock(5), clock(65), clock(3725)] == ["0:05", "1:05", "1:02:05"]


def test_plain_lines_say_how_far(capsys):
    from rich.console import Console

    units = [Unit(0, RowConfig(name="row", steps=10), (0,))]
    lines = Display(Console(), every=0.0)
    with lines.show("paired", units, {0}):
        lines.progress(Progress(0, 1, 10, {}))
        lines.progress(Progress(0, 5, 10, {"nmse": 0.5}))
    out = capsys.readouterr().out
    assert "row.s0-s0  step 5/10  nmse 0.5" in out
    assert "left]" in out


def test_results_are_json_that_keeps_every_bit(tmp_path):
    result = run(small(), out=tmp_path, jobs=1, only=("oracle",), display=Display())
    again = json.loads((tmp_path / "result.json").read_text())["rows"][0]["metrics"]["nmse"]
    assert again == result.rows["oracle"].metrics["nmse"]


REUSE = """
import resource, torch
from shippo_lab.harness.malloc import keep_freed_memory
print(keep_freed_memory())
torch.ones(1 << 26)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(1 << 25)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_workers_reuse_freed_memory():
    known, faults = subprocess.run([sys.executable, "-c", REUSE], capture_output=True, text=True, check=True).stdout.split()
    assert known == "True"
    # 128 MiB are 32,768 pages; none of them is new.
    assert int(faults) < 100
