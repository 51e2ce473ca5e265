"""The controller: what each token does to the memory, decided from the input alone.

Data path: the branch x [B, T, D] (through an auxiliary causal convolution, if asked for) is projected to (r + 1) N + 4 numbers
per group: r writes of N, one read of N, and four scalars (step, mix, write gate, read gate). A last projection, the right
suffix, gives the K coordinates of the right action per group; it is a module of its own, `right_proj`, with its own bias,
`right_bias`, so that the suffix can be found, frozen or zeroed by name. The memory is not an argument of `forward`:
controller compatibility (paper section 3.2) holds by construction. Each projection gives one contiguous tensor, so that none is
copied on the way into the scan; the gates are numbers per group, left to stand on the shorter factors, value and output.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm._private import real_numbers
from shippo_ssm.actions import RightAction
from shippo_ssm.layers.conv import ShortConv
from shippo_ssm.layers.mixer import WHOLE, Segment
from shippo_ssm.layers.spared import Spared
from shippo_ssm.layers.spec import ShippoSpec

# Rows of `scalar_bias` and order of the four scalars.
SCALARS = ("step", "mix", "write_gate", "read_gate")


class Emission(NamedTuple):
    """What the controller says for every position.

    Args:
        write: [B, T, G, r, N].
        read: [B, T, G, N]; zeros where nobody asks.
        step: [B, T, G], > 0.
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


class Controller(Spared):
    """write, read, step, mix, gates, coords = phi(x): an input-only (or causal-convolution) controller.

    write and read are linear in x_t; with raw scalars linear in x_t plus a bias, step = softplus(raw), mix = sigmoid(raw) and
    the two gates are sigmoid(raw); coords = right_proj(x_t) + right_bias.

    Args:
        channels: D, the width of the branch it reads.
        num_groups: G.
        right: the family of right actions, whose K coordinates per group it emits.
        spec: the options of the layer.

    Example:
        >>> import torch
        >>> from shippo_ssm.actions import SplitFlow
        >>> controller = Controller(16, 4, SplitFlow(4), ShippoSpec(d_state=8))
        >>> emission, _ = controller(torch.randn(2, 5, 16))
        >>> emission.write.shape, emission.coords.shape
        (torch.Size([2, 5, 4, 1, 8]), torch.Size([2, 5, 4, 16]))
    """

    spared = ("scalar_bias", "right_bias")

    def __init__(
        self,
        channels: int,
        num_groups: int,
        right: RightAction,
        spec: ShippoSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_groups, self.spec, self.num_coordinates = num_groups, spec, right.num_coordinates
        self.conv = ShortConv(channels, spec.controller_conv, **place) if spec.controller_conv else None
        self.write_proj = nn.Linear(channels, num_groups * spec.write_rank * spec.d_state, bias=False, **place)
        self.read_proj = nn.Linear(channels, num_groups * spec.d_state, bias=False, **place)
        self.scalar_proj = nn.Linear(channels, len(SCALARS) * num_groups, bias=False, **place)
        self.right_proj, self.right_bias = None, None
        self.scalar_bias = nn.Parameter(torch.empty(len(SCALARS), num_groups, **place))
        if self.num_coordinates:
            self.right_proj = nn.Linear(channels, num_groups * self.num_coordinates, bias=False, **place)
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
        for projection in (self.write_proj, self.read_proj, self.scalar_proj):
            projection.reset_parameters()
        with torch.no_grad():
            if self.spec.read_init in ("write", "next"):
                # Of several writes, the first is the one that a read finds. `Shippo` moves it on by a token for "next".
                order = self.spec.d_state
                writes = self.write_proj.weight.unflatten(0, (self.num_groups, self.spec.write_rank, order))
                self.read_proj.weight.copy_(writes[:, 0].flatten(0, 1))
            self.scalar_bias.zero_()
            low, high = math.log(self.spec.dt_min), math.log(self.spec.dt_max)
            step = torch.exp(torch.rand_like(self.scalar_bias[0]) * (high - low) + low)
            # The inverse of softplus, log(exp(step) - 1), in a form that keeps small steps.
            self.scalar_bias[0] = step + torch.log(-torch.expm1(-step))
            if self.right_proj is not None and self.right_bias is not None:
                nn.init.normal_(self.right_proj.weight, std=self.spec.right_std)
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
            segment: padding and packing, and where an output is asked.

        Returns:
            The `Emission`, in float32 at least but for write and read, which the scan takes as they were projected; and the
            next window (`None` for the input-only controller).
        """
        if self.conv is not None:
            window = self.conv.init_window(segment.num_sequences(x)) if window is None else window
            x, window = self.conv(x, window, segment)
        groups, order = self.num_groups, self.spec.d_state
        write = self.write_proj(x).unflatten(-1, (groups, self.spec.write_rank, order))
        if segment.asked is None:
            read = self.read_proj(x)
        else:
            # The scan reads at every position: zeros where nobody asks, which need no product.
            few = self.read_proj(segment.at_asked(x))
            zeros = few.new_zeros(x.shape[:2].numel(), few.shape[-1])
            read = zeros.index_copy_(0, segment.asked, few).unflatten(0, x.shape[:2])
        read = read.unflatten(-1, (groups, order))
        # The biases are kept in float32 at least, and so is what they are added to.
        dtype = self.scalar_bias.dtype
        scalars = self.scalar_proj(x).unflatten(-1, (len(SCALARS), groups)).to(dtype) + self.scalar_bias
        step, mix, write_gate, read_gate = scalars.unbind(-2)
        if self.right_proj is None or self.right_bias is None or self.zero_suffix:
            coords = x.new_zeros((*x.shape[:-1], groups, self.num_coordinates), dtype=dtype)
        else:
            coords = self.right_proj(x).unflatten(-1, (groups, -1)).to(dtype) + self.right_bias.to(dtype)
        gates = mix.sigmoid(), write_gate.sigmoid(), read_gate.sigmoid()
        return Emission(write, read, F.softplus(step), *gates, coords), window
