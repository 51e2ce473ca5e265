"""Train two tiny experiments through random kills; `test_kills.py` starts it. Usage: killed.py FOLDER.

The process imports everything once and forks: each child goes on with the run and ends itself by SIGKILL at a random moment:
at a training step, before a file is written, between its bytes and its name, or after. What is printed is a JSON line per
experiment: how many kills there were, at which kinds of moments, whether the numbers are those of an undisturbed run, and what
is left in the folder.
"""

import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from shippo_lab.experiments.paired import experiment as paired
from shippo_lab.harness import store
from shippo_lab.harness.experiment import Experiment, Result, RowResult, Session, TrainConfig
from shippo_lab.harness.progress import Display
from shippo_lab.harness.runner import run
from shippo_lab.harness.training import Trainee, fit
from shippo_ssm.models import SequenceConfig, SequenceModel

KILLS = 10
KINDS = ("step", "before a write", "inside a write", "after a write")


def stacked() -> Experiment:
    """Rows whose seeds train together."""
    rows = paired.rows(paired.PairedConfig(steps=12, num_seeds=2, batch=8, eval_batches=1, eval_every=2))
    chosen = tuple(row for row in rows if row.name in ("no-right-r1", "learned-zero"))
    return replace(paired.EXPERIMENT, presets={"full": lambda: chosen})


def one_model() -> Experiment:
    """A row that `fit` trains, one seed at a time."""
    config = TrainConfig(name="model", label="model", steps=8, num_seeds=2, batch=2, eval_every=2)
    return replace(paired.EXPERIMENT, presets={"full": lambda: (config,)}, train=train_model, stack=1, cost=lambda config: 1.0)


def train_model(config: TrainConfig, seeds: tuple[int, ...], session: Session) -> RowResult:
    (seed,) = seeds
    torch.manual_seed(seed)
    model = SequenceModel(SequenceConfig(d_model=8, n_layers=1, d_state=4, vocab_size=5, backend="reference"))

    def loss_at(step: int) -> tuple[torch.Tensor, int]:
        tokens = torch.randint(5, (config.batch, 6), generator=torch.Generator().manual_seed(100 * seed + step))
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()), tokens.numel()

    def error() -> dict[str, float]:
        with torch.no_grad():
            return {"nmse": float(loss_at(-1)[0])}

    scores = {"one": error, "two": error}
    fitted = fit(config, session, Trainee(model, loss_at, scores, evaluate=error))
    return RowResult(metrics={"nmse": [fitted.scores["two"]["nmse"]]}, curves=fitted.curves, notes=fitted.notes)


def numbers(result: Result) -> dict[str, Any]:
    return {name: (dict(row.metrics), dict(row.curves), row.seeds) for name, row in result.rows.items()}


def die_at(kind: str, count: int, told: int) -> None:
    """End the process after `count` more moments of this kind; a byte in the pipe `told` says that it was so."""
    left = count

    def pass_by(passed: str) -> None:
        nonlocal left
        left -= passed == kind
        if left < 0:
            os.write(told, b"!")
            os.kill(os.getpid(), signal.SIGKILL)

    def around(call: Callable[..., Any], before: str | None, after: str | None) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            if before:
                pass_by(before)
            result = call(*arguments)
            if after:
                pass_by(after)
            return result

        return wrapped

    # The module gets a view of `os` of its own.
    writes = {
        "fsync": around(os.fsync, None, "inside a write"),
        "replace": around(os.replace, "before a write", "after a write"),
    }
    store.os = SimpleNamespace(**vars(os) | writes)  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.backward = around(torch.Tensor.backward, None, "step")  # pyright: ignore[reportAttributeAccessIssue]
    torch.autograd.grad = around(torch.autograd.grad, None, "step")  # pyright: ignore[reportAttributeAccessIssue]


def through_kills(experiment: Experiment, folder: Path, chance: random.Random) -> dict[str, Any]:
    expected = numbers(run(experiment, out=folder / "whole", jobs=1, display=Display()))
    kinds: Counter[str] = Counter()
    while sum(kinds.values()) < KILLS:
        kind, count, (told, tell) = chance.choice(KINDS), chance.randrange(5), os.pipe()
        if os.fork() == 0:
            die_at(kind, count, tell)
            run(experiment, out=folder / "killed", jobs=1, resume=True, display=Display())
            os._exit(0)
        os.close(tell)
        _, status = os.wait()
        dead = os.read(told, 1)
        os.close(told)
        if not dead:
            assert status == 0, status
            # The run is over before there were enough kills: its units again.
            for file in (folder / "killed" / "units").iterdir():
                file.unlink()
            continue
        assert os.WIFSIGNALED(status)
        kinds[kind] += 1
    final = run(experiment, out=folder / "killed", jobs=1, resume=True, display=Display())
    left = sorted(str(path.relative_to(folder / "killed")) for path in (folder / "killed").rglob("*") if path.is_file())
    return {"kinds": kinds, "equal": numbers(final) == expected, "left": left}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    chance = random.Random(0)
    for name, experiment in (("stacked", stacked()), ("model", one_model())):
        print(json.dumps(through_kills(experiment, folder / name, chance)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
