"""Train all seeds of a row as one stacked model with parameters `flat` [S, n].

The paper's controlled models have a few hundred parameters, so a training step of one is all overhead. Row s of the
gradient of the summed losses [S] is the gradient of seed s, clipped by row. Seeds never mix: each has its own random
streams.
"""

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shippo_lab.harness.experiment import RowResult, Session, TrainConfig


def nmse(prediction: Tensor, target: Tensor, floor: float = 1e-8) -> Tensor:
    """Sum of squared errors over the sum of squared targets, at least `floor`; per seed, [S, ..] -> [S]."""
    error, power = (part.square().flatten(1).sum(1) for part in (prediction - target, target))
    return error / power.clamp_min(floor)


def r_squared(prediction: Tensor, target: Tensor) -> Tensor:
    """1 - sum ||prediction - target||^2 / sum ||target - mean||^2, the mean over examples per coordinate; [S, B, ..] -> [S]."""
    error = (prediction - target).square().flatten(1).sum(1)
    return 1 - error / (target - target.mean(1, keepdim=True)).square().flatten(1).sum(1)


class Layout:
    """Named parameters as columns of one matrix [S, n]."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """[S, n] -> name -> [S, *shape], as views."""
        parts = flat.split(self.sizes, dim=1)
        return {name: part.view(-1, *shape) for (name, shape), part in zip(self.shapes.items(), parts)}

    def join(self, seeds: list[dict[str, Tensor]]) -> Tensor:
        """One dictionary of unstacked parameters per seed -> [S, n]."""
        assert all(parameters[name].shape == shape for parameters in seeds for name, shape in self.shapes.items())
        return torch.stack([torch.cat([parameters[name].reshape(-1) for name in self.shapes]) for parameters in seeds])


@torch.no_grad()
def adamw_step(state: dict[str, Tensor], grad: Tensor, count: int, config: TrainConfig) -> None:
    """One update of `flat` [S, n] in place, each seed's gradient norm clipped; no schedule, as in the paper.

    `state` has the moments `first` and `second` as well, zero before the first update, whose `count` is 1.
    """
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    grad = grad * (config.clip / (grad.norm(dim=1, keepdim=True) + 1e-6)).clamp_max(1.0)
    state["first"].lerp_(grad, 1 - beta1)
    state["second"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (state["second"].sqrt() / math.sqrt(1 - beta2**count)).add_(eps)
    state["flat"].mul_(1 - config.learning_rate * config.weight_decay)
    state["flat"].addcdiv_(state["first"], root, value=-config.learning_rate / (1 - beta1**count))


# A kill costs at most this much work.
SAVE_SECONDS = 20.0


class Problem(Protocol):
    """What `train_stack` needs of a row: parameters, data by block, and a loss and an evaluation per seed."""

    layout: Layout
    block_steps: int
    """`block(index)` has the data of steps [index * block_steps, (index + 1) * block_steps)."""

    def init(self, seed: int) -> dict[str, Tensor]: ...
    def block(self, index: int) -> Any: ...
    def loss(self, parameters: dict[str, Tensor], block: Any, offset: int) -> Tensor: ...
    def evaluate(self, parameters: dict[str, Tensor]) -> dict[str, list[float]]: ...


def train_stack(problem: Problem, config: TrainConfig, seeds: tuple[int, ...], session: Session) -> RowResult:
    """Train all seeds together for `config.steps` steps, evaluating every `config.eval_every` steps and at the end.

    The numbers depend neither on interruptions (data are functions of seed and block) nor on the number of threads (one).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(problem, config, seeds, session)
    finally:
        torch.set_num_threads(threads)


def _train(problem: Problem, config: TrainConfig, seeds: tuple[int, ...], session: Session) -> RowResult:
    steps, restored = config.steps, session.restore()
    if restored is None:
        flat = problem.layout.join([problem.init(seed) for seed in seeds])
        state = {"flat": flat, "first": torch.zeros_like(flat), "second": torch.zeros_like(flat)}
        start, curves, spent = 0, {"step": []}, 0.0
    else:
        state, meta = restored
        start, curves, spent = meta["step"], meta["curves"], meta["seconds"]
    flat = state["flat"].requires_grad_(True)
    begun = reported = saved = time.monotonic()
    index, block, metrics = -1, None, {}
    for step in range(start, steps):
        if step // problem.block_steps != index:
            index = step // problem.block_steps
            block = problem.block(index)
        loss = problem.loss(problem.layout.split(flat), block, step % problem.block_steps)
        (grad,) = torch.autograd.grad(loss.sum(), flat)
        done = step + 1
        adamw_step(state, grad, done, config)
        if done % config.eval_every == 0 or done == steps:
            with torch.no_grad():
                metrics = problem.evaluate(problem.layout.split(flat))
            curves["step"].append(done)
            for name, values in metrics.items():
                curves.setdefault(name, []).append(values)
        now = time.monotonic()
        if curves["step"][-1:] == [done] or now - saved > SAVE_SECONDS:
            saved = now
            session.save(state, {"step": done, "curves": curves, "seconds": spent + now - begun})
        if now - reported > 0.5 or done == steps:
            reported = now
            session.report(done, steps, **{name: sum(values) / len(values) for name, values in metrics.items()})
    return RowResult(
        {name: values[-1] for name, values in curves.items() if name != "step"},
        curves,
        {"parameters": flat.shape[1], "train_seconds": spent + time.monotonic() - begun},
    )
