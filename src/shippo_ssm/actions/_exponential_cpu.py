"""CPU kernels of families: from LANES coordinates and steps to right actions, and the gradient back.

For an exponential the generator is made in the scratch array of `_expm_cpu.py`, where its gradient goes back to coordinates and
step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shippo_ssm.actions._expm_cpu import LaneScheme, block_kernel, make_exponential
from shippo_ssm.actions._rotation_cpu import make_rotation
from shippo_ssm.actions._split_cpu import make_split
from shippo_ssm.actions.expm import lane_schemes
from shippo_ssm.actions.kernels import CoordinateMap, Inline, softplus
from shippo_ssm.engine import LANES, block_reader, block_writer, simd


def make_generated(dtype: str, width: int, inline: Inline, scheme: LaneScheme, backward: bool) -> CoordinateMap:
    """exp(step A) with the generator A that a family makes of its coordinates; backward, A^T stands in its place."""
    from numba import njit

    coords, measure, run = make_exponential(dtype, width, scheme, backward)
    arithmetic, lanes, size = scheme.arithmetic, LANES, width * width
    _, num_diagonals, num_rotations, num_shears, clamp, bounded = inline
    num_factors = num_diagonals + num_rotations + num_shears
    pairs = [(i, j) for i in range(width) for j in range(i + 1, width)]
    count = num_factors or size
    step_at = coords + count * lanes
    limit, margin = 0.9 * math.log(float(np.finfo(dtype).max)), 1.0 + 4.0 * width * float(np.finfo(dtype).eps)
    # Entry of A and its sign for every coordinate; a rotation stands in two.
    places = [[(k, 1.0)] for k in range(size)]
    if num_factors:
        places = [[(i * width + i, -1.0)] for i in range(num_diagonals)]
        places += [[(j * width + i, 1.0), (i * width + j, -1.0)] for i, j in pairs[:num_rotations]]
        places += [[(i * width + j, 1.0)] for i, j in pairs[:num_shears]]

    def larger(emit: Any, a: Any, b: Any) -> Any:
        return emit.builder.select(emit.builder.fcmp_unordered(">", a, b), a, b)

    def signed(emit: Any, x: Any, sign: float) -> Any:
        return x if sign > 0 else emit.builder.fneg(x)

    def coefficient(emit: Any, k: int, x: Any) -> tuple[Any, Any]:
        """What coordinate k stands for, and the derivative of that, `None` for one."""
        build, zero, one = emit.builder, emit.constant(0.0), emit.constant(1.0)
        if k >= num_diagonals:
            return x, None
        if clamp:
            return larger(emit, x, zero), build.select(build.fcmp_ordered(">=", x, zero), one, zero)
        decay, slope = softplus(emit, x)
        cut = build.fcmp_ordered(">", decay, emit.constant(limit))
        return build.select(cut, emit.constant(limit), decay), build.select(cut, zero, slope)

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
        step = emit[w, step_at]
        parts = [coefficient(emit, k, x)[0] for k, x in enumerate(emit.load_rows(w, coords, count, lanes))]
        entries = make_entries(emit, parts)
        if bounded:
            excess = emit.mul(larger(emit, rows_of(emit, entries)[1], emit.constant(0.0)), emit.constant(margin))
            for i in range(width):
                entries[i * width + i] = emit.sub(entries[i * width + i], excess)
        for k, entry in enumerate(entries):
            place = k % width * width + k // width if backward else k
            emit[w, place * lanes] = emit.mul(entry, step)

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
        step, by_entry = emit[w, step_at], emit.load_rows(w, gradient, size, lanes)
        parts, slopes = zip(*(coefficient(emit, k, x) for k, x in enumerate(emit.load_rows(w, coords, count, lanes))))
        if bounded:
            by_entry = pull_bound(emit, by_entry, make_entries(emit, parts))
        # By Euler's rule also where A is bounded: that is homogeneous in A.
        d_step = emit.constant(0.0)
        for k, (part, slope, taken) in enumerate(zip(parts, slopes, places)):
            by_part = functools.reduce(emit.add, [signed(emit, by_entry[place], sign) for place, sign in taken])
            d_step = emit.fma(by_part, part, d_step)
            by_part = by_part if slope is None else emit.mul(by_part, slope)
            emit[w, coords + k * lanes] = emit.mul(by_part, step)
        emit[w, step_at] = d_step

    @njit(inline="always")
    def prepare(w):
        generate(w)
        return measure(w)

    @njit(inline="always")
    def pull_back(w, squarings, norm):
        pull(w, run(w, squarings, norm))

    return CoordinateMap(arithmetic, step_at + lanes, count, coords, step_at, None, size * lanes, prepare, run, pull_back)


def coordinate_map(dtype: str, width: int, inline: Inline, scheme: LaneScheme, backward: bool) -> CoordinateMap:
    """The map that a family asks for."""
    if inline.kind == "rotation":
        return make_rotation(dtype, width)
    if inline.kind == "split":
        return make_split(dtype, width, inline)
    return make_generated(dtype, width, inline, scheme, backward)


def build_family(dtype: str, width: int, inline: Inline, scheme: LaneScheme, backward: bool) -> Callable[..., None]:
    """kernel(operands, start, stop): R of `families.Operands`, or the gradients; see `block_kernel`."""
    from numba import njit

    maps = coordinate_map(dtype, width, inline, scheme, backward)
    arithmetic, scratch, num_coords, coords_at, step_at, matrix_at, cotangent_at, prepare, fill, pull_back = maps
    reads_matrix, matrix_at = backward and matrix_at is not None, matrix_at or 0
    read_coords, write_coords = (block(dtype, arithmetic, num_coords) for block in (block_reader, block_writer))
    read_step, write_step = (block(dtype, arithmetic, 1) for block in (block_reader, block_writer))
    read_matrix, write_matrix = (block(dtype, arithmetic, width * width) for block in (block_reader, block_writer))

    @njit(inline="always")
    def load(given, first, here, w):
        read_coords(given.coords, first, here, w, coords_at)
        read_step(given.step, first, here, w, step_at)

    @njit(inline="always")
    def finish(given, first, here, w, squarings, norm):
        if reads_matrix:
            read_matrix(given.right, first, here, w, matrix_at)
        if backward:
            read_matrix(given.cotangent, first, here, w, cotangent_at)
            pull_back(w, squarings, norm)
            write_coords(w, coords_at, given.d_coords, first, here)
            write_step(w, step_at, given.d_step, first, here)
        else:
            write_matrix(w, fill(w, squarings, norm), given.right, first, here)

    return block_kernel(scheme, scratch, prepare, load, finish)


def right_lanes(dtype: str, width: int, inline: Inline) -> CoordinateMap:
    """The map that a family asks for, to be used inside another kernel: its fill(w) does all."""
    from numba import njit

    maps = coordinate_map(dtype, width, inline, lane_schemes(dtype, width, False)[-1], False)
    prepare, matrices = maps.prepare, maps.fill

    @njit(inline="always")
    def fill(w):
        squarings, norm = prepare(w)
        return matrices(w, squarings, norm)

    return maps._replace(fill=fill)
