"""Linear layers on few tokens without gradients: one compiled product, as fast as memory is read (`_linear_cpu.py`).

Several layers that read the same x are one product. Weights are float32, float64, bfloat16, or the int8 rows of torchao.
Layers with an adapter, a hook, a patched forward or another quantisation are called as modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shippo_ssm._private import int8_rows
from shippo_ssm.dispatch import is_plain, is_readable
from shippo_ssm.engine import launch_raw
from shippo_ssm.layers._linear_cpu import ROWS, Matrix, Product, build_product

NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
ARITHMETIC = {"float32": "float32", "float64": "float64", "bfloat16": "float32"}
# Tokens up to which the compiled product serves, and multiplications that are worth a thread.
MAX_TOKENS, _MIN_PRODUCTS = 64, 1 << 20


class Linear(nn.Linear):
    """y = x weight^T + bias; few tokens without gradients on the CPU are one compiled product."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not is_readable(input):
            return super().forward(input)
        few = 0 < input.numel() <= MAX_TOKENS * input.shape[-1] and is_operand(input)
        weights = weights_of((self,)) if few else None
        if weights is None or weights.dtype != input.dtype or weights.columns != input.shape[-1]:
            return super().forward(input)
        return product(weights, input.view(-1, weights.columns)).view(*input.shape[:-1], weights.rows)


# The modules whose weights may be read directly, with the forward that this replaces.
_FORWARDS = {nn.Linear: nn.Linear.forward, Linear: Linear.forward}


class Weights(NamedTuple):
    """Weights of linear layers that read the same x, as `product` takes them."""

    matrices: list[Matrix]
    dtype: torch.dtype
    """Of x and of the result."""
    stored: str
    """Dtype of the weights."""
    columns: int
    rows: int
    """Of all weights together."""
    items: int


def is_operand(tensor: Tensor) -> bool:
    """Whether a kernel may read a plain CPU tensor at its address: contiguous, and no negative view."""
    return tensor.is_contiguous() and not tensor.is_neg()


def weights_of(linears: Sequence[nn.Linear]) -> Weights | None:
    """The weights of up to four plain linear layers; `None` where one of them has to be called."""
    if nn.Linear.forward is not _FORWARDS[nn.Linear]:
        return None
    matrices, rows, items = [], 0, 0
    dtype = stored = columns = None
    for linear in linears:
        if type(linear).forward is not _FORWARDS.get(type(linear)):
            return None
        weight, bias = linear._parameters["weight"], linear._parameters["bias"]
        if weight is None:
            return None
        scale, numbers, own = 0, weight, weight.dtype
        if not is_plain(weight):
            by_rows = int8_rows(weight)
            if by_rows is None:
                return None
            numbers, scale = by_rows[0], by_rows[1].data_ptr()
        if own not in NAMES or numbers.ndim != 2 or len(numbers) < ROWS or not is_operand(numbers):
            return None
        if bias is not None and not (
            is_plain(bias) and bias.dtype == own and bias.shape == numbers.shape[:1] and is_operand(bias)
        ):
            return None
        found = (own, numbers.dtype, numbers.shape[1])
        if dtype is not None and found != (dtype, stored, columns):
            return None
        dtype, stored, columns = found
        matrices.append(Matrix(numbers.data_ptr(), 0 if bias is None else bias.data_ptr(), scale, len(numbers)))
        rows += len(numbers)
        items += -(-len(numbers) // ROWS)
    if dtype is None or not columns:
        return None
    matrices += [Matrix(0, 0, 0, 0)] * (4 - len(matrices))
    return Weights(matrices, dtype, "int8" if stored == torch.int8 else NAMES[dtype], columns, rows, items)


def product(weights: Weights, x: Tensor) -> Tensor:
    """x [tokens, columns], contiguous, times the transposes of all weights: [tokens, rows], side by side."""
    matrices, dtype, stored, columns, rows, items = weights
    tokens, storage = x.shape[0], NAMES[dtype]
    out = torch.empty(tokens, rows, dtype=dtype)
    operands = Product(x.data_ptr(), out.data_ptr(), tokens, columns, rows, *matrices)
    min_items = _MIN_PRODUCTS // (ROWS * columns * tokens) + 1
    launch_raw(build_product, items, operands, min_items, storage=storage, weights=stored, dtype=ARITHMETIC[storage])
    return out
