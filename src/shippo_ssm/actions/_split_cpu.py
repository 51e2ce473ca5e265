"""CPU kernel of the split product and of its gradient: LANES tokens at a time, one per SIMD lane.

The factors are updates of columns of a scratch matrix [P P, LANES]. The backward pass starts from the finished product, removes
the factors again from the right, and reads the gradient of each coefficient on the way:
d/dc <Y, X exp(c G)> = <Y, X exp(c G) G>. It needs no memory beyond the product itself.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shippo_ssm.actions._trig import largest_angle, sine_and_cosine, softplus, square_root
from shippo_ssm.actions.kernels import CoordinateMap, Scratch, coordinate_kernel
from shippo_ssm.engine import LANES, LaneMap, simd


class Split:
    """The traces of one split product, and where the vectors of its scratch array start; the matrix stands at 0.

    Per coordinate there are its `value`, the numbers `main` and `other` of its factor (exp(-decay) and softplus, cosine and
    sine, or the coefficient of a shear), a `slope` (of the softplus, or of -log(norm) of a shear) and its `gradient`. `sizes`
    are the numbers of diagonals, rotations and shears; `bounded` divides the product by the norms of its shears.
    """

    def __init__(self, dtype: str, width: int, sizes: tuple[int, ...], bounded: bool) -> None:
        self.dtype, self.width, self.bounded, self.num_coords = dtype, width, bounded, sum(sizes)
        self.first_rotation, self.first_shear = sizes[0], sizes[0] + sizes[1]
        self.cotangent = width * width * LANES
        places = [2 * self.cotangent + k * self.num_coords * LANES for k in range(6)]
        self.value, self.main, self.other, self.slope, self.gradient, self.step = places
        # `d_scale` is <cotangent, R> of a bounded R.
        self.d_step, self.d_scale, self.scratch = (self.step + k * LANES for k in (1, 2, 3))

    def trace(self, method: Callable[..., None]) -> Any:
        """A method (scratch, ..) as a function (w, ..) of a kernel."""

        def traced(emit: Any, w: Any, *indices: Any) -> None:
            method(Scratch(emit, w), *indices)

        # The decorator reads the names of the indices.
        scratch, *indices = inspect.signature(method).parameters.values()
        names = [scratch.replace(name="emit"), scratch.replace(name="w"), *indices]
        vars(traced)["__signature__"] = inspect.Signature(names)
        return simd(self.dtype, LANES)(traced)

    def diagonal(self, s: Scratch, k: Any) -> None:
        emit, build, zero, at = s.emit, s.emit.builder, s.emit.constant(0.0), s.emit.times(k, LANES)
        limit = emit.constant(0.9 * math.log(float(np.finfo(self.dtype).max)))
        plus, sigmoid = softplus(emit, s[self.value, at])
        decay = emit.mul(s[self.step], plus)
        cut = build.fcmp_ordered(">", decay, limit)
        decay = build.select(cut, limit, decay)
        s[self.main, at] = emit.exp2(emit.mul(decay, emit.constant(-1.0 / math.log(2.0))))
        s[self.other, at] = build.select(cut, zero, plus)
        s[self.slope, at] = build.select(cut, zero, sigmoid)

    def angle(self, s: Scratch, k: Any) -> None:
        at = s.emit.times(k, LANES)
        s[self.other, at], s[self.main, at] = sine_and_cosine(s.emit, s.emit.mul(s[self.value, at], s[self.step]))

    def coefficient(self, s: Scratch, k: Any) -> None:
        at = s.emit.times(k, LANES)
        s[self.main, at] = s.emit.mul(s[self.value, at], s[self.step])

    def start(self, s: Scratch) -> None:
        for entry in range(self.width * self.width):
            s[entry * LANES] = s.emit.constant(0.0)
        for i in range(self.width):
            one = s[self.main + i * LANES] if self.first_rotation else s.emit.constant(1.0)
            s[i * (self.width + 1) * LANES] = one

    def columns(self, s: Scratch, base: int, i: Any, j: Any) -> list[tuple[Any, Any]]:
        """Where the entries of columns i and j of a matrix stand, row by row."""
        at_i, at_j = s.emit.times(i, LANES), s.emit.times(j, LANES)
        return [((row, at_i), (row, at_j)) for row in range(base, base + self.cotangent, self.width * LANES)]

    def turn(self, s: Scratch, base: int, i: Any, j: Any, cos: Any, sin: Any) -> None:
        """Rotate columns i and j."""
        for at_i, at_j in self.columns(s, base, i, j):
            first, second = s[at_i], s[at_j]
            s[at_i] = s.emit.fma(second, sin, s.emit.mul(first, cos))
            s[at_j] = s.emit.sub(s.emit.mul(second, cos), s.emit.mul(first, sin))

    def add_column(self, s: Scratch, base: int, source: Any, target: Any, coef: Any) -> None:
        """Add coef times one column to another."""
        for at_source, at_target in self.columns(s, base, source, target):
            s[at_target] = s.emit.fma(coef, s[at_source], s[at_target])

    def rotate(self, s: Scratch, k: Any, i: Any, j: Any) -> None:
        at = s.emit.times(k, LANES)
        self.turn(s, 0, i, j, s[self.main, at], s[self.other, at])

    def shear(self, s: Scratch, k: Any, i: Any, j: Any) -> None:
        self.add_column(s, 0, i, j, s[self.main, s.emit.times(k, LANES)])

    def norm_of_shears(self, s: Scratch) -> Any:
        """The product of the norms exp(asinh(|z|)) = sqrt(1 + z^2) + |z| of all shears, z = coefficient / 2; see `SplitFlow`.

        The logarithm has the derivative sign(z) / (2 sqrt(1 + z^2)), zero at zero, which goes to `slope` with a minus sign.
        """
        emit, build, total, zero = s.emit, s.emit.builder, s.emit.constant(1.0), s.emit.constant(0.0)
        for k in range(self.first_shear, self.num_coords):
            z = emit.mul(s[self.main + k * LANES], emit.constant(0.5))
            root = square_root(emit, emit.fma(z, z, emit.constant(1.0)))
            negative = build.fcmp_ordered("<", z, zero)
            sign = build.select(negative, emit.constant(0.5), emit.constant(-0.5))
            sign = build.select(build.fcmp_ordered("==", z, zero), zero, sign)
            s[self.slope + k * LANES] = build.fdiv(sign, root)
            total = emit.mul(total, emit.add(root, build.select(negative, build.fneg(z), z)))
        return total

    def shrink(self, s: Scratch) -> None:
        total = self.norm_of_shears(s)
        for entry in range(0, self.cotangent, LANES):
            s[entry] = s.emit.builder.fdiv(s[entry], total)

    def unshrink(self, s: Scratch) -> None:
        # R = S / norm: <Y, R> is the gradient of log(1 / norm), and Y / norm that of S.
        total, pulled = self.norm_of_shears(s), s.emit.constant(0.0)
        for entry in range(0, self.cotangent, LANES):
            matrix, cotangent = s[entry], s[self.cotangent + entry]
            pulled = s.emit.fma(matrix, cotangent, pulled)
            s[entry] = s.emit.mul(matrix, total)
            s[self.cotangent + entry] = s.emit.builder.fdiv(cotangent, total)
        s[self.d_scale] = pulled

    def inner(self, s: Scratch, i: Any, j: Any) -> Any:
        """<column i of the cotangent, column j of the matrix>."""
        total = s.emit.constant(0.0)
        for (at_cotangent, _), (_, at_matrix) in zip(self.columns(s, self.cotangent, i, j), self.columns(s, 0, i, j)):
            total = s.emit.fma(s[at_cotangent], s[at_matrix], total)
        return total

    def settle(self, s: Scratch, at: Any, pulled: Any) -> None:
        """The gradient of a coefficient step x: times step for the coordinate, times x for the step."""
        s[self.gradient, at] = s.emit.mul(pulled, s[self.step])
        s[self.d_step] = s.emit.fma(pulled, s[self.value, at], s[self.d_step])

    def unshear(self, s: Scratch, k: Any, i: Any, j: Any) -> None:
        at = s.emit.times(k, LANES)
        coef, pulled = s[self.main, at], self.inner(s, j, i)
        if self.bounded:
            pulled = s.emit.fma(s[self.d_scale], s[self.slope, at], pulled)
        self.settle(s, at, pulled)
        self.add_column(s, 0, i, j, s.emit.builder.fneg(coef))
        self.add_column(s, self.cotangent, j, i, coef)

    def unrotate(self, s: Scratch, k: Any, i: Any, j: Any) -> None:
        at = s.emit.times(k, LANES)
        cos, back = s[self.main, at], s.emit.builder.fneg(s[self.other, at])
        self.settle(s, at, s.emit.sub(self.inner(s, i, j), self.inner(s, j, i)))
        self.turn(s, 0, i, j, cos, back)
        self.turn(s, self.cotangent, i, j, cos, back)

    def undiagonal(self, s: Scratch, i: Any) -> None:
        # d<Y, R>/d(-step softplus) = Y_ii R_ii, and R_ii is `main` again without the other factors.
        emit, at = s.emit, s.emit.times(i, LANES)
        pulled = emit.builder.fneg(emit.mul(s[self.cotangent, emit.times(i, (self.width + 1) * LANES)], s[self.main, at]))
        s[self.gradient, at] = emit.mul(pulled, emit.mul(s[self.step], s[self.slope, at]))
        s[self.d_step] = emit.fma(pulled, s[self.other, at], s[self.d_step])


def make_map(split: Split) -> CoordinateMap:
    """The loops over the factors of a split product, forward and backward."""
    from numba import njit

    lanes, limit, bounded = LANES, largest_angle(split.dtype), split.bounded
    first_rotation, first_shear, num_coords = split.first_rotation, split.first_shear, split.num_coords
    value, main, other, step, d_step = split.value, split.main, split.other, split.step, split.d_step
    pairs = [(i, j) for i in range(split.width) for j in range(i + 1, split.width)] or [(0, 0)]
    firsts, seconds = np.array([i for i, _ in pairs]), np.array([j for _, j in pairs])
    diagonal, angle, coefficient = (split.trace(method) for method in (split.diagonal, split.angle, split.coefficient))
    start, rotate, shear, shrink = (split.trace(method) for method in (split.start, split.rotate, split.shear, split.shrink))
    undiagonal, unrotate = split.trace(split.undiagonal), split.trace(split.unrotate)
    unshear, unshrink = split.trace(split.unshear), split.trace(split.unshrink)

    @njit(inline="always")
    def prepare(w):
        for k in range(first_rotation):
            diagonal(w, k)
        for k in range(first_rotation, first_shear):
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

    @njit(inline="always")
    def fill(w):
        prepare(w)
        start(w)
        for k in range(first_rotation, first_shear):
            rotate(w, k, firsts[k - first_rotation], seconds[k - first_rotation])
        for k in range(first_shear, num_coords):
            shear(w, k, firsts[k - first_shear], seconds[k - first_shear])
        if bounded:
            shrink(w)
        return 0

    @njit(inline="always")
    def pull_back(w):
        prepare(w)
        w[d_step : d_step + lanes] = 0.0
        if bounded:
            unshrink(w)
        for k in range(num_coords - 1, first_shear - 1, -1):
            unshear(w, k, firsts[k - first_shear], seconds[k - first_shear])
        for k in range(first_shear - 1, first_rotation - 1, -1):
            unrotate(w, k, firsts[k - first_rotation], seconds[k - first_rotation])
        for i in range(first_rotation):
            undiagonal(w, i)

    lane_map = LaneMap(split.dtype, split.scratch, value, step, fill)
    return CoordinateMap(lane_map, 0, split.cotangent, split.gradient, d_step, pull_back)


def build_split(dtype: str, width: int, sizes: tuple[int, int, int, int], backward: bool) -> Callable[..., None]:
    """kernel(operands, start, stop) of a `coordinate_op`; `sizes` are those of `Split`, and whether it is bounded."""
    split = Split(dtype, width, sizes[:3], bool(sizes[3]))
    return coordinate_kernel(width, split.num_coords, make_map(split), backward)


def split_lanes(dtype: str, width: int, sizes: tuple[int, int, int], bounded: bool) -> LaneMap:
    """The split product of LANES tokens inside another kernel."""
    return make_map(Split(dtype, width, sizes, bounded)).lanes
