"""What the CPU kernels `_NAME_cpu.py` share: maps from coordinates to matrices; functions of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Inline(NamedTuple):
    """How a CPU kernel computes a family: `kind` is "rotation" (closed form), "split" (product of factors) or "exponential".

    Without factors the coordinates are the entries of the generator. A diagonal coordinate d stands for -max(d, 0) if `clamp`,
    otherwise for -softplus(d). All numbers are integers, as an operator of torch takes them.
    """

    kind: str
    num_diagonals: int = 0
    num_rotations: int = 0
    num_shears: int = 0
    clamp: int = 0
    bounded: int = 0


class CoordinateMap(NamedTuple):
    """A map from coordinates [K, LANES] and steps [LANES] to matrices [P P, LANES] in a scratch array, and its gradient.

    The scratch has `size` numbers of the dtype `arithmetic`, zeros at first. Whatever stands in it is named by where it begins;
    `matrix` is `None` where `pull_back` does not need the matrices.
    """

    arithmetic: str
    size: int
    num_coords: int
    coords: int
    step: int
    matrix: int | None
    cotangent: int
    prepare: Callable[..., tuple[int, float]]
    """prepare(w): what both passes need first; returns (squarings, norm) as `make_exponential` measures them, or zeros."""
    fill: Callable[..., int]
    """fill(w, squarings, norm): make the matrices; returns where they stand."""
    pull_back: Callable[..., None]
    """pull_back(w, squarings, norm): the gradient by coordinates and step, in their places, from the cotangent."""


def largest_angle(dtype: str) -> float:
    """The largest angle that `sine_and_cosine` reduces exactly enough; the C library takes larger ones."""
    return 1e3 if dtype == "float32" else 1e5


def sine_series(dtype: str) -> list[float]:
    """Coefficients of sin(x) / x in powers of x^2, for |x| <= pi / 4."""
    return [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(5 if dtype == "float32" else 9)]


def cosine_series(dtype: str) -> list[float]:
    """Coefficients of cos(x) in powers of x^2, for |x| <= pi / 4."""
    return [(-1.0) ** k / math.factorial(2 * k) for k in range(6 if dtype == "float32" else 10)]


def polynomial(emit: Any, coefficients: Sequence[float], x: Any) -> Any:
    """sum_k coefficients[k] x^k by Horner's rule."""
    total = emit.constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = emit.fma(total, x, emit.constant(coefficient))
    return total


def sine_and_cosine(emit: Any, angle: Any) -> tuple[Any, Any]:
    """sin and cos of angles up to `largest_angle`: quarter turns off, a polynomial, and the quadrant back on."""
    from llvmlite import ir

    build, lanes, single = emit.builder, emit.lanes, emit.dtype == "float32"
    quarter = (1.5703125, 4.837512969970703125e-4, 7.54978995489188216e-8)
    if not single:
        quarter = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
    magic = 1.5 * 2.0 ** (23 if single else 52)
    shifted = emit.fma(angle, emit.constant(2.0 / math.pi), emit.constant(magic))
    turns = build.fneg(build.fsub(shifted, emit.constant(magic)))
    rest = angle
    for piece in quarter:
        rest = emit.fma(turns, emit.constant(piece), rest)
    square = emit.mul(rest, rest)
    sin = emit.mul(polynomial(emit, sine_series(emit.dtype), square), rest)
    cos = polynomial(emit, cosine_series(emit.dtype), square)
    bits = ir.VectorType(ir.IntType(32 if single else 64), lanes)
    quadrant = build.bitcast(shifted, bits)

    def bit(vector: Any, mask: int) -> Any:
        return build.icmp_unsigned("!=", build.and_(vector, bits([mask] * lanes)), bits([0] * lanes))

    odd = bit(quadrant, 1)
    sin, cos = build.select(odd, cos, sin), build.select(odd, sin, cos)
    sin = build.select(bit(quadrant, 2), build.fneg(sin), sin)
    cos = build.select(bit(build.add(quadrant, bits([1] * lanes)), 2), build.fneg(cos), cos)
    return sin, cos


def softplus(emit: Any, x: Any) -> tuple[Any, Any]:
    """log(1 + exp(x)) and its derivative, the sigmoid of x.

    With t = exp(-|x|) and z = t / (2 + t) <= 1/3, log1p(t) = 2 z (1 + z^2 / 3 + z^4 / 5 + ..).
    """
    build, zero, one = emit.builder, emit.constant(0.0), emit.constant(1.0)
    logarithm = [2.0 / (2 * k + 1) for k in range(8 if emit.dtype == "float32" else 18)]
    below = build.fcmp_ordered("<", x, zero)
    t = emit.exp2(emit.mul(build.select(below, x, build.fneg(x)), emit.constant(1.0 / math.log(2.0))))
    z = build.fdiv(t, emit.add(t, emit.constant(2.0)))
    plus = emit.fma(polynomial(emit, logarithm, emit.mul(z, z)), z, build.select(below, zero, x))
    return plus, build.fdiv(build.select(below, t, one), emit.add(one, t))


def sigmoid(emit: Any, x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    one = emit.constant(1.0)
    return emit.builder.fdiv(one, emit.add(one, emit.exp2(emit.mul(x, emit.constant(-1.0 / math.log(2.0))))))
