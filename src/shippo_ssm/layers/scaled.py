"""Rows times numbers, as gates and steps stand in front of a memory: one pass over memory forward and one backward on the CPU.

torch broadcasts a number over the few channels of a group one group at a time, several times slower than memory; the gradient
adds a product and a sum over as few channels. `_scaled_kernels.py` has them as one kernel each. Where torch has to see the
formula it is `weight x`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shippo_ssm._private import values_visible
from shippo_ssm.engine import allocate, launch, serves
from shippo_ssm.layers._scaled_kernels import Rows, Weighed, build_scaled

# Numbers that are worth a thread, and the widest row whose columns are vectors of a kernel.
_FEWEST, _WIDEST = 1 << 15, 16
_NAMES = {torch.float32: "float32", torch.float64: "float64"}
_NONE = Weighed(0, 0, 0)


def scaled(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """weight x for each of one or two weights [..] and rows x [.., (r,) P]; the axes that a weight lacks are the last of x.

    Example:
        >>> import torch
        >>> first, second = scaled(torch.ones(2, 3), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))
        >>> first.tolist(), second.tolist()
        ([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    """
    width = x.shape[weights[0].ndim :].numel()
    if x.dtype not in _NAMES or width > _WIDEST or not serves(x, *weights):
        return _formula(x, *weights)
    products = _Scaled.apply(x.contiguous(), *(weight.contiguous() for weight in weights))
    assert isinstance(products, tuple)
    return products


def _formula(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(weight.view(*weight.shape, *[1] * (x.ndim - weight.ndim)) * x for weight in weights)


class _Scaled(torch.autograd.Function):
    """`scaled` of contiguous CPU tensors, with its gradient in one pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        x, *weights = inputs
        products = tuple(allocate(x, tuple(x.shape)) for _ in weights)
        _run(x, None, [(weight, product, None) for weight, product in zip(weights, products)])
        ctx.save_for_backward(*inputs)
        return products

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        if torch.is_grad_enabled() or not all(map(values_visible, cotangents)):
            # A second derivative is torch's.
            wanted = [tensor for tensor, needed in zip((x, *weights), ctx.needs_input_grad) if needed]
            with torch.enable_grad():
                products = _formula(x, *weights)
            found = iter(torch.autograd.grad(products, wanted, cotangents, create_graph=True))
            return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
        d_x, d_weights = allocate(x, tuple(x.shape)), [torch.empty_like(weight) for weight in weights]
        _run(x, d_x, list(zip(weights, (cotangent.contiguous() for cotangent in cotangents), d_weights)))
        return d_x, *d_weights


def _run(x: Tensor, d_x: Tensor | None, weighed: list[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    def address(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    count = weighed[0][0].numel()
    first, second = [*(Weighed(*map(address, each)) for each in weighed), _NONE][:2]
    constants = {"width": x.numel() // count, "num_weights": len(weighed), "backward": d_x is not None}
    operands = Rows(address(x), address(d_x), first, second)
    launch(build_scaled, count, operands, _FEWEST // constants["width"] + 1, dtype=_NAMES[x.dtype], **constants)
