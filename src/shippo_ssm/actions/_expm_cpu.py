"""CPU kernel of the exponential: LANES matrices at a time, one per SIMD lane.

A block of LANES matrices [P, P] is transposed into a scratch array [slots, P P, LANES], so that entry (i, j) of all of them is
one vector. Every lane has its own scaling. float32 operands of moderate norm are computed in float32 as exp(A) - I, so that
rounding errors are those of the small part; a second kernel takes larger norms, in float64.

A `Core` is a polynomial and its gradient; scaling and squarings are added around it (`make_exponential`). Up to width 4
(`narrow_core`) the Taylor polynomial is taken modulo the characteristic polynomial of A, so that
exp(A) = c0 I + c1 A + A^2 (c2 I + c3 A) needs two products whatever its degree, and the gradient four more. Wider matrices
(`wide_core`) take the scheme of `expm.py`, and its tangent at A^T for the gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.engine import LANES, block_reader, block_writer, simd, tile_columns

# Up to this width exp is taken as a polynomial of degree 3 in A.
NARROW = 4


class LaneScheme(NamedTuple):
    """Dtype of the scratch; for an exponential also the degree of the Taylor polynomial, the largest 1-norm that is not scaled,
    and the largest that is taken at all."""

    arithmetic: str
    degree: int = 0
    theta: float = math.inf
    largest: float = math.inf


class Operands(NamedTuple):
    """Flat arrays of `count` matrices."""

    generator: Any
    direction: Any
    out: Any
    count: int


class BlockOperands(NamedTuple):
    """A record of operands for `count` matrices, and one entry per block of LANES of them: 1 until it is done."""

    given: Any
    todo: Any


def tile(width: int, totals: int) -> tuple[int, int]:
    """Rows and columns of the part of a product that has at most `totals` entries and the fewest loads for each of them."""
    sides = [side for side in range(1, width + 1) if width % side == 0]
    fitting = [(rows, columns) for rows in sides for columns in sides if rows * columns <= totals]
    return max(fitting, key=lambda part: (part[0] * part[1] / (part[0] + part[1]), part[1]))


def entries(emit: Any, width: int) -> Iterator[Any]:
    """Offsets of the entries of a matrix: a run-time loop over strips of four."""
    for start, count in emit.strips(width * width, 4):
        yield from (emit.times(emit.at(start, i), LANES) for i in range(count))


def make_product(arithmetic: str, width: int, start: str = "") -> Callable[..., None]:
    """multiply(w, a, b, c): c = a b; c + a b for the start "c", and 2 a + a b for "2 a"."""
    lanes, row_size = LANES, width * LANES
    rows, columns = tile(width, tile_columns(arithmetic, lanes))

    @simd(arithmetic, lanes)
    def multiply(emit: Any, w: Any, a: Any, b: Any, c: Any) -> None:
        part = [(i, j) for i in range(rows) for j in range(columns)]
        for row, _ in emit.strips(width, rows):
            for column, _ in emit.strips(width, columns):
                above, beside = emit.times(row, row_size), emit.times(column, lanes)
                places = [emit.at(c, above, beside, i * row_size + j * lanes) for i, j in part]
                totals = [emit[w, place] for place in places] if start == "c" else []
                if start == "2 a":
                    whole = [emit[w, a, above, beside, i * row_size + j * lanes] for i, j in part]
                    totals = [emit.add(entry, entry) for entry in whole]
                for k in range(width):
                    left = [emit[w, a, above, i * row_size + k * lanes] for i in range(rows)]
                    right = [emit[w, b, beside, k * row_size + j * lanes] for j in range(columns)]
                    if totals:
                        totals = [emit.fma(left[i], right[j], total) for (i, j), total in zip(part, totals)]
                    else:
                        totals = [emit.mul(left[i], right[j]) for i, j in part]
                for place, total in zip(places, totals):
                    emit[w, place] = total

    return multiply


def make_measure(arithmetic: str, width: int, theta: float, target: int) -> Callable[..., Any]:
    """The measure of `make_exponential`; writes the scaling of every lane and its squarings, [2, LANES], to `target`."""
    from numba import njit

    lanes, row_size = LANES, width * LANES

    @simd(arithmetic, lanes)
    def column_sums(emit: Any, w: Any) -> None:
        build, zero = emit.builder, emit.constant(0.0)
        largest = zero
        for j in range(width):
            total = zero
            for i in range(width):
                entry = emit[w, i * row_size + j * lanes]
                total = emit.add(total, build.select(build.fcmp_ordered("<", entry, zero), build.fneg(entry), entry))
            # Unordered: a NaN is kept.
            largest = build.select(build.fcmp_unordered(">", total, largest), total, largest)
        emit[w, target], emit[w, target, lanes] = largest, zero
        above = build.select(build.fcmp_unordered(">", largest, emit.constant(theta)), emit.constant(1.0), zero)
        with emit.when_any(above):
            emit[w, target, lanes] = emit.constant(1.0)

    @njit(inline="always")
    def measure(w):
        column_sums(w)
        if w[target + lanes] == 0.0:
            return 0, 0.0
        most, top, finite = 0, 0.0, True
        for lane in range(lanes):
            norm, factor, squarings = w[target + lane], 1.0, 0
            if not norm < np.inf:
                norm, factor, finite = 0.0, np.nan, False
            top = max(top, norm)
            while norm > theta:
                norm *= 0.5
                factor *= 0.5
                squarings += 1
            w[target + lane], w[target + lanes + lane] = factor, squarings
            most = max(most, squarings)
        return most, top if finite else -1.0 - top

    return measure


# A polynomial that is exp up to a small norm, in a scratch array: its matrices (A, or A^T for a gradient, the cotangent, the
# next one, then its own), powers(w): what the others need of A, value(w, target), and derivative(w, cotangent, target).
Core = tuple[int, Any, Any, Any]


def wide_core(arithmetic: str, width: int, degree: int) -> Core:
    """Paterson and Stockmeyer's scheme of `expm.taylor`; the gradient is its tangent at A^T along the cotangent."""
    from numba import njit

    lanes, row_size = LANES, width * LANES
    slot = width * row_size
    set_product, add_product = make_product(arithmetic, width), make_product(arithmetic, width, "c")
    # Slots: A^2, A^3, A^4 and two totals, then the same for the tangent.
    high, spare_at, tangents, tangent_at = (k * slot for k in (3, 6, 8, 11))
    fourth, fourth_tangent = high + 2 * slot, tangents + 2 * slot
    weights = np.array([1.0 / math.factorial(k) for k in range(degree + 1)], dtype=arithmetic)
    if arithmetic == "float32":
        weights[0] = 0.0

    def combination(terms: int, plain: bool) -> Callable[..., None]:
        # coef[first] I + coef[first + 1] x + sum_k coef[first + k] powers[k - 2]; the tangent has no I.
        @simd(arithmetic, lanes)
        def combine(emit: Any, w: Any, coef: Any, first: Any, x: Any, powers: Any, out: Any) -> None:
            splats = [emit.splat(coef, emit.at(first, k)) for k in range(terms)]
            for entry in entries(emit, width):
                total = emit.mul(splats[1], emit[w, x, entry])
                for k in range(2, terms):
                    total = emit.fma(splats[k], emit[w, powers, entry, (k - 2) * slot], total)
                emit[w, out, entry] = total
            for row in emit.each(width if plain else 0):
                place = w, out, emit.times(row, row_size + lanes)
                emit[place] = emit.add(emit[place], splats[0])

        return combine

    five_terms, four_terms = combination(5, True), combination(4, True)
    five_tangents, four_tangents = combination(5, False), combination(4, False)

    @njit(inline="always")
    def powers(w):
        # A A, A A^2 and A^2 A^2 in a loop: every product that is written out has to be compiled.
        for k in range(3):
            set_product(w, high if k == 2 else 0, 0 if k == 0 else high, high + k * slot)

    @njit(inline="always")
    def value(w, target):
        total, other = spare_at, spare_at + slot
        five_terms(w, weights, degree - 4, 0, high, total)
        for step in range(1, degree // 4):
            out = target if 4 * step == degree - 4 else other
            four_terms(w, weights, degree - 4 - 4 * step, 0, high, out)
            add_product(w, fourth, total, out)
            total, other = out, total

    @njit(inline="always")
    def derivative(w, cotangent, target):
        for k in range(3):
            set_product(w, high if k == 2 else 0, cotangent if k == 0 else tangents, tangents + k * slot)
            add_product(w, tangents if k == 2 else cotangent, 0 if k == 0 else high, tangents + k * slot)
        total, other, tangent, spare = spare_at, spare_at + slot, tangent_at, tangent_at + slot
        five_terms(w, weights, degree - 4, 0, high, total)
        five_tangents(w, weights, degree - 4, cotangent, tangents, tangent)
        for step in range(1, degree // 4):
            last = 4 * step == degree - 4
            out = target if last else spare
            four_tangents(w, weights, degree - 4 - 4 * step, cotangent, tangents, out)
            add_product(w, fourth, tangent, out)
            add_product(w, fourth_tangent, total, out)
            if not last:
                four_terms(w, weights, degree - 4 - 4 * step, 0, high, other)
                add_product(w, fourth, total, other)
            total, other, tangent, spare = other, total, out, tangent

    return 13, powers, value, derivative


def narrow_core(arithmetic: str, width: int, degree: int) -> Core:
    """Horner's rule modulo the characteristic polynomial, and the same backwards.

    With the elementary symmetric functions e1 .. e4 of the eigenvalues, from the traces of A .. A^4, and r = r0 + .. + r3 x^3,
    x r(x) = (-e4 r3, r0 + e3 r3, r1 - e2 r3, r2 + e1 r3) modulo the characteristic polynomial.

    Backwards A is the transpose that stands in the array. The cotangent of c_n is s_n = <G, (A^n)^T>, which goes on by the same
    recurrence, and de_j = (-1)^(j-1) sum_k r3_k s_(k+4-j) over Horner's steps, the last one first. The gradient of tr(A^j) is
    j A^(j-1), and de_k / d tr(A^j) = (-1)^(j-1) e_(k-j) / j: the part of the traces is sum_j q_j A^(j-1).
    """
    lanes, row_size = LANES, width * LANES
    slot = width * row_size
    square_at, factor_at, moved_at = (k * slot for k in (3, 4, 5))
    entries = [(i, j) for i in range(width) for j in range(width)]
    rows, columns = tile(width, 8)
    parts = [
        [(i, j) for i in range(row, row + rows) for j in range(column, column + columns)]
        for row in range(0, width, rows)
        for column in range(0, width, columns)
    ]

    def reader(emit: Any, w: Any, base: Any) -> Callable[[int, int], Any]:
        return lambda i, j: emit[w, base, i * row_size + j * lanes]

    def multiply(emit: Any, w: Any, target: Any, start: Any, *factors: tuple[Any, Any]) -> None:
        """target = start + the products of all pairs of factors; each is a function of the place of an entry."""
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
                emit[w, target, i * row_size + j * lanes] = total
            emit.forget()

    def inner(emit: Any, x: Any, y: Any) -> Any:
        """<x, y>, the sum of a sum for every row: short chains do not wait for each other."""
        sums = [emit.dot([x(i, j) for j in range(width)], [y(i, j) for j in range(width)]) for i in range(width)]
        return functools.reduce(emit.add, sums)

    def trace(emit: Any, x: Any) -> Any:
        return functools.reduce(emit.add, [x(i, i) for i in range(width)])

    def turned(x: Any) -> Any:
        return lambda i, j: x(j, i)

    def symmetric_functions(emit: Any, a: Any, square: Any) -> list[Any]:
        """1, e1, e2, e3, e4 by Newton's identities."""
        traces = [trace(emit, a), trace(emit, square), inner(emit, a, turned(square)), inner(emit, square, turned(square))]
        functions = [emit.constant(1.0)]
        for k in range(1, 5):
            total = emit.constant(0.0)
            for j in range(1, k + 1):
                signed = traces[j - 1] if j % 2 else emit.builder.fneg(traces[j - 1])
                total = emit.fma(functions[k - j], signed, total)
            functions.append(emit.mul(total, emit.constant(1.0 / k)))
        return functions

    def horner(emit: Any, functions: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """c0 .. c3, r3 before each step, and what x^4 is in 1, x, x^2, x^3: -e4, e3, -e2, e1."""
        _, e1, e2, e3, e4 = functions
        power = [emit.builder.fneg(e4), e3, emit.builder.fneg(e2), e1]
        r, tops = [emit.constant(1.0 / math.factorial(degree - 3 + k)) for k in range(4)], []
        for n in range(degree - 4, -1, -1):
            tops.append(r[3])
            low = emit.constant(0.0 if arithmetic == "float32" and n == 0 else 1.0 / math.factorial(n))
            r = [emit.fma(p, r[3], below) for p, below in zip(power, [low, *r[:3]])]
        return r, tops, power

    def affine(emit: Any, weight: Any, x: Any, shift: Any) -> Any:
        """weight x + shift I."""
        return lambda i, j: emit.fma(weight, x(i, j), shift) if i == j else emit.mul(weight, x(i, j))

    @simd(arithmetic, lanes)
    def powers(emit: Any, w: Any) -> None:
        a = reader(emit, w, 0)
        multiply(emit, w, square_at, None, (a, a))

    @simd(arithmetic, lanes)
    def value(emit: Any, w: Any, target: Any) -> None:
        a, square, factor = (reader(emit, w, base) for base in (0, square_at, factor_at))
        (c0, c1, c2, c3), _, _ = horner(emit, symmetric_functions(emit, a, square))
        for i, j in entries:
            emit[w, factor_at + i * row_size + j * lanes] = affine(emit, c3, a, c2)(i, j)
        emit.forget()
        multiply(emit, w, target, affine(emit, c1, a, c0), (square, factor))

    @simd(arithmetic, lanes)
    def derivative(emit: Any, w: Any, cotangent: Any, target: Any) -> None:
        half = emit.constant(0.5)
        a, square, g, moved, factor = (reader(emit, w, base) for base in (0, square_at, cotangent, moved_at, factor_at))
        multiply(emit, w, moved_at, None, (g, a))
        functions = symmetric_functions(emit, a, square)
        (_, c1, c2, c3), tops, power = horner(emit, functions)
        # s0 .. s3: G, G, G A and G A against the transposes of I, A, A and A^2.
        sums = [trace(emit, g), *(inner(emit, x, turned(y)) for x, y in ((g, a), (moved, a), (moved, square)))]
        slopes = [emit.constant(0.0)] * 4
        for top in reversed(tops):
            # In the order of -e4, e3, -e2, e1.
            slopes = [emit.fma(top, x, slope) for x, slope in zip(sums, slopes)]
            sums = [*sums[1:], emit.dot(power, sums)]
        signs = [1.0, -1.0, 1.0, -1.0]
        of_functions = [emit.mul(slope, emit.constant(sign)) for slope, sign in zip(reversed(slopes), signs)]
        q = [emit.mul(emit.dot(functions[: 5 - j], of_functions[j - 1 :]), emit.constant(signs[j - 1])) for j in range(1, 5)]
        halves = [emit.mul(x, half) for x in q[1:]]
        # X = c2 G + c3 G A + (q2 I + q3 A + q4 A^2) / 2.
        for i, j in entries:
            total = emit.fma(c2, g(i, j), emit.mul(c3, moved(i, j)))
            total = emit.fma(halves[1], a(i, j), emit.fma(halves[2], square(i, j), total))
            total = emit.add(total, halves[0]) if i == j else total
            emit[w, factor_at + i * row_size + j * lanes] = total
        emit.forget()
        # Over G A, which is not needed any more: X + c3 A G.
        multiply(emit, w, moved_at, factor, (lambda i, j: emit.mul(c3, a(i, j)), g))
        # c1 G + q1 I + X A + A (X + c3 A G).
        multiply(emit, w, target, affine(emit, c1, g, q[0]), (factor, a), (a, moved))

    return 6, powers, value, derivative


def make_exponential(dtype: str, width: int, scheme: LaneScheme, backward: bool) -> tuple[int, Any, Any]:
    """The exponential of LANES matrices in a scratch array: A stands first; for a gradient A^T, and the cotangent behind it.

    Returns the size of the scratch; measure(w) -> the most squarings of a lane, and the largest finite norm, or -1 minus that
    where others are not finite; and run(w, most, top) -> where the result stands.
    """
    from numba import njit

    arithmetic, degree, theta, largest = scheme
    size, lanes, shifted = width * width, LANES, arithmetic == "float32"
    slot = size * lanes
    # exp(A) - I is squared as T <- 2 T + T^2.
    add_product, product = make_product(arithmetic, width, "c"), make_product(arithmetic, width, "2 a" if shifted else "")
    core = narrow_core if width <= NARROW else wide_core
    slots, powers, value, derivative = core(arithmetic, width, degree)
    kept = slots * slot
    # Room for the result before every squaring that a gradient goes back through; most of it is never touched.
    squarings = math.ceil(math.log2(min(largest, float(np.finfo(dtype).max))) + math.log2(width / theta))
    results = max(2, squarings) if backward else 2
    lanes_at = kept + results * slot
    factors, left, measure = lanes_at, lanes_at + lanes, make_measure(arithmetic, width, theta, lanes_at)

    @simd(arithmetic, lanes)
    def scale(emit: Any, w: Any, target: Any) -> None:
        factor = emit[w, factors]
        for entry in entries(emit, width):
            emit[w, target, entry] = emit.mul(emit[w, target, entry], factor)

    @simd(arithmetic, lanes)
    def add_identity(emit: Any, w: Any, target: Any) -> None:
        for i in range(width):
            place = w, target, i * (width + 1) * lanes
            emit[place] = emit.add(emit[place], emit.constant(1.0))

    @simd(arithmetic, lanes)
    def keep_finished(emit: Any, w: Any, old: Any, new: Any) -> None:
        """Lanes without squarings left take the old value again."""
        going = emit.builder.fcmp_ordered(">", emit[w, left], emit.constant(0.0))
        for entry in entries(emit, width):
            emit[w, new, entry] = emit.builder.select(going, emit[w, new, entry], emit[w, old, entry])

    @njit(inline="always")
    def finish(w, old, new, change):
        keep_finished(w, old, new)
        for lane in range(lanes):
            w[left + lane] += change

    @njit(inline="always")
    def forward(w, most, top):
        if most > 0 or top < 0.0:
            scale(w, 0)
        powers(w)
        total, spare = kept, kept + slot
        value(w, total)
        for _ in range(most):
            product(w, total, total, spare)
            finish(w, total, spare, -1.0)
            total, spare = spare, total
        if shifted:
            add_identity(w, total)
        return total

    @njit(inline="always")
    def gradient(w, most, top):
        scaled = most > 0 or top < 0.0
        if scaled:
            scale(w, 0)
        powers(w)
        cotangent, spare = slot, 2 * slot
        if most > 0:
            value(w, kept)
            for done in range(most - 1):
                old = kept + done * slot
                product(w, old, old, old + slot)
                finish(w, old, old + slot, -1.0)
            for done in range(most - 1, -1, -1):
                product(w, cotangent, kept + done * slot, spare)
                add_product(w, kept + done * slot, cotangent, spare)
                finish(w, cotangent, spare, 1.0)
                cotangent, spare = spare, cotangent
        derivative(w, cotangent, spare)
        if scaled:
            scale(w, spare)
        return spare

    return lanes_at + 2 * lanes, measure, gradient if backward else forward


def block_kernel(scheme: LaneScheme, scratch: int, measure: Callable, load: Callable, finish: Callable) -> Callable[..., None]:
    """kernel(operands, start, stop) for `BlockOperands`: load, measure and finish every block that is still to do; those with
    a norm above `scheme.largest` stay so. A generator that is not finite gives NaN."""
    element, largest, lanes = np.dtype(scheme.arithmetic), scheme.largest, LANES

    def kernel(operands, start, stop):
        given, todo = operands
        w = np.zeros(scratch, element)
        for block in range(start, stop):
            if todo[block] == 0:
                continue
            first = block * lanes
            here = min(lanes, given.count - first)
            load(given, first, here, w)
            most, top = measure(w)
            if max(top, -1.0 - top) > largest:
                continue
            todo[block] = 0
            finish(given, first, here, w, most, top)

    return kernel


def build_expm(dtype: str, width: int, scheme: LaneScheme, backward: bool) -> Callable[..., None]:
    """kernel(operands, start, stop): exp, or the gradient of <direction, exp>; see `block_kernel`."""
    from numba import njit

    size, lanes = width * width, LANES
    scratch, measure, run = make_exponential(dtype, width, scheme, backward)
    # For a gradient A^T stands in the place of A.
    read_generator = block_reader(dtype, scheme.arithmetic, size, turned=width if backward else 0)
    read_direction, write = block_reader(dtype, scheme.arithmetic, size), block_writer(dtype, scheme.arithmetic, size)

    @njit(inline="always")
    def load(given, first, here, w):
        read_generator(given.generator, first, here, w, 0)

    @njit(inline="always")
    def finish(given, first, here, w, most, top):
        if backward:
            read_direction(given.direction, first, here, w, size * lanes)
        write(w, run(w, most, top), given.out, first, here)

    return block_kernel(scheme, scratch, measure, load, finish)
