"""Exponentials of many small matrices on a GPU, with gradients: one kernel for all widths; names of `_expm_cpu.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from shippo_ssm.engine._triton_kernels import padded


@triton.jit
def product(a, b):
    """a b of tiles [BM, BP, BP]."""
    return tl.sum(a[:, :, :, None] * b[:, None, :, :], 2)


@triton.jit
def expm(
    generator, direction, out, count, P: tl.constexpr, FRECHET: tl.constexpr, DEGREE: tl.constexpr, THETA: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """exp(A), or the derivative of exp at A^T along `direction`; BM matrices are a tile [BM, BP, BP], padded with zeros.

    T = exp(2^-s A) - I by Horner's rule, so that rounding errors are those of the small part; squaring is T <- 2 T + T^2.
    """
    BP: tl.constexpr = padded(P)
    row, m, i = tl.program_id(0).to(tl.int64) * BM, tl.arange(0, BM)[:, None, None], tl.arange(0, BP)
    at = row * (P * P) + (m * P + i[None, :, None]) * P + i[None, None, :]
    real = (row + m < count) & (i < P)[None, :, None] & (i < P)[None, None, :]
    a = tl.load(generator + at, mask=real, other=0.0).to(DTYPE)
    if FRECHET:
        a = tl.permute(a, (0, 2, 1))
    norm = tl.max(tl.sum(tl.abs(a), 1), 1)
    # What is not finite needs no scaling, and stays what it is.
    squarings = tl.where(norm < float("inf"), tl.ceil(tl.log2(tl.maximum(norm / THETA, 1.0))), 0.0)[:, None, None]
    a *= tl.exp2(-squarings)
    total = a * (1.0 / DEGREE)
    if FRECHET:
        e = tl.load(direction + at, mask=real, other=0.0).to(DTYPE) * tl.exp2(-squarings)
        slope = e * (1.0 / DEGREE)
    power = tl.full((BM, 1, 1), DEGREE - 1, DTYPE)
    for _ in range(1, DEGREE):
        if FRECHET:
            slope = (e + product(e, total) + product(a, slope)) / power
        total = (a + product(a, total)) / power
        power -= 1.0
    for k in range(tl.max(tl.max(tl.max(squarings, 0), 0), 0).to(tl.int32)):
        going = squarings > k
        if FRECHET:
            slope = tl.where(going, 2.0 * slope + (product(total, slope) + product(slope, total)), slope)
        total = tl.where(going, 2.0 * total + product(total, total), total)
    if FRECHET:
        result = slope
    else:
        result = total + tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0).to(DTYPE)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=real)
