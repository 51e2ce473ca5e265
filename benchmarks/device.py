"""The scan on a GPU: `shippo bench --device cuda`, on a machine with one.

Data path: the inputs of the CPU benchmark are moved to the device; each of our backends there is called once and held against
the float64 reference on the CPU, as in `scan.py`; those that pass are timed in turn with a copy of as many bytes as the pass
must move, which makes the roof. Every call ends with the device's own end. The dictionary has the form of a section of
`run.py`, under a name of its own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gate import Disagreement, check, oracle
from benchmarks.machine import describe
from benchmarks.peers.base import same_recurrence, torch_candidate
from benchmarks.problem import NAMES, Shape, make_inputs
from benchmarks.roof import PASSES, bytes_moved
from benchmarks.timer import first_call, interleave
from shippo_ssm.dispatch import gpu_reason
from shippo_ssm.scan import transport_scan

BACKENDS = ("triton", "chunked")
DEFAULT_OUT = Path("runs", "bench-cuda.json")


def require_gpu() -> str:
    """The device to measure on; raises `ValueError` where there is none."""
    if not torch.cuda.is_available():
        raise ValueError(
            "bench: `device` is 'cuda', and torch finds no GPU here; run it on a machine with one, or leave it out"
        )
    if reason := gpu_reason(torch.empty(0, device="cuda")):
        raise ValueError(f"bench: `device` is 'cuda' with {reason}; install it with pip install 'shippo-ssm[gpu]'")
    return "cuda"


def measure(shape: Shape, device: str, *, rounds: int, budget: float) -> dict[str, Any]:
    """Times, errors and roofs of our backends at one shape on `device`.

    Args:
        shape: sizes of the scan.
        device: "cuda"; under Triton's interpreter also "cpu", which proves this code and measures nothing.
        rounds: how often each candidate is called at most.
        budget: seconds per candidate and pass.
    """
    inputs, cotangent = make_inputs(shape)
    placed = {name: tensor.to(device) for name, tensor in inputs.items()}
    want = oracle(same_recurrence, inputs, cotangent)
    records, calls = [], {scan_pass: {} for scan_pass in PASSES}
    for backend in BACKENDS:
        solve = functools.partial(_solve, backend=backend)
        candidate = torch_candidate(solve, placed, NAMES, cotangent.to(device))
        assert candidate.both is not None
        results, seconds = first_call(_ended(candidate.both, device))
        record: dict[str, Any] = {"name": f"shippo {backend}", "kind": "ours", "first_call": {"both": seconds}}
        records.append(record)
        try:
            record |= {"errors": {"both": check(record["name"], results, want)}, "status": "ok"}
        except Disagreement as error:
            record |= {"status": "rejected", "reason": str(error)}
            continue
        for scan_pass, call in (("forward", candidate.forward), ("both", candidate.both)):
            calls[scan_pass][record["name"]] = _ended(call, device)
    roofs = {}
    for scan_pass in PASSES:
        source = torch.ones(bytes_moved(shape, scan_pass) // 8, device=device)
        copy = _ended(functools.partial(torch.empty_like(source).copy_, source), device)
        copy()
        timings = interleave({"copy": copy, **calls[scan_pass]}, rounds=rounds, budget=budget)
        roof = timings["copy"].median
        roofs[scan_pass] = {"seconds": roof, "bytes": bytes_moved(shape, scan_pass), "copy": timings["copy"].as_dict()}
        for record in records:
            if record["name"] in timings:
                timing = timings[record["name"]]
                record[scan_pass] = timing.as_dict() | {"over_roof": timing.median / roof}
    return {"shape": asdict(shape), "roofs": roofs, "candidates": records}


def main(full: bool, out: Path | None) -> int:
    """Measure on the GPU, print a line per candidate, write the JSON; 1 where one of our backends was rejected."""
    device = require_gpu()
    name = torch.cuda.get_device_name()
    shapes = [Shape(), Shape(batch=1, length=65536)] if full else [Shape()]
    sections = [measure(shape, device, rounds=15 if full else 9, budget=5.0) for shape in shapes]
    run = {
        "mode": "full" if full else "quick",
        "machine": describe() | {"gpu": name},
        "sections": {"scan on a GPU": sections},
    }
    out = DEFAULT_OUT if out is None else out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(run, indent=1) + "\n")
    for section in sections:
        for record in section["candidates"]:
            times = [f"{1e3 * record[p]['median']:.3f} ms ({record[p]['over_roof']:.2f} x copy)" for p in PASSES if p in record]
            print(name, Shape(**section["shape"]), record["name"], record["status"], *times)
    print(f"written to {out}")
    return int(any(record["status"] == "rejected" for section in sections for record in section["candidates"]))


def _solve(leaves: Mapping[str, Any], backend: str) -> Tensor:
    return transport_scan(**leaves, backend=backend)[0]


def _ended(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The call until the device is done with it."""
    if device == "cpu":
        return call

    def ended() -> Any:
        result = call()
        torch.cuda.synchronize()
        return result

    return ended
