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
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm._dtypes import compute_dtype
from shippo_ssm.layers.conv import ShortConv

# Rows of `scalar_bias` and order of the four scalars.
SCALARS = ("step", "mix", "write_gate", "read_gate")


class Emission(NamedTuple):
    """What the controller says for every position.

    Args:
        write: [B, T, G, N], or [B, T, G, r, N] for r > 1.
        read: [B, T, G, N].
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


class Controller(nn.Module):
    """write, read, step, mix, gates, coords = phi(x): an input-only (or causal-convolution) controller.

    write and read are linear in x_t; with raw scalars linear in x_t plus a bias, step = softplus(raw), mix = sigmoid(raw) and
    the two gates are sigmoid(raw); coords = right_proj(x_t) + right_bias.

    Args:
        channels: D, the width of the branch it reads.
        num_groups: G.
        d_state: N.
        num_coordinates: K, coordinates of the right action per group; 0 leaves the suffix out.
        write_rank: r.
        conv_width: taps of an auxiliary causal convolution in front; 0 (default) is the input-only controller.
        dt_min, dt_max: the range in which steps start, log-uniform over the groups.
        init_coordinates: K numbers, where the right coordinates start; zeros by default.

    Example:
        >>> import torch
        >>> controller = Controller(16, num_groups=4, d_state=8, num_coordinates=16)
        >>> emission, _ = controller(torch.randn(2, 5, 16))
        >>> emission.write.shape, emission.coords.shape
        (torch.Size([2, 5, 4, 8]), torch.Size([2, 5, 4, 16]))
    """

    def __init__(
        self,
        channels: int,
        num_groups: int,
        d_state: int,
        num_coordinates: int = 0,
        *,
        write_rank: int = 1,
        conv_width: int = 0,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        init_coordinates: Sequence[float] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"Controller: `dt_min`, `dt_max` are {dt_min}, {dt_max}; expected 0 < dt_min <= dt_max")
        self.num_groups, self.d_state, self.num_coordinates, self.write_rank = num_groups, d_state, num_coordinates, write_rank
        self.dt_min, self.dt_max = dt_min, dt_max
        self.conv = ShortConv(channels, conv_width, device=device, dtype=dtype) if conv_width else None
        self.write_proj = nn.Linear(channels, num_groups * write_rank * d_state, bias=False, device=device, dtype=dtype)
        self.read_proj = nn.Linear(channels, num_groups * d_state, bias=False, device=device, dtype=dtype)
        self.scalar_proj = nn.Linear(channels, len(SCALARS) * num_groups, bias=False, device=device, dtype=dtype)
        self.right_proj, self.right_bias = None, None
        self.scalar_bias = nn.Parameter(torch.empty(len(SCALARS), num_groups, device=device, dtype=dtype))
        if num_coordinates:
            self.right_proj = nn.Linear(channels, num_groups * num_coordinates, bias=False, device=device, dtype=dtype)
            self.right_bias = nn.Parameter(torch.empty(num_groups, num_coordinates, device=device, dtype=dtype))
        self.init_coordinates = tuple(init_coordinates or [0.0] * num_coordinates)
        # Set by `zero_right_suffix` at evaluation.
        self.zero_suffix = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Steps log-uniform in [dt_min, dt_max]; right coordinates close to their start; the rest as linear layers start."""
        for projection in (self.write_proj, self.read_proj, self.scalar_proj):
            projection.reset_parameters()
        with torch.no_grad():
            self.scalar_bias.zero_()
            low, high = math.log(self.dt_min), math.log(self.dt_max)
            step = torch.exp(torch.rand_like(self.scalar_bias[0]) * (high - low) + low)
            # The inverse of softplus, log(exp(step) - 1), in a form that keeps small steps.
            self.scalar_bias[0] = step + torch.log(-torch.expm1(-step))
            if self.right_proj is not None and self.right_bias is not None:
                nn.init.normal_(self.right_proj.weight, std=0.02)
                for index, start in enumerate(self.init_coordinates):
                    self.right_bias[:, index] = start

    def sensitive_parameters(self) -> list[nn.Parameter]:
        """What stays in float32 in a half-precision model and takes no weight decay."""
        return [self.scalar_bias] + ([] if self.right_bias is None else [self.right_bias])

    def forward(
        self, x: Tensor, window: Tensor | None = None, *, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Emission, Tensor | None]:
        """Emit for every position of `x` [B, T, D].

        Args:
            x: [B, T, D].
            window: [B, K - 1, D], inputs before `x`, for the convolution variant; a fresh start by default.
            mask: [B, T] bool, `False` at padding.
            cu_seqlens: [num_sequences + 1], with B = 1.

        Returns:
            The `Emission` in float32 at least, and the next window (`None` for the input-only controller).
        """
        if self.conv is not None:
            count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            window = self.conv.init_window(count) if window is None else window
            x, window = self.conv(x, window, mask=mask, cu_seqlens=cu_seqlens)
        ranks = (self.write_rank,) if self.write_rank > 1 else ()
        write = self.write_proj(x).unflatten(-1, (self.num_groups, *ranks, self.d_state))
        read = self.read_proj(x).unflatten(-1, (self.num_groups, self.d_state))
        dtype = compute_dtype(write.dtype)
        scalars = self.scalar_proj(x).unflatten(-1, (len(SCALARS), self.num_groups)).to(dtype) + self.scalar_bias.to(dtype)
        step, mix, write_gate, read_gate = scalars.unbind(-2)
        emission = Emission(
            write.to(dtype),
            read.to(dtype),
            F.softplus(step),
            mix.sigmoid(),
            write_gate.sigmoid(),
            read_gate.sigmoid(),
            self._coords(x, dtype),
        )
        return emission, window

    def _coords(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The right suffix [B, T, G, K]."""
        shape = (*x.shape[:-1], self.num_groups, self.num_coordinates)
        if self.right_proj is None or self.right_bias is None or self.zero_suffix:
            return x.new_zeros(shape, dtype=dtype)
        return self.right_proj(x).unflatten(-1, shape[-2:]).to(dtype) + self.right_bias.to(dtype)
