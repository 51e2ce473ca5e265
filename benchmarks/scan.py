"""One scan at one shape: every candidate checked, then timed in turn with the copy that makes its roof.

Data path: `make_inputs(shape)` -> each peer prepared, called once (its compilation time is kept apart) and held against the
float64 reference -> those that pass timed in turn, forward and forward with backward -> a dictionary with times, error ratios
and roofs. A peer that is missing or wrong appears with the reason and without a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gate import Disagreement, as_array, check, oracle
from benchmarks.machine import Stream, fma_rate
from benchmarks.peers import Candidate, Missing, Peer, peers
from benchmarks.problem import Shape, make_inputs
from benchmarks.roof import PASSES, bytes_moved, roof, traffic
from benchmarks.timer import Timing, first_call, interleave, summarize

# Cells up to which every backward pass is run.
SMALL = 1 << 12


class Judge:
    """Holds candidates against the float64 reference; peers with the same task share one reference run.

    Args:
        inputs: named inputs of the problem.
        cotangent: [B, T, G, P].
        rows: where scans are checked; all of the batch by default, and then the gradient of `drift`, a sum over rows, too.
    """

    def __init__(self, inputs: Mapping[str, Tensor], cotangent: Tensor, rows: list[int] | None = None) -> None:
        self.inputs, self.cotangent, self.rows = inputs, cotangent, rows
        self._answers: dict[Any, dict[str, Any]] = {}

    def want(self, peer: Peer, candidate: Candidate) -> Mapping[str, Any]:
        """What the candidate should return, on the checked rows."""
        if peer.task is None:
            assert candidate.expected is not None
            return candidate.expected()
        key = (peer.task, peer.leaves)
        if key not in self._answers:
            rows = slice(None) if self.rows is None else self.rows
            leaves = {name: self.inputs[name] if name == "drift" else self.inputs[name][rows] for name in peer.leaves}
            self._answers[key] = oracle(peer.task, leaves, self.cotangent[rows])
        return self._answers[key]

    def admit(self, peer: Peer, candidate: Candidate) -> dict[str, Any]:
        """Call the candidate once; its first-call seconds and RMS error ratios. Raises `Disagreement`."""
        want = self.want(peer, candidate)
        y, seconds = first_call(candidate.forward)
        record = {"first_call": {"forward": seconds}, "errors": {"forward": check(peer.name, self._seen(peer, {"y": y}), want)}}
        if candidate.both is not None:
            results, seconds = first_call(candidate.both)
            record["first_call"]["both"] = seconds
            record["errors"]["both"] = check(peer.name, self._seen(peer, results), want)
        return record

    def _seen(self, peer: Peer, results: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.rows is None or peer.task is None:
            return results
        return {name: as_array(result)[self.rows] for name, result in results.items() if name != "drift"}


def measure(
    shape: Shape, *, rounds: int, budget: float, names: Iterable[str] | None = None, quick: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Times, errors and roofs of all candidates at one shape, on torch's number of threads.

    Args:
        shape: sizes of the scan.
        rounds: how often each candidate is called at most.
        budget: seconds per candidate and pass.
        names: peers to take; all by default.
        quick: whether to check the first and the last row only, and leave out the peers that are too slow for the quick mode.
        seed: of the inputs.
    """
    inputs, cotangent = make_inputs(shape, seed)
    judge = Judge(inputs, cotangent, [0, shape.batch - 1] if quick else None)
    chosen = peers() if names is None else tuple(peer for peer in peers() if peer.name in set(names))
    records, candidates = [], {}
    for peer in chosen:
        record: dict[str, Any] = {"name": peer.name, "kind": peer.kind, "how": peer.how, "cannot": peer.cannot}
        records.append(record)
        if quick and not peer.quick:
            record |= {"status": "full mode only", "reason": "measured by `shippo bench --full`"}
            continue
        try:
            candidate = peer.prepare(inputs, cotangent)
            if peer.slow_backward and shape.cells > SMALL:
                candidate = replace(candidate, both=None)
                record["cannot"] += "; its backward pass takes minutes and is left out"
            record |= judge.admit(peer, candidate)
        except Missing as error:
            record |= {"status": "missing", "reason": str(error)}
        except Disagreement as error:
            record |= {"status": "rejected", "reason": str(error)}
        except Exception as error:
            # A peer that breaks says so in the table; what breaks of ours must not be mistaken for a slow peer.
            if peer.kind == "ours":
                raise
            record |= {"status": "failed", "reason": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        else:
            record["status"] = "ok"
            candidates[peer.name] = candidate
    checked_is_enough = {peer.name for peer in chosen if not peer.compiles}
    roofs = _time(shape, records, candidates, checked_is_enough, rounds, budget)
    return {"shape": asdict(shape), "threads": torch.get_num_threads(), "roofs": roofs, "candidates": records}


def _time(
    shape: Shape,
    records: list[dict[str, Any]],
    candidates: dict[str, Candidate],
    checked_is_enough: set[str],
    rounds: int,
    budget: float,
) -> dict[str, Any]:
    """Times both passes, writing them into the records; returns their roofs.

    A candidate of `checked_is_enough` whose checked call already took more than the budget is not called again.
    """
    roofs = {}
    rate = fma_rate()
    for scan_pass in PASSES:
        calls: dict[str, Any] = {}
        timings: dict[str, Timing] = {}
        for record in records:
            name, seconds = record["name"], record.get("first_call", {}).get(scan_pass)
            if name not in candidates or seconds is None:
                continue
            if name in checked_is_enough and seconds > budget:
                timings[name] = summarize([seconds])
            else:
                calls[name] = candidates[name].forward if scan_pass == "forward" else candidates[name].both
        copy = Stream(shape.cells, traffic(shape, scan_pass))
        copy()
        timings |= interleave({"copy": copy, **calls}, rounds=rounds, budget=budget)
        bandwidth = bytes_moved(shape, scan_pass) / timings["copy"].median
        limit = roof(shape, scan_pass, bandwidth, rate)
        roofs[scan_pass] = limit.as_dict() | {"copy": timings["copy"].as_dict()}
        for record in records:
            if record["name"] in timings:
                timing = timings[record["name"]]
                record[scan_pass] = timing.as_dict() | {"over_roof": timing.median / limit.seconds}
    return roofs
