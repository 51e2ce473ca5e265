"""Small peers and a small shape on which the benchmark can be tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import scan
from benchmarks.peers import Peer
from benchmarks.peers.base import same_recurrence, torch_candidate
from benchmarks.problem import NAMES, Shape

TINY = Shape(batch=2, length=20, groups=2, order=4, width=2)


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


@pytest.fixture(scope="session")
def helpers():
    """The helpers above, for test files: they cannot import this one."""
    return SimpleNamespace(TINY=TINY, reference=reference, peer_of=peer_of, measure_with=measure_with)
