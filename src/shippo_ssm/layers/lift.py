"""Lifts: a fixed online memory with a moving channel frame, as a layer with the calls of `Shippo`.

A fixed online memory, C' = A C + B f^T (stationary) or t C' = A C + B f^T (scaled), is a generator A, [N, N] or the N entries
of a complex diagonal, and an input vector B [N]. With the input held constant over a step, C_k = left_k C_{k-1} + gain_k f_k^T
is exact: left = exp(h A) and gain = int_0^h exp(s A) B ds for a step of length h of a stationary memory, and
left = exp(log(t / s) A) and gain = (I - left) (-A)^{-1} B for a scaled one from time s to t, with left = 0 from time 0 on.

Data path: the channels of u [B, T, d_model] are cut into G groups of width P; a linear map of u_t gives the coordinates of the
right action R_t per group; the memory moves as H_t = left_t H_{t-1} R_t + gain_t u_t^T, [B, G, N, P]; each channel reads with a
vector of its own, y = Re(read^T H) + skip u. With right = "none" this is the ordinary layer of that measure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import expm
from torch import Tensor, nn

from shippo_ssm._expect import expect_real, expect_size
from shippo_ssm.actions import RightAction, get_family
from shippo_ssm.dispatch import compute_dtype
from shippo_ssm.layers import states
from shippo_ssm.layers.mixer import Mixer, Segment
from shippo_ssm.scan import block_affine_scan
from shippo_ssm.scan.packing import packing_of


@dataclass(frozen=True, slots=True)
class OnlineMemory:
    """A fixed online memory."""

    A: np.ndarray
    """Generator: [N, N], or the diagonal [N] (complex)."""
    B: np.ndarray
    """Input vector [N]."""
    flow: Callable[[np.ndarray], np.ndarray] | None = None
    """Of a scaled memory, t C' = A C + B f^T: left [K, N, N] as a function of s / t [K]; `None` for a stationary one."""

    @property
    def scaled(self) -> bool:
        """Whether time divides."""
        return self.flow is not None

    @property
    def diagonal(self) -> bool:
        """Whether A is a diagonal."""
        return self.A.ndim == 1

    @property
    def order(self) -> int:
        """N."""
        return self.B.shape[0]

    def steps(self, times: Any, step: Any = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """left [K, N, N] (or [K, N] for a diagonal) and gain [K, N] of the steps that end at `times` [K].

        Args:
            times: ends of the steps, from a start at 0; they matter for a scaled memory only.
            step: lengths of the steps, one for all or [K]; a step of length 0 changes nothing.
        """
        times, step = np.broadcast_arrays(np.asarray(times, dtype=np.float64), np.asarray(step, dtype=np.float64))
        if self.flow is not None:
            ratios = np.divide(times - step, times, out=np.ones_like(times), where=step > 0).clip(0)
            ratios, index = np.unique(ratios, return_inverse=True)
            left = np.array(self.flow(ratios))
            left[ratios == 0] = 0
            left = left[index]
            resting = -np.linalg.solve(self.A, self.B)
            return left, resting - left @ resting
        # One exponential for each length that occurs.
        lengths, index = np.unique(step, return_inverse=True)
        lengths = lengths[:, None]
        if self.diagonal:
            small = np.broadcast_to(lengths, (len(lengths), self.order)).astype(self.A.dtype)
            mean = np.divide(np.expm1(lengths * self.A), self.A, out=small, where=self.A != 0)
            left, gain = np.exp(lengths * self.A), mean * self.B
        else:
            # exp of [[A, B], [0, 0]] holds both, and needs no inverse of A.
            block = np.zeros((self.order + 1,) * 2)
            block[:-1, :-1], block[:-1, -1] = self.A, self.B
            both = np.stack([expm(length * block) for length in lengths[:, 0]])
            left, gain = both[:, :-1, :-1], both[:, :-1, -1]
        return left[index], gain[index]


def online_memory(measure: Any, d_state: int = 32, theta: float = 64.0) -> OnlineMemory:
    """The memory that a name or an object stands for.

    Args:
        measure: "legs" (the whole past, scaled), "legt" (a window of `theta` tokens), "s4d" (complex diagonal
            a_n = -1/2 + i pi n), a measure of `shippo_ssm.projection`, or an `OnlineMemory`.
        d_state: N, for a name.
        theta: window of "legt", in units of time.
    """
    if isinstance(measure, OnlineMemory):
        return measure
    # Loads on first use: few layers need the measures.
    from shippo_ssm.projection import LegS, LegT, Measure

    if isinstance(measure, str):
        expect_size("lift", "d_state", d_state)
        if measure == "s4d":
            return OnlineMemory(-0.5 + 1j * np.pi * np.arange(d_state), np.ones(d_state, dtype=np.complex128))
        measure = LegS(d_state) if measure == "legs" else LegT(d_state, theta) if measure == "legt" else measure
    if not isinstance(measure, Measure):
        raise ValueError(f"lift: `measure` is {measure!r:.60}; expected 'legs', 'legt', 's4d', a measure or an OnlineMemory")
    flow = None if measure.stationary else lambda ratios: measure.flow(np.ones_like(ratios), ratios)
    return OnlineMemory(measure.A(1.0), measure.B(1.0), flow)


class LiftState(NamedTuple):
    """What a lifted memory carries: the memory and the time it has seen.

    Args:
        memory: [B, G, N, P], complex for a complex measure.
        time: [B] in float64; without times of samples, the number of positions.
    """

    memory: Tensor
    time: Tensor

    detach, reorder, to = states.detach, states.select, states.to
    __repr__ = states.describe


class LiftedMemory(Mixer[LiftState]):
    """H_t = left_t H_{t-1} R_t + gain_t u_t^T, y_t = Re(read^T H_t) + skip u_t: a transported online memory; made by `lift`.

    Args:
        memory: the `OnlineMemory`.
        d_model: channels, a multiple of `group_width`.
        group_width: P.
        right: a family or its name.
        step: time between tokens, for a stationary measure.
    """

    supports_dt = True

    def __init__(self, memory: OnlineMemory, d_model: int, group_width: int, right: str | RightAction, step: float) -> None:
        super().__init__(d_model)
        for name, size in (("d_model", d_model), ("group_width", group_width)):
            expect_size("lift", name, size)
        if d_model % group_width:
            raise ValueError(f"lift: `group_width` is {group_width} with d_model = {d_model}; expected a divisor of d_model")
        expect_real("lift", "step", step, "a positive time between tokens", 0, open_end=True)
        self.memory, self.group_width, self.interval = memory, group_width, step
        self.num_groups, self.right = d_model // group_width, get_family(right, group_width)
        self.right_proj, self.right_bias = None, None
        if self.right.num_coordinates:
            self.right_proj = nn.Linear(d_model, self.num_groups * self.right.num_coordinates, bias=False)
            nn.init.normal_(self.right_proj.weight, std=0.02)
            self.right_bias = nn.Parameter(self.right.init_coordinates().repeat(self.num_groups, 1))
        # The real and imaginary part of a complex reading vector are two parameters, so that every dtype and optimiser works.
        parts = 2 if np.iscomplexobj(memory.A) else 1
        self.read = nn.Parameter(torch.randn(parts, self.num_groups, memory.order, group_width) / memory.order**0.5)
        self.skip = nn.Parameter(torch.ones(d_model))

    def init_state(self, batch_size: int) -> LiftState:
        """An empty memory."""
        dtype = compute_dtype(self.read.dtype)
        shape = (batch_size, self.num_groups, self.memory.order, self.group_width)
        memory = self.read.new_zeros(shape, dtype=dtype.to_complex() if len(self.read) == 2 else dtype)
        return LiftState(memory, self.read.new_zeros(batch_size, dtype=torch.float64))

    def run(self, u: Tensor, state: LiftState | None, segment: Segment) -> tuple[Tensor, LiftState]:
        mask, dt = segment.mask, segment.dt
        packing = None if segment.cu_seqlens is None else packing_of(segment.cu_seqlens)
        # No time passes at padding, and nothing happens.
        if dt is None and mask is not None:
            dt = mask.to(u.dtype)
        if packing is not None:
            dt = packing.pad(torch.ones_like(u[..., 0]) if dt is None else dt)
            u = packing.pad(u)
        fresh = self.init_state(u.shape[0])
        if state is None:
            state = fresh
        elif not isinstance(state, LiftState) or state.memory.shape != fresh.memory.shape:
            raise ValueError(f"LiftedMemory: `state` is of another model or batch; expected memory {tuple(fresh.memory.shape)}")
        y, state = self._move(u, state, dt)
        return (y if mask is None else y * mask.unsqueeze(-1)) if packing is None else packing.unpad(y), state

    def right_actions(self, u: Tensor, dt: Tensor | None = None) -> Tensor | None:
        """R [B, T, G, P, P] along `u` [B, T, d_model], with times `dt` [B, T]; `None` without a right action."""
        if self.right_proj is None or self.right_bias is None or not self.use_right:
            return None
        dtype = compute_dtype(u.dtype)
        coords = self.right_proj(u).unflatten(-1, (self.num_groups, -1)).to(dtype) + self.right_bias.to(dtype)
        step = torch.ones(u.shape[:2], dtype=dtype, device=u.device) if dt is None else dt.to(dtype)
        return self.right(coords, step.unsqueeze(-1).expand(coords.shape[:-1]))

    def _move(self, u: Tensor, state: LiftState, dt: Tensor | None) -> tuple[Tensor, LiftState]:
        if not u.shape[1]:
            return u, state
        dtype = state.memory.dtype
        value = u.unflatten(-1, (self.num_groups, self.group_width)).to(dtype)
        passed = torch.ones_like(u[..., 0], dtype=torch.float64) if dt is None else dt.detach().to(torch.float64)
        times = state.time.unsqueeze(1) + passed.cumsum(1)
        lengths = passed if self.memory.scaled else passed * self.interval
        both = self.memory.steps(times.flatten().cpu().numpy(), lengths.flatten().cpu().numpy())
        left, gain = (torch.from_numpy(part).to(times.device, dtype).unflatten(0, times.shape) for part in both)
        right = self.right_actions(u, dt)
        # The scan takes [B, G, T, ...]: every group has its own frame and the same left factor.
        left = left.unsqueeze(1).expand(-1, self.num_groups, *left.shape[1:])
        update = gain[:, None, :, :, None] * value.transpose(1, 2).unsqueeze(-2)
        right = None if right is None else right.transpose(1, 2).to(dtype)
        # A dense left factor is cheaper one step after another than as products of products.
        backend = "associative" if self.memory.diagonal else "reference"
        memories = block_affine_scan(left, right, update, initial_state=state.memory, backend=backend)
        read = self.read.to(compute_dtype(self.read.dtype))
        parts = [memories.real, -memories.imag] if memories.is_complex() else [memories]
        y: Any = sum(torch.einsum("bgtnp,gnp->btgp", part, c) for part, c in zip(parts, read))
        y = y.flatten(-2).to(u.dtype) + self.skip.to(u.dtype) * u
        return y, LiftState(memories[:, :, -1], times[:, -1])


def lift(
    measure: Any, right: str | RightAction = "split", *, d_model: int, d_state: int = 32, group_width: int = 4,
    step: float | None = None, theta: float = 64.0,
) -> LiftedMemory:  # fmt: skip
    """Turn a fixed online memory into a transported layer: H_t = left_t H_{t-1} R_t + gain_t u_t^T.

    Args:
        measure: "legs", "legt", "s4d", a measure or an `OnlineMemory`; see `online_memory`.
        right: "split", "dense", "none", or a family of width P. "none" is the ordinary layer.
        d_model: channels.
        d_state: N, for a measure given by name.
        group_width: P, channels per transport group.
        step: time between tokens for a stationary measure; 1 by default, 0.01 for "s4d". Scaled measures count tokens.
        theta: window of "legt" in units of time.

    Returns:
        A `LiftedMemory`. Times between samples (`dt`) are exact and get no gradient; a dense measure takes one matrix
        exponential for each length that occurs, so times on a grid are faster.
    """
    if step is None:
        step = 0.01 if measure == "s4d" else 1.0
    return LiftedMemory(online_memory(measure, d_state, theta), d_model, group_width, right, step)
