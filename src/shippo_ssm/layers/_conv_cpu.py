"""Machine code of the short convolution and of its gradient: every input is read from memory once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shippo_ssm.engine import Emitter, register_lanes, simd


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
