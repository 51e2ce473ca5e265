"""CPU kernel of the split product and of its gradient: LANES tokens at a time, one per SIMD lane.

The factors are updates of columns of a scratch matrix [P P, LANES]. The backward pass starts from the finished product, removes
the factors again from the right, and reads the gradient of each coefficient on the way:
d/dc <Y, X exp(c G)> = <Y, X exp(c G) G>. It needs no memory beyond the product itself.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shippo_ssm.actions.kernels import (
    CoordinateMap,
    Inline,
    Scratch,
    largest_angle,
    sine_and_cosine,
    softplus,
)
from shippo_ssm.engine import LANES, simd


def make_split(dtype: str, width: int, inline: Inline) -> CoordinateMap:
    """Split products of LANES tokens, and their gradient; `bounded` divides them by the norms of their shears.

    In the scratch the matrix stands first, then its cotangent. Per coordinate there are its `value`, the numbers `main` and
    `other` of its factor (exp(-decay) and softplus, cosine and sine, or the coefficient of a shear), a `slope` (of the
    softplus, or of -log(norm) of a shear). Its gradient takes the place of its value.
    """
    from numba import njit

    _, num_diagonals, num_rotations, num_shears, _, bounded = inline
    first_shear = num_diagonals + num_rotations
    num_coords, lanes, limit = first_shear + num_shears, LANES, largest_angle(dtype)
    row_size, size = width * LANES, width * width * LANES
    value, main, other, slope, step = (2 * size + k * num_coords * LANES for k in range(5))
    # `d_scale` is <cotangent, R> of a bounded R.
    d_step, d_scale, scratch = (step + k * LANES for k in (1, 2, 3))
    pairs = [(i, j) for i in range(width) for j in range(i + 1, width)] or [(0, 0)]
    firsts, seconds = np.array([i for i, _ in pairs]), np.array([j for _, j in pairs])

    def columns(emit: Any, base: int, i: Any, j: Any) -> list[tuple[Any, Any]]:
        """Where the entries of columns i and j of a matrix stand, row by row."""
        at_i, at_j = emit.times(i, LANES), emit.times(j, LANES)
        return [((row, at_i), (row, at_j)) for row in range(base, base + size, row_size)]

    def turn(s: Scratch, base: int, i: Any, j: Any, cos: Any, sin: Any) -> None:
        """Rotate columns i and j."""
        for at_i, at_j in columns(s.emit, base, i, j):
            first, second = s[at_i], s[at_j]
            s[at_i] = s.emit.fma(second, sin, s.emit.mul(first, cos))
            s[at_j] = s.emit.sub(s.emit.mul(second, cos), s.emit.mul(first, sin))

    def add_column(s: Scratch, base: int, source: Any, target: Any, coef: Any) -> None:
        """Add coef times one column to another."""
        for at_source, at_target in columns(s.emit, base, source, target):
            s[at_target] = s.emit.fma(coef, s[at_source], s[at_target])

    def norm_of_shears(s: Scratch) -> Any:
        """The product of the norms exp(asinh(|z|)) = sqrt(1 + z^2) + |z| of all shears, z = coefficient / 2; see `SplitFlow`.

        The logarithm has the derivative sign(z) / (2 sqrt(1 + z^2)), zero at zero, which goes to `slope` with a minus sign.
        """
        emit, build, total, zero = s.emit, s.emit.builder, s.emit.constant(1.0), s.emit.constant(0.0)
        for k in range(first_shear, num_coords):
            z = emit.mul(s[main + k * LANES], emit.constant(0.5))
            root = emit.sqrt(emit.fma(z, z, emit.constant(1.0)))
            negative = build.fcmp_ordered("<", z, zero)
            sign = build.select(negative, emit.constant(0.5), emit.constant(-0.5))
            sign = build.select(build.fcmp_ordered("==", z, zero), zero, sign)
            s[slope + k * LANES] = build.fdiv(sign, root)
            total = emit.mul(total, emit.add(root, build.select(negative, build.fneg(z), z)))
        return total

    def inner(s: Scratch, i: Any, j: Any) -> Any:
        """<column i of the cotangent, column j of the matrix>."""
        total = s.emit.constant(0.0)
        for (at_cotangent, _), (_, at_matrix) in zip(columns(s.emit, size, i, j), columns(s.emit, 0, i, j)):
            total = s.emit.fma(s[at_cotangent], s[at_matrix], total)
        return total

    def settle(s: Scratch, at: Any, pulled: Any) -> None:
        """The gradient of a coefficient step x: times step for the coordinate, times x for the step."""
        s[d_step] = s.emit.fma(pulled, s[value, at], s[d_step])
        s[value, at] = s.emit.mul(pulled, s[step])

    @simd(dtype, lanes)
    def diagonal(emit: Any, w: Any, k: Any) -> None:
        s, build, zero, at = Scratch(emit, w), emit.builder, emit.constant(0.0), emit.times(k, LANES)
        largest = emit.constant(0.9 * math.log(float(np.finfo(dtype).max)))
        plus, sigmoid = softplus(emit, s[value, at])
        decay = emit.mul(s[step], plus)
        cut = build.fcmp_ordered(">", decay, largest)
        decay = build.select(cut, largest, decay)
        s[main, at] = emit.exp2(emit.mul(decay, emit.constant(-1.0 / math.log(2.0))))
        s[other, at] = build.select(cut, zero, plus)
        s[slope, at] = build.select(cut, zero, sigmoid)

    @simd(dtype, lanes)
    def angle(emit: Any, w: Any, k: Any) -> None:
        s, at = Scratch(emit, w), emit.times(k, LANES)
        s[other, at], s[main, at] = sine_and_cosine(emit, emit.mul(s[value, at], s[step]))

    @simd(dtype, lanes)
    def coefficient(emit: Any, w: Any, k: Any) -> None:
        s, at = Scratch(emit, w), emit.times(k, LANES)
        s[main, at] = emit.mul(s[value, at], s[step])

    @simd(dtype, lanes)
    def start(emit: Any, w: Any) -> None:
        s = Scratch(emit, w)
        for entry in range(width * width):
            s[entry * LANES] = emit.constant(0.0)
        for i in range(width):
            s[i * (width + 1) * LANES] = s[main + i * LANES] if num_diagonals else emit.constant(1.0)

    @simd(dtype, lanes)
    def rotate(emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        s, at = Scratch(emit, w), emit.times(k, LANES)
        turn(s, 0, i, j, s[main, at], s[other, at])

    @simd(dtype, lanes)
    def shear(emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        s = Scratch(emit, w)
        add_column(s, 0, i, j, s[main, emit.times(k, LANES)])

    @simd(dtype, lanes)
    def shrink(emit: Any, w: Any) -> None:
        s = Scratch(emit, w)
        total = norm_of_shears(s)
        for entry in range(0, size, LANES):
            s[entry] = emit.builder.fdiv(s[entry], total)

    @simd(dtype, lanes)
    def unshrink(emit: Any, w: Any) -> None:
        # R = S / norm: <Y, R> is the gradient of log(1 / norm), and Y / norm that of S.
        s = Scratch(emit, w)
        total, pulled = norm_of_shears(s), emit.constant(0.0)
        for entry in range(0, size, LANES):
            matrix, cotangent = s[entry], s[size + entry]
            pulled = emit.fma(matrix, cotangent, pulled)
            s[entry] = emit.mul(matrix, total)
            s[size + entry] = emit.builder.fdiv(cotangent, total)
        s[d_scale] = pulled

    @simd(dtype, lanes)
    def unshear(emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        s, at = Scratch(emit, w), emit.times(k, LANES)
        coef, pulled = s[main, at], inner(s, j, i)
        if bounded:
            pulled = emit.fma(s[d_scale], s[slope, at], pulled)
        settle(s, at, pulled)
        add_column(s, 0, i, j, emit.builder.fneg(coef))
        add_column(s, size, j, i, coef)

    @simd(dtype, lanes)
    def unrotate(emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        s, at = Scratch(emit, w), emit.times(k, LANES)
        cos, back = s[main, at], emit.builder.fneg(s[other, at])
        settle(s, at, emit.sub(inner(s, i, j), inner(s, j, i)))
        turn(s, 0, i, j, cos, back)
        turn(s, size, i, j, cos, back)

    @simd(dtype, lanes)
    def undiagonal(emit: Any, w: Any, i: Any) -> None:
        # d<Y, R>/d(-step softplus) = Y_ii R_ii, and R_ii is `main` again without the other factors.
        s, at = Scratch(emit, w), emit.times(i, LANES)
        pulled = emit.builder.fneg(emit.mul(s[size, emit.times(i, (width + 1) * LANES)], s[main, at]))
        s[value, at] = emit.mul(pulled, emit.mul(s[step], s[slope, at]))
        s[d_step] = emit.fma(pulled, s[other, at], s[d_step])

    @njit(inline="always")
    def prepare(w):
        for k in range(num_diagonals):
            diagonal(w, k)
        for k in range(num_diagonals, first_shear):
            largest = 0.0
            for lane in range(lanes):
                largest = max(largest, abs(w[value + k * lanes + lane] * w[step + lane]))
            if largest <= limit:
                angle(w, k)
            else:
                for lane in range(lanes):
                    turned = w[value + k * lanes + lane] * w[step + lane]
                    w[main + k * lanes + lane] = math.cos(turned)
                    w[other + k * lanes + lane] = math.sin(turned)
        for k in range(first_shear, num_coords):
            coefficient(w, k)
        return 0, 0.0

    @njit(inline="always")
    def fill(w, squarings, norm):
        start(w)
        for k in range(num_diagonals, first_shear):
            rotate(w, k, firsts[k - num_diagonals], seconds[k - num_diagonals])
        for k in range(first_shear, num_coords):
            shear(w, k, firsts[k - first_shear], seconds[k - first_shear])
        if bounded:
            shrink(w)
        return 0

    @njit(inline="always")
    def pull_back(w, squarings, norm):
        w[d_step : d_step + lanes] = 0.0
        if bounded:
            unshrink(w)
        for k in range(num_coords - 1, first_shear - 1, -1):
            unshear(w, k, firsts[k - first_shear], seconds[k - first_shear])
        for k in range(first_shear - 1, num_diagonals - 1, -1):
            unrotate(w, k, firsts[k - num_diagonals], seconds[k - num_diagonals])
        for i in range(num_diagonals):
            undiagonal(w, i)
        w[step : step + lanes] = w[d_step : d_step + lanes]

    return CoordinateMap(dtype, scratch, num_coords, value, step, 0, size, prepare, fill, pull_back)
