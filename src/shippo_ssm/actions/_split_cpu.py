"""CPU kernel of the split product and of its gradient: LANES tokens at a time, one per SIMD lane.

The factors are updates of columns of a scratch matrix [P P, LANES]. The backward pass starts from the finished product, removes
the factors again from the right, and reads the gradient of each coefficient on the way:
d/dc <Y, X exp(c G)> = <Y, X exp(c G) G>. It needs no memory beyond the product itself.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shippo_ssm.actions.kernels import CoordinateMap, Inline, largest_angle, sine_and_cosine, softplus
from shippo_ssm.engine import LANES, simd


class SplitTraces:
    """What is done to LANES tokens at once, and where it stands in the scratch array `w`.

    The matrix stands first, then its cotangent. Per coordinate there are its `value`, the numbers `main` and `other` of its
    factor (exp(-decay) and softplus, cosine and sine, or the coefficient of a shear), a `slope` (of the softplus, or of
    -log(norm) of a shear). Its gradient takes the place of its value. `d_scale` is <cotangent, R> of a bounded R.
    """

    def __init__(self, width: int, inline: Inline) -> None:
        _, self.num_diagonals, num_rotations, num_shears, _, self.bounded = inline
        self.width, self.first_shear = width, self.num_diagonals + num_rotations
        self.num_coords = self.first_shear + num_shears
        self.row_size, self.size = width * LANES, width * width * LANES
        parts = (2 * self.size + k * self.num_coords * LANES for k in range(5))
        self.value, self.main, self.other, self.slope, self.step = parts
        self.d_step, self.d_scale, self.end = (self.step + k * LANES for k in (1, 2, 3))

    def diagonal(self, emit: Any, w: Any, k: Any) -> None:
        build, zero, at = emit.builder, emit.constant(0.0), emit.times(k, LANES)
        largest = emit.constant(0.9 * math.log(float(np.finfo(emit.dtype).max)))
        plus, sigmoid = softplus(emit, emit[w, self.value, at])
        decay = emit.mul(emit[w, self.step], plus)
        cut = build.fcmp_ordered(">", decay, largest)
        decay = build.select(cut, largest, decay)
        emit[w, self.main, at] = emit.exp2(emit.mul(decay, emit.constant(-1.0 / math.log(2.0))))
        emit[w, self.other, at] = build.select(cut, zero, plus)
        emit[w, self.slope, at] = build.select(cut, zero, sigmoid)

    def angle(self, emit: Any, w: Any, k: Any) -> None:
        at = emit.times(k, LANES)
        sin, cos = sine_and_cosine(emit, emit.mul(emit[w, self.value, at], emit[w, self.step]))
        emit[w, self.other, at], emit[w, self.main, at] = sin, cos

    def coefficient(self, emit: Any, w: Any, k: Any) -> None:
        at = emit.times(k, LANES)
        emit[w, self.main, at] = emit.mul(emit[w, self.value, at], emit[w, self.step])

    def start(self, emit: Any, w: Any) -> None:
        for entry in range(self.width * self.width):
            emit[w, entry * LANES] = emit.constant(0.0)
        for i in range(self.width):
            diagonal = emit[w, self.main + i * LANES] if self.num_diagonals else emit.constant(1.0)
            emit[w, i * (self.width + 1) * LANES] = diagonal

    def rotate(self, emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        at = emit.times(k, LANES)
        self._turn(emit, w, 0, i, j, emit[w, self.main, at], emit[w, self.other, at])

    def shear(self, emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        self._add_column(emit, w, 0, i, j, emit[w, self.main, emit.times(k, LANES)])

    def shrink(self, emit: Any, w: Any) -> None:
        total = self._norm_of_shears(emit, w)
        for entry in range(0, self.size, LANES):
            emit[w, entry] = emit.builder.fdiv(emit[w, entry], total)

    def unshrink(self, emit: Any, w: Any) -> None:
        # R = S / norm: <Y, R> is the gradient of log(1 / norm), and Y / norm that of S.
        total, pulled = self._norm_of_shears(emit, w), emit.constant(0.0)
        for entry in range(0, self.size, LANES):
            matrix, cotangent = emit[w, entry], emit[w, self.size + entry]
            pulled = emit.fma(matrix, cotangent, pulled)
            emit[w, entry] = emit.mul(matrix, total)
            emit[w, self.size + entry] = emit.builder.fdiv(cotangent, total)
        emit[w, self.d_scale] = pulled

    def unshear(self, emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        at = emit.times(k, LANES)
        coef, pulled = emit[w, self.main, at], self._inner(emit, w, j, i)
        if self.bounded:
            pulled = emit.fma(emit[w, self.d_scale], emit[w, self.slope, at], pulled)
        self._settle(emit, w, at, pulled)
        self._add_column(emit, w, 0, i, j, emit.builder.fneg(coef))
        self._add_column(emit, w, self.size, j, i, coef)

    def unrotate(self, emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        at = emit.times(k, LANES)
        cos, back = emit[w, self.main, at], emit.builder.fneg(emit[w, self.other, at])
        self._settle(emit, w, at, emit.sub(self._inner(emit, w, i, j), self._inner(emit, w, j, i)))
        self._turn(emit, w, 0, i, j, cos, back)
        self._turn(emit, w, self.size, i, j, cos, back)

    def undiagonal(self, emit: Any, w: Any, i: Any) -> None:
        # d<Y, R>/d(-step softplus) = Y_ii R_ii, and R_ii is `main` again without the other factors.
        at = emit.times(i, LANES)
        cotangent = emit[w, self.size, emit.times(i, (self.width + 1) * LANES)]
        pulled = emit.builder.fneg(emit.mul(cotangent, emit[w, self.main, at]))
        emit[w, self.value, at] = emit.mul(pulled, emit.mul(emit[w, self.step], emit[w, self.slope, at]))
        emit[w, self.d_step] = emit.fma(pulled, emit[w, self.other, at], emit[w, self.d_step])

    def _columns(self, emit: Any, w: Any, base: int, i: Any, j: Any) -> list[tuple[Any, Any]]:
        """Where the entries of columns i and j of a matrix stand, row by row."""
        at_i, at_j = emit.times(i, LANES), emit.times(j, LANES)
        return [((w, row, at_i), (w, row, at_j)) for row in range(base, base + self.size, self.row_size)]

    def _turn(self, emit: Any, w: Any, base: int, i: Any, j: Any, cos: Any, sin: Any) -> None:
        """Rotate columns i and j."""
        for at_i, at_j in self._columns(emit, w, base, i, j):
            first, second = emit[at_i], emit[at_j]
            emit[at_i] = emit.fma(second, sin, emit.mul(first, cos))
            emit[at_j] = emit.sub(emit.mul(second, cos), emit.mul(first, sin))

    def _add_column(self, emit: Any, w: Any, base: int, source: Any, target: Any, coef: Any) -> None:
        """Add coef times one column to another."""
        for at_source, at_target in self._columns(emit, w, base, source, target):
            emit[at_target] = emit.fma(coef, emit[at_source], emit[at_target])

    def _norm_of_shears(self, emit: Any, w: Any) -> Any:
        """The product of the norms exp(asinh(|z|)) = sqrt(1 + z^2) + |z| of all shears, z = coefficient / 2; see `SplitFlow`.

        The logarithm has the derivative sign(z) / (2 sqrt(1 + z^2)), zero at zero, which goes to `slope` with a minus sign.
        """
        build, total, zero = emit.builder, emit.constant(1.0), emit.constant(0.0)
        for k in range(self.first_shear, self.num_coords):
            z = emit.mul(emit[w, self.main + k * LANES], emit.constant(0.5))
            root = emit.sqrt(emit.fma(z, z, emit.constant(1.0)))
            negative = build.fcmp_ordered("<", z, zero)
            sign = build.select(negative, emit.constant(0.5), emit.constant(-0.5))
            sign = build.select(build.fcmp_ordered("==", z, zero), zero, sign)
            emit[w, self.slope + k * LANES] = build.fdiv(sign, root)
            total = emit.mul(total, emit.add(root, build.select(negative, build.fneg(z), z)))
        return total

    def _inner(self, emit: Any, w: Any, i: Any, j: Any) -> Any:
        """<column i of the cotangent, column j of the matrix>."""
        total = emit.constant(0.0)
        for (cotangent, _), (_, matrix) in zip(self._columns(emit, w, self.size, i, j), self._columns(emit, w, 0, i, j)):
            total = emit.fma(emit[cotangent], emit[matrix], total)
        return total

    def _settle(self, emit: Any, w: Any, at: Any, pulled: Any) -> None:
        """The gradient of a coefficient step x: times step for the coordinate, times x for the step."""
        emit[w, self.d_step] = emit.fma(pulled, emit[w, self.value, at], emit[w, self.d_step])
        emit[w, self.value, at] = emit.mul(pulled, emit[w, self.step])


def make_split(dtype: str, width: int, inline: Inline) -> CoordinateMap:
    """Split products of LANES tokens, and their gradient; `bounded` divides them by the norms of their shears."""
    from numba import njit

    traces, lanes, limit = SplitTraces(width, inline), LANES, largest_angle(dtype)
    num_diagonals, first_shear, num_coords, bounded = (
        traces.num_diagonals,
        traces.first_shear,
        traces.num_coords,
        traces.bounded,
    )
    value, main, other, step, d_step = traces.value, traces.main, traces.other, traces.step, traces.d_step
    trace = simd(dtype, LANES)
    diagonal, angle, coefficient = trace(traces.diagonal), trace(traces.angle), trace(traces.coefficient)
    start, rotate, shear, shrink = trace(traces.start), trace(traces.rotate), trace(traces.shear), trace(traces.shrink)
    unshrink, unshear, unrotate = trace(traces.unshrink), trace(traces.unshear), trace(traces.unrotate)
    undiagonal = trace(traces.undiagonal)
    pairs = [(i, j) for i in range(width) for j in range(i + 1, width)] or [(0, 0)]
    firsts, seconds = np.array([i for i, _ in pairs]), np.array([j for _, j in pairs])

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

    return CoordinateMap(dtype, traces.end, num_coords, value, step, 0, traces.size, prepare, fill, pull_back)
