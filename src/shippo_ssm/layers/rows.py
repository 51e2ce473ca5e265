"""RMS norm, scaling of rows and the short convolution, with one pass over memory forward and one backward on the CPU.

Where torch has to see the formula (a compiler, a transform, a second derivative), or where tensors are not plain CPU numbers
of one dtype, the operations are torch's. `_rows_cpu.py` has the kernels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from shippo_ssm.dispatch import is_readable
from shippo_ssm.engine import allocate, differentiate, launch
from shippo_ssm.layers import _rows_cpu as kernels
from shippo_ssm.layers.halo import halo
from shippo_ssm.layers.linear import ARITHMETIC, NAMES
from shippo_ssm.layers.mixer import WHOLE, Segment
from shippo_ssm.layers.weight_decay import NoWeightDecay

# Numbers that are worth a thread, tokens whose part of the weight's gradient is summed one after another, and the widest row
# whose columns are vectors of the scaling kernel.
_MIN_NUMBERS, _CHUNK, _MAX_WIDTH = 1 << 15, 64, 16
_FLOATS = (torch.float32, torch.float64)


class _Normed(torch.autograd.Function):
    """y = u / sqrt(mean(u^2) + eps) weight for contiguous u [.., channels], with its gradient in one pass."""

    @staticmethod
    def forward(ctx: FunctionCtx | None, *inputs: Any) -> Tensor:
        u, weight, eps = inputs
        y, channels, tokens, storage = torch.empty_like(u), u.shape[-1], u.numel() // u.shape[-1], NAMES[u.dtype]
        operands = kernels.Norm(u.data_ptr(), weight.data_ptr(), y.data_ptr(), channels, tokens)
        constants = {"storage": storage, "dtype": ARITHMETIC[storage], "eps": eps}
        launch(kernels.build_norm, tokens, operands, _MIN_NUMBERS // channels + 1, raw=True, **constants)
        if ctx is not None:
            ctx.save_for_backward(u, weight)
            vars(ctx)["eps"] = eps
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (u, weight), (dy,) = ctx.saved_tensors, grad_outputs
        if torch.is_grad_enabled() or not is_readable(dy):

            def formula(u: Tensor, weight: Tensor) -> Tensor:
                return F.rms_norm(u, weight.shape, weight, ctx.eps)

            return *differentiate(formula, (u, weight), ctx.needs_input_grad[:2], (dy,)), None
        channels = u.shape[-1]
        tokens, dy, du = u.numel() // channels, dy.contiguous(), torch.empty_like(u)
        chunks = -(-tokens // _CHUNK)
        d_weight = u.new_zeros(chunks, channels)
        addresses = [tensor.data_ptr() for tensor in (u, weight, dy, du, d_weight)]
        operands = kernels.Norm._make((*addresses[:3], channels, tokens, *addresses[3:]))
        constants = {"dtype": NAMES[u.dtype], "eps": ctx.eps, "chunk": _CHUNK}
        launch(kernels.build_norm_gradient, chunks, operands, _MIN_NUMBERS // (channels * _CHUNK) + 1, raw=True, **constants)
        return du, d_weight.sum(0), None


class RMSNorm(nn.RMSNorm):
    """y = u / sqrt(mean(u^2) + eps) weight over the last axis."""

    def forward(self, input: Tensor) -> Tensor:
        weight, eps = self.weight, self.eps
        fits = input.dtype in NAMES and eps is not None and is_readable(input, weight)
        if fits and weight.shape == input.shape[-1:] and weight.is_contiguous():
            if torch.is_grad_enabled() and input.dtype != torch.bfloat16:
                return _Normed.apply(input.contiguous(), weight, eps)  # pyright: ignore[reportReturnType]
            if not torch.is_grad_enabled() and input.is_contiguous():
                return _Normed.forward(None, input, weight, eps)
        if weight is None or input.dtype == weight.dtype:
            return super().forward(input)
        # torch warns of two dtypes, which autocast and half-precision models make, and computes in the wider one.
        wide = torch.promote_types(input.dtype, weight.dtype)
        return F.rms_norm(input.to(wide), weight.shape, weight.to(wide), eps).to(input.dtype)


class NoDecayNorm(NoWeightDecay, RMSNorm):
    """An RMS norm whose weight has no weight decay and stays in float32."""

    no_weight_decay = ("weight",)


def scaled(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """weight x for each of one or two weights [..] and rows x [.., (r,) P]; the axes that a weight lacks are the last of x.

    torch is slow at broadcasting a number over the few channels of a group, and at its gradient.
    """
    wide = x.shape[weights[0].ndim :].numel() > _MAX_WIDTH
    if wide or x.dtype not in _FLOATS or not is_readable(x, *weights):
        return _scaled_formula(x, *weights)
    products = _Scaled.apply(x.contiguous(), *map(Tensor.contiguous, weights))
    assert isinstance(products, tuple)
    return products


def _scaled_formula(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(weight.view(*weight.shape, *[1] * (x.ndim - weight.ndim)) * x for weight in weights)


class _Scaled(torch.autograd.Function):
    """`scaled` of contiguous CPU tensors, with its gradient in one pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        x, *weights = inputs
        count, weighed, products = weights[0].numel(), [], []
        for weight in weights:
            products.append(allocate(x, tuple(x.shape)))
            weighed.append(kernels.Weighed(weight.data_ptr(), products[-1].data_ptr(), 0))
        ctx.sizes = {"dtype": NAMES[x.dtype], "width": x.numel() // count, "num_weights": len(weights)}
        operands = kernels.Rows(x.data_ptr(), 0, weighed[0], weighed[-1])
        launch(
            kernels.build_scaled, count, operands, _MIN_NUMBERS // ctx.sizes["width"] + 1, raw=True, **ctx.sizes, backward=False
        )
        ctx.save_for_backward(*inputs)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_readable(*cotangents):
            return differentiate(_scaled_formula, (x, *weights), ctx.needs_input_grad, cotangents)
        cotangents, gradients = tuple(map(Tensor.contiguous, cotangents)), [allocate(x, tuple(x.shape))]
        gradients += [torch.empty_like(weight) for weight in weights]
        weighed = [kernels.Weighed._make(t.data_ptr() for t in each) for each in zip(weights, cotangents, gradients[1:])]
        operands = kernels.Rows(x.data_ptr(), gradients[0].data_ptr(), weighed[0], weighed[-1])
        count, min_items = weights[0].numel(), _MIN_NUMBERS // ctx.sizes["width"] + 1
        launch(kernels.build_scaled, count, operands, min_items, raw=True, **ctx.sizes, backward=True)
        return tuple(gradients)


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
        operands = kernels.Conv(row.data_ptr(), weight.data_ptr(), y.data_ptr(), channels, y.shape[1], bias=bias.data_ptr())
        constants = {"dtype": NAMES[row.dtype], "taps": taps}
        launch(kernels.build_conv, y.numel() // channels, operands, _MIN_NUMBERS // channels + 1, raw=True, **constants)
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
        operands = kernels.Conv._make((*addresses[:3], channels, length, 0, *addresses[3:]))
        constants = {"dtype": NAMES[row.dtype], "taps": taps}
        launch(kernels.build_conv_gradient, batch, operands, _MIN_NUMBERS // (length * channels) + 1, raw=True, **constants)
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
        if fits and torch.is_grad_enabled() and row.dtype in _FLOATS and x.numel() and is_readable(row, weight, bias):
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
