"""Rows times numbers, weight x, with one pass over memory forward and one backward on the CPU (`_scaled_cpu.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shippo_ssm.dispatch import direct_reason, is_readable
from shippo_ssm.engine import allocate, differentiate, launch
from shippo_ssm.layers._scaled_cpu import Rows, Weighed, build_scaled

# Numbers that are worth a thread, and the widest row whose columns are vectors of the kernel.
_MIN_NUMBERS, _MAX_WIDTH = 1 << 15, 16
_NAMES = {torch.float32: "float32", torch.float64: "float64"}


def scaled(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """weight x for each of one or two weights [..] and rows x [.., (r,) P]; the axes that a weight lacks are the last of x.

    torch broadcasts a number over the few channels of a group slowly, and so is its gradient; a kernel makes each pass one over
    memory.
    """
    wide = x.shape[weights[0].ndim :].numel() > _MAX_WIDTH
    if wide or x.dtype not in _NAMES or direct_reason(x, *weights):
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
        launch(build_scaled, count, operands, _MIN_NUMBERS // ctx.sizes["width"] + 1, **ctx.sizes, backward=False)
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
        launch(build_scaled, weights[0].numel(), operands, _MIN_NUMBERS // ctx.sizes["width"] + 1, **ctx.sizes, backward=True)
        return tuple(gradients)
