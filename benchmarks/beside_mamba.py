"""The figures of the page "Beside Mamba": three tasks, four layers at equal parameters, `results/beside-mamba.json`.

    python -m benchmarks.beside_mamba                  # what the file does not have yet; two hours of one core
    python -m benchmarks.beside_mamba --task words
    python -m benchmarks.beside_mamba --time           # milliseconds of a training step, added to the same file

`words`: the product so far of the rotations of a cube (the group S4, 24 elements), one layer. `recall`: plain MQAR as in the
experiment `mqar-plain`, two layers. `text`: the next byte of Python's documentation, three layers. Every model is the same
frame (embedding, pre-norm blocks, head); only the layers differ. The width of each model gives it the number of parameters
nearest to that of SHiPPO. The learning rate is chosen from `RATES` on seed 10. Mamba is that of mambapy (extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.defaults import fit, text
from benchmarks.machine import describe, machine_line
from shippo_lab.experiments.tracking import plain_mqar
from shippo_lab.experiments.tracking.curriculum import held_rate, word_loss
from shippo_lab.harness.experiment import Session
from shippo_lab.harness.training import Trainee
from shippo_lab.tasks.words import WordTask
from shippo_ssm.layers import PRESETS
from shippo_ssm.models import SequenceConfig, SequenceModel
from shippo_ssm.models.sequence import count_parameters

RESULT = Path("results", "beside-mamba.json")
SEEDS, CHOICE_SEED, RATES = (0, 1), 10, (1.5e-3, 3e-3, 6e-3)
LENGTHS = (4, 8, 16, 64, 256)
MODELS: dict[str, dict[str, Any]] = {
    "SHiPPO": {},
    "SHiPPO without right action": {"right": "none", "low_rank_right": False},
    "Mamba": {"mixer": "mamba"},
    "Transformer": {"mixer": "transformer", "mlp": "swiglu"},
}
# Task -> width of SHiPPO, layers, vocabulary, steps, options of all models, score that chooses the rate, whether high is good.
TASKS: dict[str, tuple[int, int, int, int, dict[str, Any], str, bool]] = {
    "words": (64, 1, 24, 1200, {}, "16", True),
    "recall": (64, 2, 256, 600, plain_mqar.START | {"d_state": 32}, "recall_64_16", True),
    "text": (120, 3, 256, 500, PRESETS["language"], "bits", False),
}


@cache
def width_of(task: str, name: str) -> int:
    """The multiple of 8 whose model has the number of parameters nearest to that of SHiPPO."""
    first, layers, vocab_size, _, common, *_ = TASKS[task]

    def count(width: int, options: dict[str, Any]) -> int:
        layer: dict[str, Any] = common | options
        return count_parameters(SequenceModel(SequenceConfig(d_model=width, n_layers=layers, vocab_size=vocab_size, **layer)))

    target = count(first, MODELS["SHiPPO"])
    return min(range(8 * (first // 16), 2 * first, 8), key=lambda width: abs(count(width, MODELS[name]) - target))


def train(task: str, name: str, seed: int, rate: float) -> dict[str, Any]:
    """Train one model; its scores, parameters and width."""
    _, layers, vocab_size, steps, common, *_ = TASKS[task]
    layer: dict[str, Any] = common | MODELS[name] | {"d_model": width_of(task, name)}
    torch.manual_seed(seed)
    if task == "recall":
        config = replace(plain_mqar.PlainMqarConfig(), name=name, label=name, layer=layer, steps=steps, learning_rate=rate)
        found = plain_mqar.train(config, (seed,), Session())
        scores = {key: values[0] for key, values in found.metrics.items()} | {"parameters": found.notes["parameters"]}
    elif task == "text":
        scores = fit(text(layer, seed, steps, split="validation" if seed == CHOICE_SEED else "test"), steps, rate)
    else:
        problem = WordTask(group="S4", seed=seed)
        model = SequenceModel(SequenceConfig(n_layers=layers, vocab_size=vocab_size, **layer))

        def score() -> dict[str, float]:
            return {str(n): problem.evaluate(model, max(32, 8192 // n), 32, length=n).prefix for n in LENGTHS}

        trainee = Trainee(model, word_loss(model, problem, steps), {"end": score}, held_rate(steps))
        scores = fit(trainee, steps, rate)
    scores = {key: round(value, 4) for key, value in scores.items()}
    return {"seed": seed, "rate": rate, "width": layer["d_model"], "parameters": scores.pop("parameters"), "scores": scores}


def step_times(rounds: int = 7, tokens: int = 2048) -> dict[str, dict[str, float]]:
    """Median milliseconds of a training step of `tokens` tokens, words of 16 and of 512, the models of `words` in turn."""
    models = {
        name: SequenceModel(SequenceConfig(d_model=width_of("words", name), n_layers=1, vocab_size=24, **options))
        for name, options in MODELS.items()
    }
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


def best_rate(task: str, runs: list[dict[str, Any]]) -> float:
    """The learning rate of the best of these runs."""
    *_, key, high = TASKS[task]
    return max(runs, key=lambda run: run["scores"][key] if high else -run["scores"][key])["rate"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", action="append", choices=TASKS, help="only this one")
    parser.add_argument("--time", action="store_true", help="measure training steps instead")
    options = parser.parse_args()
    path = Path(__file__).resolve().parents[1] / RESULT
    result = json.loads(path.read_text())
    if options.time:
        result["time"] = {"milliseconds": step_times(), "tokens": 2048, "machine": machine_line(describe())}
        path.write_text(json.dumps(result, indent=1) + "\n")
        return
    for task in options.task or TASKS:
        for seed in (CHOICE_SEED, *SEEDS):
            for name in MODELS:
                runs = result["tasks"].setdefault(task, {}).setdefault(name, {"choice": [], "runs": []})
                kind = "choice" if seed == CHOICE_SEED else "runs"
                for rate in RATES if seed == CHOICE_SEED else [best_rate(task, runs["choice"])]:
                    if any((run["seed"], run["rate"]) == (seed, rate) for run in runs[kind]):
                        continue
                    begun = time.process_time()
                    runs[kind].append(train(task, name, seed, rate))
                    print(f"{task}, {name}: {time.process_time() - begun:.0f} s, {runs[kind][-1]}", flush=True)
                    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
