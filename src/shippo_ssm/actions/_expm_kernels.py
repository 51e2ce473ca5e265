"""Machine code of the exponential: eight matrices at a time, one per SIMD lane.

Data path. A block of LANES matrices [P, P] is transposed into a scratch array [slots, P P, LANES], so that entry (i, j)
of all of them is one vector; every operation then is the textbook one on single numbers. A block that is not full is
padded with zeros. Every lane has its own scaling. float32 operands of moderate norm are computed in float32 as exp(A) - I,
so that rounding errors are those of the small part; blocks with a larger norm are left to a second kernel, which works in
float64.

Up to width 4 (`narrow_core`) the Taylor polynomial is taken modulo the characteristic polynomial of A (Cayley and Hamilton),
by Horner's rule on four numbers, so that

    exp(A) = c0 I + c1 A + A^2 (c2 I + c3 A)

needs two products whatever its degree. The gradient goes the same way backwards in four more. Wider matrices (`wide_core`)
take the scheme of `expm.py`, and its tangent for the derivative.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.actions._trig import softplus
from shippo_ssm.actions.base import Inline
from shippo_ssm.engine import LANES, LaneMap, block_reader, block_writer, register_lanes, simd

# Up to this width exp is a polynomial of degree 3 in A; narrower matrices are those of this width with zeros around them.
NARROW = 4


class Operands(NamedTuple):
    """Flat arrays of `count` matrices; `todo` has one entry per block of LANES of them."""

    generator: Any
    direction: Any
    out: Any
    todo: Any
    count: int


def build_expm(
    dtype: str, arithmetic: str, width: int, degree: int, theta: float, largest: float, frechet: bool
) -> Callable[..., None]:
    """kernel(operands, start, stop): exp, or its derivative along `direction`.

    The derivative is taken at the transpose of `generator`, as a gradient needs it. Blocks with todo[block] = 1 are
    done and get 0, unless a norm is larger than `largest`: then they are left as they are. A generator that is not
    finite gives NaN.
    """
    return _build(dtype, arithmetic, width, degree, theta, largest, frechet)[0]


def expm_lanes(dtype: str, width: int, degree: int, theta: float, inline: Inline) -> LaneMap:
    """exp(step A) of eight tokens inside another kernel, in float64 whatever `dtype` goes in and out."""
    from numba import njit

    arithmetic, lanes, size = "float64", LANES, width * width
    exponential, scratch = _build(dtype, arithmetic, width, degree, theta, math.inf, False)[1:]
    num_diagonal, num_rotations, num_shears = inline.sizes
    pairs = [(i, j) for i in range(width) for j in range(i + 1, width)]
    count = sum(inline.sizes) or size
    coords, step_at = scratch, scratch + count * lanes
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
    dtype: str, arithmetic: str, width: int, degree: int, theta: float, largest: float, frechet: bool
) -> tuple[Callable[..., None], Callable[..., int], int]:
    """The kernel, the exponential of what stands first in a scratch array, and the numbers of that array."""
    from numba import njit

    size, lanes, element = width * width, LANES, np.dtype(arithmetic)
    core = (narrow_core if width <= NARROW else wide_core)(arithmetic, width, degree, theta, largest, frechet)
    scratch, direction_at, measure, run = core
    # The derivative of the wide core is a tangent, that of the narrow one a gradient already.
    turned = [entry % width * width + entry // width for entry in range(size)] if frechet and width > NARROW else None
    read_generator, read_direction = block_reader(dtype, arithmetic, size, turned), block_reader(dtype, arithmetic, size)
    less_identity = arithmetic == "float32" and not frechet
    write_result = block_writer(dtype, arithmetic, size, range(0, size, width + 1) if less_identity else ())

    @njit(inline="always")
    def exponential(w):
        norms, factors, left = np.empty(2 * lanes, element), np.empty(lanes, element), np.empty(lanes, element)
        fewest, most, top = measure(w, norms, factors, left)
        return run(w, factors, left, fewest, most, top)

    def kernel(operands, start, stop):
        generator, direction, out, todo, count = operands
        w = np.zeros(scratch, dtype=element)
        norms, factors, left = np.empty(2 * lanes, element), np.empty(lanes, element), np.empty(lanes, element)
        for block in range(start, stop):
            if todo[block] == 0:
                continue
            first = block * lanes
            here = min(lanes, count - first)
            read_generator(generator, first, here, w, 0)
            fewest, most, top = measure(w, norms, factors, left)
            if top > largest:
                continue
            todo[block] = 0
            if frechet:
                read_direction(direction, first, here, w, direction_at)
            write_result(w, run(w, factors, left, fewest, most, top), out, first, here)

    return kernel, exponential, scratch


class Core(NamedTuple):
    """The exponential of eight matrices in a scratch array in which A [P P, LANES] stands first."""

    scratch: int
    """Numbers of the array."""
    direction: int
    """Where the direction of a derivative stands."""
    measure: Callable[..., Any]
    """measure(w, norms, factors, left) -> fewest and most squarings of a lane, and the largest norm, or -1 for what is not
    finite; fills in the scaling of every lane and its squarings."""
    run: Callable[..., int]
    """run(w, factors, left, fewest, most, top) -> where the result stands; exp(A) - I instead of exp(A) in float32."""


class Tools(NamedTuple):
    """What both cores are made of."""

    measure: Callable[..., Any]
    scale: Any
    """scale(w, target, factors): every lane times its factor."""
    set_product: Callable[..., None]
    """set_product(w, a, b, c): c = a b."""
    add_product: Callable[..., None]
    """add_product(w, a, b, c): c = c + a b."""
    double: Any
    """double(w, x, c): c = 2 x."""
    keep_finished: Any
    """keep_finished(w, old, new, left): lanes without squarings left take the old value again."""


def tile(width: int, totals: int) -> tuple[int, int]:
    """Rows and columns of the part of a product that has at most `totals` entries and the fewest loads for each of them.

    Example:
        >>> tile(4, 8), tile(16, 16), tile(5, 8)
        ((2, 4), (4, 4), (1, 5))
    """
    sides = [side for side in range(1, width + 1) if width % side == 0]
    fitting = [(rows, columns) for rows in sides for columns in sides if rows * columns <= totals]
    return max(fitting, key=lambda part: (part[0] * part[1] / (part[0] + part[1]), part[1]))


def make_tools(arithmetic: str, width: int, theta: float) -> Tools:
    """The tools for one width and arithmetic; a norm above `theta` is scaled."""
    from numba import njit

    lanes = LANES
    row_size = width * lanes
    # Half of the registers hold totals: 16 of 32 with AVX-512, 8 of 16 without; a vector may take two.
    register = register_lanes(arithmetic)
    registers = 16 if register * np.dtype(arithmetic).itemsize == 64 else 8
    rows, columns = tile(width, registers // max(1, lanes // register))

    def part_of_product(more: bool) -> Callable[..., None]:
        @simd(arithmetic, lanes)
        def part(emit: Any, w: Any, a: Any, b: Any, c: Any, row: Any, column: Any) -> None:
            a, b = emit.at(a, emit.times(row, row_size)), emit.at(b, emit.times(column, lanes))
            c = emit.at(c, emit.times(row, row_size), emit.times(column, lanes))
            entries = [(i, j) for i in range(rows) for j in range(columns)]
            places = [emit.at(c, i * row_size + j * lanes) for i, j in entries]
            totals = [emit.load(w, place, padded=True) for place in places] if more else []
            for k in range(width):
                left = [emit.load(w, emit.at(a, i * row_size + k * lanes), padded=True) for i in range(rows)]
                right = [emit.load(w, emit.at(b, k * row_size + j * lanes), padded=True) for j in range(columns)]
                if totals:
                    totals = [emit.fma(left[i], right[j], total) for (i, j), total in zip(entries, totals)]
                else:
                    totals = [emit.mul(left[i], right[j]) for i, j in entries]
            for place, total in zip(places, totals):
                emit.store(w, place, total, padded=True)

        return part

    set_part, add_part = part_of_product(False), part_of_product(True)

    @njit(inline="always")
    def set_product(w, a, b, c):
        for row in range(0, width, rows):
            for column in range(0, width, columns):
                set_part(w, a, b, c, row, column)

    @njit(inline="always")
    def add_product(w, a, b, c):
        for row in range(0, width, rows):
            for column in range(0, width, columns):
                add_part(w, a, b, c, row, column)

    @simd(arithmetic, lanes)
    def column_sums(emit: Any, w: Any, norms: Any) -> None:
        build, zero = emit.builder, emit.constant(0.0)
        largest = zero
        for j in range(width):
            total = zero
            for i in range(width):
                entry = emit.load(w, i * row_size + j * lanes, padded=True)
                total = emit.add(total, build.select(build.fcmp_ordered("<", entry, zero), build.fneg(entry), entry))
            # Unordered: a NaN wins, and shows.
            largest = build.select(build.fcmp_unordered(">", total, largest), total, largest)
        emit.store(norms, 0, largest, padded=True)
        emit.store(norms, lanes, zero, padded=True)
        above = build.select(build.fcmp_unordered(">", largest, emit.constant(theta)), emit.constant(1.0), zero)
        with emit.when_any(above):
            emit.store(norms, lanes, emit.constant(1.0), padded=True)

    @simd(arithmetic, lanes)
    def scale(emit: Any, w: Any, target: Any, factors: Any) -> None:
        factor = emit.load(factors, 0, padded=True)
        for row in emit.each(width):
            for j in range(width):
                place = emit.at(target, emit.times(row, row_size), j * lanes)
                emit.store(w, place, emit.mul(emit.load(w, place, padded=True), factor), padded=True)

    @simd(arithmetic, lanes)
    def double(emit: Any, w: Any, source: Any, target: Any) -> None:
        for row in emit.each(width):
            for j in range(width):
                shift = emit.at(j * lanes, emit.times(row, row_size))
                vector = emit.load(w, emit.at(source, shift), padded=True)
                emit.store(w, emit.at(target, shift), emit.add(vector, vector), padded=True)

    @simd(arithmetic, lanes)
    def keep_finished(emit: Any, w: Any, old: Any, new: Any, left: Any) -> None:
        going = emit.builder.fcmp_ordered(">", emit.load(left, 0, padded=True), emit.constant(0.0))
        for row in emit.each(width):
            for j in range(width):
                shift = emit.at(j * lanes, emit.times(row, row_size))
                place = emit.at(new, shift)
                before = emit.load(w, emit.at(old, shift), padded=True)
                emit.store(w, place, emit.builder.select(going, emit.load(w, place, padded=True), before), padded=True)

    @njit(inline="always")
    def measure(w, norms, factors, left):
        column_sums(w, norms)
        if norms[lanes] == 0.0:
            return 0, 0, 0.0
        fewest, most, top, finite = 1 << 30, 0, 0.0, True
        for lane in range(lanes):
            norm, factor, count_here = norms[lane], 1.0, 0
            if not norm < np.inf:
                norm, factor, finite = 0.0, np.nan, False
            top = max(top, norm)
            while norm > theta:
                norm *= 0.5
                factor *= 0.5
                count_here += 1
            factors[lane], left[lane] = factor, count_here
            fewest, most = min(fewest, count_here), max(most, count_here)
        return fewest, most, top if finite else -1.0

    return Tools(measure, scale, set_product, add_product, double, keep_finished)


def wide_core(arithmetic: str, width: int, degree: int, theta: float, largest: float, frechet: bool) -> Core:
    """Paterson and Stockmeyer's scheme of `expm.taylor` and squarings; the derivative is the tangent of all of it."""
    from numba import njit

    lanes, shifted, row_size = LANES, arithmetic == "float32", width * LANES
    slot = width * row_size
    # Slots: four powers, the total and the next total, then the same six for the tangent.
    tangent = 6 * slot
    measure, scale, set_product, add_product, double, keep_finished = make_tools(arithmetic, width, theta)
    weights = np.array([1.0 / math.factorial(k) for k in range(degree + 1)], dtype=arithmetic)
    if shifted:
        weights[0] = 0.0

    def combination(terms: int, plain: bool) -> Callable[..., None]:
        # combine(w, coef, first, powers, out): coef[first] I + sum_k coef[first + k] powers[k - 1]; the tangent has no I.
        @simd(arithmetic, lanes)
        def combine(emit: Any, w: Any, coef: Any, first: Any, powers: Any, out: Any) -> None:
            splats = [emit.splat(coef, emit.at(first, k)) for k in range(terms)]
            for row in emit.each(width):
                for j in range(width):
                    shift = emit.at(j * lanes, emit.times(row, row_size))
                    total = emit.constant(0.0)
                    for k in range(terms - 1, 0, -1):
                        power = emit.load(w, emit.at(powers, shift, (k - 1) * slot), padded=True)
                        total = emit.fma(splats[k], power, total)
                    emit.store(w, emit.at(out, shift), total, padded=True)
            for row in emit.each(width if plain else 0):
                place = emit.at(out, emit.times(row, row_size + lanes))
                emit.store(w, place, emit.add(emit.load(w, place, padded=True), splats[0]), padded=True)

        return combine

    five_terms, four_terms = combination(5, True), combination(4, True)
    five_tangents, four_tangents = combination(5, False), combination(4, False)

    @njit(inline="always")
    def run(w, factors, left, fewest, most, top):
        if most > 0 or top < 0.0:
            scale(w, 0, factors)
            if frechet:
                scale(w, tangent, factors)
        for target in range(1, 4):
            x, y = max(0, target - 2) * slot, min(1, target - 1) * slot
            set_product(w, x, y, target * slot)
            if frechet:
                set_product(w, x, tangent + y, tangent + target * slot)
                add_product(w, tangent + x, y, tangent + target * slot)
        total, spare = 4 * slot, 5 * slot
        five_terms(w, weights, degree - 4, 0, total)
        if frechet:
            five_tangents(w, weights, degree - 4, tangent, tangent + total)
        for step in range(1, degree // 4):
            four_terms(w, weights, degree - 4 - 4 * step, 0, spare)
            add_product(w, 3 * slot, total, spare)
            if frechet:
                four_tangents(w, weights, degree - 4 - 4 * step, tangent, tangent + spare)
                add_product(w, 3 * slot, tangent + total, tangent + spare)
                add_product(w, tangent + 3 * slot, total, tangent + spare)
            total, spare = spare, total
        for done in range(most):
            if shifted:
                double(w, total, spare)
                add_product(w, total, total, spare)
            else:
                set_product(w, total, total, spare)
            if frechet:
                if shifted:
                    double(w, tangent + total, tangent + spare)
                    add_product(w, total, tangent + total, tangent + spare)
                else:
                    set_product(w, total, tangent + total, tangent + spare)
                add_product(w, tangent + total, total, tangent + spare)
            if done >= fewest:
                keep_finished(w, total, spare, left)
                if frechet:
                    keep_finished(w, tangent + total, tangent + spare, left)
            for lane in range(lanes):
                left[lane] -= 1.0
            total, spare = spare, total
        return tangent + total if frechet else total

    return Core((12 if frechet else 6) * slot, tangent, measure, run)


def narrow_core(arithmetic: str, width: int, degree: int, theta: float, largest: float, frechet: bool) -> Core:
    """Horner's rule modulo the characteristic polynomial, squarings, and the same backwards.

    With the elementary symmetric functions e1 .. e4 of the eigenvalues, from the traces of A .. A^4,

        x r(x) = (-e4 r3, r0 + e3 r3, r1 - e2 r3, r2 + e1 r3)    modulo the characteristic polynomial, r = r0 + .. + r3 x^3.

    Backwards, the cotangent of c_n is s_n = <G, A^n>, which goes on by the same recurrence, and
    de_j = (-1)^(j-1) sum_k r3_k s_(k+4-j) over Horner's steps, the last one first. d tr(A^j) = j A^(j-1)^T dA and
    de_k / d tr(A^j) = (-1)^(j-1) e_(k-j) / j give the part of the traces, sum_j q_j (A^(j-1))^T.
    """
    from numba import njit

    lanes, shifted, row_size = LANES, arithmetic == "float32", width * LANES
    slot = width * row_size
    measure, scale, set_product, add_product, double, keep_finished = make_tools(arithmetic, width, theta)
    # Slots: A, A^2, a factor of the last product, the total and the next one; for the gradient its cotangent and two more, and
    # from `kept` on the results before each squaring.
    square_at, factor_at, total_at, spare_at, direction_at, moved_at, next_at, kept = (k * slot for k in range(1, 9))
    most_squarings = math.ceil(math.log2(largest / theta)) if frechet and largest > theta else 0
    entries = [(i, j) for i in range(width) for j in range(width)]
    rows, columns = tile(width, 8)
    parts = [
        [(i, j) for i in range(row, row + rows) for j in range(column, column + columns)]
        for row in range(0, width, rows)
        for column in range(0, width, columns)
    ]

    def reader(emit: Any, w: Any, base: Any) -> Callable[[int, int], Any]:
        return lambda i, j: emit.load(w, emit.at(base, i * row_size + j * lanes), padded=True)

    def multiply(emit: Any, w: Any, target: Any, start: Any, *factors: tuple[Any, Any]) -> None:
        """target = start + the products of all pairs of factors, which give an entry each when asked."""
        for part in parts:
            totals = [start(i, j) if start else None for i, j in part]
            for left, right in factors:
                for k in range(width):
                    lefts = {i: left(i, k) for i, _ in part}
                    rights = {j: right(k, j) for _, j in part}
                    totals = [
                        emit.mul(lefts[i], rights[j]) if total is None else emit.fma(lefts[i], rights[j], total)
                        for (i, j), total in zip(part, totals)
                    ]
            for (i, j), total in zip(part, totals):
                emit.store(w, emit.at(target, i * row_size + j * lanes), total, padded=True)

    def inner(emit: Any, x: Any, y: Any) -> Any:
        """<x, y>, the sum of a sum for every row: short chains do not wait for each other."""
        sums = [emit.dot([x(i, j) for j in range(width)], [y(i, j) for j in range(width)]) for i in range(width)]
        return functools.reduce(emit.add, sums)

    def trace(emit: Any, x: Any) -> Any:
        return functools.reduce(emit.add, [x(i, i) for i in range(width)])

    def symmetric_functions(emit: Any, a: Any, square: Any) -> list[Any]:
        """1, e1, e2, e3, e4 by Newton's identities."""
        turned = lambda i, j: square(j, i)  # noqa: E731
        traces = [trace(emit, a), trace(emit, square), inner(emit, a, turned), inner(emit, square, turned)]
        functions = [emit.constant(1.0)]
        for k in range(1, 5):
            total = emit.constant(0.0)
            for j in range(1, k + 1):
                signed = traces[j - 1] if j % 2 else emit.builder.fneg(traces[j - 1])
                total = emit.fma(functions[k - j], signed, total)
            functions.append(emit.mul(total, emit.constant(1.0 / k)))
        return functions

    def advance(emit: Any, functions: list[Any]) -> list[Any]:
        """-e4, e3, -e2, e1: what x^4 is in 1, x, x^2, x^3."""
        _, e1, e2, e3, e4 = functions
        return [emit.builder.fneg(e4), e3, emit.builder.fneg(e2), e1]

    def horner(emit: Any, power: list[Any]) -> tuple[list[Any], list[Any]]:
        """c0 .. c3, and r3 before each step."""
        r, tops = [emit.constant(1.0 / math.factorial(degree - 3 + k)) for k in range(4)], []
        for n in range(degree - 4, -1, -1):
            tops.append(r[3])
            low = emit.constant(0.0 if shifted and n == 0 else 1.0 / math.factorial(n))
            r = [emit.fma(p, r[3], below) for p, below in zip(power, [low, *r[:3]])]
        return r, tops

    @simd(arithmetic, lanes)
    def value(emit: Any, w: Any, target: Any) -> None:
        a, square, factor = (reader(emit, w, base) for base in (0, square_at, factor_at))
        multiply(emit, w, square_at, None, (a, a))
        (c0, c1, c2, c3), _ = horner(emit, advance(emit, symmetric_functions(emit, a, square)))
        for i, j in entries:
            entry = emit.fma(c3, a(i, j), c2) if i == j else emit.mul(c3, a(i, j))
            emit.store(w, factor_at + i * row_size + j * lanes, entry, padded=True)
        multiply(
            emit, w, target,
            lambda i, j: emit.fma(c1, a(i, j), c0) if i == j else emit.mul(c1, a(i, j)),
            (square, factor),
        )  # fmt: skip

    @simd(arithmetic, lanes)
    def pull_back(emit: Any, w: Any, cotangent: Any, target: Any) -> None:
        a, square, g, moved, factor = (reader(emit, w, base) for base in (0, square_at, cotangent, moved_at, factor_at))
        turned = lambda i, j: a(j, i)  # noqa: E731
        half = emit.constant(0.5)
        multiply(emit, w, square_at, None, (a, a))
        multiply(emit, w, moved_at, None, (g, turned))
        functions = symmetric_functions(emit, a, square)
        power = advance(emit, functions)
        (_, c1, c2, c3), tops = horner(emit, power)
        # s0 .. s3: G, G, G A^T and G A^T against I, A, A and A^2.
        s = [trace(emit, g), inner(emit, g, a), inner(emit, moved, a), inner(emit, moved, square)]
        slopes = [emit.constant(0.0)] * 4
        for top in reversed(tops):
            # In the order of -e4, e3, -e2, e1.
            slopes = [emit.fma(top, x, slope) for x, slope in zip(s, slopes)]
            s = [*s[1:], emit.dot(power, s)]
        signs = [1.0, -1.0, 1.0, -1.0]
        of_functions = [emit.mul(slope, emit.constant(sign)) for slope, sign in zip(reversed(slopes), signs)]
        q = [emit.mul(emit.dot(functions[: 5 - j], of_functions[j - 1 :]), emit.constant(signs[j - 1])) for j in range(1, 5)]
        halves = [emit.mul(x, half) for x in q[1:]]

        def common(i: int, j: int) -> Any:
            """X = c2 G + c3 G A^T + (q2 I + q3 A^T + q4 A^2^T) / 2."""
            total = emit.fma(c2, g(i, j), emit.mul(c3, moved(i, j)))
            total = emit.fma(halves[1], a(j, i), emit.fma(halves[2], square(j, i), total))
            return emit.add(total, halves[0]) if i == j else total

        for i, j in entries:
            emit.store(w, factor_at + i * row_size + j * lanes, common(i, j), padded=True)
        # Over G A^T, which is not needed any more: X + c3 A^T G.
        scaled = lambda i, j: emit.mul(c3, a(j, i))  # noqa: E731
        multiply(emit, w, moved_at, factor, (scaled, g))
        # c1 G + q1 I + X A^T + A^T (X + c3 A^T G).
        multiply(
            emit, w, target,
            lambda i, j: emit.fma(c1, g(i, j), q[0]) if i == j else emit.mul(c1, g(i, j)),
            (factor, turned), (turned, moved),
        )  # fmt: skip

    @simd(arithmetic, lanes)
    def pull_square_back(emit: Any, w: Any, x: Any, cotangent: Any, target: Any) -> None:
        before, g = reader(emit, w, x), reader(emit, w, cotangent)
        turned = lambda i, j: before(j, i)  # noqa: E731
        start = (lambda i, j: emit.add(g(i, j), g(i, j))) if shifted else None
        multiply(emit, w, target, start, (g, turned), (turned, g))

    @njit(inline="always")
    def square_up(w, x, target, left, some):
        if shifted:
            double(w, x, target)
            add_product(w, x, x, target)
        else:
            set_product(w, x, x, target)
        if some:
            keep_finished(w, x, target, left)
        for lane in range(lanes):
            left[lane] -= 1.0

    @njit(inline="always")
    def forward(w, factors, left, fewest, most, top):
        if most > 0 or top < 0.0:
            scale(w, 0, factors)
        total, spare = total_at, spare_at
        value(w, total)
        for done in range(most):
            square_up(w, total, spare, left, done >= fewest)
            total, spare = spare, total
        return total

    @njit(inline="always")
    def backward(w, factors, left, fewest, most, top):
        if most > 0 or top < 0.0:
            scale(w, 0, factors)
        cotangent, spare = direction_at, next_at
        if most > 0:
            value(w, kept)
            for done in range(most - 1):
                square_up(w, kept + done * slot, kept + (done + 1) * slot, left, done >= fewest)
            for done in range(most - 1, -1, -1):
                pull_square_back(w, kept + done * slot, cotangent, spare)
                if done >= fewest:
                    keep_finished(w, cotangent, spare, left)
                cotangent, spare = spare, cotangent
                for lane in range(lanes):
                    left[lane] += 1.0
        pull_back(w, cotangent, total_at)
        if most > 0 or top < 0.0:
            scale(w, total_at, factors)
        return total_at

    if not frechet:
        return Core(direction_at, direction_at, measure, forward)
    return Core(kept + most_squarings * slot, direction_at, measure, backward)
