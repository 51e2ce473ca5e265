"""What a layer costs beside those it replaces, as ratios inside one run: `python -m benchmarks.layer_cost`.

Training: one forward and backward pass of B 8, T 512, d 256. Decoding: one token after another, batch 1. Scan: Q = 1 set of
write and read vectors beside Q = G. Writes `results/layer-cost.json`; Mamba is mambapy's (extra `bench`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import describe
from benchmarks.timer import Timing, interleave
from shippo_ssm import Shippo
from shippo_ssm.layers import PAPER_GEOMETRY
from shippo_ssm.models import transformer_block
from shippo_ssm.scan import transport_scan

RESULT = Path("results", "layer-cost.json")
BATCH, LENGTH, WIDTH, TOKENS = 8, 512, 256, 64


def layers() -> dict[str, nn.Module]:
    """Layers of one width."""
    from mambapy.mamba import MambaBlock, MambaConfig

    torch.manual_seed(0)
    return {
        "SHiPPO": Shippo(WIDTH),
        "SHiPPO, language preset": Shippo(WIDTH, preset="language"),
        "SHiPPO, paper geometry": Shippo(WIDTH, **PAPER_GEOMETRY),
        "Mamba": MambaBlock(MambaConfig(d_model=WIDTH, n_layers=1, d_state=16)),
        "Transformer": transformer_block(WIDTH, 4),
    }


def train_once(layer: nn.Module, u: Tensor) -> None:
    """One forward and backward pass."""
    layer.zero_grad(set_to_none=True)
    layer(u).square().mean().backward()


@torch.no_grad()
def decode(layer: Shippo, u: Tensor) -> None:
    """Tokens of `u` [T, 1, d_model], one after another."""
    state = layer.init_state(1)
    for token in u:
        _, state = layer.step(token, state, in_place=True)


def scan_once(operands: list[Tensor]) -> None:
    """One scan and its gradients."""
    for operand in operands:
        operand.grad = None
    y, _ = transport_scan(*operands)
    y.sum().backward()


def scan_operands(sets: int) -> list[Tensor]:
    """B16 T512 G64 N32 P4, with `sets` of write and read vectors."""
    torch.manual_seed(1)
    batch, length, groups, order, width = 16, 512, 64, 32, 4
    vectors = [torch.randn(batch, length, sets, order) for _ in range(2)]
    # The factor of a QR decomposition has other strides, and the kernels would copy it.
    right = torch.linalg.qr(torch.randn(batch, length, groups, width, width))[0].contiguous()
    value, step = torch.randn(batch, length, groups, width), torch.rand(batch, length, groups) * 0.1
    operands = [value, *vectors, step, -torch.rand(groups, order), right]
    return [operand.requires_grad_() for operand in operands]


def timed(calls: dict[str, Callable[[], Any]], rounds: int, budget: float) -> dict[str, Timing]:
    """Every call twice to warm up, then all in turn."""
    for call in calls.values():
        call()
        call()
    return interleave(calls, rounds=rounds, budget=budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    found, u = layers(), torch.randn(BATCH, LENGTH, WIDTH)
    # A Mamba layer takes many times as long as the others: it gets fewer rounds.
    training = timed({name: partial(train_once, layer, u) for name, layer in found.items()}, options.rounds, 30.0)
    sets = {"Q = 1": scan_operands(1), "Q = G": scan_operands(64)}
    scans = timed({name: partial(scan_once, operands) for name, operands in sets.items()}, options.rounds, 30.0)
    tokens = torch.randn(TOKENS, 1, WIDTH)
    decoders = {name: layer.eval() for name, layer in found.items() if isinstance(layer, Shippo)}
    decoding = timed({name: partial(decode, layer, tokens) for name, layer in decoders.items()}, options.rounds, 10.0)
    result = {
        "machine": describe(),
        "threads": torch.get_num_threads(),
        "shape": {"batch": BATCH, "length": LENGTH, "d_model": WIDTH},
        "parameters": {name: sum(p.numel() for p in layer.parameters()) for name, layer in found.items()},
        "training": {name: timing.as_dict() for name, timing in training.items()},
        "scan": {name: timing.as_dict() for name, timing in scans.items()},
        "tokens_per_second": {name: TOKENS / timing.median for name, timing in decoding.items()},
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("parameters", "training", "scan", "tokens_per_second")}, indent=1))


if __name__ == "__main__":
    main()
