"""Transported projection.

Claim: A memory with right transport predicts transported coefficients that a rank-4 source cannot.
Protocol: d = N = K = 16, length 256, fixed left operator; AdamW 3e-4, 20,000 steps of 32 sequences, 5 seeds, last step
Time: about 2 hours on two cores

    H_t = L H_{t-1} R_t + 2^{-1} sum_{j<4} b_j (E_j^T f_t)^T,     prediction O vec(H_T)

with learned b_j, E_j and O. R_t is the identity, the task's own, or exp(sqrt(epsilon) sum_k rho_k A_k) with learned A_k
that start at the true generators. L is fixed, so it moves into the write vectors: H_T = sum_t (L^{T-t} b_j) (E_j^T
f_t)^T R_{t+1} .. R_T is the last state of `transport_scan` with left factor one. Paper: tab:transported-projection.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shippo_lab.harness import experiment as lab
from shippo_lab.harness.stacked import Layout, nmse, r_squared, train_stack
from shippo_lab.tasks.paired import stream
from shippo_lab.tasks.projection import ProjectionTask, Sequences
from shippo_ssm.actions import expm
from shippo_ssm.scan import transport_scan

# Random streams of a seed.
INIT, TRAIN, EVAL = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionConfig(lab.TrainConfig):
    """A row of the projection experiment; defaults are the paper's protocol."""

    right: Literal["none", "learned", "oracle"] = "none"
    rank: int = 4
    length: int = 256
    batch: int = 32
    eval_batches: int = 8
    init_noise: float = 0.3
    """Random part of the maps that start near the identity, relative to a random map of the usual scale."""

    @property
    def task(self) -> ProjectionTask:
        return self.shared(ProjectionTask)


class ProjectionBatch(NamedTuple):
    """Sequences of one step for one seed, with their answers."""

    sequences: Sequences
    target: Tensor  # [M, N, d]
    right: Tensor | None  # [M, T, d, d], the true right actions for the oracle


def final_state(value: Tensor, write: Tensor, right: Tensor | None) -> Tensor:
    """sum_tj write_tj (value_tj^T R_{t+1} .. R_T) [M, N, d]; value [M, T, r, d], write [T, r, N], right [M, T, d, d]."""
    batch, length, _, width = value.shape
    order = write.shape[-1]
    if right is None:
        return torch.einsum("trn,mtrd->mnd", write, value)
    _, state = transport_scan(
        value.unsqueeze(2),
        write.unsqueeze(1).expand(batch, -1, -1, -1, -1),
        value.new_zeros(batch, length, 1, order),
        value.new_ones(batch, length, 1),
        value.new_zeros(1, order),
        right.view(batch, length, 1, width, width),
        output_final_state=True,
    )
    assert state is not None
    return state.squeeze(1)


class Projection:
    """The stacked models of one row with their data: a `Problem` for `train_stack`."""

    block_steps = 1

    def __init__(self, config: ProjectionConfig, seeds: tuple[int, ...]) -> None:
        self.config, self.seeds, self.task = config, seeds, config.task
        d, order, rank = self.task.width, self.task.d_state, config.rank
        shapes: dict[str, tuple[int, ...]] = {"front": (d, rank * d), "write": (order, rank), "readout": (order * d, order * d)}
        if config.right == "learned":
            shapes["generators"] = (self.task.num_generators, d, d)
        self.layout = Layout(shapes)
        powers = [torch.eye(order, dtype=torch.float64)]
        for _ in range(config.length - 1):
            powers.append(self.task.left @ powers[-1])
        # L^{T-t} for t = 1 .. T as [T, N, N], and what the task's own source becomes at the end [T, 1, N].
        stacked = torch.stack(powers[::-1])
        self.powers, self.written = stacked.float(), (stacked @ self.task.write).unsqueeze(1).float()
        size = config.batch * config.eval_batches
        self.held_out = [self.prepare(self.task.draw(stream(seed, EVAL), size)) for seed in seeds]

    def prepare(self, sequences: Sequences) -> ProjectionBatch:
        """Add the answers C_T = sum_t (L^{T-t} epsilon B) (f_t^T R_{t+1} .. R_T), and the true right actions for the oracle."""
        right = expm(self.task.generator(sequences))
        target = final_state(sequences.signal.unsqueeze(2), self.written, right)
        return ProjectionBatch(sequences, target, right if self.config.right == "oracle" else None)

    def init(self, seed: int) -> dict[str, Tensor]:
        """A random write vector, and maps near the identity: readout and front end start close to passing the state through."""
        config, task = self.config, self.task
        d, order, rank = task.width, task.d_state, config.rank

        def noise(name: str) -> Tensor:
            return torch.randn(self.layout.shapes[name], generator=stream(seed, INIT, *name.encode()))

        parameters = {
            "front": torch.eye(d).repeat(1, rank) + config.init_noise * noise("front") / math.sqrt(d),
            "write": noise("write") * task.epsilon**0.5,
            "readout": torch.eye(order * d) + config.init_noise * noise("readout") / math.sqrt(order * d),
        }
        if config.right == "learned":
            parameters["generators"] = task.generators.float()
        return parameters

    def block(self, index: int) -> list[ProjectionBatch]:
        """One step's fresh sequences for every seed."""
        return [self.prepare(self.task.draw(stream(seed, TRAIN, index), self.config.batch)) for seed in self.seeds]

    def predict(self, parameters: dict[str, Tensor], batch: ProjectionBatch) -> Tensor:
        """O vec(H_T) of one seed, [M, N, d]."""
        config, (signal, coef), right = self.config, batch.sequences, batch.right
        if config.right == "learned":
            right = expm(self.task.epsilon**0.5 * torch.einsum("mtk,kpq->mtpq", coef, parameters["generators"]))
        write = (self.powers @ parameters["write"]).mT / math.sqrt(config.rank)
        value = (signal @ parameters["front"]).unflatten(-1, (config.rank, self.task.width))
        state = final_state(value, write, right)
        return (state.flatten(1) @ parameters["readout"]).view_as(state)

    def loss(self, parameters: dict[str, Tensor], block: list[ProjectionBatch], offset: int) -> Tensor:
        """NMSE of each seed's predictions, [S]."""
        return torch.cat([self._score(nmse, parameters, s, batch) for s, batch in enumerate(block)])

    def evaluate(self, parameters: dict[str, Tensor]) -> dict[str, list[float]]:
        """NMSE and R^2 on held-out sequences, one number per seed."""
        return {
            name: [self._score(score, parameters, s, batch).item() for s, batch in enumerate(self.held_out)]
            for name, score in (("nmse", nmse), ("r2", r_squared))
        }

    def _score(self, score: Any, parameters: dict[str, Tensor], s: int, batch: ProjectionBatch) -> Tensor:
        own = {name: parameter[s] for name, parameter in parameters.items()}
        return score(self.predict(own, batch)[None], batch.target[None])


SMOKE = ProjectionConfig(steps=20, num_seeds=2, batch=8, eval_batches=2, eval_every=10, length=32)


def rows(base: ProjectionConfig) -> tuple[ProjectionConfig, ...]:
    """The three rows of the paper's table."""
    return (
        replace(base, name="no-right", label="No-right r = 4"),
        replace(base, name="learned-true", label="SHiPPO learned R (true start)", right="learned"),
        replace(base, name="oracle", label="SHiPPO oracle R", right="oracle"),
    )


def train(config: ProjectionConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Train one row for all its seeds."""
    return train_stack(Projection(config, seeds), config, seeds, session)


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict | None:
    """Both transported rows below no-right, as in the paper."""
    blind = result.rows.get("no-right")
    if row.name == "no-right":
        return lab.Verdict(3e-4 < row.mean("nmse") < 3e-3, "stays near the error of ignoring the transport (1.2e-3)")
    return None if blind is None else lab.Verdict(row.mean("nmse") < blind.mean("nmse"), "below no-right")


EXPERIMENT = lab.Experiment(
    name="projection",
    **lab.described(__doc__),
    presets={"full": partial(rows, ProjectionConfig()), "smoke": partial(rows, SMOKE)},
    train=train,
    columns=(
        lab.Column(key="nmse", label="Eval NMSE"),
        lab.Column(key="r2", label="Eval R^2", better="higher", format=".4f"),
    ),
    judge=judge,
    tables=lab.paper_tables("projection"),
    # Seeds go through a step one after another, so that two parts of a row cost as much as one; six parts keep two cores busy.
    stack=3,
    highlights=(
        lab.Highlight("no-right", "nmse", "transported coefficients, rank-4 source: error"),
        lab.Highlight("learned-true", "nmse", "transported coefficients, learned right action: error"),
    ),
)
