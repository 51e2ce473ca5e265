"""Machine code of the RMS norm, scaling and the short convolution, and of their gradients: memory is read once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.engine import Emitter, register_lanes, simd


class Norm(NamedTuple):
    """Addresses of u [tokens, channels], the weight [channels] and y [tokens, channels]. Backward y is dy, and there are
    du [tokens, channels] and the gradient of the weight by chunks of tokens, d_weight [chunks, channels], zero at the start."""

    u: int
    weight: int
    y: int
    channels: int
    tokens: int
    du: int = 0
    d_weight: int = 0


def build_norm(storage: str, dtype: str, eps: float) -> Callable[..., None]:
    """kernel(operands, start, stop): y = u / sqrt(mean(u^2) + eps) weight, for tokens start .. stop - 1."""
    lanes, element = register_lanes(dtype), np.dtype(dtype)

    @simd(dtype, lanes)
    def square(emit: Emitter, operands: Any, place: Any, sums: Any) -> None:
        u, total = emit.pointer(operands.u, storage), emit.variable()
        for d in emit.blocks(operands.channels):
            vector = emit.load(u, emit.at(place, d))
            total.set(emit.fma(vector, vector, total.get()))
        emit.store_sums(sums, 0, [total.get()])

    @simd(dtype, lanes)
    def scale(emit: Emitter, operands: Any, place: Any, factor: Any) -> None:
        u, weight, y = (emit.pointer(address, storage) for address in operands[:3])
        for d in emit.blocks(operands.channels):
            vector = emit.mul(emit.load(u, emit.at(place, d)), emit.splat(factor, 0))
            emit.store(y, emit.at(place, d), emit.mul(vector, emit.load(weight, d)))

    def kernel(operands, start, stop):
        sums, channels = np.zeros(4, element), operands.channels
        for token in range(start, stop):
            square(operands, token * channels, sums)
            sums[0] = 1.0 / math.sqrt(sums[0] / channels + eps)
            scale(operands, token * channels, sums)

    return kernel


def build_norm_gradient(dtype: str, eps: float, chunk: int) -> Callable[..., None]:
    """kernel(operands, start, stop), for chunks start .. stop - 1 of `chunk` tokens: with r = 1 / sqrt(mean(u^2) + eps),

    du = r (weight dy - r^2 mean(weight dy u) u),   d_weight = sum_tokens r dy u.
    """
    lanes, element = register_lanes(dtype), np.dtype(dtype)

    @simd(dtype, lanes)
    def sum_up(emit: Emitter, operands: Any, place: Any, sums: Any) -> None:
        u, weight, dy = (emit.pointer(address, dtype) for address in operands[:3])
        squares, products = emit.variable(), emit.variable()
        for d in emit.blocks(operands.channels):
            vector, pulled = emit.load(u, emit.at(place, d)), emit.load(dy, emit.at(place, d))
            squares.set(emit.fma(vector, vector, squares.get()))
            products.set(emit.fma(emit.mul(pulled, emit.load(weight, d)), vector, products.get()))
        emit.store_sums(sums, 0, [squares.get(), products.get()])

    @simd(dtype, lanes)
    def pull_back(emit: Emitter, operands: Any, place: Any, chunk_at: Any, factors: Any) -> None:
        u, weight, dy = (emit.pointer(address, dtype) for address in operands[:3])
        du, d_weight = (emit.pointer(address, dtype) for address in operands[5:])
        for d in emit.blocks(operands.channels):
            vector = emit.load(u, emit.at(place, d))
            pulled = emit.mul(emit.load(dy, emit.at(place, d)), emit.splat(factors, 0))
            turned = emit.mul(vector, emit.splat(factors, 1))
            emit.store(du, emit.at(place, d), emit.fma(pulled, emit.load(weight, d), turned))
            total = emit.load(d_weight, emit.at(chunk_at, d))
            emit.store(d_weight, emit.at(chunk_at, d), emit.fma(pulled, vector, total))

    def kernel(operands, start, stop):
        sums, channels = np.zeros(4, element), operands.channels
        for number in range(start, stop):
            for token in range(number * chunk, min(operands.tokens, (number + 1) * chunk)):
                sum_up(operands, token * channels, sums)
                root = 1.0 / math.sqrt(sums[0] / channels + eps)
                sums[0], sums[1] = root, -root * root * root * sums[1] / channels
                pull_back(operands, token * channels, number * channels, sums)

    return kernel


class Weighed(NamedTuple):
    """Addresses of a weight [rows] and of weight x [rows, width]; backward of the cotangent of the latter and of d_weight."""

    weight: int
    product: int
    d_weight: int


class Rows(NamedTuple):
    """Addresses of x and d_x [rows, width] and the weights, of one weight twice the same; what a kernel does not have is 0."""

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


class Conv(NamedTuple):
    """Addresses of row [B, T + K - 1, D], weight [K, D] and y [B, T, D]; of bias [D], or backward of d_row and of the gradients
    of the weight and, behind it, of the bias by rows, d_taps [B, K + 1, D]. Backward y is dy, and the two start at zero."""

    row: int
    weight: int
    y: int
    channels: int
    length: int
    bias: int = 0
    d_row: int = 0
    d_taps: int = 0


def build_conv(dtype: str, taps: int) -> Callable[..., None]:
    """kernel(operands, start, stop): y_t = bias + sum_k weight_k row_{t+k}, for the outputs start .. stop - 1 of all rows."""

    @simd(dtype, register_lanes(dtype))
    def convolve(emit: Emitter, operands: Any, source: Any, target: Any) -> None:
        row, weight, y = (emit.pointer(address, dtype) for address in operands[:3])
        bias = emit.pointer(operands.bias, dtype)
        for d in emit.blocks(operands.channels):
            total = emit.load(bias, d)
            for tap in range(taps):
                at = emit.at(emit.times(operands.channels, tap), d)
                total = emit.fma(emit.load(row, emit.at(source, at)), emit.load(weight, at), total)
            emit.store(y, emit.at(target, d), total)

    def kernel(operands, start, stop):
        channels, length = operands.channels, operands.length
        for place in range(start, stop):
            # A row has K - 1 more inputs than outputs.
            convolve(operands, (place + place // length * (taps - 1)) * channels, place * channels)

    return kernel


def build_conv_gradient(dtype: str, taps: int) -> Callable[..., None]:
    """kernel(operands, start, stop), for rows start .. stop - 1:

    d_row_s = sum_k weight_k dy_{s-k},   d_weight_k = sum_t dy_t row_{t+k},   d_bias = sum_t dy_t.
    """

    @simd(dtype, register_lanes(dtype))
    def pull_back(emit: Emitter, operands: Any, source: Any, target: Any, sums: Any) -> None:
        row, weight, dy = (emit.pointer(address, dtype) for address in operands[:3])
        d_row, d_taps = (emit.pointer(address, dtype) for address in operands[6:8])
        for d in emit.blocks(operands.channels):
            pulled = emit.load(dy, emit.at(target, d))
            for tap in range(taps):
                at = emit.at(emit.times(operands.channels, tap), d)
                here, total = emit.at(source, at), emit.at(sums, at)
                emit.store(d_row, here, emit.fma(pulled, emit.load(weight, at), emit.load(d_row, here)))
                emit.store(d_taps, total, emit.fma(pulled, emit.load(row, here), emit.load(d_taps, total)))
            total = emit.at(sums, emit.times(operands.channels, taps), d)
            emit.store(d_taps, total, emit.add(pulled, emit.load(d_taps, total)))

    def kernel(operands, start, stop):
        channels, length = operands.channels, operands.length
        for number in range(start, stop):
            source, target = number * (length + taps - 1) * channels, number * length * channels
            for t in range(length):
                pull_back(operands, source + t * channels, target + t * channels, number * (taps + 1) * channels)

    return kernel
