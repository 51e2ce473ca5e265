"""RMS norm and scaling of the rows of a tensor, with one pass over memory forward and one backward on the CPU.

Where torch has to see the formula (a compiler, a transform, a second derivative), or where tensors are not plain CPU numbers
of one dtype, the operations are torch's. `_rows_cpu.py` has the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from shippo_ssm.dispatch import direct_reason, is_readable
from shippo_ssm.engine import allocate, differentiate, launch
from shippo_ssm.layers._rows_cpu import Norm, Rows, Weighed, build_norm, build_norm_gradient, build_scaled
from shippo_ssm.layers.weight_decay import NoWeightDecay

# Numbers that are worth a thread, tokens whose part of the weight's gradient is summed one after another, and the widest row
# whose columns are vectors of the scaling kernel.
_MIN_NUMBERS, _CHUNK, _MAX_WIDTH = 1 << 15, 64, 16
_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class _Normed(torch.autograd.Function):
    """y = u / sqrt(mean(u^2) + eps) weight for contiguous u [.., channels], with its gradient in one pass."""

    @staticmethod
    def forward(ctx: FunctionCtx | None, *inputs: Any) -> Tensor:
        u, weight, eps = inputs
        y, channels, tokens, storage = torch.empty_like(u), u.shape[-1], u.numel() // u.shape[-1], _NAMES[u.dtype]
        operands = Norm(u.data_ptr(), weight.data_ptr(), y.data_ptr(), channels, tokens)
        constants = {"storage": storage, "dtype": "float32" if storage == "bfloat16" else storage, "eps": eps}
        launch(build_norm, tokens, operands, _MIN_NUMBERS // channels + 1, raw=True, **constants)
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
        operands = Norm._make((*addresses[:3], channels, tokens, *addresses[3:]))
        constants = {"dtype": _NAMES[u.dtype], "eps": ctx.eps, "chunk": _CHUNK}
        launch(build_norm_gradient, chunks, operands, _MIN_NUMBERS // (channels * _CHUNK) + 1, raw=True, **constants)
        return du, d_weight.sum(0), None


class RMSNorm(nn.RMSNorm):
    """y = u / sqrt(mean(u^2) + eps) weight over the last axis."""

    def forward(self, input: Tensor) -> Tensor:
        weight, eps = self.weight, self.eps
        fits = input.dtype in _NAMES and eps is not None and not direct_reason(input, weight)
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
    if wide or x.dtype not in (torch.float32, torch.float64) or direct_reason(x, *weights):
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
            weighed.append(Weighed(weight.data_ptr(), products[-1].data_ptr(), 0))
        ctx.sizes = {"dtype": _NAMES[x.dtype], "width": x.numel() // count, "num_weights": len(weights)}
        operands = Rows(x.data_ptr(), 0, weighed[0], weighed[-1])
        launch(build_scaled, count, operands, _MIN_NUMBERS // ctx.sizes["width"] + 1, raw=True, **ctx.sizes, backward=False)
        ctx.save_for_backward(*inputs)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        if torch.is_grad_enabled() or not all(map(is_readable, cotangents)):
            return differentiate(_scaled_formula, (x, *weights), ctx.needs_input_grad, cotangents)
        cotangents, gradients = tuple(map(Tensor.contiguous, cotangents)), [allocate(x, tuple(x.shape))]
        gradients += [torch.empty_like(weight) for weight in weights]
        weighed = [Weighed._make(t.data_ptr() for t in each) for each in zip(weights, cotangents, gradients[1:])]
        operands = Rows(x.data_ptr(), gradients[0].data_ptr(), weighed[0], weighed[-1])
        count, min_items = weights[0].numel(), _MIN_NUMBERS // ctx.sizes["width"] + 1
        launch(build_scaled, count, operands, min_items, raw=True, **ctx.sizes, backward=True)
        return tuple(gradients)
