"""The models of transported projection, all seeds stacked.

H_t = L H_{t-1} R_t + 2^{-1} sum_{j<4} b_j (E_j^T f_t)^T with learned b_j, E_j, prediction O vec(H_T) with a
learned O; R_t is the identity, the task's own, or exp(sqrt(epsilon) sum_k rho_k A_k) with learned A_k that start at
the true generators. L is fixed, so H_T = sum_t (L^{T-t} b_j) z_{t,j}^T with z carried to the end (`carry.py`): no
state is formed per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shippo_ssm.experiments.projection.carry import Motion, carry, carry_exactly, new_frame, sum_sources, turn
from shippo_ssm.lab.experiment import TrainConfig
from shippo_ssm.lab.stacked import Layout, nmse, r_squared
from shippo_ssm.tasks.paired import stream
from shippo_ssm.tasks.projection import ProjectionTask, Sequences

# Where no more than this is left of a source, exp has one degree less: predictions move by 4e-10 in NMSE, targets by 2e-14.
FADED = 0.1
# Random streams of a seed.
INIT, TRAIN, EVAL = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionConfig(TrainConfig):
    """A row of the projection experiment; defaults are the paper's protocol."""

    right: Literal["none", "learned", "oracle"] = "none"
    rank: int = 4
    width: int = 16
    d_state: int = 16
    num_generators: int = 16
    length: int = 256
    coef_range: float = 0.15
    epsilon: float = 0.05
    generator_seed: int = 321
    batch: int = 32
    eval_batches: int = 8
    init_noise: float = 0.3
    """Random part of the maps that start near the identity, relative to a random map of the usual scale."""

    @property
    def task(self) -> ProjectionTask:
        return self.shared(ProjectionTask)


class ProjectionBatch(NamedTuple):
    """Sequences of one step for one seed, with their answers."""

    signal: Tensor  # [M, T, d]
    coef: Tensor  # [M, T, K]
    target: Tensor  # [M, N, d]
    frame: Tensor | None  # [M, T, d, d], the oracle's true frames R_{t+1} .. R_T; memory for those of a learned transport


class _Differentiated(torch.autograd.Function):
    """Losses [S] whose gradients in the parameters [S, ..] are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        # In place: they are taken once.
        grads, ctx.grads = ctx.grads, None
        return None, None, *(grad.mul_(outer[0].view(-1, *[1] * (grad.ndim - 1))) for grad in grads)


class Projection:
    """The stacked models of one row with their data: a `Problem` for `train_stack`.

    Seeds share a parameter matrix but go through a step one after another: at this size a seed fills the caches alone.
    """

    block_steps = 1

    def __init__(self, config: ProjectionConfig, seeds: tuple[int, ...]) -> None:
        self.config, self.seeds, self.task = config, seeds, config.task
        d, order, rank = config.width, config.d_state, config.rank
        shapes: dict[str, tuple[int, ...]] = {"front": (d, rank * d), "write": (order, rank), "readout": (order * d, order * d)}
        if config.right == "learned":
            shapes["generators"] = (config.num_generators, d, d)
        self.layout = Layout(shapes)
        powers = [torch.eye(order, dtype=torch.float64)]
        for _ in range(config.length - 1):
            powers.append(self.task.left @ powers[-1])
        # L^{T-t} for t = 1 .. T as [N, T, N], and what the task's own source becomes at the end [N, T, 1].
        stacked = torch.stack(powers[::-1], 1)
        self.powers, self.written = stacked.float(), (stacked @ self.task.write[:, None]).float()
        norms = torch.linalg.matrix_norm(stacked.transpose(0, 1), 2)
        self.near = int((norms > FADED).sum())
        self.true_generators = config.epsilon**0.5 * self.task.generators.float()
        # Memory that every step writes anew: frames of one seed, gradients of all.
        self.frame = torch.empty(config.batch, config.length, d, d)
        self.grad = torch.empty(len(seeds), sum(self.layout.sizes))
        size = config.batch * config.eval_batches
        self.held_out = [self.prepare(self.task.draw(stream(seed, EVAL), size)) for seed in seeds]

    def prepare(self, sequences: Sequences, frame: Tensor | None = None) -> ProjectionBatch:
        """Answers of drawn sequences, C_T = sum_t (L^{T-t} epsilon B) (f_t^T R_{t+1} .. R_T), and the oracle's frames.

        `frame` is memory for frames, new where it is needed and not given.
        """
        signal, coef = sequences
        oracle = self.config.right == "oracle"
        if oracle and frame is None:
            frame = new_frame(signal)
        motion = Motion(coef, self.true_generators, self.near)
        target = carry_exactly(signal, self.written, motion, frame=frame if oracle else None)
        return ProjectionBatch(signal, coef, target, frame)

    def init(self, seed: int) -> dict[str, Tensor]:
        """A random write vector, and maps near the identity: readout and front end start close to passing the state through."""
        config = self.config
        d, order, rank = config.width, config.d_state, config.rank

        def noise(name: str) -> Tensor:
            return torch.randn(self.layout.shapes[name], generator=stream(seed, INIT, *name.encode()))

        parameters = {
            "front": torch.eye(d).repeat(1, rank) + config.init_noise * noise("front") / math.sqrt(d),
            "write": noise("write") * config.epsilon**0.5,
            "readout": torch.eye(order * d) + config.init_noise * noise("readout") / math.sqrt(order * d),
        }
        if config.right == "learned":
            parameters["generators"] = self.task.generators.float()
        return parameters

    def block(self, index: int) -> list[Sequences]:
        """One step's fresh sequences for every seed."""
        return [self.task.draw(stream(seed, TRAIN, index), self.config.batch) for seed in self.seeds]

    def predict(self, parameters: dict[str, Tensor], batch: ProjectionBatch) -> Tensor:
        """O vec(H_T) of one seed, [M, N, d]."""
        config = self.config
        d, order, rank = config.width, config.d_state, config.rank
        write = self.powers @ parameters["write"] / math.sqrt(rank)  # [N, T, r]
        front = parameters["front"]
        if config.right == "oracle":
            assert batch.frame is not None
            state = turn(batch.signal, front, write, batch.frame)
        elif config.right == "learned":
            motion = Motion(batch.coef, config.epsilon**0.5 * parameters["generators"], self.near)
            if torch.is_grad_enabled():
                state = carry(batch.signal, front, write, motion, frame=batch.frame)
            else:
                state = carry_exactly(batch.signal, write, motion, front=front)
        else:
            # Nothing moves the values, so the sum over positions comes before the front end.
            signal = batch.signal.transpose(0, 1).unsqueeze(1)
            summed = sum_sources(write.mT.reshape(order * rank, -1, 1), signal)  # [M, N r, d]
            state = summed.reshape(-1, order, rank * d) @ front.unflatten(1, (rank, d)).transpose(0, 1).flatten(0, 1)
        return (state.flatten(1) @ parameters["readout"]).unflatten(-1, (order, d))

    def loss(self, parameters: dict[str, Tensor], block: list[Sequences], offset: int) -> Tensor:
        """NMSE of each seed's predictions, [S]; gradients are taken here, so that a seed's frames give way to the next's."""
        losses, grads = [], self.layout.split(self.grad)
        for s, sequences in enumerate(block):
            own = {name: parameter[s].detach().requires_grad_() for name, parameter in parameters.items()}
            batch = self.prepare(sequences, self.frame)
            loss = nmse(self.predict(own, batch)[None], batch.target[None])
            losses.append(loss.detach())
            for name, grad in zip(own, torch.autograd.grad(loss.sum(), list(own.values()))):
                grads[name][s] = grad
        known = [grads[name] for name in parameters]
        return _Differentiated.apply(torch.cat(losses), known, *parameters.values())  # pyright: ignore[reportReturnType]

    def evaluate(self, parameters: dict[str, Tensor]) -> dict[str, list[float]]:
        """NMSE and R^2 on held-out sequences, one number per seed."""
        scores: dict[str, list[float]] = {"nmse": [], "r2": []}
        for s, batch in enumerate(self.held_out):
            own = {name: parameter[s] for name, parameter in parameters.items()}
            prediction = self.predict(own, batch)[None]
            scores["nmse"].append(nmse(prediction, batch.target[None]).item())
            scores["r2"].append(r_squared(prediction, batch.target[None]).item())
        return scores
