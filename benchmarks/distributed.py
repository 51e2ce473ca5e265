"""The scan over processes: `python -m benchmarks.distributed [--out FILE] [--length T] [--speed-length T]`.

Data path: processes on the loopback with gloo and one thread each, bound to their cores. `memory` runs one long sequence
forward and backward in one process and over four, each time in fresh processes, and reads the high-water mark of every process;
both get the same numbers, block by block from seeds, and the sums of y and of a gradient must agree. `speed` runs one process
alone and two together, in turn, on the same data, and gives the ratio of the medians. `wire` counts the bytes of one layer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.memory import peak_bytes
from benchmarks.problem import Shape, make_inputs
from shippo_lab.harness.malloc import keep_freed_memory
from shippo_ssm.scan import transport_scan

MEMORY = Shape(batch=1, length=1 << 20, groups=8, order=16, width=4)
SPEED = Shape(batch=1, length=1 << 16, groups=64, order=32, width=4)
# Positions that one seed makes.
BLOCK = 4096
ROUNDS = 5
# The drift of a memory that lasts for the whole sequence, over that of the benchmarks.
SLOW = 1e-3


def part_of(shape: Shape, low: int, high: int, forgetting: float = 1.0) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and cotangent at the positions low .. high - 1, both multiples of the block or the end; `forgetting` scales the
    drift."""
    whole: dict[str, list[Tensor]] = {}
    for start in range(low, high, BLOCK):
        stop = min(start + BLOCK, high)
        inputs, cotangent = make_inputs(replace(shape, length=stop - start), seed=start)
        for name, tensor in (inputs | {"cotangent": cotangent}).items():
            whole.setdefault(name, []).append(tensor)
    # The drift is the same everywhere: that of the first block.
    drift = forgetting * make_inputs(replace(shape, length=1))[0]["drift"]
    joined = {}
    for name in list(whole):
        tensors = whole.pop(name)
        joined[name] = drift if name == "drift" else torch.cat(tensors, dim=1)
    cotangent = joined.pop("cotangent")
    return {name: tensor.requires_grad_() for name, tensor in joined.items()}, cotangent


def both(inputs: dict[str, Tensor], cotangent: Tensor, group: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Forward and backward."""
    operands: dict[str, Any] = dict(inputs)
    y, _ = transport_scan(**operands, group=group)
    return y, torch.autograd.grad(y, list(inputs.values()), cotangent)


def worker(rank: int, size: int, port: int, job: str, shape: Shape, out: str) -> None:
    """One process of a job; the first one writes the result."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    if job.endswith("speed"):
        # The allocator gives large blocks back to the system after every call, and reaching them anew costs more than the scan;
        # halves of a sequence happen to be below its limit. Kept by both, the two differ by the work alone.
        keep_freed_memory()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=size, rank=rank)
    jobs = {"memory": memory, "speed": speed, "slow speed": partial(speed, forgetting=SLOW), "wire": wire}
    result = jobs[job](rank, size, shape)
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.destroy_process_group()


def memory(rank: int, size: int, shape: Shape) -> dict[str, Any]:
    """Peak resident bytes of every process, the seconds of the pass, and sums to compare."""
    group = dist.group.WORLD if size > 1 else None
    blocks = -(-shape.length // BLOCK)
    low, high = (min(shape.length, blocks * place // size * BLOCK) for place in (rank, rank + 1))
    inputs, cotangent = part_of(shape, low, high)
    before = time.perf_counter()
    y, gradients = both(inputs, cotangent, group)
    seconds = time.perf_counter() - before
    sums = torch.stack([y.double().square().sum(), gradients[0].double().square().sum()])
    peaks = torch.zeros(size, dtype=torch.float64)
    peaks[rank] = peak_bytes()
    for tensor in (sums, peaks):
        dist.all_reduce(tensor)
    return {"processes": size, "peak_bytes": peaks.tolist(), "seconds": seconds, "sums": sums.tolist()}


def speed(rank: int, size: int, shape: Shape, forgetting: float = 1.0) -> dict[str, Any]:
    """Seconds of one process alone and of all together, in turn."""
    alone = part_of(shape, 0, shape.length, forgetting) if rank == 0 else None
    blocks = shape.length // BLOCK
    together = part_of(shape, blocks * rank // size * BLOCK, blocks * (rank + 1) // size * BLOCK, forgetting)
    times: dict[str, list[float]] = {"one": [], "all": []}
    for turn in range(ROUNDS + 1):
        dist.barrier()
        before = time.perf_counter()
        if alone is not None:
            both(*alone, None)
        own = time.perf_counter() - before
        dist.barrier()
        before = time.perf_counter()
        both(*together, dist.group.WORLD)
        dist.barrier()
        shared = time.perf_counter() - before
        # The first turn compiles.
        if turn:
            times["one"].append(own)
            times["all"].append(shared)
    one, many = statistics.median(times["one"]), statistics.median(times["all"])
    return {"processes": size, "seconds_one": one, "seconds_all": many, "speedup": one / many, "turns": times}


def wire(rank: int, size: int, shape: Shape) -> dict[str, Any]:
    """Bytes that one rank sends in a forward and in a backward pass, headers apart."""
    sent: list[int] = []
    gather = dist.all_gather

    def counting(received: list[Tensor], message: Tensor, group: Any = None) -> Any:
        if message.is_floating_point():
            sent.append(message.nbytes)
        return gather(received, message, group=group)

    dist.all_gather = counting
    inputs, cotangent = part_of(shape, rank * BLOCK, (rank + 1) * BLOCK)
    both(inputs, cotangent, dist.group.WORLD)
    # One message in each direction.
    forward = sent[0]
    return {"forward_bytes": forward, "backward_bytes": sum(sent) - forward, "messages": len(sent)}


def start(job: str, size: int, shape: Shape, scratch: Path) -> dict[str, Any]:
    """`job` in `size` fresh processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(worker, (size, port, job, shape, str(scratch)), nprocs=size)
    return json.loads(scratch.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--out", type=Path, default=Path("results/distributed.json"))
    parser.add_argument("--length", type=int, default=MEMORY.length, help="positions of the sequence for the memory")
    parser.add_argument("--speed-length", type=int, default=SPEED.length)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    scratch = options.out.with_suffix(".part")
    long, wide = replace(MEMORY, length=options.length), replace(SPEED, length=options.speed_length)
    run: dict[str, Any] = {"machine": describe(), "memory_shape": asdict(long), "speed_shape": asdict(wide)}
    run["wire"] = start("wire", 2, wide, scratch)
    print(f"one layer and batch row, G 64, N 32, P 4: {run['wire']['forward_bytes']} bytes forward, "
          f"{run['wire']['backward_bytes']} bytes backward, from every rank")  # fmt: skip
    one, four = start("memory", 1, long, scratch), start("memory", 4, long, scratch)
    ratio = max(four["peak_bytes"]) / one["peak_bytes"][0]
    difference = max(abs(a - b) / abs(a) for a, b in zip(one["sums"], four["sums"]))
    run["memory"] = {"one": one, "four": four, "ratio": ratio, "difference": difference}
    print(f"T = {options.length}: peak of one process {one['peak_bytes'][0] / 2**20:.0f} MiB, of four at most "
          f"{max(four['peak_bytes']) / 2**20:.0f} MiB each, ratio {ratio:.3f}; sums differ by {difference:.1e}")  # fmt: skip
    # A summary skips what is forgotten; so once with inputs that forget within the sequence, and once with such that do not.
    for job in ("speed", "slow speed"):
        pair = run[job.replace(" ", "_")] = start(job, 2, wide, scratch)
        print(f"T = {options.speed_length}, {job}: one process {pair['seconds_one']:.3f} s, two {pair['seconds_all']:.3f} s, "
              f"{pair['speedup']:.2f} times as fast")  # fmt: skip
    scratch.unlink()
    options.out.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
