"""bfloat16 operands beside float32 ones: what mixed precision makes of the scan's traffic.

Data path: the operands of `make_inputs` are rounded to bfloat16, but for step and drift, which a layer keeps in float32;
`transport_scan` gets the same numbers in both dtypes. Both are held against the float64 reference on those numbers, a result
that is rounded to bfloat16 itself to `TOLERANCE`, and timed in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import gate
from benchmarks.peers import Candidate, Peer, peers
from benchmarks.problem import Shape, make_inputs
from benchmarks.roof import PASSES
from benchmarks.sweeps import check_corner
from benchmarks.timer import interleave

# Half a unit in the last place of bfloat16 is 2^-9; a gradient is made of results and cotangents that are rounded so.
TOLERANCE = 1e-2
KEPT = ("step", "drift")


def rounded(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The operands in `dtype`, but for those that stay in float32."""
    return {name: tensor if name in KEPT else tensor.to(dtype) for name, tensor in inputs.items()}


def measure(shape: Shape, *, rounds: int, budget: float) -> dict[str, Any]:
    """Times and error ratios of both dtypes at one shape, through the public call with "auto"."""
    (fused,) = (peer for peer in peers() if peer.name == "shippo fused")

    def prepare(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
        return fused.prepare(rounded(inputs, torch.bfloat16), cotangent.bfloat16())

    inputs, cotangent = make_inputs(shape)
    inputs, cotangent = rounded(rounded(inputs, torch.bfloat16), torch.float32), cotangent.bfloat16().float()
    chosen: dict[str, tuple[Peer, float]] = {
        "float32": (fused, gate.TOLERANCE),
        "bfloat16": (replace(fused, name="shippo fused, bfloat16 operands", prepare=prepare), TOLERANCE),
    }
    result: dict[str, Any] = {"shape": asdict(shape), "threads": torch.get_num_threads()}
    candidates = {}
    for name, (peer, tolerance) in chosen.items():
        result[name] = {"error": check_corner(peer, inputs, cotangent, tolerance=tolerance)}
        candidates[name] = peer.prepare(inputs, cotangent)
    for scan_pass in PASSES:
        calls = {name: one.forward if scan_pass == "forward" else one.both for name, one in candidates.items()}
        for call in calls.values():
            call()
        for name, timing in interleave(calls, rounds=rounds, budget=budget).items():
            result[name][scan_pass] = timing.as_dict()
    return result
