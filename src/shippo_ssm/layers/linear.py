"""Linear layers on few tokens without gradients: one compiled product, as fast as memory is read.

Several layers that read the same x are one product. Weights are float32, float64, bfloat16, or the int8 rows of torchao.
Layers with an adapter, a hook, a patched forward or another quantisation are called as modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shippo_ssm._private import int8_rows
from shippo_ssm.dispatch import is_plain, is_readable
from shippo_ssm.engine import Emitter, Variable, launch, register_lanes, simd, transposed

NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
ARITHMETIC = {"float32": "float32", "float64": "float64", "bfloat16": "float32"}
# Tokens up to which the compiled product serves, and multiplications that are worth a thread.
MAX_TOKENS, _MIN_PRODUCTS = 64, 1 << 20


class Matrix(NamedTuple):
    """A weight [rows, columns] of a product: addresses, 0 for what is not there."""

    weight: int
    bias: int
    """[rows]."""
    scale: int
    """[rows], what the rows of an int8 weight are to be multiplied by."""
    rows: int


class Product(NamedTuple):
    """Operands of `build_product`: x [tokens, columns] and out [tokens, rows], the rows of all matrices one after another."""

    x: int
    out: int
    tokens: int
    columns: int
    rows: int
    first: Matrix
    second: Matrix
    third: Matrix
    fourth: Matrix


# Rows of a weight that one item takes, no fewer than a matrix has; what is left at its end is taken with rows before it.
# As many tokens stand in the lanes.
ROWS = 8


def build_product(storage: str, weights: str, dtype: str) -> Callable[..., None]:
    """kernel(operands, start, stop): out = x weight^T + bias, for the blocks start .. stop - 1 of ROWS rows.

    A weight is read once, in the order of memory, which is what its time is made of. One token is a dot product along each row.
    Several stand in the lanes: the block is widened into a scratch first, and its numbers are splat from there.
    """
    element = np.dtype(dtype)
    # Sums that are under way at once: as many as hide the latency of an addition.
    lanes = 4 * register_lanes(dtype)

    @simd(dtype, register_lanes(dtype))
    def widen_x(emit: Emitter, operands: Any, wide: Any) -> None:
        x = emit.pointer(operands.x, storage)
        for k in emit.blocks(operands.columns):
            emit.store(wide, k, emit.load(x, k))

    @simd(dtype, 1)
    def spread_x(emit: Emitter, operands: Any, token: Any, wide: Any, target: Any) -> None:
        # A token goes into one lane of the vectors of all columns.
        x, start = emit.pointer(operands.x, storage), emit.builder.mul(token, operands.columns)
        for k in emit.each(operands.columns):
            emit.store(wide, emit.at(target, emit.times(k, ROWS)), emit.load(x, emit.at(start, k), padded=True), padded=True)

    @simd(dtype, lanes)
    def dot_rows(emit: Emitter, operands: Any, matrix: Any, row: Any, wide: Any, sums: Any) -> None:
        weight, columns, build = emit.pointer(matrix.weight, weights), operands.columns, emit.builder
        narrow = Emitter(build, dtype, register_lanes(dtype))
        totals = []
        for i in range(ROWS):
            start, total = build.mul(emit.at(row, i), columns), emit.variable()
            for k in emit.blocks(columns):
                total.set(emit.fma(emit.load(weight, emit.at(start, k)), emit.load(wide, k), total.get()))
            totals.append(emit.fold(total.get(), narrow.lanes))
        narrow.store_sums(sums, 0, totals)

    @simd(dtype, register_lanes(dtype))
    def widen_rows(emit: Emitter, operands: Any, matrix: Any, row: Any, block: Any) -> None:
        weight, start = emit.pointer(matrix.weight, weights), emit.builder.mul(row, operands.columns)
        for k in emit.blocks(emit.times(operands.columns, ROWS)):
            emit.store(block, k, emit.load(weight, emit.at(start, k)))

    @simd(dtype, ROWS)
    def multiply(emit: Emitter, operands: Any, matrix: Any, row: Any, block: Any, wide: Any, first: Any, sums: Any) -> None:
        totals = [emit.variable() for _ in range(ROWS)]
        weight, later = emit.pointer(matrix.weight, weights), emit.builder.mul(emit.at(row, ROWS), operands.columns)
        for k in emit.each(operands.columns):
            # The rows of the next block come while this one is multiplied.
            emit.prefetch(weight, emit.at(later, emit.times(k, ROWS)), 1)
            tokens = emit.load(wide, emit.at(first, emit.times(k, ROWS)), padded=True)
            for i, total in enumerate(totals):
                place = emit.at(emit.times(operands.columns, i), k)
                total.set(emit.fma(emit.splat(block, place), tokens, total.get()))
        for token, vector in enumerate(transposed(emit, [total.get() for total in totals])):
            emit.store(sums, token * ROWS, vector, padded=True)

    @simd(dtype, ROWS)
    def finish(emit: Emitter, operands: Any, matrix: Any, row: Any, sums: Any, place: Any, target: Any) -> None:
        vector = emit.load(sums, place, padded=True)
        if weights == "int8":
            vector = emit.mul(vector, emit.load(emit.pointer(matrix.scale, dtype), row, padded=True))
        slot = Variable(emit, vector)
        with emit.builder.if_then(emit.builder.icmp_signed("!=", matrix.bias, emit.at(0))):
            slot.set(emit.add(vector, emit.load(emit.pointer(matrix.bias, storage), row, padded=True)))
        emit.store(emit.pointer(operands.out, storage), target, slot.get(), padded=True)

    def kernel(operands, start, stop):
        tokens, columns = operands.tokens, operands.columns
        wide = np.zeros(columns if tokens == 1 else -(-tokens // ROWS) * ROWS * columns, element)
        block, sums = np.empty(0 if tokens == 1 else ROWS * columns, element), np.zeros(ROWS * ROWS, element)
        if tokens == 1:
            widen_x(operands, wide)
        else:
            for token in range(tokens):
                spread_x(operands, token, wide, token // ROWS * ROWS * columns + token % ROWS)
        for item in range(start, stop):
            left, base = item, 0
            matrix = operands.first
            for other in (operands.second, operands.third, operands.fourth):
                if left * ROWS >= matrix.rows:
                    left, base, matrix = left - (matrix.rows + ROWS - 1) // ROWS, base + matrix.rows, other
            row = min(left * ROWS, matrix.rows - ROWS)
            if tokens == 1:
                dot_rows(operands, matrix, row, wide, sums)
                finish(operands, matrix, row, sums, 0, base + row)
            else:
                widen_rows(operands, matrix, row, block)
                for first in range(0, tokens, ROWS):
                    multiply(operands, matrix, row, block, wide, first * columns, sums)
                    for token in range(first, min(first + ROWS, tokens)):
                        finish(operands, matrix, row, sums, (token - first) * ROWS, token * operands.rows + base + row)

    return kernel


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
    """Whether a kernel may read a plain CPU tensor at its address: contiguous, no negative view, and its memory not freed."""
    return tensor.is_contiguous() and not tensor.is_neg() and bool(tensor.data_ptr() or not tensor.numel())


def address_of(tensor: Tensor) -> int:
    """Where the numbers of a contiguous tensor begin."""
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise ValueError(f"Shippo: a tensor of shape {tuple(tensor.shape)} has no memory; expected one that was not freed")
    return address


def weights_of(linears: Sequence[nn.Linear]) -> Weights | None:
    """The weights of up to four plain linear layers; `None` where one of them has to be called."""
    if nn.Linear.forward is not _FORWARDS[nn.Linear]:
        return None
    matrices: list[Matrix] = []
    kinds: set[tuple[torch.dtype, torch.dtype, int]] = set()
    for linear in linears:
        if type(linear).forward is not _FORWARDS.get(type(linear)):
            return None
        weight, bias = linear._parameters.get("weight"), linear._parameters.get("bias")
        if weight is None or (bias is None and linear.bias is not None):
            return None
        scale, numbers, own = 0, weight, weight.dtype
        if not is_plain(weight):
            by_rows = int8_rows(weight)
            if by_rows is None:
                return None
            numbers, scale = by_rows[0], address_of(by_rows[1])
        if own not in NAMES or numbers.ndim != 2 or len(numbers) < ROWS or not is_operand(numbers):
            return None
        if bias is not None and not (
            is_plain(bias) and bias.dtype == own and bias.shape == numbers.shape[:1] and is_operand(bias)
        ):
            return None
        kinds.add((own, numbers.dtype, numbers.shape[1]))
        matrices.append(Matrix(numbers.data_ptr(), 0 if bias is None else bias.data_ptr(), scale, len(numbers)))
    if len(kinds) != 1:
        return None
    (dtype, stored, columns), rows = kinds.pop(), sum(matrix.rows for matrix in matrices)
    if not columns:
        return None
    items = sum(-(-matrix.rows // ROWS) for matrix in matrices)
    matrices += [Matrix(0, 0, 0, 0)] * (4 - len(matrices))
    return Weights(matrices, dtype, "int8" if stored == torch.int8 else NAMES[dtype], columns, rows, items)


def product(weights: Weights, x: Tensor) -> Tensor:
    """x [tokens, columns], contiguous, times the transposes of all weights: [tokens, rows], side by side."""
    matrices, dtype, stored, columns, rows, items = weights
    tokens, storage = x.shape[0], NAMES[dtype]
    # Not `torch.empty`, which takes a default device.
    out = x.new_empty(tokens, rows)
    operands = Product(x.data_ptr() or address_of(x), out.data_ptr(), tokens, columns, rows, *matrices)
    min_items = _MIN_PRODUCTS // (ROWS * columns * tokens) + 1
    launch(build_product, items, operands, min_items, raw=True, storage=storage, weights=stored, dtype=ARITHMETIC[storage])
    return out
