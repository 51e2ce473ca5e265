"""The figures of the page "Beside Mamba": one task, one budget, one width, four layers, `results/beside-mamba.json`.

    python -m benchmarks.beside_mamba            # accuracies; ten minutes of one core
    python -m benchmarks.beside_mamba --time     # milliseconds of a training step, added to the same file

The task is word problems: after each element of a word of a group, say the product so far. The group is S4, the turns of a
cube, 24 elements. Every model is the same frame (embedding, one pre-norm block of width 64, head); only the layer in the
block is another one. Mamba is that of mambapy (extra `bench`), with its own start. Recipe and curriculum are those of the
experiment `words`, chosen there for SHiPPO on A5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import describe, machine_line
from shippo_lab.experiments.tracking.curriculum import held_rate, word_loss
from shippo_lab.tasks.words import WordTask
from shippo_ssm.layers import PAPER_GEOMETRY, Mixer, Segment
from shippo_ssm.models import SequenceConfig, SequenceModel

RESULT = Path("results", "beside-mamba.json")
GROUP, STEPS, SEEDS, LENGTHS = "S4", 1200, (0, 1), (4, 8, 16, 64, 256)
WIDTH, ORDER = 64, 32
MODELS: dict[str, dict[str, Any]] = {
    "SHiPPO": PAPER_GEOMETRY,
    "SHiPPO without right action": PAPER_GEOMETRY | {"right": "none"},
    "Mamba": {},
    "Transformer": {"mixer": "transformer"},
}


class MambaMixer(Mixer[None]):
    """A Mamba layer of mambapy, [B, T, d_model] -> [B, T, d_model]; whole sequences only."""

    def __init__(self, d_model: int) -> None:
        from mambapy.mamba import MambaBlock, MambaConfig

        super().__init__(d_model)
        self.inner = MambaBlock(MambaConfig(d_model=d_model, n_layers=1, d_state=ORDER))

    def run(self, u: Tensor, state: None, segment: Segment) -> tuple[Tensor, None]:
        return self.inner(u), None

    def init_state(self, batch_size: int) -> None:
        return None


def make(name: str, seed: int) -> SequenceModel:
    """A model from a seed."""
    torch.manual_seed(seed)
    vocab_size = WordTask(group=GROUP).vocab_size
    model = SequenceModel(SequenceConfig(d_model=WIDTH, n_layers=1, vocab_size=vocab_size, **MODELS[name]))
    if name == "Mamba":
        model.layers[0].mixer = MambaMixer(WIDTH)
    return model


def train(name: str, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Train one model; its accuracies per length, and the losses on the way."""
    task, model, losses = WordTask(group=GROUP, seed=seed), make(name, seed), []
    loss_at, rate = word_loss(model, task, steps), held_rate(steps)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
    for step in range(steps):
        loss, _ = loss_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate(step)
        optimizer.step()
        losses.append(loss.item())
    accuracy = {str(n): task.evaluate(model.eval(), max(32, 8192 // n), 32, length=n).prefix for n in LENGTHS}
    kept = [round(statistics.mean(losses[start : start + 50]), 4) for start in range(0, steps, 50)]
    return {"accuracy": accuracy, "losses": kept, "parameters": sum(weight.numel() for weight in model.parameters())}


def step_times(rounds: int = 7, tokens: int = 2048) -> dict[str, dict[str, float]]:
    """Milliseconds of a training step of `tokens` tokens, words of 16 and of 512, in turn; the median."""
    models = {name: make(name, 0) for name in MODELS}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in MODELS}
    for length in (16, 512):
        ids = torch.randint(24, (tokens // length, length))
        for turn in range(rounds + 1):
            for name, model in models.items():
                start = time.perf_counter()
                logits = model(ids)
                F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
                if turn:
                    found[name].setdefault(str(length), []).append(1e3 * (time.perf_counter() - start))
    return {name: {length: statistics.median(times) for length, times in by.items()} for name, by in found.items()}


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def add(path: Path, part: dict[str, Any]) -> None:
    """Put a part into the file and keep the others."""
    path.write_text(json.dumps(load(path) | part, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--time", action="store_true", help="measure training steps instead")
    parser.add_argument("--row", action="append", choices=MODELS, help="train this layer again and keep the others")
    options = parser.parse_args()
    path = Path(__file__).resolve().parents[1] / RESULT
    if options.time:
        add(path, {"time": {"milliseconds": step_times(), "tokens": 2048, "machine": machine_line(describe())}})
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.row or MODELS}
    for seed in SEEDS:
        for name in runs:
            start = time.process_time()
            runs[name].append({"seed": seed} | train(name, seed))
            print(f"{name}, seed {seed}: {time.process_time() - start:.0f} s, {runs[name][-1]['accuracy']}", flush=True)
    found = load(path).get("runs", {}) | runs
    runs = {name: found[name] for name in MODELS if name in found}
    add(path, {"group": GROUP, "steps": STEPS, "width": WIDTH, "d_state": ORDER, "lengths": LENGTHS, "runs": runs})


if __name__ == "__main__":
    main()
