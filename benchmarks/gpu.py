"""What the kernels should do on GPUs nobody has run them on: a prediction, `python -m benchmarks.gpu [--out FILE]`.

Data path: the instruction counts of the compiled loops (`results/gpu.json`, made by `benchmarks.gpu_code`) and the published
rates of a `Gpu` give, for a pass over a `Shape`, the time that each resource needs if nothing else held it up; the pass takes
as long as the largest of them, which binds. Of the configurations that autotuning may choose, the fastest is taken. Nothing
here was measured on a gpu. What is assumed beside the published rates: all resources overlap; a warp alone on its scheduler
issues in order, with the latencies of `gpu_code.LATENCY`; memory answers after `MEMORY_SECONDS`; a program that ends makes
room for the next at once; 128 bytes pass through the shared memory of a processor in a cycle.

The same kind of model, work over peak rate and bytes over bandwidth, is held against the CPU kernel's measured time
(`results/bench.json`): what it says too little there it may well say too little here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_code import RESULT
from benchmarks.problem import Shape
from benchmarks.roof import EXP_WORK, PASSES, bytes_moved, traffic
from shippo_ssm.dispatch import MIN_GPU_CHAINS, SEGMENT_LENGTH
from shippo_ssm.scan.segments import MOST_SEGMENTS
from shippo_ssm.scan.triton import keep_every, span_of

MEMORY_SECONDS = 600e-9
# Units of four schedulers: registers, and bytes of shared memory.
REGISTERS, SHARED = 65536, 160 * 1024
SHAPES = {"training": Shape(), "one long sequence": Shape(batch=1, length=65536)}


class Gpu(NamedTuple):
    """Published rates of one gpu."""

    name: str
    target: str
    processors: int
    float_lanes: int
    """Single-precision units of one processor."""
    flops: float
    """Single-precision operations per second: two per lane and cycle, which gives the clock."""
    bandwidth: float
    """Bytes per second of its memory."""

    @property
    def clock(self) -> float:
        """Cycles per second."""
        return self.flops / (2 * self.processors * self.float_lanes)


GPUS = (
    Gpu("A100 80 GB", "sm_80", 108, 64, 19.5e12, 2.039e12),
    Gpu("H100", "sm_90", 132, 128, 67e12, 3.35e12),
    Gpu("B200", "sm_100", 148, 128, 75e12, 8.0e12),
)


class Terms(NamedTuple):
    """Seconds that each resource needs for a pass."""

    memory: float
    """Bytes that must move, and the kept states, over the memory's bandwidth."""
    flight: float
    """Rounds over those that loads run ahead, times the answer time of the memory."""
    issue: float
    """Instructions of the busiest scheduler, or those of one of its units."""
    order: float
    """A warp's own instructions, each waiting for its operands."""

    def binds(self) -> str:
        return max(self._asdict(), key=lambda name: getattr(self, name))


class Work(NamedTuple):
    """What a kernel does at a shape."""

    floats: float
    """Numbers that must move, per cell."""
    programs: int
    """Per block of groups."""
    positions: int
    """Of one program."""


def work_of(kernel: str, shape: Shape) -> Work:
    """The work of a kernel of `gpu_code.kernels`."""
    order, width = shape.order, shape.width
    (read, written), (read_back, written_back) = traffic(shape, "both")
    size = min(shape.length, span_of(shape.batch * shape.groups, shape.length))
    kept, sources, adjoints = order * width / keep_every(width), 1 + order + width + width**2, order * width / size
    # Nobody asks for the adjoint before the first span.
    rest = shape.length - size
    return {
        "scan forward": Work(read + written, shape.batch, shape.length),
        "scan forward, training": Work(read + written + kept, shape.batch, shape.length),
        "scan adjoint": Work(sources * rest / shape.length + adjoints, shape.batch, rest),
        "segment adjoint": Work(sources, shape.batch, shape.length),
        "scan gradients": Work(read_back + written_back + kept + adjoints, shape.cells // (shape.groups * size), size),
    }[kernel]


def terms(gpu: Gpu, shape: Shape, record: dict[str, Any], work: Work) -> Terms:
    """The terms of one compiled kernel."""
    here = -(-work.programs * -(-shape.groups // record["BG"]) // gpu.processors)
    # Programs that do not fit beside each other come one after another.
    room = min(REGISTERS // (32 * record["warps"] * record["registers"]), SHARED // max(1, record["shared"]))
    turns, rounds = -(-here // max(1, room)), work.positions / record["BT"]
    (loop,) = record["loops"]
    units = loop["units"]
    own = max(sum(loop["instructions"].values()), units["float"] * 128 / gpu.float_lanes)
    # Shared memory serves one warp of a processor at a time.
    warps = here * record["warps"]
    return Terms(
        memory=4 * shape.cells * work.floats / gpu.bandwidth,
        flight=turns * rounds * MEMORY_SECONDS / (record["STAGES"] - 1),
        issue=max(own * -(-warps // 4), units["exchange"] * warps) * rounds / gpu.clock,
        order=turns * rounds * loop["alone"] / gpu.clock,
    )


# The kernels of a pass, and those that segments need besides.
PARTS = {"forward": ("scan forward",), "both": ("scan forward, training", "scan adjoint", "scan gradients")}
SUMMARIES = {"forward": ("scan forward",), "both": ("scan forward", "segment adjoint")}


def predict(gpu: Gpu, shape: Shape, scan_pass: str, records: list[dict[str, Any]], *, segments: int = 1) -> dict[str, Any]:
    """The predicted time of "forward" or "both", its fraction of the memory roof, and what binds each kernel."""
    pieces = replace(shape, batch=shape.batch * segments, length=shape.length // segments)
    parts = []
    for kernel in PARTS[scan_pass] + (SUMMARIES[scan_pass] if segments > 1 else ()):
        work = work_of(kernel, pieces)
        choices = [record for record in records if record["kernel"] == kernel and record["target"] == gpu.target]
        found = [(terms(gpu, pieces, record, work), record["BG"]) for record in choices]
        best, groups = min(found, key=lambda pair: max(pair[0]))
        parts.append({"kernel": kernel, "BG": groups, "seconds": max(best), "binds": best.binds(), "terms": best._asdict()})
    roof = bytes_moved(shape, scan_pass) / gpu.bandwidth
    seconds = sum(part["seconds"] for part in parts)
    return {"gpu": gpu.name, "pass": scan_pass, "seconds": seconds, "roof": roof, "fraction": roof / seconds, "parts": parts}


def check_on_cpu(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """The same kind of model for the CPU kernel beside its measured time: work over peak rate, bytes over bandwidth."""
    scan = bench["sections"]["scan"]
    shape = Shape(**scan["shape"])
    order, width = shape.order, shape.width
    forward = order * (width**2 + 3 * width + EXP_WORK)
    work = {"forward": forward, "both": forward + order * (3 * width**2 + 8 * width + EXP_WORK + 2)}
    (ours,) = (record for record in scan["candidates"] if record["name"] == "shippo fused")
    rows = []
    for scan_pass in PASSES:
        rates = scan["roofs"][scan_pass]
        memory = bytes_moved(shape, scan_pass) / rates["bandwidth"]
        issue = shape.cells * work[scan_pass] / rates["fma_rate"]
        measured = ours[scan_pass]["median"]
        predicted = max(memory, issue)
        rows.append({"pass": scan_pass, "memory": memory, "issue": issue, "predicted": predicted, "measured": measured})
    return rows


def measure(code: dict[str, Any], bench: dict[str, Any]) -> dict[str, Any]:
    """All predictions, and the comparison on the CPU."""
    rows = []
    for title, shape in SHAPES.items():
        counts = [1]
        if shape.batch * shape.groups < MIN_GPU_CHAINS:
            counts.append(min(MOST_SEGMENTS, shape.length // SEGMENT_LENGTH))
        for gpu in GPUS:
            for scan_pass in PASSES:
                for count in counts:
                    found = predict(gpu, shape, scan_pass, code["kernels"], segments=count)
                    rows.append({"shape": str(shape), "title": title, "segments": count, **found})
    return {"predictions": rows, "cpu": check_on_cpu(bench)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Predict the kernels' times on GPUs from their machine code.")
    parser.add_argument(
        "--out", type=Path, default=RESULT, help="the file of compiled kernels, to which the predictions are added"
    )
    options = parser.parse_args()
    code = json.loads(options.out.read_text())
    code["model"] = measure(code, json.loads(RESULT.with_name("bench.json").read_text()))
    options.out.write_text(json.dumps(code, indent=1) + "\n")
