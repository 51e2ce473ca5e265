"""The controller: what each token does to the memory, decided from the input alone.

Data path: the branch x [B, T, D] (through an auxiliary causal convolution, if asked for) is projected to Q sets of r writes and
one read of N numbers each, which the transport groups share, and to four scalars per group (step, mix, write gate, read gate).
The right suffix, `right_proj` with its `right_bias`, gives the K coordinates of the right action per group. With
`controller_rank` the scalars (and, if asked for, the right coordinates) are read from a narrow linear map of x, `down_proj`.
The memory is not an argument of `forward`: controller compatibility (paper section 3.2) holds by construction.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm._private import real_numbers
from shippo_ssm.actions import RightAction
from shippo_ssm.layers.mixer import WHOLE, Segment
from shippo_ssm.layers.rows import ShortConv
from shippo_ssm.layers.spec import ShippoSpec
from shippo_ssm.layers.weight_decay import NoWeightDecay

# Rows of `scalar_bias` and order of the four scalars.
SCALARS = ("step", "mix", "write_gate", "read_gate")


class Emission(NamedTuple):
    """What the controller says for every position.

    Args:
        write: [B, T, Q, r, N].
        read: [B, T, Q, N]; zeros where nobody asks.
        step: [B, T, G], > 0; 0 where no time passes.
        mix: [B, T, G] in (0, 1).
        write_gate: [B, T, G] in (0, 1), a factor of the source.
        read_gate: [B, T, G] in (0, 1), a factor of the output.
        coords: [B, T, G, K], coordinates of the right action; K = 0 without one.
    """

    write: Tensor
    read: Tensor
    step: Tensor
    mix: Tensor
    write_gate: Tensor
    read_gate: Tensor
    coords: Tensor


class Controller(NoWeightDecay):
    """write, read, step, mix, gates, coords = phi(x): an input-only (or causal-convolution) controller.

    write and read are linear in x_t; with raw scalars linear in x_t plus a bias, step = softplus(raw), mix = sigmoid(raw) and
    the two gates are sigmoid(raw); coords = right_proj(x_t) + right_bias. Times since the previous sample multiply the step.

    Args:
        channels: D, the width of the branch it reads.
        num_groups: G.
        right: the family of right actions, whose K coordinates per group it emits.
        spec: the options of the layer.
        place: device and dtype.
    """

    no_weight_decay = ("scalar_bias", "right_bias")

    def __init__(self, channels: int, num_groups: int, right: RightAction, spec: ShippoSpec, **place: Any) -> None:
        super().__init__()
        self.num_groups, self.spec, self.num_coordinates = num_groups, spec, right.num_coordinates
        self.num_sets, rank = spec.num_sets(num_groups), spec.controller_rank
        self.conv = ShortConv(channels, spec.controller_conv, **place) if spec.controller_conv else None
        self.write_proj = nn.Linear(channels, self.num_sets * spec.write_rank * spec.d_state, bias=False, **place)
        self.read_proj = nn.Linear(channels, self.num_sets * spec.d_state, bias=False, **place)
        self.down_proj = nn.Linear(channels, rank, bias=False, **place) if rank else None
        self.scalar_proj = nn.Linear(rank or channels, len(SCALARS) * num_groups, bias=False, **place)
        self.scalar_bias = nn.Parameter(torch.empty(len(SCALARS), num_groups, **place))
        self.right_proj = self.right_bias = None
        if self.num_coordinates:
            width = rank if rank and spec.low_rank_right else channels
            self.right_proj = nn.Linear(width, num_groups * self.num_coordinates, bias=False, **place)
            self.right_bias = nn.Parameter(torch.empty(num_groups, self.num_coordinates, **place))
        # Plain numbers also where modules are built without storage, on the meta device.
        with real_numbers():
            longest = spec.memory_length if spec.drift_init == "geometric" else None
            self.init_coordinates = right.init_coordinates(longest).tolist()
        # Set by `zero_right_suffix` at evaluation.
        self.zero_suffix = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Steps log-uniform in [dt_min, dt_max]; right coordinates close to their start; the rest as linear layers start."""
        for projection in filter(None, (self.write_proj, self.read_proj, self.down_proj, self.scalar_proj)):
            projection.reset_parameters()
        with torch.no_grad():
            if self.spec.read_init in ("write", "next"):
                # Of several writes, the first is the one that a read finds. `Shippo` moves it on by a token for "next".
                order = self.spec.d_state
                writes = self.write_proj.weight.unflatten(0, (self.num_sets, self.spec.write_rank, order))
                self.read_proj.weight.copy_(writes[:, 0].flatten(0, 1))
            self.scalar_bias.zero_()
            low, high = math.log(self.spec.dt_min), math.log(self.spec.dt_max)
            step = torch.exp(torch.rand_like(self.scalar_bias[0]) * (high - low) + low)
            # The inverse of softplus, log(exp(step) - 1), in a form that keeps small steps.
            self.scalar_bias[0] = step + torch.log(-torch.expm1(-step))
            if self.right_proj is not None and self.right_bias is not None:
                # A bottleneck of r starts with 1 / sqrt(3 r) of the spread that D inputs give.
                narrowed = self.write_proj.in_features / self.right_proj.in_features
                spread = (3 * narrowed) ** 0.5 if self.spec.low_rank_right else 1.0
                nn.init.normal_(self.right_proj.weight, std=self.spec.right_std * spread)
                for index, start in enumerate(self.init_coordinates):
                    self.right_bias[:, index] = start

    def right_parameters(self) -> list[Tensor]:
        """What makes the coordinates of right actions; nothing without one."""
        return [] if self.right_proj is None or self.right_bias is None else [self.right_proj.weight, self.right_bias]

    @property
    def projections(self) -> list[nn.Linear]:
        """The linear layers in the order of what they emit: write, read, scalars and, where there is one, the right suffix."""
        return [self.write_proj, self.read_proj, self.scalar_proj] + ([] if self.right_proj is None else [self.right_proj])

    def forward(self, x: Tensor, window: Tensor | None = None, segment: Segment = WHOLE) -> tuple[Emission, Tensor | None]:
        """Emit for every position of `x` [B, T, D].

        Args:
            x: [B, T, D].
            window: [B, K - 1, D], inputs before `x`, for the convolution variant; a fresh start by default.
            segment: padding and packing, times, and where an output is asked.

        Returns:
            The `Emission`, in float32 at least but for write and read, which the scan takes as they were projected; and the
            next window (`None` for the input-only controller).
        """
        if self.conv is not None:
            x, window = self.conv(x, window, segment)
        groups, sets, order = self.num_groups, self.num_sets, self.spec.d_state
        write = self.write_proj(x).unflatten(-1, (sets, self.spec.write_rank, order))
        if segment.positions is None:
            read = self.read_proj(x)
        else:
            # The scan reads at every position: zeros where nobody asks, which need no product.
            few = self.read_proj(segment.at_positions(x))
            zeros = few.new_zeros(x.shape[:2].numel(), few.shape[-1])
            read = zeros.index_copy_(0, segment.positions, few).unflatten(0, x.shape[:2])
        read = read.unflatten(-1, (sets, order))
        # The biases are kept in float32 at least, and so is what they are added to.
        dtype, narrow = self.scalar_bias.dtype, x if self.down_proj is None else self.down_proj(x)
        scalars = self.scalar_proj(narrow).unflatten(-1, (len(SCALARS), groups)).to(dtype) + self.scalar_bias
        step, mix, write_gate, read_gate = scalars.unbind(-2)
        step = F.softplus(step)
        if segment.dt is not None:
            step = step * segment.dt.unsqueeze(-1).to(dtype)
        if self.right_proj is None or self.right_bias is None or self.zero_suffix:
            coords = x.new_zeros((*x.shape[:-1], groups, self.num_coordinates), dtype=dtype)
        else:
            suffix = self.right_proj(narrow if self.spec.low_rank_right else x)
            coords = suffix.unflatten(-1, (groups, -1)).to(dtype) + self.right_bias.to(dtype)
        gates = mix.sigmoid(), write_gate.sigmoid(), read_gate.sigmoid()
        return Emission(write, read, step, *gates, coords), window
