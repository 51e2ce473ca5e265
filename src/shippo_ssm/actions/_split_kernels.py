"""Machine code of the split product and of its gradient: LANES tokens at a time, one per SIMD lane.

Data path. Coordinates [LANES, K] and steps [LANES] become vectors over the lanes; exp, softplus, sine and cosine are
polynomials; the factors are updates of columns of a scratch matrix [P P, LANES]. The backward pass starts from the
finished product, takes the factors off again from the right, and reads the gradient of each coefficient on the way:
d/dc <Y, X exp(c G)> = <Y, X exp(c G) G>. It needs no memory beyond the product itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shippo_ssm.actions._trig import largest_angle, sine_and_cosine, softplus, square_root
from shippo_ssm.engine import LANES, LaneMap, block_reader, block_writer, simd


def build_split(dtype: str, width: int, sizes: tuple[int, int, int, int], backward: bool) -> Callable[..., None]:
    """kernel(operands, start, stop): the split product or its gradient; `kernels.Operands` names the operands.

    The forward pass writes `right`; the backward pass reads it with its cotangent and writes d_coords and d_step.
    `sizes` counts diagonals, rotations and shears, and says whether the product is divided by the norms of its shears.
    """
    *counts, bounded = sizes
    return _build(dtype, width, tuple(counts), backward, bool(bounded))[0]


def split_lanes(dtype: str, width: int, sizes: tuple[int, int, int], bounded: bool) -> LaneMap:
    """The split product of LANES tokens inside another kernel; `bounded` divides it by the norms of its shears."""
    return _build(dtype, width, sizes, False, bounded)[1]


def _build(
    dtype: str, width: int, sizes: tuple[int, ...], backward: bool, bounded: bool
) -> tuple[Callable[..., None], LaneMap]:
    from numba import njit

    lanes, element, size = LANES, np.dtype(dtype), width * width
    num_diagonal, num_rotations, num_shears = sizes
    count_coords = sum(sizes)
    pairs = [(i, j) for i in range(width) for j in range(i + 1, width)]
    firsts = np.array([i for i, _ in pairs] or [0])
    seconds = np.array([j for _, j in pairs] or [0])
    largest_decay, limit = 0.9 * math.log(float(np.finfo(element).max)), largest_angle(dtype)

    # Vectors of the scratch: the matrix, its cotangent, and per coordinate its value, two numbers of its factor, its
    # derivative and its gradient; the step and its gradient; <cotangent, R> of a bounded R.
    matrix, bar = 0, size * lanes
    value = 2 * size * lanes
    main, other, slope, gradient = (value + k * count_coords * lanes for k in (1, 2, 3, 4))
    step_at = value + 5 * count_coords * lanes
    step_gradient = step_at + lanes
    scale_gradient = step_gradient + lanes
    room = scale_gradient + lanes

    @simd(dtype, lanes)
    def prepare_diagonal(emit: Any, w: Any, k: Any) -> None:
        # main = exp(-step softplus(d)), other = softplus(d), slope = sigmoid(d), both 0 where the decay is cut.
        build, zero = emit.builder, emit.constant(0.0)
        shift = emit.times(k, lanes)
        x, step = emit.load(w, emit.at(value, shift), padded=True), emit.load(w, step_at, padded=True)
        plus, sigmoid = softplus(emit, x)
        decay = emit.mul(step, plus)
        cut = build.fcmp_ordered(">", decay, emit.constant(largest_decay))
        decay = build.select(cut, emit.constant(largest_decay), decay)
        kept = emit.exp2(emit.mul(decay, emit.constant(-1.0 / math.log(2.0))))
        emit.store(w, emit.at(main, shift), kept, padded=True)
        emit.store(w, emit.at(other, shift), build.select(cut, zero, plus), padded=True)
        emit.store(w, emit.at(slope, shift), build.select(cut, zero, sigmoid), padded=True)

    @simd(dtype, lanes)
    def prepare_rotation(emit: Any, w: Any, k: Any) -> None:
        # main = cos(step theta), other = sin(step theta).
        shift = emit.times(k, lanes)
        angle = emit.mul(emit.load(w, emit.at(value, shift), padded=True), emit.load(w, step_at, padded=True))
        sin, cos = sine_and_cosine(emit, angle)
        emit.store(w, emit.at(main, shift), cos, padded=True)
        emit.store(w, emit.at(other, shift), sin, padded=True)

    @simd(dtype, lanes)
    def prepare_shear(emit: Any, w: Any, k: Any) -> None:
        # main = step eta.
        shift = emit.times(k, lanes)
        coef = emit.mul(emit.load(w, emit.at(value, shift), padded=True), emit.load(w, step_at, padded=True))
        emit.store(w, emit.at(main, shift), coef, padded=True)

    def columns(emit: Any, base: int, i: Any, j: Any, row: int) -> tuple[Any, Any]:
        return tuple(emit.at(base + row * width * lanes, emit.times(column, lanes)) for column in (i, j))

    def turn(emit: Any, w: Any, base: int, i: Any, j: Any, cos: Any, sin: Any) -> None:
        for row in range(width):
            at_i, at_j = columns(emit, base, i, j, row)
            first, second = emit.load(w, at_i, padded=True), emit.load(w, at_j, padded=True)
            emit.store(w, at_i, emit.fma(second, sin, emit.mul(first, cos)), padded=True)
            emit.store(w, at_j, emit.builder.fsub(emit.mul(second, cos), emit.mul(first, sin)), padded=True)

    def add_column(emit: Any, w: Any, base: int, source: Any, target: Any, coef: Any) -> None:
        for row in range(width):
            at_source, at_target = columns(emit, base, source, target, row)
            total = emit.fma(coef, emit.load(w, at_source, padded=True), emit.load(w, at_target, padded=True))
            emit.store(w, at_target, total, padded=True)

    def inner(emit: Any, w: Any, i: Any, j: Any) -> Any:
        """<column i of the cotangent, column j of the matrix>."""
        total = emit.constant(0.0)
        for row in range(width):
            at_bar, at_matrix = columns(emit, bar, i, j, row)[0], columns(emit, matrix, i, j, row)[1]
            total = emit.fma(emit.load(w, at_bar, padded=True), emit.load(w, at_matrix, padded=True), total)
        return total

    def settle(emit: Any, w: Any, shift: Any, pulled: Any) -> None:
        # The gradient of a coefficient step x goes to the coordinate as step, and to the step as x.
        emit.store(w, emit.at(gradient, shift), emit.mul(pulled, emit.load(w, step_at, padded=True)), padded=True)
        total = emit.fma(pulled, emit.load(w, emit.at(value, shift), padded=True), emit.load(w, step_gradient, padded=True))
        emit.store(w, step_gradient, total, padded=True)

    @simd(dtype, lanes)
    def rotate(emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        shift = emit.times(k, lanes)
        cos, sin = (emit.load(w, emit.at(place, shift), padded=True) for place in (main, other))
        turn(emit, w, matrix, i, j, cos, sin)

    @simd(dtype, lanes)
    def unrotate(emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        shift = emit.times(k, lanes)
        cos, sin = (emit.load(w, emit.at(place, shift), padded=True) for place in (main, other))
        settle(emit, w, shift, emit.builder.fsub(inner(emit, w, i, j), inner(emit, w, j, i)))
        turn(emit, w, matrix, i, j, cos, emit.builder.fneg(sin))
        turn(emit, w, bar, i, j, cos, emit.builder.fneg(sin))

    @simd(dtype, lanes)
    def shear(emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        add_column(emit, w, matrix, i, j, emit.load(w, emit.at(main, emit.times(k, lanes)), padded=True))

    @simd(dtype, lanes)
    def unshear(emit: Any, w: Any, k: Any, i: Any, j: Any) -> None:
        shift = emit.times(k, lanes)
        coef = emit.load(w, emit.at(main, shift), padded=True)
        pulled = inner(emit, w, j, i)
        if bounded:
            # d log(1 / norm) / d coef is in `slope`, see `unshrink`.
            scale = emit.load(w, scale_gradient, padded=True)
            pulled = emit.fma(scale, emit.load(w, emit.at(slope, shift), padded=True), pulled)
        settle(emit, w, shift, pulled)
        add_column(emit, w, matrix, i, j, emit.builder.fneg(coef))
        add_column(emit, w, bar, j, i, coef)

    @simd(dtype, lanes)
    def start_matrix(emit: Any, w: Any, diagonal: Any) -> None:
        for entry in range(size):
            vector = emit.constant(1.0 if entry % (width + 1) == 0 else 0.0)
            if num_diagonal and entry % (width + 1) == 0:
                vector = emit.load(w, main + entry // (width + 1) * lanes, padded=True)
            emit.store(w, entry * lanes, vector, padded=True)

    def norm_of_shears(emit: Any, w: Any) -> Any:
        # exp(asinh(|z|)) = sqrt(1 + z^2) + |z| for every shear, z = coefficient / 2; see `SplitFlow`. Its logarithm has the
        # derivative sign(z) / (2 sqrt(1 + z^2)), zero at zero, which is left in `slope` with a minus sign.
        build, total, zero = emit.builder, emit.constant(1.0), emit.constant(0.0)
        for k in range(last_shear, count_coords):
            z = emit.mul(emit.load(w, main + k * lanes, padded=True), emit.constant(0.5))
            root = square_root(emit, emit.fma(z, z, emit.constant(1.0)))
            negative = build.fcmp_ordered("<", z, zero)
            sign = build.select(negative, emit.constant(0.5), emit.constant(-0.5))
            sign = build.select(build.fcmp_ordered("==", z, zero), zero, sign)
            emit.store(w, slope + k * lanes, build.fdiv(sign, root), padded=True)
            total = emit.mul(total, emit.add(root, build.select(negative, build.fneg(z), z)))
        return total

    @simd(dtype, lanes)
    def shrink(emit: Any, w: Any) -> None:
        total = norm_of_shears(emit, w)
        for entry in range(size):
            place = matrix + entry * lanes
            emit.store(w, place, emit.builder.fdiv(emit.load(w, place, padded=True), total), padded=True)

    @simd(dtype, lanes)
    def unshrink(emit: Any, w: Any) -> None:
        # R = S / norm: <Y, R> pulls at the logarithm of 1 / norm, and Y / norm at S, whose factors are then taken off.
        total, pulled = norm_of_shears(emit, w), emit.constant(0.0)
        for entry in range(size):
            place, place_bar = matrix + entry * lanes, bar + entry * lanes
            held, cotangent = emit.load(w, place, padded=True), emit.load(w, place_bar, padded=True)
            pulled = emit.fma(held, cotangent, pulled)
            emit.store(w, place, emit.mul(held, total), padded=True)
            emit.store(w, place_bar, emit.builder.fdiv(cotangent, total), padded=True)
        emit.store(w, scale_gradient, pulled, padded=True)

    @simd(dtype, lanes)
    def undiagonal(emit: Any, w: Any, i: Any) -> None:
        # d<Y, R>/d(-step softplus) = Y_ii R_ii, and R_ii is `main` again when all other factors are off.
        shift = emit.times(i, lanes)
        pulled = emit.mul(
            emit.load(w, emit.at(bar, emit.times(i, (width + 1) * lanes)), padded=True),
            emit.load(w, emit.at(main, shift), padded=True),
        )
        pulled = emit.builder.fneg(pulled)
        stretched = emit.mul(emit.load(w, step_at, padded=True), emit.load(w, emit.at(slope, shift), padded=True))
        emit.store(w, emit.at(gradient, shift), emit.mul(pulled, stretched), padded=True)
        total = emit.fma(pulled, emit.load(w, emit.at(other, shift), padded=True), emit.load(w, step_gradient, padded=True))
        emit.store(w, step_gradient, total, padded=True)

    read_coords, write_coords = block_reader(dtype, dtype, count_coords), block_writer(dtype, dtype, count_coords)
    read_matrix, write_matrix = block_reader(dtype, dtype, size), block_writer(dtype, dtype, size)
    last_shear, last_rotation = num_diagonal + num_rotations, num_diagonal

    @njit(inline="always")
    def prepare(w):
        for k in range(num_diagonal):
            prepare_diagonal(w, k)
        for k in range(last_rotation, last_shear):
            largest = 0.0
            for lane in range(lanes):
                largest = max(largest, abs(w[value + k * lanes + lane] * w[step_at + lane]))
            if largest <= limit:
                prepare_rotation(w, k)
            else:
                for lane in range(lanes):
                    angle = w[value + k * lanes + lane] * w[step_at + lane]
                    w[main + k * lanes + lane] = math.cos(angle)
                    w[other + k * lanes + lane] = math.sin(angle)
        for k in range(last_shear, count_coords):
            prepare_shear(w, k)

    @njit(inline="always")
    def fill(w):
        prepare(w)
        start_matrix(w, 0)
        for pair in range(num_rotations):
            rotate(w, last_rotation + pair, firsts[pair], seconds[pair])
        for pair in range(num_shears):
            shear(w, last_shear + pair, firsts[pair], seconds[pair])
        if bounded:
            shrink(w)
        return matrix

    def kernel(operands, start, stop):
        coords, step, right, cotangent, d_coords, d_step, count = operands
        w = np.zeros(room, dtype=element)
        for block in range(start, stop):
            first = block * lanes
            here = min(lanes, count - first)
            read_coords(coords, first, here, w, value)
            for lane in range(lanes):
                w[step_at + lane] = step[first + lane] if lane < here else 0.0
            if not backward:
                fill(w)
                write_matrix(w, matrix, right, first, here)
                continue
            prepare(w)
            read_matrix(right, first, here, w, matrix)
            read_matrix(cotangent, first, here, w, bar)
            w[step_gradient : step_gradient + lanes] = 0.0
            if bounded:
                unshrink(w)
            for pair in range(num_shears - 1, -1, -1):
                unshear(w, last_shear + pair, firsts[pair], seconds[pair])
            for pair in range(num_rotations - 1, -1, -1):
                unrotate(w, last_rotation + pair, firsts[pair], seconds[pair])
            for i in range(num_diagonal):
                undiagonal(w, i)
            write_coords(w, gradient, d_coords, first, here)
            for lane in range(here):
                d_step[first + lane] = w[step_gradient + lane]

    return kernel, LaneMap(dtype, room, value, step_at, fill)
