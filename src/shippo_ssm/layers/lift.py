"""Lifts: a fixed online memory with a moving channel frame, as a layer with the calls of `Shippo`.

Data path: the channels of u [B, T, d_model] are cut into G groups of width P; a linear map of u_t gives the coordinates of the
right action R_t per group; the memory moves as H_t = left_t H_{t-1} R_t + gain_t u_t^T, [B, G, N, P], with the exact steps of
the measure (dense or complex diagonal, see `online.py`); each channel reads with a vector of its own, y = Re(read^T H) +
skip u. With right = "none" this is the ordinary layer of that measure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shippo_ssm._dtypes import compute_dtype
from shippo_ssm._expect import expect_real, expect_size
from shippo_ssm.actions import RightAction, get_family
from shippo_ssm.layers.mixer import Mixer, Segment
from shippo_ssm.layers.online import OnlineMemory, online_memory
from shippo_ssm.scan import block_affine_scan
from shippo_ssm.scan.packing import packing_of


class LiftState(NamedTuple):
    """What a lifted memory carries: the memory and how many positions it has seen.

    Args:
        memory: [B, G, N, P], complex for a complex measure.
        count: [B] integers.
    """

    memory: Tensor
    count: Tensor

    def detach(self) -> LiftState:
        """The same numbers outside the graph."""
        return LiftState(self.memory.detach(), self.count)

    def reorder(self, index: Tensor) -> LiftState:
        """Rows `index` of the batch."""
        return LiftState(self.memory.index_select(0, index), self.count.index_select(0, index))

    def to(self, device: torch.device | str) -> LiftState:
        """The state on another device."""
        return LiftState(self.memory.to(device), self.count.to(device))


class LiftedMemory(Mixer[LiftState]):
    """H_t = left_t H_{t-1} R_t + gain_t u_t^T, y_t = Re(read^T H_t) + skip u_t: a transported online memory; made by `lift`.

    Args:
        memory: the `OnlineMemory`.
        d_model: channels, a multiple of `group_width`.
        group_width: P.
        right: a family or its name.
        step: time between tokens, for a stationary measure.
    """

    def __init__(self, memory: OnlineMemory, d_model: int, group_width: int, right: str | RightAction, step: float) -> None:
        super().__init__(d_model)
        for name, size in (("d_model", d_model), ("group_width", group_width)):
            expect_size("lift", name, size)
        if d_model % group_width:
            raise ValueError(
                f"lift: `group_width` is {group_width} with d_model = {d_model}; expected a divisor of d_model; choose another"
            )
        expect_real("lift", "step", step, "a positive time between tokens", 0, open_end=True)
        self.memory, self.group_width, self.interval = memory, group_width, step
        self.num_groups = d_model // group_width
        self.right = get_family(right, group_width)
        self.right_proj, self.right_bias = None, None
        if self.right.num_coordinates:
            self.right_proj = nn.Linear(d_model, self.num_groups * self.right.num_coordinates, bias=False)
            nn.init.normal_(self.right_proj.weight, std=0.02)
            self.right_bias = nn.Parameter(self.right.init_coordinates().repeat(self.num_groups, 1))
        # The real and imaginary part of a complex reading vector are two parameters, so that every dtype and optimiser works.
        self._table = self._tabulate(1)
        parts = 2 if self._table[1].is_complex() else 1
        self.read = nn.Parameter(torch.randn(parts, self.num_groups, memory.order, group_width) / memory.order**0.5)
        self.skip = nn.Parameter(torch.ones(d_model))

    @property
    def is_complex(self) -> bool:
        """Whether the memory is complex."""
        return self.read.shape[0] == 2

    def init_state(self, batch_size: int) -> LiftState:
        """An empty memory."""
        dtype = compute_dtype(self.read.dtype)
        shape = (batch_size, self.num_groups, self.memory.order, self.group_width)
        memory = torch.zeros(shape, dtype=dtype.to_complex() if self.is_complex else dtype, device=self.read.device)
        return LiftState(memory, torch.zeros(batch_size, dtype=torch.int64, device=self.read.device))

    def run(self, u: Tensor, state: LiftState | None, segment: Segment) -> tuple[Tensor, LiftState]:
        mask, packing = segment.mask, None if segment.cu_seqlens is None else packing_of(segment.cu_seqlens)
        if packing is not None:
            mask = packing.pad(torch.ones(u.shape[:2], dtype=torch.bool, device=u.device))
            u = packing.pad(u)
        fresh = self.init_state(u.shape[0])
        if state is None:
            state = fresh
        elif not isinstance(state, LiftState) or state.memory.shape != fresh.memory.shape:
            raise ValueError(
                f"LiftedMemory: `state` does not fit; expected a LiftState with memory {tuple(fresh.memory.shape)}; "
                "the state belongs to another model or batch, make one with init_state(batch_size)"
            )
        y, state = self._move(u, state, mask)
        return y if packing is None else packing.unpad(y), state

    def right_actions(self, u: Tensor) -> Tensor | None:
        """R [B, T, G, P, P] along `u` [B, T, d_model]; `None` without a right action."""
        if self.right_proj is None or self.right_bias is None or not self.use_right:
            return None
        dtype = compute_dtype(u.dtype)
        coords = self.right_proj(u).unflatten(-1, (self.num_groups, -1)).to(dtype) + self.right_bias.to(dtype)
        return self.right(coords, torch.ones(coords.shape[:-1], dtype=dtype, device=u.device))

    def _move(self, u: Tensor, state: LiftState, mask: Tensor | None) -> tuple[Tensor, LiftState]:
        batch, length = u.shape[:2]
        if not length:
            return u, state
        dtype = state.memory.dtype
        value = u.unflatten(-1, (self.num_groups, self.group_width)).to(dtype)
        real = torch.ones(batch, length, dtype=torch.bool, device=u.device) if mask is None else mask
        positions = state.count.unsqueeze(1) + real.cumsum(1)
        left, gain = self._steps(positions, dtype)
        right = self.right_actions(u)
        if mask is not None:
            eye = (
                torch.ones_like(left[0, 0]) if self.memory.diagonal else torch.eye(left.shape[-1], dtype=dtype, device=u.device)
            )
            left = torch.where(real.view(batch, length, *[1] * (left.ndim - 2)), left, eye)
            gain = gain * real.unsqueeze(-1)
            if right is not None:
                eye = torch.eye(self.group_width, dtype=right.dtype, device=u.device)
                right = torch.where(real[..., None, None, None], right, eye)
        # The scan takes [B, G, T, ...]: every group has its own frame and the same left factor.
        groups = (batch, self.num_groups, length)
        left = left.unsqueeze(1).expand(*groups, *left.shape[2:])
        update = gain[:, None, :, :, None] * value.transpose(1, 2).unsqueeze(-2)
        right = None if right is None else right.transpose(1, 2).to(dtype)
        # A dense left factor is cheaper one step after another than as products of products.
        backend = "associative" if self.memory.diagonal else "reference"
        states = block_affine_scan(left, right, update, initial_state=state.memory, backend=backend)
        read = self.read.to(compute_dtype(self.read.dtype))
        parts = [states.real, states.imag] if self.is_complex else [states]
        signs = [1.0, -1.0]
        y = sum(sign * torch.einsum("bgtnp,gnp->btgp", part, c) for sign, part, c in zip(signs, parts, read))
        assert isinstance(y, Tensor)
        y = y.flatten(-2).to(u.dtype) + self.skip.to(u.dtype) * u
        return y * real.unsqueeze(-1), LiftState(states[:, :, -1], state.count + real.sum(1))

    def _steps(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """left and gain at `positions` [B, T] (0, before the first real position, counts as 1)."""
        if not self.memory.scaled:
            rows = torch.zeros_like(positions)
        else:
            rows = (positions - 1).clamp_min(0)
            needed = int(rows.max()) + 1
            if needed > len(self._table[1]):
                self._table = self._tabulate(2 * needed)
        left, gain = (table.to(positions.device, dtype) for table in self._table)
        return left[rows], gain[rows]

    def _tabulate(self, count: int) -> tuple[Tensor, Tensor]:
        """left and gain of the first `count` steps, in float64 on the CPU."""
        left, gain = self.memory.steps(np.arange(1, count + 1), self.interval)
        with torch.device("cpu"):
            return torch.tensor(left), torch.tensor(gain)


def lift(
    measure: Any,
    right: str | RightAction = "split",
    *,
    d_model: int,
    d_state: int = 32,
    group_width: int = 4,
    step: float | None = None,
    theta: float = 64.0,
) -> LiftedMemory:
    """Turn a fixed online memory into a transported layer: H_t = left_t H_{t-1} R_t + gain_t u_t^T.

    Args:
        measure: "legs", "legt", "s4d", or an object with A and B; see `online_memory`.
        right: "split", "dense", "none", or a family of width P. "none" is the ordinary layer.
        d_model: channels.
        d_state: N, for a measure given by name.
        group_width: P, channels per transport group.
        step: time between tokens for a stationary measure; 1 by default, 0.01 for "s4d". Scaled measures count tokens.
        theta: window of "legt" in units of time.

    Returns:
        A `LiftedMemory`, with `forward`, `step` and `init_state` as a `Shippo` layer has them.

    Example:
        >>> import torch
        >>> from shippo_ssm.layers import lift
        >>> layer = lift("legs", "dense", d_model=8, d_state=16)
        >>> y, state = layer(torch.randn(2, 5, 8), output_state=True)
        >>> y.shape, state.memory.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 2, 16, 4]))
    """
    if step is None:
        step = 0.01 if measure == "s4d" else 1.0
    return LiftedMemory(online_memory(measure, d_state, theta), d_model, group_width, right, step)
