"""Compression of a long multi-channel signal: 100,000 samples of 16 channels into N = 64 coefficients each.

`compression()` times `ProjectionMemory.evolve` with only the last state kept, for HiPPO (no transport), a constant
and a time-varying right generator, and with each discretisation; and reports the peak of memory that NumPy allocated
meanwhile. Run as a script it prints the figures.
"""

from __future__ import annotations

import time
import tracemalloc

import numpy as np

from shippo_ssm.projection import LegS, ProjectionMemory, Transport


def compression(num_samples: int = 100_000, width: int = 16, order: int = 64, seed: int = 0) -> dict[str, float]:
    """Seconds per way of running, and the peak of allocated megabytes of the first one.

    Returns:
        `{"hippo_exact_s": .., "constant_exact_s": .., "varying_exact_s": .., "constant_zoh_s": .., "constant_bilinear_s": ..,
        "peak_mb": ..}`.
    """
    rng = np.random.default_rng(seed)
    times = np.arange(1, num_samples + 1) * (10.0 / num_samples)
    phases = rng.uniform(0, 2 * np.pi, width)
    samples = np.sin(np.outer(times, np.linspace(1, 5, width)) + phases)
    first, second = rng.normal(size=(2, width, width)) / np.sqrt(width)
    constant = Transport(0.3 * (first - first.T), width)
    varying = Transport(lambda t: 0.3 * (np.cos(t) * (first - first.T) + np.sin(2 * t) * second), width)
    runs = {
        "hippo_exact_s": (None, "exact"),
        "constant_exact_s": (constant, "exact"),
        "varying_exact_s": (varying, "exact"),
        "constant_zoh_s": (constant, "zoh"),
        "constant_bilinear_s": (constant, "bilinear"),
    }
    result: dict[str, float] = {}
    for name, (transport, method) in runs.items():
        memory = ProjectionMemory(LegS(order), transport)
        start = time.perf_counter()
        memory.evolve(samples, times, method=method, keep="last")
        result[name] = time.perf_counter() - start
    tracemalloc.start()
    ProjectionMemory(LegS(order)).evolve(samples, times, keep="last")
    result["peak_mb"] = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return result


if __name__ == "__main__":
    for name, value in compression().items():
        print(f"{name:24s} {value:8.2f}")
