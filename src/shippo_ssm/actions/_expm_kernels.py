"""Machine code of the exponential: eight matrices at a time, one per SIMD lane.

Data path. A block of LANES matrices [P, P] is transposed into a scratch array [slots, P P, LANES], so that entry (i, j)
of all of them is one vector; every operation then is the textbook one on single numbers. A block that is not full is
padded with zeros. The scheme is that of `expm.py`, every lane with its own scaling, and its tangent for the
Frechet derivative. float32 operands of moderate norm are computed in float32 as exp(A) - I, so that rounding errors
are those of the small part; blocks with a larger norm are left to a second kernel, which works in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.actions._trig import softplus
from shippo_ssm.actions.base import Inline
from shippo_ssm.engine import LANES, LaneMap, block_reader, block_writer, simd


class Operands(NamedTuple):
    """Flat arrays of `count` matrices; `todo` has one entry per block of LANES of them."""

    generator: Any
    direction: Any
    out: Any
    todo: Any
    count: int


def build_expm(
    dtype: str, arithmetic: str, width: int, degree: int, theta: float, squarings: int, frechet: bool
) -> Callable[..., None]:
    """kernel(operands, start, stop): exp, or its derivative along `direction`.

    The derivative is taken at the transpose of `generator`, as a gradient needs it. Blocks with todo[block] = 1 are
    done and get 0, unless a matrix asks for more than `squarings`: then they are left as they are. A generator that is not
    finite gives NaN. With float32 arithmetic the scratch holds exp(A) - I.
    """
    return _build(dtype, arithmetic, width, degree, theta, squarings, frechet)[0]


def expm_lanes(dtype: str, width: int, degree: int, theta: float, inline: Inline) -> LaneMap:
    """exp(step A) of eight tokens inside another kernel, in float64 whatever `dtype` goes in and out."""
    from numba import njit

    arithmetic, lanes, size = "float64", LANES, width * width
    exponential = _build(dtype, arithmetic, width, degree, theta, 1 << 20, False)[1]
    num_diagonal, num_rotations, num_shears = inline.sizes
    pairs = [(i, j) for i in range(width) for j in range(i + 1, width)]
    count = sum(inline.sizes) or size
    coords, step_at = 6 * size * lanes, (6 * size + count) * lanes
    limit, margin = 0.9 * math.log(float(np.finfo(dtype).max)), 1.0 + 4.0 * width * float(np.finfo(dtype).eps)

    @simd(arithmetic, lanes)
    def generate(emit: Any, w: Any) -> None:
        build, zero = emit.builder, emit.constant(0.0)

        def larger(a: Any, b: Any) -> Any:
            return build.select(build.fcmp_unordered(">", a, b), a, b)

        values = [emit.load(w, coords + k * lanes, padded=True) for k in range(count)]
        entries = list(values)
        if any(inline.sizes):
            entries = [zero] * size
            for i, x in enumerate(values[:num_diagonal]):
                decay = larger(x, zero) if inline.diagonal == "clamp" else softplus(emit, x)[0]
                cut = build.fcmp_ordered(">", decay, emit.constant(limit))
                entries[i * width + i] = build.fneg(build.select(cut, emit.constant(limit), decay))
            for (i, j), x in zip(pairs[:num_rotations], values[num_diagonal:]):
                entries[j * width + i], entries[i * width + j] = x, build.fneg(x)
            for (i, j), x in zip(pairs[:num_shears], values[num_diagonal + num_rotations :]):
                entries[i * width + j] = emit.add(entries[i * width + j], x)
        if inline.bounded:
            excess = zero
            for i in range(width):
                total = entries[i * width + i]
                for j in (j for j in range(width) if j != i):
                    off = emit.mul(emit.add(entries[i * width + j], entries[j * width + i]), emit.constant(0.5))
                    total = emit.add(total, larger(off, build.fneg(off)))
                excess = larger(total, excess)
            excess = emit.mul(excess, emit.constant(margin))
            for i in range(width):
                entries[i * width + i] = emit.sub(entries[i * width + i], excess)
        step = emit.load(w, step_at, padded=True)
        for k, entry in enumerate(entries):
            emit.store(w, k * lanes, emit.mul(entry, step), padded=True)

    @njit(inline="always")
    def fill(w):
        generate(w)
        return exponential(w)

    return LaneMap(arithmetic, step_at + lanes, coords, step_at, fill)


def _build(
    dtype: str, arithmetic: str, width: int, degree: int, theta: float, squarings: int, frechet: bool
) -> tuple[Callable[..., None], Callable[..., int]]:
    from numba import njit

    size, lanes, element = width * width, LANES, np.dtype(arithmetic)
    slot = size * lanes
    # Slots: four powers, the total and the next total, then the same six for the tangent.
    tangent = 6 * slot
    shifted = arithmetic == "float32"
    transpose = [entry % width * width + entry // width for entry in range(size)]
    read_generator = block_reader(dtype, arithmetic, size, transpose if frechet else None)
    read_direction = block_reader(dtype, arithmetic, size)
    write_result = block_writer(dtype, arithmetic, size, range(0, size, width + 1) if shifted and not frechet else ())
    weights = np.array([1.0 / math.factorial(k) for k in range(degree + 1)], dtype=element)
    if shifted:
        weights[0] = 0.0
    group = 2 if width % 2 == 0 else 1

    def rows_of_product(more: bool) -> Callable[..., None]:
        # rows(w, a, b, c, row): `group` rows of c = a b (+ c) from `row` on, few enough accumulators for the registers.
        @simd(arithmetic, lanes)
        def rows(emit: Any, w: Any, a: Any, b: Any, c: Any, row: Any) -> None:
            shift = emit.times(row, width * lanes)
            columns = [(i, j) for i in range(group) for j in range(width)]
            places = [emit.at(c, shift, (i * width + j) * lanes) for i, j in columns]
            totals = [emit.load(w, place, padded=True) for place in places] if more else []
            for k in range(width):
                left = [emit.load(w, emit.at(a, shift, (i * width + k) * lanes), padded=True) for i in range(group)]
                right = [emit.load(w, emit.at(b, (k * width + j) * lanes), padded=True) for j in range(width)]
                if totals:
                    totals = [emit.fma(left[i], right[j], total) for (i, j), total in zip(columns, totals)]
                else:
                    totals = [emit.mul(left[i], right[j]) for i, j in columns]
            for place, total in zip(places, totals):
                emit.store(w, place, total, padded=True)

        return rows

    set_rows, add_rows = rows_of_product(False), rows_of_product(True)

    @simd(arithmetic, lanes)
    def column_sums(emit: Any, w: Any, norms: Any) -> None:
        build, zero = emit.builder, emit.constant(0.0)
        largest = zero
        for j in range(width):
            total = zero
            for i in range(width):
                entry = emit.load(w, (i * width + j) * lanes, padded=True)
                total = emit.add(total, build.select(build.fcmp_ordered("<", entry, zero), build.fneg(entry), entry))
            # Unordered: a NaN wins, and shows.
            largest = build.select(build.fcmp_unordered(">", total, largest), total, largest)
        emit.store(norms, 0, largest, padded=True)

    @simd(arithmetic, lanes)
    def scale(emit: Any, w: Any, target: Any, factors: Any) -> None:
        factor = emit.load(factors, 0, padded=True)
        for entry in range(size):
            place = emit.at(target, entry * lanes)
            emit.store(w, place, emit.mul(emit.load(w, place, padded=True), factor), padded=True)

    def combination(terms: int, plain: bool) -> Callable[..., None]:
        # combine(w, coef, first, powers, out): coef[first] I + sum_k coef[first + k] powers[k - 1]; the tangent has no I.
        @simd(arithmetic, lanes)
        def combine(emit: Any, w: Any, coef: Any, first: Any, powers: Any, out: Any) -> None:
            splats = [emit.splat(coef, emit.at(first, k)) for k in range(terms)]
            for entry in range(size):
                total = splats[0] if plain and entry % (width + 1) == 0 else emit.constant(0.0)
                for k in range(terms - 1, 0, -1):
                    power = emit.load(w, emit.at(powers, (k - 1) * slot + entry * lanes), padded=True)
                    total = emit.fma(splats[k], power, total)
                emit.store(w, emit.at(out, entry * lanes), total, padded=True)

        return combine

    five_terms, four_terms = combination(5, True), combination(4, True)
    five_tangents, four_tangents = combination(5, False), combination(4, False)

    @simd(arithmetic, lanes)
    def double(emit: Any, w: Any, source: Any, target: Any) -> None:
        for entry in range(size):
            vector = emit.load(w, emit.at(source, entry * lanes), padded=True)
            emit.store(w, emit.at(target, entry * lanes), emit.add(vector, vector), padded=True)

    @simd(arithmetic, lanes)
    def keep_finished(emit: Any, w: Any, old: Any, new: Any, left: Any) -> None:
        # Lanes whose squarings are done take the old value again.
        going = emit.builder.fcmp_ordered(">", emit.load(left, 0, padded=True), emit.constant(0.0))
        for entry in range(size):
            place = emit.at(new, entry * lanes)
            before = emit.load(w, emit.at(old, entry * lanes), padded=True)
            emit.store(w, place, emit.builder.select(going, emit.load(w, place, padded=True), before), padded=True)

    @njit(inline="always")
    def measure(w, norms, factors, left):
        column_sums(w, norms)
        fewest, most, finite = 1 << 30, 0, True
        for lane in range(lanes):
            norm, factor, count_here = norms[lane], 1.0, 0
            if not norm < np.inf:
                norm, factor, finite = 0.0, np.nan, False
            while norm > theta:
                norm *= 0.5
                factor *= 0.5
                count_here += 1
            factors[lane], left[lane] = factor, count_here
            fewest, most = min(fewest, count_here), max(most, count_here)
        return fewest, most, finite

    @njit(inline="always")
    def raise_powers(w, left, fewest, most):
        for target in range(1, 4):
            x, y = max(0, target - 2), min(1, target - 1)
            for i in range(0, width, group):
                set_rows(w, x * slot, y * slot, target * slot, i)
                if frechet:
                    set_rows(w, x * slot, tangent + y * slot, tangent + target * slot, i)
                    add_rows(w, tangent + x * slot, y * slot, tangent + target * slot, i)
        total, spare = 4 * slot, 5 * slot
        five_terms(w, weights, degree - 4, 0, total)
        if frechet:
            five_tangents(w, weights, degree - 4, tangent, tangent + total)
        for step in range(1, degree // 4):
            four_terms(w, weights, degree - 4 - 4 * step, 0, spare)
            if frechet:
                four_tangents(w, weights, degree - 4 - 4 * step, tangent, tangent + spare)
            for i in range(0, width, group):
                add_rows(w, 3 * slot, total, spare, i)
                if frechet:
                    add_rows(w, 3 * slot, tangent + total, tangent + spare, i)
                    add_rows(w, tangent + 3 * slot, total, tangent + spare, i)
            total, spare = spare, total
        for done in range(most):
            if shifted:
                double(w, total, spare)
                if frechet:
                    double(w, tangent + total, tangent + spare)
            for i in range(0, width, group):
                if shifted:
                    add_rows(w, total, total, spare, i)
                else:
                    set_rows(w, total, total, spare, i)
                if frechet:
                    if shifted:
                        add_rows(w, total, tangent + total, tangent + spare, i)
                    else:
                        set_rows(w, total, tangent + total, tangent + spare, i)
                    add_rows(w, tangent + total, total, tangent + spare, i)
            if done >= fewest:
                keep_finished(w, total, spare, left)
                if frechet:
                    keep_finished(w, tangent + total, tangent + spare, left)
            for lane in range(lanes):
                left[lane] -= 1.0
            total, spare = spare, total
        return total

    @njit(inline="always")
    def exponential(w):
        norms, factors, left = np.empty(lanes, element), np.empty(lanes, element), np.empty(lanes, element)
        fewest, most, finite = measure(w, norms, factors, left)
        if most > 0 or not finite:
            scale(w, 0, factors)
        return raise_powers(w, left, fewest, most)

    def kernel(operands, start, stop):
        generator, direction, out, todo, count = operands
        w = np.zeros((12 if frechet else 6) * slot, dtype=element)
        norms, factors, left = np.empty(lanes, element), np.empty(lanes, element), np.empty(lanes, element)
        for block in range(start, stop):
            if todo[block] == 0:
                continue
            first = block * lanes
            here = min(lanes, count - first)
            read_generator(generator, first, here, w, 0)
            fewest, most, finite = measure(w, norms, factors, left)
            if most > squarings:
                continue
            todo[block] = 0
            scaled = most > 0 or not finite
            if scaled:
                scale(w, 0, factors)
            if frechet:
                read_direction(direction, first, here, w, tangent)
                if scaled:
                    scale(w, tangent, factors)
            total = raise_powers(w, left, fewest, most)
            write_result(w, tangent + total if frechet else total, out, first, here)

    return kernel, exponential
