"""Peak memory of a forward and backward pass beyond what it is given and what it returns.

Data path: in a process of its own, a small problem of the same N and P loads and compiles everything; then operands and
cotangent of the real shape are made, the high-water mark of the resident set is reset, the pass runs, and

    extra = (high-water mark - resident set before) - (y and gradients);    ratio = extra / (operands + gradients).

Whatever the pass keeps or scratches, in PyTorch, NumPy, JAX or a kernel, is counted, because the system counts it.
"""

from __future__ import annotations

import gc
import re
import resource
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.peers import Missing, peers
from benchmarks.problem import Shape, make_inputs

_STATUS = Path("/proc/self/status")


def measure(shape: Shape, name: str) -> dict[str, Any]:
    """Peak extra memory of one peer at one shape, in bytes and as a ratio.

    Args:
        shape: sizes of the scan.
        name: of a peer that has a backward pass.
    """
    (peer,) = (peer for peer in peers() if peer.name == name)
    record: dict[str, Any] = {"name": name, "shape": asdict(shape)}
    try:
        small = peer.prepare(*make_inputs(replace(shape, batch=2, length=32, groups=2)))
        assert small.both is not None
        small.both()
    except Missing as error:
        return record | {"status": "missing", "reason": str(error)}
    del small
    inputs, cotangent = make_inputs(shape)
    candidate = peer.prepare(inputs, cotangent)
    assert candidate.both is not None
    operands = sum(inputs[leaf].nbytes for leaf in peer.leaves)
    gc.collect()
    method, before = reset_peak()
    results = candidate.both()
    peak = peak_bytes()
    returned = sum(result.nbytes for result in results.values())
    gradients = returned - results["y"].nbytes
    extra = peak - before - returned
    return record | {
        "status": "ok",
        "method": method,
        "operands": operands,
        "gradients": gradients,
        "extra": extra,
        "ratio": extra / (operands + gradients),
    }


def reset_peak() -> tuple[str, int]:
    """Reset the high-water mark where the system allows it; how it is read, and the bytes resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        # The mark cannot be lowered: what follows must exceed it to be seen, which large operands make sure of.
        return "high-water mark of the whole process", peak_bytes()
    return "high-water mark reset before the pass", _status("VmRSS")


def peak_bytes() -> int:
    """High-water mark of the resident set, in bytes."""
    if _STATUS.exists():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{_STATUS} has no {field}")
    return int(found[1]) * 1024
