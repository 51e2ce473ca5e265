"""The controlled matrix-state family of the paper's appendix D on the paired task, all seeds stacked.

    H_t = L_t H_{t-1} R_t + U_t,     U_t = r^{-1/2} sum_j b_j x_j^T at WRITE and 0 at operations,     y = O vec(H_3)

with x_j = E_j^T v a learned map of the payload, b_j a learned write vector, and L_t = exp(D^T phi_t) diagonal, emitted
from the features phi_t = (one-hot generator, coefficient at that place) [2K]. A group width below d keeps diagonal
blocks of R_t only. `docs/results/paired.md` says how we chose what the paper leaves open.

Training uses that diagonal factors commute and the readout is linear: with l = exp(D^T (phi_1 + phi_2)) the answer is O
vec(l * (b x^T R_1 R_2)) and the difference of a pair is O vec(l * (b x^T (R_1 R_2 - R_2 R_1))). Evaluation runs both
orders token by token. Shapes: S seeds, M examples, d channels, N state order, K generators, r write rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shippo_lab.harness.experiment import TrainConfig
from shippo_lab.harness.stacked import Layout, nmse, r_squared
from shippo_lab.tasks.paired import Examples, PairedTask, stream
from shippo_ssm.actions import expm
from shippo_ssm.scan import block_affine_scan

# Random streams of a seed.
INIT, TRAIN, EVAL, AUDIT = range(4)
# exp(c A) = sum_k c^k A^k / k!: at |c| ||A|| = 1 the first omitted term is 2.5e-8, below float32.
SERIES_DEGREE = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedConfig(TrainConfig):
    """A row of the paired diagnostic; defaults are the paper's. A step has `batch` ordinary examples and as many pairs."""

    right: Literal["solver", "none", "oracle", "learned", "selective"] = "none"
    """Where R_t comes from; "solver" is the exact recurrence with nothing to train."""
    start: Literal["true", "zero", "random"] = "true"
    """Initial generators of a learned right action."""
    rank: int = 1
    group_width: int = 4
    """Channels per transport group: R_t keeps diagonal blocks of this width."""
    width: int = 4
    d_state: int = 16
    num_generators: int = 2
    pair_weight: float = 5.0
    eval_batches: int = 16
    audit_examples: int = 0
    """Examples of one audit batch; there are `eval_batches` of them. Without any there is no off-block ratio."""
    controller_width: int = 16
    random_scale: float = 0.3
    """Standard deviation of the entries of random initial generators."""
    readout_gain: float = 1 / 16
    """The readout acts with this factor and is stored larger by its inverse: it learns slowly beside the source."""
    left_scale: float = 0.1
    """Standard deviation of the initial left controller D."""

    def __post_init__(self) -> None:
        if self.width % self.group_width:
            raise ValueError(f"PairedConfig: `group_width` is {self.group_width}; expected a divisor of width {self.width}")

    @property
    def task(self) -> PairedTask:
        return self.shared(PairedTask)


class PairedBatch(NamedTuple):
    """Ordinary examples, then pairs, of some steps, stacked over seeds: [S, steps, ..], or [S, ..] for one step."""

    value: Tensor  # [.., 2M, d]
    features: Tensor  # [.., 2M, 2, 2K], phi of both operations
    target: Tensor  # [.., 2M, d]: answers of the ordinary examples, differences of the pairs
    right: Tensor  # [.., 2M, 2, ..]: what the right action is made from (see `MatrixState.right_input`)


def stack_seeds(draw: Callable[[int], Examples], seeds: tuple[int, ...]) -> Examples:
    """`draw(seed)` for every seed, stacked on a new leading axis."""
    return Examples(*(torch.stack(parts) for parts in zip(*(draw(seed) for seed in seeds))))


def held_out(config: PairedConfig, seeds: tuple[int, ...]) -> tuple[Examples, Examples]:
    """The evaluation examples of every seed: ordinary ones and pairs."""
    task, size = config.task, config.eval_batches * config.batch
    ordinary = stack_seeds(lambda seed: task.draw(stream(seed, EVAL, 0), size), seeds)
    return ordinary, stack_seeds(lambda seed: task.draw_pairs(stream(seed, EVAL, 1), size), seeds)


def scores(answer: Tensor, truth: Tensor, difference: Tensor, true_difference: Tensor) -> dict[str, list[float]]:
    """NMSE of answers, NMSE and R^2 of the differences of pairs; one number per seed."""
    pair = nmse(difference, true_difference), r_squared(difference, true_difference)
    return {"nmse": nmse(answer, truth).tolist(), "pair_nmse": pair[0].tolist(), "pair_r2": pair[1].tolist()}


def last_state(left: Tensor, right: Tensor | None, source: Tensor) -> Tensor:
    """H_3 [.., N, d]: `source` [.., N, d] is written, then two operations act with left [.., 2, N] and right [.., 2, d, d]."""
    left = torch.nn.functional.pad(left, (0, 0, 1, 0), value=1.0)
    update = torch.nn.functional.pad(source.unsqueeze(-3), (0, 0, 0, 0, 0, 2))
    if right is not None:
        still = torch.eye(right.shape[-1]).expand(*right.shape[:-3], 1, -1, -1)
        right = torch.cat([still, right], -3)
    return block_affine_scan(left, right, update, backend="reference")[..., -1, :, :]


def transport(value: Tensor, right: Tensor) -> Tensor:
    """x^T R for many small matrices, [.., d], [.., d, d] -> [.., d]; a product and a sum beat a batched matmul at d = 4."""
    return (value.unsqueeze(-1) * right).sum(-2)


class MatrixState:
    """The stacked models of one row with their data: a `Problem` for `train_stack`."""

    block_steps = 100

    def __init__(self, config: PairedConfig, seeds: tuple[int, ...]) -> None:
        self.config, self.seeds, self.task = config, seeds, config.task
        d, order, generators, rank = config.width, config.d_state, config.num_generators, config.rank
        shapes: dict[str, tuple[int, ...]] = {
            "front": (rank, d, d),
            "write": (rank, order),
            "left": (2 * generators, order),
            "readout": (order * d, d),
        }
        if config.right == "learned":
            shapes["generators"] = (generators, d, d)
        if config.right == "selective":
            hidden = config.controller_width
            shapes |= {"hidden": (2 * generators, hidden), "hidden_bias": (1, hidden)}
            shapes |= {"emit": (hidden, d * d), "emit_bias": (1, d * d)}
        self.layout = Layout(shapes)
        self.blocks = torch.block_diag(*[torch.ones(config.group_width, config.group_width)] * (d // config.group_width))
        self.ordinary, self.pairs = held_out(config, seeds)

    def init(self, seed: int) -> dict[str, Tensor]:
        """Parameters of one seed: x_1 close to v, a readout close to undoing it, further write rows silent (b_j = 0).

        Rows of every rank so start from one function; right generators start as `start` says, or near zero.
        """
        config = self.config
        d, order, rank = config.width, config.d_state, config.rank

        def noise(name: str) -> Tensor:
            # A stream for each parameter: rows of one seed differ in what their configuration changes and in nothing else.
            return torch.randn(self.layout.shapes[name], generator=stream(seed, INIT, *name.encode()))

        front, write = noise("front") / math.sqrt(d), noise("write") / math.sqrt(order)
        front[0] = torch.eye(d) + 0.2 * front[0]
        write[1:] = 0.0
        undo = write[0] / write[0].square().sum()
        readout = noise("readout") / math.sqrt(order * d) + (undo[:, None, None] * torch.eye(d)).reshape(order * d, d)
        parameters = {
            "front": front,
            "write": write * math.sqrt(rank),
            "left": config.left_scale * noise("left"),
            "readout": readout / config.readout_gain,
        }
        if config.right == "learned":
            scale = config.random_scale if config.start == "random" else 0.0
            parameters["generators"] = self.task.generators if config.start == "true" else scale * noise("generators")
        if config.right == "selective":
            parameters["hidden"] = noise("hidden") / math.sqrt(2 * config.num_generators)
            parameters["emit"] = 0.1 * noise("emit") / math.sqrt(config.controller_width)
            parameters["hidden_bias"], parameters["emit_bias"] = torch.zeros(1, config.controller_width), torch.zeros(1, d * d)
        return parameters

    def one_hot(self, examples: Examples) -> Tensor:
        return torch.nn.functional.one_hot(examples.generator, self.config.num_generators).to(examples.coef)

    def features(self, examples: Examples) -> Tensor:
        """phi = (one-hot generator, one-hot generator times coefficient) of both operations, [.., 2, 2K]."""
        hot = self.one_hot(examples)
        return torch.cat([hot, hot * examples.coef.unsqueeze(-1)], -1)

    def right_input(self, examples: Examples) -> Tensor:
        """What the right action is made from: the oracle's R itself, or the powers c^k, k = 1.., at the generator's place."""
        if self.config.right == "oracle":
            return self.task.right(examples) * self.blocks
        if self.config.right == "learned":
            powers = examples.coef.unsqueeze(-1).expand(*examples.coef.shape, SERIES_DEGREE).cumprod(-1)
            return (self.one_hot(examples).unsqueeze(-1) * powers.unsqueeze(-2)).flatten(-2)
        return examples.coef

    def block(self, index: int) -> PairedBatch:
        """The data of `block_steps` steps, a function of (seeds, index) alone."""
        shape = (self.block_steps, self.config.batch)
        ordinary = stack_seeds(lambda seed: self.task.draw(stream(seed, TRAIN, 0, index), *shape), self.seeds)
        pairs = stack_seeds(lambda seed: self.task.draw_pairs(stream(seed, TRAIN, 1, index), *shape), self.seeds)
        both = Examples(*(torch.cat(parts, 2) for parts in zip(ordinary, pairs)))
        difference = self.task.answer(pairs) - self.task.answer(pairs.swapped())
        target = torch.cat([self.task.answer(ordinary), difference], 2)
        return PairedBatch(both.value, self.features(both), target, self.right_input(both))

    def training_right(self, parameters: dict[str, Tensor], batch: PairedBatch) -> Tensor:
        """R_1 and R_2 of every example, [S, 2M, 2, d, d]."""
        d = self.config.width
        if self.config.right == "oracle":
            return batch.right
        if self.config.right == "learned":
            powers = [parameters["generators"]]
            for k in range(2, SERIES_DEGREE + 1):
                powers.append(powers[-1] @ powers[0] / k)
            series = torch.stack(powers, 2).flatten(3).flatten(1, 2)
            right = torch.baddbmm(torch.eye(d).reshape(-1), batch.right.flatten(1, 2), series)
        else:
            right = expm(self.emit(parameters, batch.features.flatten(1, 2)))
        right = right.view(*batch.right.shape[:3], d, d)
        return right if self.config.group_width == d else right * self.blocks

    def emit(self, parameters: dict[str, Tensor], features: Tensor) -> Tensor:
        """The selective controller: features [S, M, 2K] -> generators [S, M, d, d]."""
        hidden = torch.tanh(torch.baddbmm(parameters["hidden_bias"], features, parameters["hidden"]))
        d = self.config.width
        return torch.baddbmm(parameters["emit_bias"], hidden, parameters["emit"]).view(*features.shape[:2], d, d)

    def loss(self, parameters: dict[str, Tensor], block: PairedBatch, offset: int) -> Tensor:
        """NMSE of the ordinary examples + pair_weight x NMSE of the pair differences, per seed."""
        config, size = self.config, self.config.batch
        batch = PairedBatch(*(part[:, offset] for part in block))
        if config.right == "none":
            # The difference of a pair is zero whatever the parameters: its loss is one and its gradient zero.
            batch = PairedBatch(*(part[:, :size] for part in batch))
        left = torch.exp(torch.bmm(batch.features.sum(2), parameters["left"]))
        value = self.front(parameters, batch.value)
        if config.right == "none":
            return nmse(self.read(parameters, left, value), batch.target) + config.pair_weight
        first, second = self.training_right(parameters, batch).unsqueeze(3).unbind(2)
        forth = transport(transport(value, first), second)
        back = transport(transport(value[:, size:], second[:, size:]), first[:, size:])
        moved = torch.cat([forth[:, :size], forth[:, size:] - back], 1)
        output = self.read(parameters, left, moved)
        ordinary = nmse(output[:, :size], batch.target[:, :size])
        return ordinary + config.pair_weight * nmse(output[:, size:], batch.target[:, size:])

    def front(self, parameters: dict[str, Tensor], value: Tensor) -> Tensor:
        """x_j = E_j^T v, [S, M, d] -> [S, M, r, d]."""
        if self.config.rank == 1:
            return torch.bmm(value, parameters["front"].squeeze(1)).unsqueeze(2)
        return torch.einsum("smd,sjde->smje", value, parameters["front"])

    def read(self, parameters: dict[str, Tensor], left: Tensor, value: Tensor) -> Tensor:
        """O vec(l * r^{-1/2} sum_j b_j x_j^T), from l [S, M, N] and x [S, M, r, d]."""
        if self.config.rank == 1:
            state = (left * parameters["write"]).unsqueeze(-1) * value
        else:
            written = torch.einsum("sjn,smjd->smnd", parameters["write"], value) / math.sqrt(self.config.rank)
            state = left.unsqueeze(-1) * written
        return torch.bmm(state.flatten(2), self.config.readout_gain * parameters["readout"])

    def right(self, parameters: dict[str, Tensor], examples: Examples) -> Tensor | None:
        """The generated R_t of both operations before any block restriction, [S, M, 2, d, d]; `None` for the identity."""
        if self.config.right == "none":
            return None
        if self.config.right == "oracle":
            return self.task.right(examples)
        if self.config.right == "learned":
            seed = torch.arange(len(self.seeds))[:, None, None]
            return expm(examples.coef[..., None, None] * parameters["generators"][seed, examples.generator])
        generator = self.emit(parameters, self.features(examples).flatten(1, 2))
        return expm(generator).view(*examples.coef.shape, *generator.shape[-2:])

    def answer(self, parameters: dict[str, Tensor], examples: Examples, right: Tensor | None) -> Tensor:
        """y [S, M, d], token by token: WRITE(v), then the two operations with `right` [S, M, 2, d, d] (`None`: identity)."""
        value = self.front(parameters, examples.value)
        source = torch.einsum("sjn,smjd->smnd", parameters["write"], value) / math.sqrt(self.config.rank)
        left = torch.exp(torch.einsum("smtk,skn->smtn", self.features(examples), parameters["left"]))
        state = last_state(left, None if right is None else right * self.blocks, source)
        return torch.bmm(state.flatten(2), self.config.readout_gain * parameters["readout"])

    def evaluate(self, parameters: dict[str, Tensor]) -> dict[str, list[float]]:
        """NMSE, pair NMSE, pair R^2 and, with a right action, the pair NMSE under R_t -> I; one number per seed."""
        right, pair_right = self.right(parameters, self.ordinary), self.right(parameters, self.pairs)
        truth = self.task.answer(self.pairs) - self.task.answer(self.pairs.swapped())
        ordinary = self.answer(parameters, self.ordinary, right)
        metrics = scores(ordinary, self.task.answer(self.ordinary), self.difference(parameters, pair_right), truth)
        if right is not None:
            metrics["identity_pair_nmse"] = nmse(self.difference(parameters, None), truth).tolist()
        if self.config.audit_examples:
            metrics["off_block"] = self.off_block_ratio(parameters)
        return metrics

    def difference(self, parameters: dict[str, Tensor], right: Tensor | None) -> Tensor:
        """y(ab) - y(ba) of the evaluation pairs, from the right actions of the order ab."""
        back = self.answer(parameters, self.pairs.swapped(), None if right is None else right.flip(2))
        return self.answer(parameters, self.pairs, right) - back

    def order_averaged_bound(self) -> list[float]:
        """NMSE of the order-averaged answer on each seed's evaluation examples: the best that a model blind to order can do."""
        return nmse(self.task.order_averaged(self.ordinary), self.task.answer(self.ordinary)).tolist()

    def off_block_ratio(self, parameters: dict[str, Tensor]) -> list[float]:
        """||off-block part of R||_F / ||R||_F on the audit examples, squares summed over operation tokens before the root."""
        count = self.config.audit_examples * self.config.eval_batches
        examples = stack_seeds(lambda seed: self.task.draw(stream(seed, AUDIT), count), self.seeds)
        right = self.right(parameters, examples)
        assert right is not None
        square = right.double().square()
        off, whole = (square * (1 - self.blocks)).flatten(1).sum(1), square.flatten(1).sum(1)
        return (off / whole).sqrt().tolist()
