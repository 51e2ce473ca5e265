"""One section in a process of its own: `python -m benchmarks.child OPTIONS OUT`, both given by `run.spawn`.

Data path: OPTIONS is JSON with the section's name, its thread count and its keyword arguments; the process binds itself to
that many cores before it imports anything that starts threads, measures, and writes the section's dictionary to OUT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def bind(threads: int) -> None:
    """Keep this process, and every library it will load, on `threads` cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import torch

    torch.set_num_threads(threads)


def measure(section: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one section by name.

    Args:
        section: "scan", "sweeps", "expm", "memory", "training", "decoding" or "projection".
        arguments: its keyword arguments; a shape is a dictionary of sizes.
    """
    from benchmarks.problem import Shape

    if "shape" in arguments:
        arguments = arguments | {"shape": Shape(**arguments["shape"])}
    if section == "scan":
        from benchmarks.scan import measure as run
    elif section == "sweeps":
        from benchmarks.sweeps import measure as run
    elif section == "expm":
        from benchmarks.expm import measure as run
    elif section == "memory":
        from benchmarks.memory import measure as run
    elif section == "training":
        from benchmarks.models import training as run
    elif section == "decoding":
        from benchmarks.models import decoding as run
    elif section == "projection":
        from benchmarks.projection import compression as run
    else:
        raise ValueError(f"section is {section!r}; expected scan, sweeps, expm, memory, training, decoding or projection")
    return run(**arguments)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    bind(options["threads"])
    Path(sys.argv[2]).write_text(json.dumps(measure(options["section"], options["arguments"])))
