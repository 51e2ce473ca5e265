"""The RMS norm: torch's module, with one pass over memory forward and one backward on the CPU.

Where torch has to see the formula (a compiler, a transform, a second derivative), or where tensors are not plain CPU numbers
of one dtype, the norm is torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from shippo_ssm.dispatch import direct_reason, is_readable
from shippo_ssm.engine import differentiate, launch
from shippo_ssm.layers._norm_cpu import Norm, NormGradient, build_norm, build_norm_gradient
from shippo_ssm.layers.weight_decay import NoWeightDecay

# Numbers that are worth a thread, and tokens whose part of the weight's gradient is summed one after another.
_MIN_NUMBERS, _CHUNK = 1 << 15, 64
_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class _Normed(torch.autograd.Function):
    """y = u / sqrt(mean(u^2) + eps) weight for contiguous u [.., channels], with its gradient in one pass."""

    @staticmethod
    def forward(ctx: FunctionCtx | None, *inputs: Any) -> Tensor:
        u, weight, eps = inputs
        y, channels, storage = torch.empty_like(u), u.shape[-1], _NAMES[u.dtype]
        operands = Norm(u.data_ptr(), weight.data_ptr(), y.data_ptr(), channels)
        constants = {"storage": storage, "dtype": "float32" if storage == "bfloat16" else storage, "eps": eps}
        launch(build_norm, u.numel() // channels, operands, min_items_per_thread=_MIN_NUMBERS // channels + 1, **constants)
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
        d_weight = torch.zeros(chunks, channels, dtype=u.dtype)
        addresses = (tensor.data_ptr() for tensor in (u, weight, dy, du, d_weight))
        operands = NormGradient._make((*addresses, channels, tokens))
        min_items_per_thread = _MIN_NUMBERS // (channels * _CHUNK) + 1
        launch(build_norm_gradient, chunks, operands, min_items_per_thread, dtype=_NAMES[u.dtype], eps=ctx.eps, chunk=_CHUNK)
        return du, d_weight.sum(0), None


class RMSNorm(nn.RMSNorm):
    """y = u / sqrt(mean(u^2) + eps) weight over the last axis."""

    def forward(self, input: Tensor) -> Tensor:
        weight, eps = self.weight, self.eps
        if input.dtype not in _NAMES or eps is None or direct_reason(input, weight):
            return super().forward(input)
        if torch.is_grad_enabled() and input.dtype != torch.bfloat16:
            return _Normed.apply(input.contiguous(), weight, eps)  # pyright: ignore[reportReturnType]
        if torch.is_grad_enabled() or not input.is_contiguous():
            return super().forward(input)
        return _Normed.forward(None, input, weight, eps)


class NoDecayNorm(NoWeightDecay, RMSNorm):
    """An RMS norm whose weight has no weight decay and stays in float32."""

    no_weight_decay = ("weight",)
