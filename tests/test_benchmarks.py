"""The benchmark judges rightly: wrong results get no time, the roof is the arithmetic it says, absence is said aloud."""

from __future__ import annotations

import copy
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import report, run, scan, sweeps, timer  # noqa: E402
from benchmarks.gate import Disagreement, check, error_ratio, oracle  # noqa: E402
from benchmarks.machine import Stream, describe, machine_line  # noqa: E402
from benchmarks.peers import Candidate, Missing, Peer, peers  # noqa: E402
from benchmarks.peers.base import require, same_recurrence, torch_candidate  # noqa: E402
from benchmarks.problem import NAMES, Shape, make_inputs  # noqa: E402
from benchmarks.roof import PASSES, bytes_moved, fma_work, roof, traffic  # noqa: E402
from benchmarks.tables import tables  # noqa: E402
from benchmarks.verdict import targets, verdict  # noqa: E402

TINY = Shape(batch=2, length=20, groups=2, order=4, width=2)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(leaves):
    from shippo_ssm.scan import transport_scan

    return transport_scan(*(leaves[name] for name in NAMES), backend="reference")[0]


def peer_of(solve, name: str = "test", kind: str = "same recurrence") -> Peer:
    return Peer(
        name=name,
        kind=kind,
        how="for the test",
        task=same_recurrence,
        prepare=lambda inputs, cotangent: torch_candidate(solve, inputs, NAMES, cotangent),
    )


def measure_with(monkeypatch, *given: Peer) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(scan, "peers", lambda: given)
    monkeypatch.setattr(scan, "fma_rate", lambda: 1e10)
    section = scan.measure(TINY, rounds=2, budget=0.5)
    return {record["name"]: record for record in section["candidates"]}


class TestGate:
    def test_oracle_is_the_reference_with_its_gradients(self):
        inputs, cotangent = make_inputs(replace(TINY, batch=6))
        answers = oracle(same_recurrence, inputs, cotangent)
        leaves = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
        y = reference(leaves)
        gradients = torch.autograd.grad(y, list(leaves.values()), cotangent.double())
        torch.testing.assert_close(answers["y"], y.detach(), rtol=1e-12, atol=1e-12)
        for name, gradient in zip(leaves, gradients):
            torch.testing.assert_close(answers[name], gradient, rtol=1e-10, atol=1e-10)

    def test_wrong_output_gets_no_time(self, monkeypatch):
        records = measure_with(
            monkeypatch, peer_of(reference, "right"), peer_of(lambda leaves: 1.001 * reference(leaves), "wrong")
        )
        assert records["right"]["status"] == "ok"
        assert records["right"]["forward"]["median"] > 0
        assert records["wrong"]["status"] == "rejected"
        assert "y off by 1.0e-03" in records["wrong"]["reason"]
        assert "forward" not in records["wrong"]
        assert "both" not in records["wrong"]

    @pytest.mark.parametrize("name", NAMES)
    def test_wrong_gradient_gets_no_time(self, monkeypatch, name):
        def solve(leaves):
            given = dict(leaves)
            # The value is right, the gradient of one leaf is a thousandth too large.
            given[name] = leaves[name].detach() + 1.001 * (leaves[name] - leaves[name].detach())
            return reference(given)

        record = measure_with(monkeypatch, peer_of(solve))["test"]
        assert record["status"] == "rejected"
        assert f"{name} off by 1.0e-03" in record["reason"]
        assert "both" not in record

    def test_error_ratio(self):
        assert error_ratio(np.array([1.0, 1.0]), np.array([1.0, 1.0])) == 0
        assert error_ratio(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
        assert error_ratio(np.array([np.nan, 4.0]), np.array([3.0, 4.0])) == float("inf")
        assert error_ratio(np.ones(3), np.ones((3, 1))) == float("inf")

    def test_nothing_to_check_is_not_right(self):
        with pytest.raises(Disagreement, match="nothing"):
            check("empty", {}, {})


class TestPeers:
    def test_missing_is_listed_with_its_reason(self, monkeypatch):
        def prepare(inputs, cotangent):
            require("no_such_package_of_ours", "install it")
            raise AssertionError

        absent = replace(peer_of(reference, "absent"), prepare=prepare)
        records = measure_with(monkeypatch, absent, peer_of(reference, "present"))
        assert records["absent"]["status"] == "missing"
        assert "no_such_package_of_ours" in records["absent"]["reason"]
        assert records["present"]["status"] == "ok"

    def test_a_broken_peer_is_listed_and_a_broken_backend_raises(self, monkeypatch):
        def broken(leaves):
            raise ArithmeticError("gave up")

        assert "gave up" in measure_with(monkeypatch, peer_of(broken))["test"]["reason"]
        with pytest.raises(ArithmeticError):
            measure_with(monkeypatch, peer_of(broken, kind="ours"))

    @pytest.mark.parametrize(
        "name",
        [
            "shippo fused",
            "shippo chunked",
            "jax.lax.scan",
            "PyTorch loop",
            "PyTorch loop, unbind",
            "torch associative_scan",
            "mambapy pscan",
            "mambapy pscan, from inputs to y",
            "fla naive GLA",
            "fla naive simple GLA",
            "nn.GRU",
            "causal SDPA",
        ],
    )
    def test_results_are_what_its_task_says(self, name):
        (peer,) = (peer for peer in peers() if peer.name == name)
        inputs, cotangent = make_inputs(replace(TINY, order=32, width=4))
        try:
            candidate = peer.prepare(inputs, cotangent)
        except Missing as error:
            pytest.skip(f"{name}: {error}")
        record = scan.Judge(inputs, cotangent).admit(peer, candidate)
        assert set(record["errors"]) == {"forward", "both"}

    def test_checked_rows_are_seen_and_others_are_not(self):
        inputs, cotangent = make_inputs(replace(TINY, batch=3))

        def wrong_in(row):
            def solve(leaves):
                y = reference(leaves)
                return torch.cat([y[:row], 1.01 * y[row : row + 1], y[row + 1 :]])

            return peer_of(solve)

        judge = scan.Judge(inputs, cotangent, rows=[0, 2])
        record = judge.admit(wrong_in(1), wrong_in(1).prepare(inputs, cotangent))
        assert set(record["errors"]["both"]) == {"y", *inputs} - {"drift"}
        for row in (0, 2):
            with pytest.raises(Disagreement):
                judge.admit(wrong_in(row), wrong_in(row).prepare(inputs, cotangent))

    def test_names_are_unique_and_targets_name_existing_peers(self):
        names = [peer.name for peer in peers()]
        assert len(names) == len(set(names))
        assert {"shippo fused", "jax.lax.scan", "PyTorch loop", "mambapy pscan"} <= set(names)
        assert all(peer.cannot for peer in peers() if peer.kind in ("easier recurrence", "other model"))


class TestRoof:
    def test_bytes_by_hand(self):
        # Per cell: step 1, write 32, read 32, value 4, right 16, y 4; backward the same with dy, and gradients of all inputs.
        cells = 16 * 512 * 64
        assert Shape().cells == cells
        assert bytes_moved(Shape(), "forward") == 4 * cells * 89
        assert bytes_moved(Shape(), "both") == 4 * cells * (89 + 89 + 85)
        assert bytes_moved(Shape(), "forward", has_right=False) == 4 * cells * 73

    def test_work_by_hand(self):
        # N (3 P + 10) and the cheaper of N P^2 and the frame's 2 P^3 + 2 P^2.
        assert fma_work(Shape(batch=1, length=1, groups=1), "forward") == 32 * 22 + 160
        assert fma_work(Shape(batch=1, length=1, groups=1, order=4), "forward") == 4 * 22 + 4 * 16
        assert fma_work(Shape(), "both") > 2 * fma_work(Shape(), "forward")
        assert fma_work(Shape(), "forward", has_right=False) < fma_work(Shape(), "forward")

    def test_the_larger_term_is_active(self):
        slow_memory = roof(Shape(), "forward", bandwidth=1e9, fma_rate=1e12)
        assert slow_memory.active == "bandwidth"
        assert slow_memory.seconds == pytest.approx(4 * Shape().cells * 89 / 1e9)
        slow_units = roof(Shape(), "forward", bandwidth=1e12, fma_rate=1e9)
        assert slow_units.active == "fma"
        assert slow_units.seconds == pytest.approx(fma_work(Shape(), "forward") / 1e9)

    def test_an_unknown_pass_is_refused(self):
        with pytest.raises(ValueError, match="scan_pass"):
            traffic(Shape(), "backward")

    def test_the_copy_is_as_fast_as_a_copy(self):
        # A slow copy would make a low roof, under which every kernel looks good.
        copy_ = Stream(1 << 18, [(85, 4)])
        source = torch.ones(1 << 24)
        target = torch.ones_like(source)

        def rate(call, num_bytes):
            best = float("inf")
            for _ in range(5):
                begin = time.thread_time()
                call()
                best = min(best, time.thread_time() - begin)
            return num_bytes / best

        assert rate(copy_, copy_.num_bytes) > 0.4 * rate(lambda: target.copy_(source), 2 * source.nbytes)

    def test_the_copy_moves_what_it_says(self):
        copy_ = Stream(1000, [(5, 2)])
        copy_.source[:] = np.arange(copy_.source.size) % 7
        copy_()
        ((_, sink),) = copy_.passes
        source = copy_.source.reshape(copy_.items, 5, -1)
        want = np.stack([source[:, 0] + source[:, 2] + source[:, 4], source[:, 1] + source[:, 3]], axis=1)
        np.testing.assert_array_equal(sink.reshape(want.shape), want)
        assert copy_.num_bytes == 4 * 1000 * 7
        with pytest.raises(ValueError, match="passes"):
            Stream(10, [(1, 2)])


class TestTimer:
    def test_slow_ones_drop_out_and_all_are_timed(self, monkeypatch):
        clock = [0.0]
        monkeypatch.setattr(timer.time, "perf_counter", lambda: clock[0])
        monkeypatch.setattr(timer.time, "sleep", lambda _: None)
        order = []

        def call(name, seconds):
            def run_once():
                order.append(name)
                clock[0] += seconds

            return run_once

        timings = timer.interleave({"fast": call("fast", 1.0), "slow": call("slow", 9.0)}, rounds=3, budget=10.0)
        assert order == ["fast", "slow", "fast", "fast"]
        assert timings["slow"].repeats == 1
        assert timings["fast"].median == 1.0

    def test_quantiles(self):
        timing = timer.summarize([float(i) for i in range(11)])
        assert (timing.p20, timing.median, timing.p80) == (2.0, 5.0, 8.0)
        with pytest.raises(ValueError, match="empty"):
            timer.summarize([])


class TestSweeps:
    @pytest.mark.parametrize("exponent", [1.0, 1.3])
    def test_growth_finds_the_exponent(self, exponent):
        points = [
            {"shape": {"batch": 64 // t, "length": t}, "forward": {"median": 64 / t * 1e-6 * t**exponent}}
            for t in (1, 4, 16, 64)
        ]
        assert sweeps.growth(points, "forward") == pytest.approx(exponent)

    def test_shapes_keep_the_tokens_and_reach_the_end(self):
        shapes = sweeps.length_shapes()
        assert shapes[0].length == 1024
        assert shapes[-1].length == 65536
        assert all(0.95 < shape.batch * shape.length / sweeps.TOKENS <= 1 for shape in shapes)
        assert any(shape.length & (shape.length - 1) for shape in shapes)

    @pytest.mark.parametrize("window", [None, 96])
    def test_a_corner_that_is_wrong_late_is_seen(self, window):
        inputs, cotangent = make_inputs(Shape(batch=1, length=224, groups=3, order=2, width=2))
        # Forgets within the small window of this test.
        inputs["step"] = 50 * inputs["step"]

        def late(leaves):
            y = reference(leaves)
            return torch.cat([y[:, :-4], 1.01 * y[:, -4:]], dim=1)

        assert sweeps.check_corner(peer_of(reference), inputs, cotangent, window) < 1e-5
        with pytest.raises(Disagreement):
            sweeps.check_corner(peer_of(late), inputs, cotangent, window)

    def test_lengths_are_cut_from_the_same_tokens_and_timed(self):
        shapes = [Shape(batch=12 // length, length=length, groups=2, order=4, width=2) for length in (3, 5, 12)]
        points = sweeps.measure_lengths(shapes, rounds=2, budget=0.5, rate=1e9)
        assert [point["shape"]["length"] for point in points] == [3, 5, 12]
        for point in points:
            assert point["errors"]["shippo fused"] < 1e-5
            assert all(point[scan_pass]["median"] > 0 and point[scan_pass]["over_roof"] > 0 for scan_pass in PASSES)


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
    sections: dict[str, Any] = {
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
                for name, seconds in (("shippo expm", 0.01), ("torch.linalg.matrix_exp", 0.5))
            },
        },
        "training": {
            "batch": 16,
            "length": 512,
            "threads": 2,
            "generator": timing(0.1, tokens_per_second=8e4),
            "models": {
                name: timing(seconds, tokens_per_second=8192 / seconds, parameters=5_000_000, error=1e-6)
                for name, seconds in (("StructGen-Split", 2.8), ("No-right", 2.0))
            },
        },
        "decoding": {
            "batch": 1,
            "threads": 2,
            "errors": {},
            "rates": [{"model": "Transformer", "context": 128, "tokens_per_second": 100.0}],
        },
    }
    whole = {"mode": "quick", "date": "2026-01-01", "machine": describe(), "sections": sections, "errors": {}, "seconds": 1.0}
    return whole | {"verdict": verdict(whole)}


class TestVerdict:
    def test_figures_by_hand(self):
        reached = [row["reached"] for row in made_up_run()["verdict"]]
        assert reached == pytest.approx([2.0, 0.1 / 0.03, 15, 14, 300, 50, 40, 50, 1.4, 1.02, 0.05])
        results = [row["result"] for row in made_up_run()["verdict"]]
        assert results == ["must", "must", "must", "missed", "aim", "aim", "aim", "must", "must", "must", "aim"]

    def test_a_missing_peer_has_no_figure(self):
        whole = made_up_run()
        record = whole["sections"]["scan"]["candidates"][1]
        record |= {"status": "missing", "reason": "not installed"}
        rows = {row["what"]: row for row in verdict(whole)}
        row = rows["ahead of jax.lax.scan, forward"]
        assert row["reached"] is None
        assert "not installed" in row["why"]
        del whole["sections"]["expm"]
        assert sum(row["result"] == "not measured" for row in verdict(whole)) == 3

    def test_aims_are_harder_than_musts(self):
        for target in targets():
            assert target.met(target.aim, target.must)
            assert not target.met(target.must, target.aim)


class TestReport:
    def test_page_and_figure_show_the_run(self, tmp_path):
        pytest.importorskip("matplotlib")
        whole = made_up_run()
        page = report.render(whole)
        assert machine_line(whole["machine"]) in page
        assert "bandwidth is the active term; shippo fused takes 2.00 times as long" in page
        assert "gone: missing, not here." in page
        assert "| jax.lax.scan | 300 (300–300) | 1400 (1400–1400) | 15 × | 14 × |" in page
        assert len(tables(whole)) == 7
        results = tmp_path / "bench.json"
        results.write_text(json.dumps(whole))
        report.main(results, tmp_path / "page.md", tmp_path / "figure.svg")
        assert (tmp_path / "page.md").read_text() == report.render(json.loads(json.dumps(whole)))
        assert "<svg" in (tmp_path / "figure.svg").read_text()

    def test_a_section_measured_again_is_on_the_page(self):
        again = made_up_run() | {"again": {"sweeps": "2026-02-03"}}
        assert "Measured again by itself, after the run: sweeps on 2026-02-03." in report.render(again)

    def test_a_failed_section_is_on_the_page(self):
        whole = made_up_run()
        del whole["sections"]["decoding"]
        whole["errors"]["decoding"] = "Traceback\nRuntimeError: out of memory"
        assert "- decoding: RuntimeError: out of memory" in report.render(whole)

    def test_the_committed_page_is_that_of_the_committed_run(self):
        if not report.RESULTS.exists():
            pytest.skip("results/bench.json is not there yet: no run has been committed")
        committed = json.loads(report.RESULTS.read_text())
        assert committed["verdict"] == verdict(committed)
        assert report.PAGE.read_text() == report.render(committed)
        assert report.FIGURE.exists()


class TestRun:
    def test_plan_covers_every_section_in_both_modes(self):
        for quick in (True, False):
            sections = {section for _, section, _, _ in run.plan(quick)}
            assert {"scan", "expm", "memory", "training", "decoding"} <= sections
            assert ("sweeps" in sections) is not quick
        threads = {threads for _, section, threads, _ in run.plan(True) if section == "scan"}
        assert threads == {1, 2}

    def test_main_writes_and_judges(self, monkeypatch, tmp_path, capsys):
        whole = made_up_run()
        monkeypatch.setattr(run, "measure", lambda quick, earlier, only: copy.deepcopy(whole))
        out = tmp_path / "deep" / "bench.json"
        assert run.main(True, out) == 0
        assert json.loads(out.read_text())["verdict"] == whole["verdict"]
        assert "What was to be reached" in capsys.readouterr().out
        whole["sections"]["scan"]["candidates"][0]["status"] = "rejected"
        whole["sections"]["scan"]["candidates"][0]["reason"] = "wrong"
        assert run.main(True, out) == 1

    def test_a_section_is_measured_again_and_the_others_stay(self, monkeypatch, tmp_path):
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

    def test_a_section_runs_in_its_own_process(self):
        result = run.spawn("expm", 1, {"num_matrices": 64, "rounds": 1, "budget": 0.1})
        assert result["threads"] == 1
        assert result["candidates"]["shippo expm"]["both"]["median"] > 0

    def test_a_failing_section_raises_with_its_last_words(self):
        with pytest.raises(RuntimeError, match="nonsense"):
            run.spawn("nonsense", 1, {})


def test_a_candidate_without_backward_is_timed_forward_only(monkeypatch):
    def prepare(inputs, cotangent):
        return Candidate(forward=torch_candidate(reference, inputs, NAMES, cotangent).forward)

    record = measure_with(monkeypatch, replace(peer_of(reference), prepare=prepare))["test"]
    assert record["status"] == "ok"
    assert "forward" in record
    assert "both" not in record
