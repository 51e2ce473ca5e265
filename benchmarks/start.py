"""What the parts of the start cost: a training step with and without the norm of what is read, and by right action.

    python -m benchmarks.start --out results/start-cost.json        # a minute and a half, on a quiet machine

Data path: `SequenceModel` of width 128 with two layers (N 32, P 4) on vectors [16, 512, 128]; a step is forward, the mean
square, backward and AdamW. All models take their steps in turn; what counts are ratios.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import describe
from benchmarks.timer import interleave
from shippo_ssm.models import SequenceConfig, SequenceModel

# Name -> options of the layer.
MODELS: dict[str, dict[str, Any]] = {
    "split": {"right": "split"},
    "split, no norm": {"right": "split", "read_norm": False},
    "orthogonal": {"right": "orthogonal"},
    "dissipative": {"right": "dissipative"},
    "dense": {"right": "dense"},
    "none": {"right": "none"},
}
# What is compared -> (costs, beside), at most 1.05 by the bar.
RATIOS = {
    "the norm": ("split", "split, no norm"),
    "orthogonal": ("orthogonal", "split"),
    "dissipative": ("dissipative", "split"),
}
BAR = 1.05


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, u: Tensor) -> None:
    """One step."""
    optimizer.zero_grad(set_to_none=True)
    model(u).square().mean().backward()
    optimizer.step()


def measure(batch: int = 16, length: int = 512, rounds: int = 9, budget: float = 25.0) -> dict[str, Any]:
    """Seconds of a step of every model, and the ratios."""
    u = torch.randn(batch, length, 128, generator=torch.Generator().manual_seed(0))
    steps = {}
    for name, options in MODELS.items():
        torch.manual_seed(0)
        model = SequenceModel(SequenceConfig(d_model=128, n_layers=2, **options))
        steps[name] = partial(train_once, model, torch.optim.AdamW(model.parameters(), lr=1e-4), u)
        steps[name]()
    times = interleave(steps, rounds=rounds, budget=budget)
    ratios = {what: times[cost].median / times[beside].median for what, (cost, beside) in RATIOS.items()}
    return {
        "machine": describe(),
        "threads": torch.get_num_threads(),
        "shape": {"batch": batch, "length": length, "d_model": 128, "layers": 2},
        "seconds": {name: timing.as_dict() for name, timing in times.items()},
        "ratios": ratios,
        "bar": BAR,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What the parts of the start cost.")
    parser.add_argument("--out", type=Path, default=Path("results", "start-cost.json"))
    result = measure()
    parser.parse_args().out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for what, ratio in result["ratios"].items():
        print(f"{what}: {ratio:.3f} (bar {BAR})")
