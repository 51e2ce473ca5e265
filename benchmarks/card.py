"""What the kernels should do on cards nobody has run them on: a prediction, `python -m benchmarks.card [--out FILE]`.

Data path: the instruction counts of the compiled loops (`results/gpu.json`, made by `benchmarks.card_code`) and the published
rates of a `Card` give, for a pass over a `Shape`, the time that each resource needs if nothing else held it up; the pass takes
as long as the largest of them, which binds. Of the configurations that autotuning may choose, the fastest is taken. Nothing
here was measured on a card. What is assumed beside the published rates: all resources overlap; a warp alone on its scheduler
issues in order, with the latencies of `card_code.LATENCY`; scratch states stay in the second-level cache; memory answers after
`MEMORY_SECONDS`, and that cache after `CACHE_SECONDS`.

The same kind of model, work over peak rate and bytes over bandwidth, is held against the CPU kernel's measured time
(`results/bench.json`): what it says too little there it may well say too little here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.card_code import RESULT
from benchmarks.problem import Shape
from benchmarks.roof import EXP_WORK, PASSES, bytes_moved
from shippo_ssm.scan.triton import FEWEST_CHAINS, KEEP

MEMORY_SECONDS, CACHE_SECONDS = 600e-9, 250e-9
# Units of four schedulers: registers, and bytes of shared memory.
REGISTERS, SHARED = 65536, 160 * 1024
SHAPES = {"training": Shape(), "one long sequence": Shape(batch=1, length=65536)}


class Card(NamedTuple):
    """Published rates of one card."""

    name: str
    target: str
    processors: int
    float_lanes: int
    """Single-precision units of one processor."""
    flops: float
    """Single-precision operations per second: two per lane and cycle, which gives the clock."""
    bandwidth: float
    """Bytes per second of its memory."""
    cache_bytes: float
    """Bytes per cycle of the second-level cache; published for the A100, and taken to be the same on the others."""

    @property
    def clock(self) -> float:
        """Cycles per second."""
        return self.flops / (2 * self.processors * self.float_lanes)


CARDS = (
    Card("A100 80 GB", "sm_80", 108, 64, 19.5e12, 2.039e12, 5120),
    Card("H100", "sm_90", 132, 128, 67e12, 3.35e12, 5120),
    Card("B200", "sm_100", 148, 128, 75e12, 8.0e12, 5120),
)


class Terms(NamedTuple):
    """Seconds that each resource needs for a pass."""

    memory: float
    """Bytes that must move, and the kept states, over the memory's bandwidth."""
    cache: float
    """All loads and stores over the second-level cache's bandwidth."""
    flight: float
    """Positions over those that loads run ahead, times the answer time of the memory."""
    issue: float
    """Instructions of the busiest scheduler, or those of one of its units."""
    order: float
    """A warp's own instructions, each waiting for its operands."""

    def binds(self) -> str:
        return max(self._asdict(), key=lambda name: getattr(self, name))


def of_units(instructions: dict[str, int]) -> dict[str, int]:
    """How many instructions go to the units that can hold a scheduler up."""
    groups = {"float": ("FFMA", "FMUL", "FADD", "FSEL", "FSETP"), "exchange": ("SHFL", "LDS", "STS", "LDG", "STG", "LDGSTS")}
    return {
        name: sum(count for word, count in instructions.items() if word.startswith(words)) for name, words in groups.items()
    }


def terms(card: Card, shape: Shape, record: dict[str, Any], *, backward: bool, keep: bool) -> Terms:
    """The terms of one pass of one compiled kernel."""
    programs = shape.batch * -(-shape.groups // record["BG"])
    here = -(-programs // card.processors)
    # Programs that do not fit beside each other come one after another.
    room = min(REGISTERS // (32 * record["warps"] * record["registers"]), SHARED // max(1, record["shared"]))
    turns = -(-here // max(1, room))
    warps = -(-here // turns) * record["warps"]
    busiest = -(-warps // 4)
    issue = order = 0.0
    for loop in record["loops"]:
        units = of_units(loop["instructions"])
        own = max(sum(loop["instructions"].values()), units["float"] * 128 / card.float_lanes)
        # Shuffles and shared memory serve one warp of a processor per cycle.
        issue += max(own * busiest, units["exchange"] * warps)
        order += loop["alone"]
    operands = 1 + 2 * shape.order + shape.width + shape.width**2
    state = shape.order * shape.width
    kept = 4 * shape.cells * state / KEEP * (keep or backward)
    compulsory = bytes_moved(shape, "forward")
    passing, flight = compulsory + kept, MEMORY_SECONDS
    if backward:
        compulsory = bytes_moved(shape, "both") - compulsory
        # The operands are read twice, the second time from the cache; the states of a chunk are written there and read.
        passing = compulsory + kept + 4 * shape.cells * (operands + 2 * state)
        flight += CACHE_SECONDS
    cycles = shape.length * turns / card.clock
    return Terms(
        memory=(compulsory + kept) / card.bandwidth,
        cache=passing / (card.cache_bytes * card.clock),
        flight=shape.length * turns * flight / (record["STAGES"] - 1),
        issue=issue * cycles,
        order=order * cycles,
    )


def predict(card: Card, shape: Shape, scan_pass: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The predicted time of "forward" or "both", its fraction of the memory roof, and what binds each kernel."""
    kernels = {"forward": ["scan forward"], "both": ["scan forward, training", "scan backward"]}[scan_pass]
    parts = []
    for name in kernels:
        options = {"backward": name == "scan backward", "keep": name != "scan forward"}
        choices = [record for record in records if record["kernel"] == name and record["target"] == card.target]
        found = [(terms(card, shape, record, **options), record["BG"]) for record in choices]
        best, groups = min(found, key=lambda pair: max(pair[0]))
        parts.append({"kernel": name, "BG": groups, "seconds": max(best), "binds": best.binds(), "terms": best._asdict()})
    roof = bytes_moved(shape, scan_pass) / card.bandwidth
    seconds = sum(part["seconds"] for part in parts)
    return {"card": card.name, "pass": scan_pass, "seconds": seconds, "roof": roof, "fraction": roof / seconds, "parts": parts}


def cut(shape: Shape, card: Card) -> Shape:
    """The shape of a few long sequences after they are cut into segments, so that four warps find a group each."""
    count = 1
    while shape.batch * count * shape.groups < 16 * card.processors and shape.length % (2 * count) == 0:
        count *= 2
    return replace(shape, batch=shape.batch * count, length=shape.length // count)


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
        for card in CARDS:
            for scan_pass in PASSES:
                whole = predict(card, shape, scan_pass, code["kernels"])
                rows.append({"shape": str(shape), "title": title, "segments": 1, **whole})
                pieces = cut(shape, card)
                if shape.batch * shape.groups < FEWEST_CHAINS:
                    # The summaries of the segments are one more pass of a kernel like the forward one.
                    again, once = (predict(card, pieces, which, code["kernels"]) for which in (scan_pass, "forward"))
                    seconds = again["seconds"] + once["seconds"]
                    more = {"seconds": seconds, "fraction": whole["roof"] / seconds, "roof": whole["roof"]}
                    count = pieces.batch // shape.batch
                    rows.append({"shape": str(shape), "title": title, "segments": count, **again, **more})
    return {"predictions": rows, "cpu": check_on_cpu(bench)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Predict the kernels' times on cards from their machine code.")
    parser.add_argument(
        "--out", type=Path, default=RESULT, help="the file of compiled kernels, to which the predictions are added"
    )
    options = parser.parse_args()
    code = json.loads(options.out.read_text())
    code["model"] = measure(code, json.loads(RESULT.with_name("bench.json").read_text()))
    options.out.write_text(json.dumps(code, indent=1) + "\n")
