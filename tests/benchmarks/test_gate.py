"""Wrong results get no time, and absence is said aloud."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import scan
from benchmarks.gate import Disagreement, check, error_ratio, oracle
from benchmarks.peers import Candidate, Missing, peers
from benchmarks.peers.base import require, same_recurrence, torch_candidate
from benchmarks.problem import NAMES, make_inputs


def test_oracle_is_the_reference_with_its_gradients(helpers):
    inputs, cotangent = make_inputs(replace(helpers.TINY, batch=6))
    answers = oracle(same_recurrence, inputs, cotangent)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    y = helpers.reference(leaves)
    gradients = torch.autograd.grad(y, list(leaves.values()), cotangent.double())
    torch.testing.assert_close(answers["y"], y.detach(), rtol=1e-12, atol=1e-12)
    for name, gradient in zip(leaves, gradients):
        torch.testing.assert_close(answers[name], gradient, rtol=1e-10, atol=1e-10)


def test_wrong_output_gets_no_time(helpers, monkeypatch):
    records = helpers.measure_with(
        monkeypatch,
        helpers.peer_of(helpers.reference, "right"),
        helpers.peer_of(lambda leaves: 1.001 * helpers.reference(leaves), "wrong"),
    )
    assert records["right"]["status"] == "ok"
    assert records["right"]["forward"]["median"] > 0
    assert records["wrong"]["status"] == "rejected"
    assert "y off by 1.0e-03" in records["wrong"]["reason"]
    assert "forward" not in records["wrong"]
    assert "both" not in records["wrong"]


@pytest.mark.parametrize("name", NAMES)
def test_wrong_gradient_gets_no_time(helpers, monkeypatch, name):
    def solve(leaves):
        given = dict(leaves)
        # The value is right, the gradient of one leaf is a thousandth too large.
        given[name] = leaves[name].detach() + 1.001 * (leaves[name] - leaves[name].detach())
        return helpers.reference(given)

    record = helpers.measure_with(monkeypatch, helpers.peer_of(solve))["test"]
    assert record["status"] == "rejected"
    assert f"{name} off by 1.0e-03" in record["reason"]
    assert "both" not in record


def test_error_ratio():
    assert error_ratio(np.array([1.0, 1.0]), np.array([1.0, 1.0])) == 0
    assert error_ratio(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    assert error_ratio(np.array([np.nan, 4.0]), np.array([3.0, 4.0])) == float("inf")
    assert error_ratio(np.ones(3), np.ones((3, 1))) == float("inf")


def test_nothing_to_check_is_not_right():
    with pytest.raises(Disagreement, match="nothing"):
        check("empty", {}, {})


def test_missing_is_listed_with_its_reason(helpers, monkeypatch):
    def prepare(inputs, cotangent):
        require("no_such_package_of_ours", "install it")
        raise AssertionError

    absent = replace(helpers.peer_of(helpers.reference, "absent"), prepare=prepare)
    records = helpers.measure_with(monkeypatch, absent, helpers.peer_of(helpers.reference, "present"))
    assert records["absent"]["status"] == "missing"
    assert "no_such_package_of_ours" in records["absent"]["reason"]
    assert records["present"]["status"] == "ok"


def test_a_broken_peer_is_listed_and_a_broken_backend_raises(helpers, monkeypatch):
    def broken(leaves):
        raise ArithmeticError("gave up")

    assert "gave up" in helpers.measure_with(monkeypatch, helpers.peer_of(broken))["test"]["reason"]
    with pytest.raises(ArithmeticError):
        helpers.measure_with(monkeypatch, helpers.peer_of(broken, kind="ours"))


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
def test_results_are_what_its_task_says(helpers, name):
    (peer,) = (peer for peer in peers() if peer.name == name)
    inputs, cotangent = make_inputs(replace(helpers.TINY, order=32, width=4))
    try:
        candidate = peer.prepare(inputs, cotangent)
    except Missing as error:
        pytest.skip(f"{name}: {error}")
    record = scan.Judge(inputs, cotangent).admit(peer, candidate)
    assert set(record["errors"]) == {"forward", "both"}


def test_checked_rows_are_seen_and_others_are_not(helpers):
    inputs, cotangent = make_inputs(replace(helpers.TINY, batch=3))

    def wrong_in(row):
        def solve(leaves):
            y = helpers.reference(leaves)
            return torch.cat([y[:row], 1.01 * y[row : row + 1], y[row + 1 :]])

        return helpers.peer_of(solve)

    judge = scan.Judge(inputs, cotangent, rows=[0, 2])
    record = judge.admit(wrong_in(1), wrong_in(1).prepare(inputs, cotangent))
    assert set(record["errors"]["both"]) == {"y", *inputs} - {"drift"}
    for row in (0, 2):
        with pytest.raises(Disagreement):
            judge.admit(wrong_in(row), wrong_in(row).prepare(inputs, cotangent))


def test_names_are_unique_and_targets_name_existing_peers():
    names = [peer.name for peer in peers()]
    assert len(names) == len(set(names))
    assert {"shippo fused", "jax.lax.scan", "PyTorch loop", "mambapy pscan"} <= set(names)
    assert all(peer.cannot for peer in peers() if peer.kind in ("easier recurrence", "other model"))


def test_a_candidate_without_backward_is_timed_forward_only(helpers, monkeypatch):
    def prepare(inputs, cotangent):
        return Candidate(forward=torch_candidate(helpers.reference, inputs, NAMES, cotangent).forward)

    record = helpers.measure_with(monkeypatch, replace(helpers.peer_of(helpers.reference), prepare=prepare))["test"]
    assert record["status"] == "ok"
    assert "forward" in record
    assert "both" not in record
