"""Transported recall on quarter turns.

Claim: Where operations are real-linear, a right action solves transported recall exactly; without one it stays unsolved.
Protocol: one layer, 2,000 or 3,000 steps, 8/12/24 events with 1/2/3 keys, 3 seeds; 640 examples per length
Time: 11 minutes on two cores

A quarter turn is (a, b) -> (-b, a), and -a in F_31 is 31 - a: an odd embedding e: F_31 -> R^G is learned, one for all
coordinates; coordinate j is written into column j of every group. Write and read vectors [G, N] per key are equal at
the start. The controller is a table over event types (13 operations, BIND, QUERY): a step [G] and the coordinates of a
right action [G, K]. `docs/results/rotation.md` has the general rows, the loss and how the recipe was chosen.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_lab.experiments.mqar.figures import rotation_figure
from shippo_lab.experiments.mqar.scoring import RecallConfig, add_scores, query_loss, scores_of_lengths, train_recall
from shippo_lab.experiments.tracking.curriculum import WARM_UP, held_rate, stage
from shippo_lab.harness import experiment as lab
from shippo_lab.tasks.mqar import BIND, MODULUS, OP, WIDTH, Events, TransportMQAR
from shippo_ssm.actions import get_family
from shippo_ssm.layers import Mixer, Segment, identity_right
from shippo_ssm.models import SequenceConfig, SequenceModel
from shippo_ssm.scan import transport_scan


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationConfig(RecallConfig):
    """A row of the experiment; defaults are the protocol."""

    right: Literal["split", "dense", "none"] = "split"
    layer: dict[str, Any] | None = None
    """Fields of `SequenceConfig` of a general layer; `None` is the memory made for this task, which the next options are of."""
    num_groups: int = 32
    d_state: int = 32
    num_keys: int = 256
    curriculum: tuple[tuple[float, int, int], ...] = ((0.15, 8, 1), (0.3, 12, 2), (1.0, 24, 3))
    """(until this fraction of the steps, length, active keys)."""
    start_scale: float = 0.0125
    """Standard deviation of the right coordinates at the start, around the identity."""
    start_step: float = 4.0
    """Step at the start. An angle is step x coordinate, so this is how much faster angles move than other parameters."""
    isometry: float = 1.0
    """Weight of the penalty on ||R^T R - I||^2."""
    steps: int = 2000
    num_seeds: int = 3
    batch: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.0
    eval_lengths: tuple[int, ...] = (24, 48, 96, 192, 384, 768)

    def task(self, seed: int, length: int | None = None, num_active: int | None = None) -> TransportMQAR:
        _, last_length, last_active = self.curriculum[-1]
        sizes = {"length": length or last_length, "num_active": num_active or last_active}
        return self.shared(TransportMQAR, library="rotation", rebind=False, seed=seed, **sizes)

    def task_at(self, seed: int, step: int) -> TransportMQAR:
        return self.task(seed, *stage(self.curriculum, step, self.steps))


# Every event is one token, so a convolution could only learn pairs of events by heart.
GENERAL: dict[str, Any] = {"d_conv": 1}


class RotationMemory(Mixer[Tensor]):
    """tokens [B, T, 7] -> [B, T, 4, G]: what is read from column j, relative to all four columns; state [B, G, N, P]."""

    supports_masks = False
    reads_tokens = True

    def __init__(self, config: RotationConfig) -> None:
        super().__init__(d_model=3 + WIDTH)
        groups, order = config.num_groups, config.d_state
        self.num_operations = config.task(0).num_operations
        num_types = self.num_operations + 2
        self.family = get_family(config.right, WIDTH)
        self.value = nn.Embedding(MODULUS + 1, groups, padding_idx=MODULUS)
        keys = torch.randn(config.num_keys + 1, groups, order) / order**0.5
        self.write = nn.Parameter(keys)
        self.read = nn.Parameter(keys.clone())
        start = self.family.init_coordinates().expand(num_types, groups, -1)
        self.coords = nn.Parameter(start + config.start_scale * torch.randn(start.shape))
        self.raw_step = nn.Parameter(torch.full((num_types, groups), math.log(math.expm1(config.start_step))))
        self.log_decay = nn.Parameter(torch.full((groups, order), math.log(1e-3)))

    def actions(self) -> Tensor:
        """R of every event type, [13 + 2, G, P, P]: the operations, BIND, QUERY."""
        return self.family.dense(self.coords, F.softplus(self.raw_step))

    def right_actions(self, u: Tensor) -> Tensor | None:
        """R [B, T, G, P, P] along tokens [B, T, 7]; `None` without a right action."""
        return self.actions()[self.event(u)] if self.use_right and self.family.num_coordinates else None

    def distance_from_isometry(self) -> Tensor:
        """The mean of ||R^T R - I||_F^2 over event types and groups; 0 without a right action."""
        right = self.actions()
        return (right.mT @ right - torch.eye(WIDTH)).square().sum((-2, -1)).mean()

    def event(self, tokens: Tensor) -> Tensor:
        """The row of the controller's table for every token: its operation, or BIND, or QUERY."""
        kind, operation = tokens[..., 0], tokens[..., 2]
        return torch.where(kind == OP, operation, torch.where(kind == BIND, self.num_operations, self.num_operations + 1))

    def run(self, u: Tensor, state: Tensor | None, segment: Segment) -> tuple[Tensor, Tensor]:
        key, value = u[..., 1], self.value(u[..., 3:]).mT
        step, drift = F.softplus(self.raw_step)[self.event(u)], -self.log_decay.exp()
        operands = value, self.write[key], self.read[key], step, drift, self.right_actions(u)
        y, state = transport_scan(*operands, initial_state=state, output_final_state=True)
        assert state is not None
        return F.rms_norm(y, (WIDTH,), eps=1e-6).mT, state

    def init_state(self, batch_size: int) -> Tensor:
        return self.write.new_zeros(batch_size, *self.write.shape[1:], WIDTH)


class RotationModel(nn.Module):
    """tokens [B, T, 7] -> logits [B, T, 4, 31]: the memory, and one linear map G -> 31 for every coordinate."""

    def __init__(self, config: RotationConfig) -> None:
        super().__init__()
        self.memory = RotationMemory(config)
        self.head = nn.Linear(config.num_groups, MODULUS)

    def features(self, tokens: Tensor, asked: Tensor) -> Tensor:
        """[n, 4, G] at the positions `asked` [B, T]."""
        return self.memory(tokens)[asked]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.memory(tokens))


class TurnEmbedding(nn.Module):
    """tokens [.., 7] -> [.., d_model]: a value's coordinates side by side in one half; type, key and operation in the other."""

    def __init__(self, task: TransportMQAR, d_model: int) -> None:
        super().__init__()
        half = d_model // 2
        self.value = nn.Embedding(MODULUS + 1, half // WIDTH, padding_idx=MODULUS)
        self.kind = nn.Embedding(3, half)
        self.key = nn.Embedding(task.num_keys + 1, half, padding_idx=task.num_keys)
        self.operation = nn.Embedding(task.num_operations + 1, half, padding_idx=task.num_operations)

    def forward(self, tokens: Tensor) -> Tensor:
        kind, key, operation, value = tokens[..., 0], tokens[..., 1], tokens[..., 2], tokens[..., 3:]
        rest = self.kind(kind) + self.key(key) + self.operation(operation)
        return torch.cat([self.value(value).mT.flatten(-2), rest], -1)


class TurnHead(nn.Module):
    """[.., d_model] -> [.., 4, 31]: one classifier on the channels of every coordinate."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.width = d_model // 2
        self.proj = nn.Linear(self.width // WIDTH, MODULUS)

    def forward(self, features: Tensor) -> Tensor:
        return self.proj(features[..., : self.width].unflatten(-1, (-1, WIDTH)).mT)


def general_model(layer: dict[str, Any], task: TransportMQAR) -> SequenceModel:
    """tokens [B, T, 7] -> logits [B, T, 4, 31]: one `Shippo` layer of width 128."""
    geometry = SequenceConfig(d_model=128, n_layers=1, expand=1, **layer)
    return SequenceModel(geometry, embedding=TurnEmbedding(task, geometry.d_model), head=TurnHead(geometry.d_model))


SMOKE = RotationConfig(steps=20, num_seeds=2, batch=8, eval_every=10, curve_examples=8, eval_examples=8, eval_lengths=(24, 48))


def rows(base: RotationConfig) -> tuple[RotationConfig, ...]:
    """Two right-action families and none; then the general layer, with and without its right action."""
    labels = {"split": "Split flow", "dense": "Dense exponential", "none": "No right action"}
    general = replace(base, steps=3 * base.steps // 2, isometry=0.0)
    return (
        *(replace(base, name=name, label=labels[name], right=name) for name in labels),
        replace(general, name="general", label="General layer", layer=GENERAL),
        replace(general, name="general-none", label="General layer, no right action", layer=GENERAL | {"right": "none"}),
    )


def train(config: RotationConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Train one seed of a row, and score it with and without its right action."""
    (seed,) = seeds
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = config.layer
        model = RotationModel(config) if layer is None else general_model(layer, config.task(seed))

    def loss_of(model: Any, events: Events) -> Tensor:
        penalty = model.memory.distance_from_isometry() if isinstance(model, RotationModel) else 0.0
        return query_loss(model, events) + config.isometry * penalty

    result = train_recall(model, config, seed, session, loss_of, held_rate(config.steps, 0.5, WARM_UP))
    with identity_right(model):
        add_scores(result, scores_of_lengths(config, seed, model), "identity_")
    return result


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict:
    """Solved with a right action, not without, and not after R -> I."""
    length = row.config["curriculum"][-1][1]
    bound, predictor = row.mean(f"untouched_exact_{length}") + 0.1, "the untouched-coordinates predictor + 0.1"
    if row.name.endswith("none"):
        return lab.Verdict(row.mean(f"exact_{length}") <= bound, f"exact at most {predictor} at length {length}")
    least = 0.98 if row.name == "general" else 0.99
    holds = min(row.metrics[f"exact_{length}"]) >= least and row.mean(f"identity_exact_{length}") <= bound
    return lab.Verdict(holds, f"exact >= {least} at length {length} for every seed, R -> I back to {predictor}")


EXPERIMENT = lab.Experiment(
    name="rotation",
    **lab.described(__doc__),
    presets={"full": partial(rows, RotationConfig()), "smoke": partial(rows, SMOKE)},
    train=train,
    columns=(
        *(lab.accuracy(f"exact_{n}", f"Exact {n}") for n in (24, 48, 96, 192, 384, 768)),
        lab.accuracy("coordinate_24", "Coord. 24"),
        lab.Column(key="identity_exact_24", label="R -> I exact 24", better="neither", format=".3f"),
        lab.Column(key="untouched_exact_24", label="Untouched exact 24", better="neither", format=".3f"),
    ),
    judge=judge,
    main=("exact_24", "exact_768", "identity_exact_24"),
    figure=rotation_figure,
    highlights=(
        lab.Highlight("none", "exact_24", "recall through quarter turns, no right action: exact"),
        lab.Highlight("split", "exact_24", "recall through quarter turns, split right action: exact"),
    ),
)
