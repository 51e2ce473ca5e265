"""Another commit in the same run: both packages measured, words that mean no commit refused; and the new rows."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from benchmarks import against, halves, run, sweeps
from benchmarks.gate import Disagreement
from benchmarks.models import Products
from benchmarks.problem import Shape

inside_git = pytest.mark.skipif(not (against.ROOT / ".git").exists(), reason="the sources are no git checkout")


@inside_git
def test_both_packages_take_turns_and_the_ratio_is_stored(monkeypatch, tmp_path, capsys):
    seen = []

    def spawn(section, threads, arguments, source):
        seen.append((source == against.ROOT / "src", (source / "shippo_ssm").is_dir(), arguments["checked"]))
        seconds = 1.0 if source == against.ROOT / "src" else 4.0
        return {
            "scan": {"forward": seconds, "both": 2.0},
            "young": {"both": 1.0} if seconds == 1 else {"failed": "no such thing"},
        }

    monkeypatch.setattr(run, "spawn", spawn)
    out = tmp_path / "against.json"
    assert run.main(out=out, against="HEAD") == 0
    assert seen == [
        *((True, True, True), (False, True, True)),
        *((False, True, False), (True, True, False)),
        *((True, True, False), (False, True, False)),
    ]
    stored = json.loads(out.read_text())
    assert stored["commit"] == against.git("rev-parse", "HEAD")[:12]
    assert stored["cases"]["scan"]["forward"]["ratio"] == 0.25
    assert stored["cases"]["scan"]["both"]["ratio"] == 1.0
    assert stored["cases"]["young"] == {"failed": {"theirs": "no such thing"}}
    assert "now / then" in capsys.readouterr().out
    assert "tree" not in against.git("worktree", "list")


@inside_git
def test_an_unknown_commit_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(run, "spawn", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"`against` is 'no-such-commit'.*expected a commit, branch or tag"):
        run.main(quick=False, against="no-such-commit")


def test_sources_without_git_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(against, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="needs a git checkout"):
        against.resolve("HEAD")
    # A folder inside another repository is not one either.
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    monkeypatch.setattr(against, "ROOT", tmp_path / "inside")
    (tmp_path / "inside").mkdir()
    with pytest.raises(ValueError, match="needs a git checkout"):
        against.resolve("HEAD")


def test_a_case_of_the_wrong_package_is_refused_and_a_failing_one_says_so(monkeypatch, tmp_path):
    import shippo_ssm

    effort = {"rounds": 1, "budget": 0.1, "checked": True}
    with pytest.raises(RuntimeError, match="comes from"):
        against.cases(**effort, source=str(tmp_path))

    def wrong():
        raise Disagreement("off")

    monkeypatch.setattr(
        against,
        "CASES",
        {"ok": lambda: against.Calls(both=lambda: None), "bad": lambda: against.Calls(both=wrong, check=wrong)},
    )
    found = against.cases(**effort, source=str(next(iter(shippo_ssm.__path__)))[: -len("/shippo_ssm")])
    assert set(found["ok"]) == {"both"}
    assert found["bad"] == {"failed": "Disagreement: off"}


def test_products_are_those_that_ran():
    weight, x = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3)
    with Products() as products:
        torch.nn.functional.linear(x, weight).sum().backward()
    assert [(tuple(a.shape), tuple(b.shape)) for a, b in products.pairs] == [((4, 3), (3, 5)), ((5, 4), (4, 3))]
    assert products.pairs[0][1].stride() == (1, 3)
    products.replay()


def test_short_operands_are_checked_and_timed():
    section = halves.measure(Shape(batch=2, length=20, groups=2, order=8, width=4), rounds=1, budget=0.1)
    assert section["float32"]["error"] < 2e-5 < section["bfloat16"]["error"] < halves.TOLERANCE
    assert all(section[name][key]["median"] > 0 for name in ("float32", "bfloat16") for key in ("forward", "both"))


def test_widths_keep_the_channels():
    section = sweeps.measure_widths(rounds=1, budget=0.1, batch=1, length=9, channels=8, widths=(2, 4))
    assert [(point["shape"]["width"], point["shape"]["groups"]) for point in section["points"]] == [(2, 4), (4, 2)]
    assert all(point["both"]["over_roof"] > 0 for point in section["points"])
