"""The model of the quarter turns: one layer, G 32, N 32, P 4, and nothing but the memory.

Values: one embedding e: F_31 -> R^G shared by the four coordinates; coordinate j is written into column j of every group,
value_t[g, j] = e(v_j)[g]. Keys: write and read vectors [G, N] per key, equal at the start. The controller is a table over event
types (13 operations, BIND, QUERY): a step [G] and the coordinates of a right action [G, K] each. Readout: y_t [G, P] is
normalised in every group over its columns, by the norm that rotations keep; then one linear map G -> 31 is shared by the
columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shippo_ssm.actions import get_family
from shippo_ssm.experiments.mqar.recall import RecallConfig
from shippo_ssm.layers import Mixer, Segment
from shippo_ssm.scan import transport_scan
from shippo_ssm.tasks.mqar import BIND, MODULUS, OP, WIDTH, TransportMQAR


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
        return self.shared(TransportMQAR, library="rotation", length=length, num_active=num_active, rebind=False, seed=seed)


class RotationMemory(Mixer[Tensor]):
    """tokens [B, T, 7] -> [B, T, 4, G] by one transported memory: what is read from column j, relative to all four columns.

    Its state is the memory [B, G, N, P].

    Args:
        config: geometry and family.
    """

    takes_gaps = False

    def __init__(self, config: RotationConfig) -> None:
        super().__init__(d_model=3 + WIDTH)
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

    def check(
        self,
        u: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> Segment:
        """Tokens are numbers, not vectors; whether there is a mask is all that `forward` asks."""
        if group is not None:
            return super().check(u, attention_mask, cu_seqlens, group)
        if u.ndim != 3 or u.shape[-1] != self.d_model or u.is_floating_point():
            raise ValueError(f"RotationMemory: `u` is {u.dtype} {tuple(u.shape)}; expected integers [B, T, {self.d_model}]")
        return Segment(attention_mask, cu_seqlens)

    def run(self, u: Tensor, state: Tensor | None, segment: Segment) -> tuple[Tensor, Tensor]:
        key, value = u[..., 1], self.value(u[..., 3:]).mT
        step, drift = F.softplus(self.raw_step)[self.event(u)], -self.log_decay.exp()
        y, state = transport_scan(
            value,
            self.write[key],
            self.read[key],
            step,
            drift,
            self.right_actions(u),
            initial_state=state,
            output_final_state=True,
        )
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
