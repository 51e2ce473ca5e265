"""The measurements that chose the defaults of the layer (`shippo_ssm/layers/spec.py`): `results/defaults.json`.

    python -m benchmarks.defaults                      # what the file does not have yet; hours of one core
    python -m benchmarks.defaults --probe words --seeds 10 11

Probes, each with the options of a row changed: `words`, products in A5 trained to 16 elements (one layer of width 64, 4,500
steps) and tested at 16, 64, 256 and 1,024; `recall`, plain MQAR as in `mqar-plain`; `text`, the next byte of Python's
documentation (three layers, 500 steps of 8 x 256 bytes, AdamW 3e-3 with warm-up and cosine; bits per byte of the validation
split), the width of each row chosen for about 0.55 M parameters; `turns`, quarter turns as in `start`; `tracking`, the first
row of the experiment `words`. Seeds 10 to 12, which no experiment reports.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_lab.experiments.start import PROBES, StartConfig
from shippo_lab.experiments.tracking import plain_mqar
from shippo_lab.experiments.tracking import words as tracking
from shippo_lab.experiments.tracking.curriculum import held_rate
from shippo_lab.harness.experiment import Session
from shippo_lab.harness.training import Trainee
from shippo_lab.tasks.text import TextTask
from shippo_ssm.layers import PAPER_GEOMETRY, PRESETS
from shippo_ssm.models import SequenceConfig, SequenceModel
from shippo_ssm.models.sequence import count_parameters

RESULT = Path("results", "defaults.json")
SEEDS, STEPS = (10, 11, 12), {"words": 4500, "turns": 3000, "text": 500}
LANGUAGE, SHORT = PRESETS["language"], {"memory_length": 4096.0}
# Probe -> row -> options, the most important first.
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "words": {
        "default": {},
        "memory of 4,096 tokens": SHORT,
        "memory of 4,096 tokens, N 16": SHORT | {"d_state": 16},
        "bottleneck 32": {"controller_rank": 32},
        "no bottleneck": {"controller_rank": None},
        "bottleneck 32, right coordinates too": {"controller_rank": 32, "low_rank_right": True},
        "one set per group": PAPER_GEOMETRY,
        "dissipative": {"right": "dissipative"},
    },
    "recall": {
        "default": {},
        "memory of 4,096 tokens": SHORT,
        "memory of 4,096 tokens, N 16": SHORT | {"d_state": 16},
        "N 64": {"d_state": 64},
        "language": LANGUAGE,
        "Q 4": {"num_bc_groups": 4},
        "one set per group": PAPER_GEOMETRY,
        "no right action": {"right": "none"},
    },
    "text": {
        "language": {"d_model": 122} | LANGUAGE,
        "language, orthogonal": {"d_model": 126} | LANGUAGE | {"right": "orthogonal"},
        "language, bottleneck 16": {"d_model": 130} | LANGUAGE | {"controller_rank": 16},
        "language, N 16": {"d_model": 128} | LANGUAGE | {"d_state": 16},
        "language, no right action": {"d_model": 132} | LANGUAGE | {"right": "none", "low_rank_right": False},
        "tracking": {"d_model": 104},
    },
    "turns": {
        "default": {},
        "memory of 4,096 tokens": SHORT,
        "no convolution": {"d_conv": 1},
        "one set per group": PAPER_GEOMETRY,
    },
    "tracking": {"default": {}, "memory of 4,096 tokens": SHORT},
}


def text(layer: dict[str, Any], seed: int, steps: int, split: str = "validation") -> Trainee:
    """Three layers on bytes."""
    task = TextTask(length=256, seed=seed)
    model = SequenceModel(SequenceConfig(n_layers=3, vocab_size=task.vocab_size, **layer))

    def loss_at(step: int) -> tuple[Tensor, int]:
        tokens, target = task.batch(range(8 * step, 8 * step + 8))
        return F.cross_entropy(model(tokens).flatten(0, 1), target.flatten()), tokens.numel()

    def score() -> dict[str, float]:
        return {"bits": task.evaluate(model, split=split).bits_per_token}

    return Trainee(model, loss_at, {"end": score}, held_rate(steps, 0.0))


def fit(trainee: Trainee, steps: int, learning_rate: float = 3e-3) -> dict[str, float]:
    """AdamW without weight decay, gradients clipped at 1; the scores."""
    model = trainee.model
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.0, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * trainee.rate(step)
        loss, _ = trainee.loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    found: dict[str, float] = trainee.scores["end"]()
    return found | {"parameters": count_parameters(model)}


def run(probe: str, layer: dict[str, Any], seed: int) -> dict[str, float]:
    """The scores of one model."""
    if probe == "recall":
        config = replace(plain_mqar.PlainMqarConfig(), name=probe, label=probe, layer=layer)
        found = plain_mqar.train(config, (seed,), Session())
        return {key: values[0] for key, values in found.metrics.items()} | {"parameters": found.notes["parameters"]}
    if probe == "tracking":
        found = tracking.train(replace(tracking.EXPERIMENT.rows()[0], layer=layer), (seed,), Session())
        return {key: values[0] for key, values in found.metrics.items()}
    torch.manual_seed(seed)
    steps = STEPS[probe]
    if probe == "text":
        return fit(text(layer, seed, steps), steps)
    config = StartConfig(layer=layer, word_lengths=(16, 64, 256, 1024), turn_lengths=(24, 96, 768))
    return fit(PROBES[probe](config, seed, steps), steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--probe", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--row", nargs="*", help="these rows only")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    options = parser.parse_args()
    path = Path(__file__).resolve().parents[1] / RESULT
    for probe in options.probe:
        for seed in options.seeds:
            for name, layer in ROWS[probe].items():
                # Read again each time: several processes may add to the file.
                found = json.loads(path.read_text()) if path.exists() else {}
                row = found.get(probe, {}).get(name, {"options": layer})
                if str(seed) in row or (options.row and name not in options.row):
                    continue
                begun = time.process_time()
                scores = {key: round(value, 4) for key, value in run(probe, layer, seed).items()}
                print(f"{probe}, {name}, seed {seed}: {time.process_time() - begun:.0f} s, {scores}", flush=True)
                found = json.loads(path.read_text()) if path.exists() else {}
                found.setdefault(probe, {}).setdefault(name, {"options": layer})[str(seed)] = scores
                path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
