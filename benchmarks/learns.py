"""Does the default language model learn, whatever its size and learning rate? Outcome in results/learns.json.

    python -m benchmarks.learns                 # what the file does not have yet; about two hours of one core
    python -m benchmarks.learns --hidden 48 --seeds 0

Every run is `ShippoForCausalLM(ShippoConfig(hidden_size=.., num_hidden_layers=..))`, or a Transformer of the same width and
depth (rotary positions, SwiGLU), on bytes of the standard library's source: 300 steps of 8 x 256 bytes, AdamW with warm-up and
cosine, gradients clipped at 1. What is kept is the bits per byte of the validation split.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.defaults import fit
from shippo_lab.experiments.tracking.curriculum import held_rate
from shippo_lab.harness.training import Trainee
from shippo_lab.tasks.text import TextTask
from shippo_ssm.models import SequenceConfig, SequenceModel

RESULT = Path(__file__).resolve().parents[1] / "results" / "learns.json"
WIDTHS, LAYERS, RATES, SEEDS = (48, 64, 96, 128), (2, 4, 6), (5e-4, 1e-3, 3e-3, 6e-3), (0, 1, 2)
STEPS, BATCH, LENGTH, WINDOWS = 300, 8, 256, 64
MODELS = ("shippo", "transformer")
# A run that ends above this many bits per byte has not learned, if the Transformer's ends below.
LEARNED = 2.6


class Logits(nn.Module):
    """A causal language model of transformers as tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def make_model(kind: str, width: int, layers: int) -> nn.Module:
    """The default model of a size, or the Transformer beside it."""
    if kind == "shippo":
        from shippo_ssm.integrations.huggingface import ShippoConfig, ShippoForCausalLM

        return Logits(ShippoForCausalLM(ShippoConfig(vocab_size=256, hidden_size=width, num_hidden_layers=layers)))
    return SequenceModel(
        SequenceConfig(d_model=width, n_layers=layers, vocab_size=256, mixer="transformer", mlp="swiglu", n_heads=2)
    )


def bits(kind: str, width: int, layers: int, rate: float, seed: int) -> float:
    """Bits per byte on validation after a short run."""
    torch.manual_seed(seed)
    model, task = make_model(kind, width, layers), TextTask(length=LENGTH, corpus="library", seed=seed)

    def loss_at(step: int) -> tuple[Tensor, int]:
        text = task.batch(range(BATCH * step, BATCH * (step + 1)))
        return F.cross_entropy(model(text.tokens).flatten(0, 1), text.target.flatten()), text.tokens.numel()

    def score() -> dict[str, float]:
        return {"bits": task.evaluate(model, WINDOWS, 16).bits_per_token}

    return fit(Trainee(model, loss_at, {"end": score}, held_rate(STEPS, 0.0)), STEPS, rate)["bits"]


def runs(options: argparse.Namespace) -> Iterator[tuple[str, int, int, float, int]]:
    """All runs that are asked for; the Transformer's once per size and rate, which is all that a comparison needs."""
    for seed, width, layers, rate in itertools.product(options.seeds, options.hidden, options.layers, options.rates):
        yield "shippo", width, layers, rate, seed
        if seed == SEEDS[0]:
            yield "transformer", width, layers, rate, seed


def read() -> dict[str, float]:
    """Run -> bits; `shippo 48 2 0.001 0` is model, width, layers, learning rate and seed."""
    return json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}


def not_learned(found: dict[str, float]) -> list[str]:
    """The runs of the default that end above `LEARNED` (or not at all) where the Transformer's end below."""
    rows = [name.split() for name in found]
    beside = {tuple(row[1:4]): found[" ".join(row)] for row in rows if row[0] == "transformer"}
    return [
        " ".join(row)
        for row in rows
        if row[0] == "shippo" and not found[" ".join(row)] <= LEARNED and beside.get(tuple(row[1:4]), 0.0) <= LEARNED
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, kind, values in (
        ("hidden", int, WIDTHS),
        ("layers", int, LAYERS),
        ("rates", float, RATES),
        ("seeds", int, SEEDS),
    ):
        parser.add_argument(f"--{name}", nargs="*", type=kind, default=values)
    for run in runs(parser.parse_args()):
        name = " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in run)
        if name in read():
            continue
        begun = time.process_time()
        score = round(bits(*run), 4)
        print(f"{name}: {score} bits, {time.process_time() - begun:.0f} s", flush=True)
        # Read again: several processes may add to the file.
        RESULT.write_text(json.dumps(dict(sorted((read() | {name: score}).items())), indent=1) + "\n", encoding="utf-8")
    missed = not_learned(read())
    print(f"{len(missed)} runs have not learned where the Transformer has", *missed, sep="\n")


if __name__ == "__main__":
    main()
