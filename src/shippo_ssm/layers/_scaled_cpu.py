"""Machine code of rows times numbers and of its gradient: every row is read from memory once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shippo_ssm.engine import Emitter, register_lanes, simd


class Weighed(NamedTuple):
    """A weight [rows] and weight x [rows, width] by their addresses; backward the cotangent of the latter and d_weight."""

    weight: int
    product: int
    d_weight: int


class Rows(NamedTuple):
    """Operands of `build_scaled`: addresses of x and d_x [rows, width], and the weights, of one weight twice the same; what a
    kernel does not have is 0."""

    x: int
    d_x: int
    first: Weighed
    second: Weighed


def build_scaled(dtype: str, width: int, num_weights: int, backward: bool) -> Callable[..., None]:
    """kernel(operands, start, stop), for rows start .. stop - 1: product_k = weight_k x, or backward

    d_x = sum_k weight_k d_product_k,   d_weight_k = <d_product_k, x>.
    """

    @simd(dtype, register_lanes(dtype))
    def run(emit: Emitter, operands: Any, start: Any, count: Any) -> None:
        x, d_x = (emit.pointer(address, dtype) for address in operands[:2])
        weighed = [[emit.pointer(address, dtype) for address in each] for each in operands[2 : 2 + num_weights]]
        for i in emit.blocks(count):
            at = emit.at(start, i)
            columns, pulled = emit.load_columns(x, emit.times(at, width), width), []
            for weight, product, d_weight in weighed:
                factor = emit.load(weight, at)
                if not backward:
                    emit.store_columns(product, emit.times(at, width), [emit.mul(column, factor) for column in columns])
                    continue
                cotangent = emit.load_columns(product, emit.times(at, width), width)
                emit.store(d_weight, at, emit.dot(cotangent, columns))
                if pulled:
                    pulled = [emit.fma(column, factor, total) for column, total in zip(cotangent, pulled)]
                else:
                    pulled = [emit.mul(column, factor) for column in cotangent]
            if backward:
                emit.store_columns(d_x, emit.times(at, width), pulled)

    def kernel(operands, start, stop):
        run(operands, start, stop - start)

    return kernel
