"""Machine code of the exponential: LANES matrices at a time, one per SIMD lane.

Data path. A block of LANES matrices [P, P] is transposed into a scratch array [slots, P P, LANES], so that entry (i, j)
of all of them is one vector; every operation then is the textbook one on single numbers. A block that is not full is
padded with zeros. Where a family gives its generator by coordinates and a step, these are read instead, and the generator is
made in the scratch (`coordinate_traces`); its gradient goes back to them there. Every lane has its own scaling. float32
operands of moderate norm are computed in float32 as exp(A) - I, so that rounding errors are those of the small part; blocks
with a larger norm are left to a second kernel, which works in float64.

A `Core` has a polynomial and its gradient; around it stand, for every width, the scaling and the squarings, with the results
before each of them kept for the gradient (`_exponential`). Up to width 4 (`narrow_core`) the Taylor polynomial is taken modulo
the characteristic polynomial of A (Cayley and Hamilton), by Horner's rule on four numbers, so that

    exp(A) = c0 I + c1 A + A^2 (c2 I + c3 A)

needs two products whatever its degree. The gradient goes the same way backwards in four more. Wider matrices (`wide_core`)
take the scheme of `expm.py`, and its tangent at A^T for the gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm.actions._trig import softplus
from shippo_ssm.actions.base import Inline
from shippo_ssm.engine import LANES, LaneMap, block_reader, block_writer, register_lanes, simd

# Up to this width exp is a polynomial of degree 3 in A; narrower matrices are those of this width with zeros around them.
NARROW = 4


class LaneScheme(NamedTuple):
    """What the kernel computes an exponential with."""

    arithmetic: str
    """Dtype of the scratch."""
    degree: int
    """Of the Taylor polynomial."""
    theta: float
    """A larger 1-norm is halved until it is at most this."""
    largest: float = math.inf
    """Blocks with a larger norm are left to another scheme."""


class Operands(NamedTuple):
    """Flat arrays of `count` matrices; `todo` has one entry per block of LANES of them."""

    generator: Any
    direction: Any
    out: Any
    todo: Any
    count: int


class FamilyOperands(NamedTuple):
    """`kernels.Operands`, and `todo`."""

    given: Any
    todo: Any


def build_expm(dtype: str, width: int, scheme: LaneScheme, backward: bool) -> Callable[..., None]:
    """kernel(operands, start, stop): exp, or the gradient of <direction, exp>.

    Blocks with todo[block] = 1 are done and get 0, unless a norm is larger than `scheme.largest`: then they are left as they
    are. A generator that is not finite gives NaN.
    """
    arithmetic, size, lanes, largest = scheme.arithmetic, width * width, LANES, scheme.largest
    element = np.dtype(arithmetic)
    core = _exponential(dtype, width, scheme, backward)
    scratch, measure, run, read, write = core.scratch, core.measure, core.run, core.read, core.write
    read_direction = block_reader(dtype, arithmetic, size)

    def kernel(operands, start, stop):
        generator, direction, out, todo, count = operands
        w = np.zeros(scratch, element)
        for block in range(start, stop):
            if todo[block] == 0:
                continue
            first = block * lanes
            here = min(lanes, count - first)
            read(generator, first, here, w, 0)
            fewest, most, top = measure(w)
            if top > largest:
                continue
            todo[block] = 0
            if backward:
                read_direction(direction, first, here, w, size * lanes)
            write(w, run(w, fewest, most, top), out, first, here)

    return kernel


def build_family(dtype: str, width: int, scheme: LaneScheme, inline: Inline, backward: bool) -> Callable[..., None]:
    """kernel(operands, start, stop): exp(step A) of coordinates and steps, or the gradient by both; else as `build_expm`."""
    arithmetic, size, lanes, largest = scheme.arithmetic, width * width, LANES, scheme.largest
    element = np.dtype(arithmetic)
    core = _exponential(dtype, width, scheme, backward)
    measure, run, write = core.measure, core.run, core.write
    traces = coordinate_traces(dtype, width, scheme, inline, core.scratch, turned=backward)
    count_coords, coords_at, step_at, scratch, generate, pull = traces
    read_coords, write_coords = (block(dtype, arithmetic, count_coords) for block in (block_reader, block_writer))
    read_step, write_step = block_reader(dtype, arithmetic, 1), block_writer(dtype, arithmetic, 1)
    read_direction = block_reader(dtype, arithmetic, size)

    def kernel(operands, start, stop):
        (coords, step, right, cotangent, d_coords, d_step, count), todo = operands
        w = np.zeros(scratch, element)
        for block in range(start, stop):
            if todo[block] == 0:
                continue
            first = block * lanes
            here = min(lanes, count - first)
            read_coords(coords, first, here, w, coords_at)
            read_step(step, first, here, w, step_at)
            generate(w)
            fewest, most, top = measure(w)
            if top > largest:
                continue
            todo[block] = 0
            if backward:
                read_direction(cotangent, first, here, w, size * lanes)
                pull(w, run(w, fewest, most, top))
                write_coords(w, coords_at, d_coords, first, here)
                write_step(w, step_at, d_step, first, here)
            else:
                write(w, run(w, fewest, most, top), right, first, here)

    return kernel


def expm_lanes(dtype: str, width: int, scheme: LaneScheme, inline: Inline) -> LaneMap:
    """exp(step A) of LANES tokens inside another kernel."""
    from numba import njit

    core = _exponential(dtype, width, scheme, False)
    measure, run = core.measure, core.run
    _, coords_at, step_at, scratch, generate, _ = coordinate_traces(dtype, width, scheme, inline, core.scratch)

    @njit(inline="always")
    def fill(w):
        generate(w)
        fewest, most, top = measure(w)
        return run(w, fewest, most, top)

    return LaneMap(scheme.arithmetic, scratch, coords_at, step_at, fill)


class CoordinateTraces(NamedTuple):
    """How a family makes its generator of coordinates, and where these stand in the scratch."""

    count: int
    coords: int
    step: int
    scratch: int
    generate: Any
    """generate(w): step A to where the scratch begins."""
    pull: Any
    """pull(w, gradient): the gradient by step A becomes that by the coordinates and the step, in their places."""


def coordinate_traces(
    dtype: str, width: int, scheme: LaneScheme, inline: Inline, coords: int, turned: bool = False
) -> CoordinateTraces:
    """The traces of a family whose coordinates stand at `coords`; A^T in the place of A where it is `turned`."""
    arithmetic, lanes, size = scheme.arithmetic, LANES, width * width
    num_diagonal, num_rotations, num_shears = inline.sizes
    pairs = [(i, j) for i in range(width) for j in range(i + 1, width)]
    count = sum(inline.sizes) or size
    step_at = coords + count * lanes
    limit, margin = 0.9 * math.log(float(np.finfo(dtype).max)), 1.0 + 4.0 * width * float(np.finfo(dtype).eps)
    # Entry of A and its sign for every coordinate; a rotation stands in two.
    places = [[(k, 1.0)] for k in range(size)]
    if any(inline.sizes):
        places = [[(i * width + i, -1.0)] for i in range(num_diagonal)]
        places += [[(j * width + i, 1.0), (i * width + j, -1.0)] for i, j in pairs[:num_rotations]]
        places += [[(i * width + j, 1.0)] for i, j in pairs[:num_shears]]

    def larger(emit: Any, a: Any, b: Any) -> Any:
        return emit.builder.select(emit.builder.fcmp_unordered(">", a, b), a, b)

    def signed(emit: Any, x: Any, sign: float) -> Any:
        return x if sign > 0 else emit.builder.fneg(x)

    def coefficient(emit: Any, k: int, x: Any) -> tuple[Any, Any]:
        """What coordinate k stands for, and the derivative of that, `None` for one."""
        build, zero, one = emit.builder, emit.constant(0.0), emit.constant(1.0)
        if k >= num_diagonal:
            return x, None
        if inline.diagonal == "clamp":
            return larger(emit, x, zero), build.select(build.fcmp_ordered(">=", x, zero), one, zero)
        decay, slope = softplus(emit, x)
        cut = build.fcmp_ordered(">", decay, emit.constant(limit))
        return build.select(cut, emit.constant(limit), decay), build.select(cut, zero, slope)

    def load(emit: Any, w: Any) -> tuple[list[Any], Any]:
        return [emit.load(w, coords + k * lanes, padded=True) for k in range(count)], emit.load(w, step_at, padded=True)

    def make_entries(emit: Any, parts: Sequence[Any]) -> list[Any]:
        """A before it is bounded."""
        entries: list[Any] = [None] * size
        for part, taken in zip(parts, places):
            for place, sign in taken:
                term = signed(emit, part, sign)
                entries[place] = term if entries[place] is None else emit.add(entries[place], term)
        return [emit.constant(0.0) if entry is None else entry for entry in entries]

    def rows_of(emit: Any, entries: list[Any]) -> tuple[list[Any], Any, dict[tuple[int, int], Any]]:
        """Gershgorin's sums of the symmetric part (see `families.contracted`), the largest, and what is off the diagonal."""
        beside = {
            (i, j): emit.mul(emit.add(entries[i * width + j], entries[j * width + i]), emit.constant(0.5)) for i, j in pairs
        }
        sums = [entries[i * width + i] for i in range(width)]
        for (i, j), off in beside.items():
            size_of = larger(emit, off, emit.builder.fneg(off))
            sums[i], sums[j] = emit.add(sums[i], size_of), emit.add(sums[j], size_of)
        return sums, functools.reduce(lambda a, b: larger(emit, b, a), sums), beside

    @simd(arithmetic, lanes)
    def generate(emit: Any, w: Any) -> None:
        values, step = load(emit, w)
        entries = make_entries(emit, [coefficient(emit, k, x)[0] for k, x in enumerate(values)])
        if inline.bounded:
            excess = emit.mul(larger(emit, rows_of(emit, entries)[1], emit.constant(0.0)), emit.constant(margin))
            for i in range(width):
                entries[i * width + i] = emit.sub(entries[i * width + i], excess)
        for k, entry in enumerate(entries):
            place = k % width * width + k // width if turned else k
            emit.store(w, place * lanes, emit.mul(entry, step), padded=True)

    def pull_bound(emit: Any, gradient: list[Any], entries: list[Any]) -> list[Any]:
        """The gradient by A before it was bounded: the diagonal lost the largest sum, or several equal ones in equal parts."""
        build, zero, one = emit.builder, emit.constant(0.0), emit.constant(1.0)
        sums, top, beside = rows_of(emit, entries)
        lost = functools.reduce(emit.add, [gradient[i * width + i] for i in range(width)])
        lost = build.select(build.fcmp_ordered(">=", top, zero), emit.mul(lost, emit.constant(-margin)), zero)
        chosen = [build.select(build.fcmp_ordered("==", total, top), one, zero) for total in sums]
        share = build.fdiv(lost, larger(emit, functools.reduce(emit.add, chosen), one))
        shares = [emit.mul(share, one_of) for one_of in chosen]
        gradient = list(gradient)
        for i in range(width):
            gradient[i * width + i] = emit.add(gradient[i * width + i], shares[i])
        for (i, j), off in beside.items():
            both = emit.mul(emit.add(shares[i], shares[j]), emit.constant(0.5))
            both = build.select(build.fcmp_ordered("<", off, zero), build.fneg(both), both)
            both = build.select(build.fcmp_ordered("==", off, zero), zero, both)
            for place in (i * width + j, j * width + i):
                gradient[place] = emit.add(gradient[place], both)
        return gradient

    @simd(arithmetic, lanes)
    def pull(emit: Any, w: Any, gradient: Any) -> None:
        values, step = load(emit, w)
        parts, slopes = zip(*(coefficient(emit, k, x) for k, x in enumerate(values)))
        by_entry = [emit.load(w, emit.at(gradient, place * lanes), padded=True) for place in range(size)]
        if inline.bounded:
            by_entry = pull_bound(emit, by_entry, make_entries(emit, parts))
        # By Euler's rule also where A is bounded: that is homogeneous in A.
        d_step = emit.constant(0.0)
        for k, (part, slope, taken) in enumerate(zip(parts, slopes, places)):
            by_part = functools.reduce(emit.add, [signed(emit, by_entry[place], sign) for place, sign in taken])
            d_step = emit.fma(by_part, part, d_step)
            by_part = by_part if slope is None else emit.mul(by_part, slope)
            emit.store(w, coords + k * lanes, emit.mul(by_part, step), padded=True)
        emit.store(w, step_at, d_step, padded=True)

    return CoordinateTraces(count, coords, step_at, step_at + lanes, generate, pull)


class Exponential(NamedTuple):
    """The exponential of LANES matrices in a scratch array: A stands first; for a gradient A^T, and the cotangent behind it."""

    scratch: int
    """Numbers of the array."""
    measure: Callable[..., Any]
    """measure(w) -> fewest and most squarings of a lane, and the largest norm, or -1 for what is not finite."""
    run: Callable[..., int]
    """run(w, fewest, most, top) -> where the result stands."""
    read: Callable[..., None]
    """A `block_reader` of A."""
    write: Callable[..., None]
    """A `block_writer` of the result."""


class Core(NamedTuple):
    """A polynomial that is exp up to a small norm, and its gradient, in a scratch array."""

    slots: int
    """Matrices of the array: A (A^T for a gradient), the cotangent, the next cotangent, then the core's own."""
    powers: Any
    """powers(w): what the other two need of A."""
    value: Any
    """value(w, target)."""
    derivative: Any
    """derivative(w, cotangent, target): the gradient, from what was made of A^T."""


def _exponential(dtype: str, width: int, scheme: LaneScheme, backward: bool) -> Exponential:
    """Scaling, polynomial and squarings; for a gradient all of it at A^T and then backwards."""
    from numba import njit

    arithmetic, degree, theta, largest = scheme
    size, lanes, shifted = width * width, LANES, arithmetic == "float32"
    slot = size * lanes
    tools = make_tools(arithmetic, width, theta)
    measure_at, scale, set_product, add_product, double, add_identity, keep_finished = tools
    slots, powers, value, derivative = (narrow_core if width <= NARROW else wide_core)(arithmetic, width, degree, tools)
    kept = slots * slot
    # Room for the result before every squaring that a gradient goes back through; most of it is never touched.
    squarings = math.ceil(math.log2(min(largest, float(np.finfo(dtype).max))) + math.log2(width / theta))
    results = max(2, squarings) if backward else 2
    lanes_at = kept + results * slot
    factors, left = lanes_at, lanes_at + lanes

    @njit(inline="always")
    def measure(w):
        return measure_at(w, lanes_at)

    @njit(inline="always")
    def square_up(w, x, target, some):
        if shifted:
            double(w, x, target)
            add_product(w, x, x, target)
        else:
            set_product(w, x, x, target)
        if some:
            keep_finished(w, x, target, left)
        for lane in range(lanes):
            w[left + lane] -= 1.0

    @njit(inline="always")
    def pull_square_back(w, x, cotangent, target, some):
        if shifted:
            double(w, cotangent, target)
            add_product(w, cotangent, x, target)
        else:
            set_product(w, cotangent, x, target)
        add_product(w, x, cotangent, target)
        if some:
            keep_finished(w, cotangent, target, left)
        for lane in range(lanes):
            w[left + lane] += 1.0

    @njit(inline="always")
    def forward(w, fewest, most, top):
        if most > 0 or top < 0.0:
            scale(w, 0, factors)
        powers(w)
        total, spare = kept, kept + slot
        value(w, total)
        for done in range(most):
            square_up(w, total, spare, done >= fewest)
            total, spare = spare, total
        if shifted:
            add_identity(w, total)
        return total

    @njit(inline="always")
    def gradient(w, fewest, most, top):
        scaled = most > 0 or top < 0.0
        if scaled:
            scale(w, 0, factors)
        powers(w)
        cotangent, spare = slot, 2 * slot
        if most > 0:
            value(w, kept)
            for done in range(most - 1):
                square_up(w, kept + done * slot, kept + (done + 1) * slot, done >= fewest)
            for done in range(most - 1, -1, -1):
                pull_square_back(w, kept + done * slot, cotangent, spare, done >= fewest)
                cotangent, spare = spare, cotangent
        derivative(w, cotangent, spare)
        if scaled:
            scale(w, spare, factors)
        return spare

    turned = [entry % width * width + entry // width for entry in range(size)] if backward else None
    return Exponential(
        lanes_at + 2 * lanes,
        measure,
        gradient if backward else forward,
        block_reader(dtype, arithmetic, size, turned),
        block_writer(dtype, arithmetic, size),
    )


class Tools(NamedTuple):
    """What all of it is made of; indices are those of the scratch array."""

    measure: Callable[..., Any]
    """measure(w, target): `Exponential.measure`; fills in the scaling of every lane and its squarings, [2, LANES]."""
    scale: Any
    """scale(w, target, factors): every lane times its factor."""
    set_product: Callable[..., None]
    """set_product(w, a, b, c): c = a b."""
    add_product: Callable[..., None]
    """add_product(w, a, b, c): c = c + a b."""
    double: Any
    """double(w, x, c): c = 2 x."""
    add_identity: Any
    """add_identity(w, c): c = c + I."""
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


def entries(emit: Any, width: int) -> Iterator[Any]:
    """Where the entries of a matrix stand behind its first: a run-time loop over strips of four."""
    for start, count in emit.strips(width * width, 4):
        yield from (emit.times(emit.at(start, i), LANES) for i in range(count))


def make_tools(arithmetic: str, width: int, theta: float) -> Tools:
    """The tools for one width and arithmetic; a norm above `theta` is scaled."""
    from numba import njit

    lanes = LANES
    row_size = width * lanes
    # Half of the registers hold totals: 16 of 32 with AVX-512, 8 of 16 without; a vector may take two.
    register = register_lanes(arithmetic)
    registers = 16 if register * np.dtype(arithmetic).itemsize == 64 else 8
    rows, columns = tile(width, registers // max(1, lanes // register))

    def product(more: bool) -> Callable[..., None]:
        @simd(arithmetic, lanes, shared=width > NARROW)
        def multiply(emit: Any, w: Any, a: Any, b: Any, c: Any) -> None:
            part = [(i, j) for i in range(rows) for j in range(columns)]
            for row, _ in emit.strips(width, rows):
                for column, _ in emit.strips(width, columns):
                    above, beside = emit.times(row, row_size), emit.times(column, lanes)
                    places = [emit.at(c, above, beside, i * row_size + j * lanes) for i, j in part]
                    totals = [emit.load(w, place, padded=True) for place in places] if more else []
                    for k in range(width):
                        left = [emit.load(w, emit.at(a, above, i * row_size + k * lanes), padded=True) for i in range(rows)]
                        right = [
                            emit.load(w, emit.at(b, beside, k * row_size + j * lanes), padded=True) for j in range(columns)
                        ]
                        if totals:
                            totals = [emit.fma(left[i], right[j], total) for (i, j), total in zip(part, totals)]
                        else:
                            totals = [emit.mul(left[i], right[j]) for i, j in part]
                    for place, total in zip(places, totals):
                        emit.store(w, place, total, padded=True)

        return multiply

    set_product, add_product = product(False), product(True)

    @simd(arithmetic, lanes)
    def column_sums(emit: Any, w: Any, target: Any) -> None:
        build, zero = emit.builder, emit.constant(0.0)
        largest = zero
        for j in range(width):
            total = zero
            for i in range(width):
                entry = emit.load(w, i * row_size + j * lanes, padded=True)
                total = emit.add(total, build.select(build.fcmp_ordered("<", entry, zero), build.fneg(entry), entry))
            # Unordered: a NaN wins, and shows.
            largest = build.select(build.fcmp_unordered(">", total, largest), total, largest)
        emit.store(w, target, largest, padded=True)
        emit.store(w, emit.at(target, lanes), zero, padded=True)
        above = build.select(build.fcmp_unordered(">", largest, emit.constant(theta)), emit.constant(1.0), zero)
        with emit.when_any(above):
            emit.store(w, emit.at(target, lanes), emit.constant(1.0), padded=True)

    @simd(arithmetic, lanes)
    def scale(emit: Any, w: Any, target: Any, factors: Any) -> None:
        factor = emit.load(w, factors, padded=True)
        for shift in entries(emit, width):
            place = emit.at(target, shift)
            emit.store(w, place, emit.mul(emit.load(w, place, padded=True), factor), padded=True)

    @simd(arithmetic, lanes)
    def double(emit: Any, w: Any, source: Any, target: Any) -> None:
        for shift in entries(emit, width):
            vector = emit.load(w, emit.at(source, shift), padded=True)
            emit.store(w, emit.at(target, shift), emit.add(vector, vector), padded=True)

    @simd(arithmetic, lanes)
    def add_identity(emit: Any, w: Any, target: Any) -> None:
        for i in range(width):
            place = emit.at(target, i * (row_size + lanes))
            emit.store(w, place, emit.add(emit.load(w, place, padded=True), emit.constant(1.0)), padded=True)

    @simd(arithmetic, lanes)
    def keep_finished(emit: Any, w: Any, old: Any, new: Any, left: Any) -> None:
        going = emit.builder.fcmp_ordered(">", emit.load(w, left, padded=True), emit.constant(0.0))
        for shift in entries(emit, width):
            place = emit.at(new, shift)
            before = emit.load(w, emit.at(old, shift), padded=True)
            emit.store(w, place, emit.builder.select(going, emit.load(w, place, padded=True), before), padded=True)

    @njit(inline="always")
    def measure(w, target):
        column_sums(w, target)
        if w[target + lanes] == 0.0:
            return 0, 0, 0.0
        fewest, most, top, finite = 1 << 30, 0, 0.0, True
        for lane in range(lanes):
            norm, factor, count_here = w[target + lane], 1.0, 0
            if not norm < np.inf:
                norm, factor, finite = 0.0, np.nan, False
            top = max(top, norm)
            while norm > theta:
                norm *= 0.5
                factor *= 0.5
                count_here += 1
            w[target + lane], w[target + lanes + lane] = factor, count_here
            fewest, most = min(fewest, count_here), max(most, count_here)
        return fewest, most, top if finite else -1.0

    return Tools(measure, scale, set_product, add_product, double, add_identity, keep_finished)


def wide_core(arithmetic: str, width: int, degree: int, tools: Tools) -> Core:
    """Paterson and Stockmeyer's scheme of `expm.taylor`; the gradient is its tangent at A^T along the cotangent."""
    from numba import njit

    lanes, row_size = LANES, width * LANES
    slot = width * row_size
    set_product, add_product = tools.set_product, tools.add_product
    # Slots: A^2, A^3, A^4 and two totals, then the same for the tangent.
    high, spare_at, tangents, tangent_at = (k * slot for k in (3, 6, 8, 11))
    fourth, fourth_tangent = high + 2 * slot, tangents + 2 * slot
    weights = np.array([1.0 / math.factorial(k) for k in range(degree + 1)], dtype=arithmetic)
    if arithmetic == "float32":
        weights[0] = 0.0

    def combination(terms: int, plain: bool) -> Callable[..., None]:
        # combine(w, coef, first, x, powers, out): coef[first] I + coef[first + 1] x + sum_k coef[first + k] powers[k - 2]; the
        # tangent has no I.
        @simd(arithmetic, lanes)
        def combine(emit: Any, w: Any, coef: Any, first: Any, x: Any, powers: Any, out: Any) -> None:
            splats = [emit.splat(coef, emit.at(first, k)) for k in range(terms)]
            for shift in entries(emit, width):
                total = emit.mul(splats[1], emit.load(w, emit.at(x, shift), padded=True))
                for k in range(2, terms):
                    power = emit.load(w, emit.at(powers, shift, (k - 2) * slot), padded=True)
                    total = emit.fma(splats[k], power, total)
                emit.store(w, emit.at(out, shift), total, padded=True)
            for row in emit.each(width if plain else 0):
                place = emit.at(out, emit.times(row, row_size + lanes))
                emit.store(w, place, emit.add(emit.load(w, place, padded=True), splats[0]), padded=True)

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

    return Core(13, powers, value, derivative)


def narrow_core(arithmetic: str, width: int, degree: int, tools: Tools) -> Core:
    """Horner's rule modulo the characteristic polynomial, and the same backwards.

    With the elementary symmetric functions e1 .. e4 of the eigenvalues, from the traces of A .. A^4,

        x r(x) = (-e4 r3, r0 + e3 r3, r1 - e2 r3, r2 + e1 r3)    modulo the characteristic polynomial, r = r0 + .. + r3 x^3.

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
            emit.forget()

    def inner(emit: Any, x: Any, y: Any) -> Any:
        """<x, y>, the sum of a sum for every row: short chains do not wait for each other."""
        sums = [emit.dot([x(i, j) for j in range(width)], [y(i, j) for j in range(width)]) for i in range(width)]
        return functools.reduce(emit.add, sums)

    def trace(emit: Any, x: Any) -> Any:
        return functools.reduce(emit.add, [x(i, i) for i in range(width)])

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

    def advance(emit: Any, functions: list[Any]) -> list[Any]:
        """-e4, e3, -e2, e1: what x^4 is in 1, x, x^2, x^3."""
        _, e1, e2, e3, e4 = functions
        return [emit.builder.fneg(e4), e3, emit.builder.fneg(e2), e1]

    def horner(emit: Any, power: list[Any]) -> tuple[list[Any], list[Any]]:
        """c0 .. c3, and r3 before each step."""
        r, tops = [emit.constant(1.0 / math.factorial(degree - 3 + k)) for k in range(4)], []
        for n in range(degree - 4, -1, -1):
            tops.append(r[3])
            low = emit.constant(0.0 if arithmetic == "float32" and n == 0 else 1.0 / math.factorial(n))
            r = [emit.fma(p, r[3], below) for p, below in zip(power, [low, *r[:3]])]
        return r, tops

    def turned(x: Any) -> Any:
        return lambda i, j: x(j, i)

    @simd(arithmetic, lanes)
    def powers(emit: Any, w: Any) -> None:
        a = reader(emit, w, 0)
        multiply(emit, w, square_at, None, (a, a))

    @simd(arithmetic, lanes)
    def value(emit: Any, w: Any, target: Any) -> None:
        a, square, factor = (reader(emit, w, base) for base in (0, square_at, factor_at))
        (c0, c1, c2, c3), _ = horner(emit, advance(emit, symmetric_functions(emit, a, square)))
        for i, j in entries:
            entry = emit.fma(c3, a(i, j), c2) if i == j else emit.mul(c3, a(i, j))
            emit.store(w, factor_at + i * row_size + j * lanes, entry, padded=True)
        emit.forget()
        multiply(
            emit, w, target,
            lambda i, j: emit.fma(c1, a(i, j), c0) if i == j else emit.mul(c1, a(i, j)),
            (square, factor),
        )  # fmt: skip

    @simd(arithmetic, lanes)
    def derivative(emit: Any, w: Any, cotangent: Any, target: Any) -> None:
        a, square, g, moved, factor = (reader(emit, w, base) for base in (0, square_at, cotangent, moved_at, factor_at))
        half = emit.constant(0.5)
        multiply(emit, w, moved_at, None, (g, a))
        functions = symmetric_functions(emit, a, square)
        power = advance(emit, functions)
        (_, c1, c2, c3), tops = horner(emit, power)
        # s0 .. s3: G, G, G A and G A against the transposes of I, A, A and A^2.
        s = [trace(emit, g), *(inner(emit, x, turned(y)) for x, y in ((g, a), (moved, a), (moved, square)))]
        slopes = [emit.constant(0.0)] * 4
        for top in reversed(tops):
            # In the order of -e4, e3, -e2, e1.
            slopes = [emit.fma(top, x, slope) for x, slope in zip(s, slopes)]
            s = [*s[1:], emit.dot(power, s)]
        signs = [1.0, -1.0, 1.0, -1.0]
        of_functions = [emit.mul(slope, emit.constant(sign)) for slope, sign in zip(reversed(slopes), signs)]
        q = [emit.mul(emit.dot(functions[: 5 - j], of_functions[j - 1 :]), emit.constant(signs[j - 1])) for j in range(1, 5)]
        halves = [emit.mul(x, half) for x in q[1:]]
        # X = c2 G + c3 G A + (q2 I + q3 A + q4 A^2) / 2.
        for i, j in entries:
            total = emit.fma(c2, g(i, j), emit.mul(c3, moved(i, j)))
            total = emit.fma(halves[1], a(i, j), emit.fma(halves[2], square(i, j), total))
            total = emit.add(total, halves[0]) if i == j else total
            emit.store(w, factor_at + i * row_size + j * lanes, total, padded=True)
        emit.forget()
        # Over G A, which is not needed any more: X + c3 A G.
        multiply(emit, w, moved_at, factor, (lambda i, j: emit.mul(c3, a(i, j)), g))
        # c1 G + q1 I + X A + A (X + c3 A G).
        multiply(
            emit, w, target,
            lambda i, j: emit.fma(c1, g(i, j), q[0]) if i == j else emit.mul(c1, g(i, j)),
            (factor, a), (a, moved),
        )  # fmt: skip

    return Core(6, powers, value, derivative)
