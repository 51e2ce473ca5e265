"""A streaming memory as a PyTorch layer: the states of `shippo_ssm.projection.StreamingMemory`, with gradients.

The transport is given, by a gyroscope for example: samples [B, T, d] and turns [B, T, 3] become coefficients C [B, T, N, d] in
the present frame of each sample, for a classifier behind it. Nothing in the layer is learned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shippo_ssm._expect import expect_size
from shippo_ssm.actions import expm
from shippo_ssm.projection import Measure
from shippo_ssm.projection._numerics import gauss
from shippo_ssm.projection.streaming import block_operators, cut_long_steps, pieces
from shippo_ssm.scan import block_affine_scan


def cross_matrix(vector: Tensor) -> Tensor:
    """[v]x [.., 3, 3] of vectors [.., 3]."""
    x, y, z = vector.unbind(-1)
    zero = torch.zeros_like(x)
    return torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))


def start_at_zero(steps: np.ndarray) -> np.ndarray:
    """The times [B, T + 1] of steps [B, T]."""
    return np.cumsum(np.pad(steps, ((0, 0), (1, 0))), axis=1)


class StreamingLayer(nn.Module):
    """C_t [N, d] of all samples so far, in the frame of sample t: the numbers of `StreamingMemory`, differentiable.

    Args:
        measure: LegS, LegT, LagT or Fourier of `shippo_ssm.projection`.
        channels: d; sensors that share a frame stand side by side.
        rate: samples per unit of time, where `dt` is not given.

    Example:
        >>> import torch
        >>> from shippo_ssm.projection import LegT
        >>> layer = StreamingLayer(LegT(8, 1.0), 6, rate=50.0)
        >>> layer(torch.randn(2, 100, 6), turn=0.01 * torch.randn(2, 100, 3)).shape
        torch.Size([2, 100, 8, 6])
    """

    def __init__(self, measure: Measure, channels: int, rate: float | None = None) -> None:
        super().__init__()
        expect_size("StreamingLayer", "channels", channels)
        self.measure, self.channels, self.rate = measure, channels, rate

    def forward(self, sample: Tensor, dt: Any = None, turn: Tensor | None = None) -> Tensor:
        """States [B, T, N, d] from a memory that is empty at first.

        Args:
            sample: [B, T, d]; NaN where one is missing: the frame advances and nothing is written.
            dt: [B, T] or [T], or a number: time since the previous sample; default 1 / rate. No gradient.
            turn: motion since the previous sample: rotation vectors [B, T, 3], or logarithms of step matrices [B, T, w, w].
        """
        lead, came = sample.shape[:2], tuple(sample.shape)
        if sample.ndim != 3 or sample.shape[-1] != self.channels or not sample.shape[1]:
            raise ValueError(f"StreamingLayer: `sample` has shape {came}; expected [B, T, {self.channels}], T >= 1")
        if dt is None and self.rate is None:
            raise ValueError("StreamingLayer: `dt` is missing; expected the time since the previous sample; or pass rate=")
        steps = 1 / self.rate if dt is None and self.rate else dt.detach().cpu() if isinstance(dt, Tensor) else dt
        steps = np.broadcast_to(np.asarray(steps, dtype=float), lead)
        if not ((steps >= 0) & (steps < np.inf)).all():
            raise ValueError("StreamingLayer: `dt` is negative or not finite; expected times >= 0; sort the samples")
        if turn is not None and (turn.shape[:2] != lead or turn.shape[2:] not in ((3,), (turn.shape[-1],) * 2)):
            raise ValueError(f"StreamingLayer: `turn` has shape {tuple(turn.shape)}; expected {(*lead, 3)} or [B, T, w, w]")
        generator = cross_matrix(turn) if turn is not None and turn.ndim == 3 else turn
        width = 1 if generator is None else generator.shape[-1]
        if self.channels % width:
            raise ValueError(f"StreamingLayer: `turn` has {width} axes; expected a divisor of {self.channels} channels")
        times = start_at_zero(steps)
        values = sample.unflatten(-1, (-1, width))
        present = values.isfinite().all(-1, keepdim=True)
        values = torch.where(present, values, 0.0)
        # The first sample, and one after a missing one, is held over its step.
        before = torch.cat([values[:, :1], torch.where(present[:, :-1], values[:, :-1], values[:, 1:])], 1)
        cut = cut_long_steps(self.measure, times, steps)
        if cut is not None:
            which, begin, end = cut
            steps = steps[:, which] * (end - begin)
            times = start_at_zero(steps)
            low, high = (torch.from_numpy(share).to(values)[..., None, None] for share in (begin, end))
            first, second, present = before[:, which], values[:, which], present[:, which]
            before, values = (first + share * (second - first) for share in (low, high))
            generator = None if generator is None else (high - low) * generator[:, which]
        state, found = None, []
        for part in pieces(times, steps.shape[1]):
            tensors = (None if tensor is None else tensor[:, part] for tensor in (before, values, generator, present))
            found.append(self._block(times[:, part.start : part.stop + 1], steps[:, part], state, *tensors))
            state = found[-1][:, :, -1]
        states = torch.cat(found, 2).permute(0, 2, 3, 1, 4).flatten(-2)
        return states if cut is None else states[:, np.searchsorted(cut[0], np.arange(lead[1]), side="right") - 1]

    def _block(self, times: Any, steps: Any, state: Tensor | None, before: Any, now: Any, turn: Any, present: Any) -> Tensor:
        """States [B, G, T, N, w] of a block, G sensors."""
        operators, index = block_operators(self.measure, times, steps)
        order = self.measure.N
        operator = torch.from_numpy(operators).to(now)[torch.from_numpy(index).to(now.device)].unflatten(0, steps.shape)
        node = torch.from_numpy(gauss(operators.shape[1] - order)[0]).to(now)[:, None, None]
        # [B, T, q, G, w]
        line = (1 - node) * before.unsqueeze(2) + node * now.unsqueeze(2)
        right = None
        if turn is not None:
            line = line @ expm((1 - node) * turn.unsqueeze(2))
            right = expm(turn).unsqueeze(1).expand(-1, now.shape[2], -1, -1, -1)
        line = line * present.unsqueeze(2)
        update = torch.einsum("btqn,btqgw->bgtnw", operator[:, :, order:], line)
        left = operator[:, :, :order].mT.unsqueeze(1).expand(-1, now.shape[2], -1, -1, -1)
        return block_affine_scan(left, right, update, initial_state=state, backend="reference")
