"""The theory: every check holds, every check can fail, and the report says so."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

import shippo_ssm.scan
from shippo_lab.theory import CHECKS, CheckResult, registry, run_check, verify
from shippo_lab.theory.registry import check
from shippo_ssm.projection import LegS, Transport


@pytest.mark.parametrize("name", CHECKS)
def test_statement_holds(name):
    row = CHECKS[name]()
    assert isinstance(row, CheckResult)
    assert row.name == name
    assert row.statement
    assert row.measured
    assert row.holds, row


def broken(names):
    return {name for name in names if not run_check(name, CHECKS[name]).holds}


def test_swapped_composition_is_seen(monkeypatch):
    true = shippo_ssm.scan.compose
    monkeypatch.setattr(shippo_ssm.scan, "compose", lambda first, second: true(second, first))
    names = ["block_affine_scan_closure", "block_affine_summary", "block_affine_prefix_scan"]
    assert broken(names) == set(names)


def test_order_of_the_right_factors_is_seen(monkeypatch):
    true = shippo_ssm.scan.compose

    def swapped(first, second):
        return true(first, second)._replace(right=second.right @ first.right)

    monkeypatch.setattr(shippo_ssm.scan, "compose", swapped)
    assert broken(["block_affine_scan_closure", "block_affine_summary"]) == {
        "block_affine_scan_closure",
        "block_affine_summary",
    }


def test_transposed_inverse_is_seen(monkeypatch):
    monkeypatch.setattr(Transport, "inverse", lambda self, t, tau: np.swapaxes(self.P(t, tau), -1, -2))
    assert broken(["inverse_dynamics", "transport_maps_families"]) == {"inverse_dynamics", "transport_maps_families"}


def test_transposed_metric_is_seen(monkeypatch):
    def transposed(self, t, tau):
        frame = self.P(t, tau)
        return np.swapaxes(frame, -1, -2) @ frame

    monkeypatch.setattr(Transport, "metric", transposed)
    names = [
        "shippo_online_approximation_problem", "shippo_normal_equation", "shippo_stationarity", "shippo_first_variation",
        "transport_isometry", "shippo_hippo_conjugacy", "identity_metric_only_if_skew",
    ]  # fmt: skip
    assert broken(names) == set(names)


def test_left_transport_is_seen(monkeypatch):
    """A frame that composes in the wrong order, as d_t P = A_R P would give."""
    true = Transport.P
    monkeypatch.setattr(Transport, "P", lambda self, t, tau: np.swapaxes(true(self, t, tau), -1, -2))
    assert "composition_rule" in broken(["composition_rule"])
    assert "transport_equation" in broken(["transport_equation"])
    assert "sylvester_coefficient_dynamics" in broken(["sylvester_coefficient_dynamics"])


def test_wrong_left_operator_is_seen(monkeypatch):
    true = LegS.A
    monkeypatch.setattr(LegS, "A", lambda self, t: true(self, t).T)
    names = ["hippo_closure_condition", "sylvester_coefficient_dynamics", "ordinary_hippo_coefficient_dynamics"]
    assert broken(names) == set(names)


def test_a_memory_without_transport_is_seen(monkeypatch):
    monkeypatch.setattr(Transport, "carry", lambda self, values, tau, t: values)
    names = ["sylvester_coefficient_dynamics", "rotation_does_not_reduce", "no_static_mixer", "moving_frame_factorisation"]
    assert broken(names) == set(names)


def test_report(tmp_path):
    text = io.StringIO()
    console = Console(file=text, width=160)
    names = ["rotation_example", "direct_channelwise_obstruction"]
    assert verify(only="local_truncation_half", console=Console(quiet=True)) == 0
    assert verify(only=names, out=tmp_path / "deep" / "rows.json", console=console) == 0
    shown = text.getvalue()
    for word in ("statement", "what is measured", "residual", "bound", "holds", "2 statements", "all hold"):
        assert word in shown
    report = json.loads((tmp_path / "deep" / "rows.json").read_text())
    assert report["holds"] is True
    assert [row["name"] for row in report["rows"]] == names
    assert {"statement", "measured", "residual", "bound", "sense", "holds", "place"} <= set(report["rows"][0])
    verify(only=names, out=tmp_path, console=console)
    assert (tmp_path / "verify.json").exists()


def test_the_summary_counts_by_section(monkeypatch):
    """Without `only` and `every`: a line per section, the rows that do not hold, and the way to the others."""
    some = ("rotation_example", "liouville_formula", "metric_of_a_mixed_generator", "sylvester_coefficient_dynamics")
    chosen = {name: CHECKS[name] for name in some}
    monkeypatch.setattr(registry, "CHECKS", chosen)
    text = io.StringIO()
    assert verify(console=Console(file=text, width=80), wide=False) == 0
    shown = text.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    sections = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert [name for name in sections if name] == ["Appendix B", "Section 2"]
    assert "4 statements" in shown
    assert "--all prints every one" in shown
    assert "Liouville" not in shown
    verify(every=True, console=Console(file=text, width=80), wide=False)
    assert "Liouville" in text.getvalue()
    monkeypatch.setattr(Transport, "metric", lambda self, t, tau: np.eye(self.width))
    text = io.StringIO()
    assert verify(console=Console(file=text, width=80), wide=False) == 1
    assert "not skew" in text.getvalue()
    assert "Liouville" not in text.getvalue()


def test_a_failing_row_fails_the_run(monkeypatch, tmp_path):
    text = io.StringIO()
    monkeypatch.setattr(Transport, "metric", lambda self, t, tau: np.eye(self.width))
    console = Console(file=text, width=200)
    assert verify(only=["rotation_example", "metric_of_a_mixed_generator"], console=console) == 1
    assert "1 do not hold" in text.getvalue()

    def explode(self, t, tau):
        raise RuntimeError("no [metric] today")

    monkeypatch.setattr(Transport, "metric", explode)
    assert verify(only=["rotation_example"], out=tmp_path / "r.json", console=console) == 1
    assert "RuntimeError: no [metric] today" in text.getvalue()
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["residual"] is None


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no_such_check"):
        verify(only=["no_such_check"], console=Console(quiet=True))


def test_rows_judge_both_ways():
    def row(residual, bound, sense):
        return CheckResult(name="n", statement="s", place="p", measured="m", residual=residual, bound=bound, sense=sense)

    assert row(0.1, 0.2, "<=").holds
    assert not row(0.3, 0.2, "<=").holds
    assert row(0.3, 0.2, ">=").holds
    assert not row(0.1, 0.2, ">=").holds
    assert not row(math.nan, 0.2, "<=").holds
    assert not row(math.inf, 0.2, ">=").holds


def test_registry_keeps_names():
    assert check.__doc__
    for name, function in CHECKS.items():
        assert function.__name__ == name


def test_import_is_light():
    code = "import sys, shippo_lab.theory; print([m for m in ('matplotlib', 'numba', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
