"""A run from its plan to its verdict and its page, on a run in round numbers."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import pytest

from benchmarks import compilation, report, run
from benchmarks.machine import describe, machine_line
from benchmarks.tables import tables
from benchmarks.verdict import targets, verdict


def made_up_run() -> dict[str, Any]:
    """The dictionary of a run with every section, in round numbers."""

    def timing(seconds: float, **more: Any) -> dict[str, Any]:
        return {"median": seconds, "p20": seconds, "p80": seconds, "repeats": 3, **more}

    def candidate(name: str, kind: str, forward: float, both: float) -> dict[str, Any]:
        return {
            "name": name,
            "kind": kind,
            "how": "somehow",
            "cannot": "",
            "status": "ok",
            "errors": {"forward": {"y": 1e-7}, "both": {"y": 1e-7, "right": 3e-7}},
            "first_call": {"forward": 1.0, "both": 1.0},
            "forward": timing(forward, over_roof=forward / 0.01),
            "both": timing(both, over_roof=both / 0.03),
        }

    def limit(seconds: float) -> dict[str, Any]:
        terms = {
            "bytes": 2e8,
            "fma": 5e8,
            "bandwidth": 2e10,
            "fma_rate": 1e11,
            "bandwidth_seconds": seconds,
            "fma_seconds": 0.005,
        }
        return {"seconds": seconds, "active": "bandwidth", "copy": timing(seconds), **terms}

    shape = {"batch": 16, "length": 512, "groups": 64, "order": 32, "width": 4}
    gone = {
        "name": "gone",
        "kind": "easier recurrence",
        "how": "unknown",
        "cannot": "run",
        "status": "missing",
        "reason": "not here",
    }
    point = {"errors": {"shippo fused": 1e-6}, "peers": {}}
    points = [
        {"shape": shape | {"batch": 64 // scale, "length": 1024 * scale}, **point}
        | {scan_pass: timing(0.1, over_roof=2.0, active="bandwidth") for scan_pass in ("forward", "both")}
        for scale in (1, 8, 64)
    ]
    wide = {"status": "ok", "forward": timing(0.44), "both": timing(1.3)}
    widths = [
        {
            "shape": shape | {"width": width, "groups": 256 // width},
            **point,
            "peers": {"jax.lax.scan": wide} if width > 4 else {},
        }
        | {"forward": timing(0.04, over_roof=over), "both": timing(0.1, over_roof=over + 0.25)}
        for width, over in ((1, 1.25), (2, 1.5), (4, 1.0), (8, 2.0), (16, 1.75))
    ]
    sections: dict[str, Any] = {
        "widths": {"threads": 2, "points": widths},
        "halves": {"shape": shape, "threads": 2}
        | {
            name: {"error": 1e-3, "forward": timing(x), "both": timing(x)} for name, x in (("float32", 0.1), ("bfloat16", 0.07))
        },
        "scan": {
            "shape": shape,
            "threads": 2,
            "roofs": {"forward": limit(0.01), "both": limit(0.03)},
            "candidates": [
                candidate("shippo fused", "ours", 0.02, 0.1),
                candidate("jax.lax.scan", "same recurrence", 0.3, 1.4),
                candidate("PyTorch loop", "same recurrence", 0.2, 30.0),
                candidate("mambapy pscan", "easier recurrence", 1.0, 4.0),
                gone,
            ],
        },
        "memory": [{"name": "shippo fused", "status": "ok", "operands": 1e8, "gradients": 1e8, "extra": 1e7, "ratio": 0.05}],
        "sweeps": {"threads": 2, "constant_tokens": points, "exponent": {"forward": 1.0, "both": 1.02}},
        "expm": {
            "num_matrices": 100,
            "width": 4,
            "threads": 2,
            "candidates": {
                name: {"errors": {"value": 1e-7}, "forward": timing(seconds), "both": timing(seconds)}
                for name, seconds in (("shippo expm", 0.01), ("torch.linalg.matrix_exp", 1.2))
            },
        },
        "training": {
            "batch": 16,
            "length": 512,
            "threads": 2,
            "generator": timing(0.1, tokens_per_second=8e4),
            "models": {
                name: timing(seconds, tokens_per_second=8192 / seconds, parameters=5_000_000, error=1e-6)
                | {"products": timing(1.75), "over_products": seconds / 1.75}
                for name, seconds in (("StructGen-Split", 2.8), ("No-right", 2.0))
            },
        },
        "decoding": {
            "batch": 1,
            "threads": 2,
            "errors": {},
            "rates": [{"model": "Transformer", "context": 128, "tokens_per_second": 100.0}],
        },
        "compilation": {
            "kernels": [
                {"of": "scan, P = 4", "kernel": f"build_{name}", "seconds": seconds} for name, seconds in (("a", 2), ("b", 5))
            ]
        },
    }
    whole = {"mode": "quick", "date": "2026-01-01", "machine": describe(), "sections": sections, "errors": {}, "seconds": 1.0}
    return whole | {"verdict": verdict(whole)}


def test_figures_by_hand():
    reached = [row["reached"] for row in made_up_run()["verdict"]]
    roofs, jax = [2.0, 0.1 / 0.03, 2.0, 2.25, 1.75], [15, 14, 11, 13]
    assert reached == pytest.approx([*roofs, *jax, 300, 50, 40, 0.7, 120, 5, 1.0, 1.6, 1.4, 1.02, 0.05])
    results = [row["result"] for row in made_up_run()["verdict"]]
    assert results == [
        *("missed", "missed", "required", "required", "required"),
        *("required", "missed", "required", "required"),
        *("goal", "goal", "goal", "required", "required", "required", "goal", "missed", "required", "required", "goal"),
    ]


def test_a_missing_peer_has_no_figure():
    whole = made_up_run()
    record = whole["sections"]["scan"]["candidates"][1]
    record |= {"status": "missing", "reason": "not installed"}
    rows = {row["what"]: row for row in verdict(whole)}
    row = rows["ahead of jax.lax.scan, forward"]
    assert row["reached"] is None
    assert "not installed" in row["why"]
    del whole["sections"]["expm"], whole["sections"]["widths"]
    assert sum(row["result"] == "not measured" for row in verdict(whole)) == 8


def test_goals_are_harder_than_requirements():
    for target in targets():
        assert target.met(target.goal, target.required)
        assert not target.met(target.required, target.goal)


def test_page_and_figure_show_the_run(tmp_path):
    pytest.importorskip("matplotlib")
    whole = made_up_run()
    page = report.details(whole)
    assert machine_line(whole["machine"]) in report.machines(whole)
    assert "bandwidth is the active term; shippo fused takes 2.00 times as long" in page
    assert "gone: missing, not here." in page
    assert "| jax.lax.scan | 300 (300–300) | 1400 (1400–1400) | 15 × | 14 × |" in page
    rows = [row for table in tables(whole) for row in table.rows]
    assert ("16", "16", "40.0 (40.0–40.0)", "1.75", "100 (100–100)", "2.00", "1e-06", "11.0 ×", "13.0 ×") in rows
    assert ("bfloat16", "70.0 (70.0–70.0)", "70.0 (70.0–70.0)", "0.70", "0.70", "1e-03") in rows
    assert ("shippo expm", "10.0 (10.0–10.0)", "10.0 (10.0–10.0)", "120 ×", "120 ×", "1e-07") in rows
    assert ("scan, P = 4", "2", "7.0", "5.0", "build_b") in rows
    assert len(tables(whole)) == 10
    assert page.count("<details>") == page.count("</details>") == 4
    report.figure(whole, tmp_path / "figure.svg")
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_a_section_measured_again_is_on_the_page():
    again = made_up_run() | {"again": {"sweeps": "2026-02-03"}}
    assert "Measured again by itself, after the run: sweeps on 2026-02-03." in report.machines(again)


def test_a_failed_section_is_on_the_page():
    whole = made_up_run()
    del whole["sections"]["decoding"]
    whole["errors"]["decoding"] = "Traceback\nRuntimeError: out of memory"
    assert "Failed: decoding: RuntimeError: out of memory" in report.details(whole)


def test_another_machine_stands_beside(tmp_path):
    ours, other = made_up_run(), made_up_run()
    ours["machine"]["simd"], other["machine"]["simd"] = "AVX512", "AVX2"
    other["verdict"][0] |= {"reached": 3.25, "result": "missed"}
    for name, whole in (("bench", ours), ("bench-avx2", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(whole))
    runs = report.load(tmp_path / "bench.json")
    table, page = report.targets(*runs), report.details(*runs)
    assert "| what | required | goal | reached, AVX512 | status | reached, AVX2 | status |" in table
    assert "| P = 4: forward time over its roof | ≤ 1.4 | ≤ 1.2 | 2 | missed | 3.25 | missed |" in table
    assert report.machines(*runs).count("\n- ") == 1
    assert page.index("### AVX512") < page.index("### AVX2") < page.rindex("<details>")


def test_the_verdicts_of_the_committed_runs_are_current():
    for whole in report.load():
        assert whole["verdict"] == verdict(whole)
    assert report.FIGURE.exists()


def test_plan_covers_every_section_in_both_modes():
    for quick in (True, False):
        sections = {section for _, section, _, _ in run.plan(quick)}
        assert {"scan", "expm", "memory", "training", "decoding"} <= sections
        assert ("sweeps" in sections) is not quick
        assert ("widths" in sections) is not quick
    threads = {threads for _, section, threads, _ in run.plan(True) if section == "scan"}
    assert threads == {1, 2}


def test_main_writes_and_judges(monkeypatch, tmp_path, capsys):
    whole = made_up_run()
    monkeypatch.setattr(run, "measure", lambda quick, earlier, only: copy.deepcopy(whole))
    out = tmp_path / "deep" / "bench.json"
    assert run.main(True, out) == 0
    assert json.loads(out.read_text())["verdict"] == whole["verdict"]
    assert "Targets" in capsys.readouterr().out
    whole["sections"]["scan"]["candidates"][0]["status"] = "rejected"
    whole["sections"]["scan"]["candidates"][0]["reason"] = "wrong"
    assert run.main(True, out) == 1


def test_a_section_is_measured_again_and_the_others_stay(monkeypatch, tmp_path):
    whole = made_up_run() | {"mode": "full", "again": {}}
    fresh = copy.deepcopy(whole["sections"]["sweeps"]) | {"exponent": {"forward": 0.5, "both": 0.5}}
    monkeypatch.setattr(run, "spawn", lambda section, threads, arguments: fresh)
    out = tmp_path / "bench.json"
    out.write_text(json.dumps(whole))
    assert run.main(out=out, only="sweeps") == 0
    after = json.loads(out.read_text())
    assert after["sections"] == json.loads(json.dumps(whole["sections"])) | {"sweeps": fresh}
    assert list(after["again"]) == ["sweeps"]
    assert any(row["reached"] == 0.5 for row in after["verdict"])
    with pytest.raises(ValueError, match="no section"):
        run.main(out=out, only="nonsense")


def test_compilations_are_heard(monkeypatch):
    monkeypatch.setenv("SHIPPO_CACHE_DIR", "as it was")
    (start,) = compilation.measure(widths=())["kernels"]
    assert (start["of"], start["kernel"]) == (compilation.START, "_nothing")
    assert start["seconds"] > 0
    assert os.environ["SHIPPO_CACHE_DIR"] == "as it was"


def test_a_section_runs_in_its_own_process():
    result = run.spawn("expm", 1, {"num_matrices": 64, "rounds": 1, "budget": 0.1})
    assert result["threads"] == 1
    assert result["candidates"]["shippo expm"]["both"]["median"] > 0


def test_a_failing_section_raises_with_its_last_words():
    with pytest.raises(RuntimeError, match="nonsense"):
        run.spawn("nonsense", 1, {})
