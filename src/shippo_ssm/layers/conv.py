"""The short causal depthwise convolution, y_t = bias + sum_k weight_k x_{t-K+1+k}, with a window that continues it exactly.

Data path: the inputs [B, T, D] are put behind the window [B, K - 1, D] of the inputs before them (zeros at a start), and
the K shifted copies are weighed and summed. Padded positions take no part: the real inputs of a row are moved together
behind its window, convolved, and moved back. Packed sequences stand in one long row, each behind its own window.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shippo_ssm.dispatch import direct_reason, is_readable
from shippo_ssm.engine import differentiate, launch
from shippo_ssm.layers._conv_cpu import Conv, build_conv, build_conv_gradient
from shippo_ssm.layers.halo import halo
from shippo_ssm.layers.mixer import WHOLE, Segment

# Numbers that are worth a thread.
_MIN_NUMBERS = 1 << 15
_NAMES = {torch.float32: "float32", torch.float64: "float64"}


def shifted_sums(row: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y_t = bias + sum_k weight_k row_{t+k}, [B, T, D] of row [B, T + K - 1, D]; faster than a depthwise convolution."""
    length, y = row.shape[1] - len(weight) + 1, bias
    for tap, factor in enumerate(weight.unbind()):
        y = torch.addcmul(y, row[:, tap : tap + length], factor)
    return y


class _Convolved(torch.autograd.Function):
    """`shifted_sums` of contiguous CPU tensors, with its gradient in one pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        row, weight, bias = inputs
        (batch, long, channels), taps = row.shape, len(weight)
        y = row.new_empty(batch, long - taps + 1, channels)
        operands = Conv(row.data_ptr(), weight.data_ptr(), y.data_ptr(), channels, y.shape[1], bias=bias.data_ptr())
        constants = {"dtype": _NAMES[row.dtype], "taps": taps}
        launch(build_conv, y.numel() // channels, operands, _MIN_NUMBERS // channels + 1, raw=True, **constants)
        ctx.save_for_backward(row, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (row, weight, bias), (dy,) = ctx.saved_tensors, grad_outputs
        if torch.is_grad_enabled() or not is_readable(dy):
            return differentiate(shifted_sums, (row, weight, bias), ctx.needs_input_grad, (dy,))
        (batch, length, channels), taps, dy = dy.shape, len(weight), dy.contiguous()
        d_row, d_taps = torch.zeros_like(row), row.new_zeros(batch, taps + 1, channels)
        addresses = [tensor.data_ptr() for tensor in (row, weight, dy, d_row, d_taps)]
        operands = Conv._make((*addresses[:3], channels, length, 0, *addresses[3:]))
        constants = {"dtype": _NAMES[row.dtype], "taps": taps}
        launch(build_conv_gradient, batch, operands, _MIN_NUMBERS // (length * channels) + 1, raw=True, **constants)
        d_weight, d_bias = d_taps.sum(0).split([taps, 1])
        return d_row, d_weight, d_bias.squeeze(0)


class ShortConv(nn.Module):
    """y_t = bias + sum_{k < K} weight_k x_{t-K+1+k} per channel, over the real positions of each sequence.

    Args:
        channels: D.
        width: K, the number of taps; 1 is a plain per-channel gain.
        bias: whether there is a bias.
        place: device and dtype.
    """

    def __init__(self, channels: int, width: int, *, bias: bool = True, **place: Any) -> None:
        super().__init__()
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(width, channels, **place))
        self.bias = nn.Parameter(torch.empty(channels, **place)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1 / sqrt(K), as for any depthwise convolution."""
        bound = 1 / math.sqrt(self.width)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @torch.no_grad()
    def start_as_shift(self, lags: Tensor) -> None:
        """y_t = x_{t - lag} per channel, lags [D] below K: one tap is one, the others and the bias are zero."""
        self.weight.zero_()
        self.weight.scatter_(0, self.width - 1 - lags.unsqueeze(0), 1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, window: Tensor | None = None, segment: Segment = WHOLE) -> tuple[Tensor, Tensor]:
        """Convolve `x` [B, T, D] behind a window; returns y [B, T, D] and the next window.

        Args:
            x: [B, T, D].
            window: [B, K - 1, D], or [num_sequences, K - 1, D] with `cu_seqlens`; zeros by default.
            segment: padding (where y is not meaningful) and packing; on a part of a sequence, the window is that of the whole.
        """
        mask, cu_seqlens = segment.mask, segment.cu_seqlens
        if window is None:
            count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            window = x.new_zeros(count, self.width - 1, self.channels)
        if segment.part is not None and self.width > 1:
            (window,), (after,) = halo([x], [window], segment)
            return self.forward(x, window, segment._replace(part=None))[0], after
        # Under autocast the inputs may be of a lower precision than a window kept from an earlier call.
        window = window.to(x.dtype)
        if cu_seqlens is not None:
            return self._packed(x, window, cu_seqlens)
        row, place = torch.cat([window, x], dim=1), None
        if mask is not None:
            # Padding goes to the front; window and real inputs stand behind it in their order.
            real = torch.cat([mask.new_ones(mask.shape[0], self.width - 1), mask], dim=1)
            padding = ~real
            front = padding.sum(1, keepdim=True)
            place = torch.where(real, front + real.cumsum(1), padding.cumsum(1)).unsqueeze(-1) - 1
            row = torch.zeros_like(row).scatter(1, place.expand_as(row), row)
        weight = self.weight.to(row.dtype)
        bias = row.new_zeros(self.channels) if self.bias is None else self.bias.to(row.dtype)
        fits = weight.shape == (self.width, row.shape[2]) and bias.shape == row.shape[2:]
        if fits and torch.is_grad_enabled() and row.dtype in _NAMES and x.numel() and not direct_reason(row, weight, bias):
            y = _Convolved.apply(row, weight.contiguous(), bias.contiguous())
            assert isinstance(y, Tensor)
        else:
            y = shifted_sums(row, weight, bias)
        if place is not None:
            # The outputs before the first real input are missing from a convolution without padding; they are never real.
            y = torch.cat([torch.zeros_like(window), y], dim=1)
            y = y.gather(1, place.expand_as(y))[:, self.width - 1 :]
        return y, row[:, x.shape[1] :]

    def _packed(self, x: Tensor, window: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """One long row: window of sequence 0, sequence 0, window of sequence 1, sequence 1, .."""
        before = self.width - 1
        bounds, positions = cu_seqlens.to(torch.int64), torch.arange(x.shape[1], device=x.device)
        sequence_of = torch.searchsorted(bounds, positions, right=True) - 1
        windows = torch.arange(len(window) * before, device=x.device).view(len(window), before)
        starts, ends = bounds[:-1, None] + windows, bounds[1:, None] + windows
        row = x.new_zeros(x.shape[1] + len(window) * before, x.shape[2])
        row = row.index_put((positions + (sequence_of + 1) * before,), x[0]).index_put((starts,), window).unsqueeze(0)
        y = self.forward(row[:, before:], row[:, :before])[0]
        return y[:, positions + sequence_of * before], row[0, ends]
