"""CPU kernel of closed-form rotations and of their gradient: LANES tokens at a time, one per SIMD lane.

The formulas of `rotation.py` run once on `Lane`s while compiling: vectors that record how they were made, for the chain rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shippo_ssm.actions.kernels import (
    CoordinateMap,
    cosine_series,
    largest_angle,
    polynomial,
    sine_and_cosine,
    sine_series,
)
from shippo_ssm.actions.rotation import rotation_matrix, squared_angles
from shippo_ssm.engine import LANES, simd

# sqrt of this is below pi / 4, where the series of sine and cosine hold.
SMALL = 0.6


class Lane:
    """A vector with its derivatives by the lanes it was made from; `adjoint` is the derivative of the result by it.

    The `tape` holds the lanes of one formula in the order in which they were made.
    """

    def __init__(self, emit: Any, tape: list[Lane], vector: Any, parents: Sequence[tuple[Lane, Any]] = ()) -> None:
        self.emit, self.tape, self.vector, self.parents, self.adjoint = emit, tape, vector, parents, None
        tape.append(self)

    def __add__(self, other: Lane) -> Lane:
        one = self.emit.constant(1.0)
        return Lane(self.emit, self.tape, self.emit.add(self.vector, other.vector), [(self, one), (other, one)])

    def __neg__(self) -> Lane:
        return self * -1.0

    def __sub__(self, other: Lane) -> Lane:
        return self + -other

    def __rsub__(self, other: float) -> Lane:
        difference = self.emit.sub(self.emit.constant(other), self.vector)
        return Lane(self.emit, self.tape, difference, [(self, self.emit.constant(-1.0))])

    def __mul__(self, other: Lane | float) -> Lane:
        if isinstance(other, Lane):
            factor, parents = other.vector, [(self, other.vector), (other, self.vector)]
        else:
            factor = self.emit.constant(other)
            parents = [(self, factor)]
        return Lane(self.emit, self.tape, self.emit.mul(self.vector, factor), parents)


def pull_lanes(tape: list[Lane]) -> None:
    """From the adjoints of the results to those of everything else."""
    for lane in reversed(tape):
        if lane.adjoint is None:
            continue
        for parent, slope in lane.parents:
            if parent.adjoint is None:
                parent.adjoint = lane.emit.mul(lane.adjoint, slope)
            else:
                parent.adjoint = lane.emit.fma(lane.adjoint, slope, parent.adjoint)


def functions_of(emit: Any, s: Any) -> tuple[Any, Any, Any, Any]:
    """x (1 where it is small), cos(x), sin(x) / x and the derivative of that by x^2, of s = x^2."""
    build, sines, cosines = emit.builder, sine_series(emit.dtype), cosine_series(emit.dtype)
    near = build.fcmp_ordered("<", s, emit.constant(SMALL))
    safe = build.select(near, emit.constant(1.0), s)
    x = emit.sqrt(safe)
    sin, cos = sine_and_cosine(emit, x)
    cos = build.select(near, polynomial(emit, cosines, s), cos)
    sinc = build.select(near, polynomial(emit, sines, s), build.fdiv(sin, x))
    # One step of Newton's iteration to cos^2 + sin^2 = 1: what is left is rounding without a preferred sign.
    off = emit.fma(emit.mul(sinc, sinc), s, emit.fma(cos, cos, emit.constant(-1.0)))
    half = emit.mul(off, emit.constant(-0.5))
    cos, sinc = emit.fma(cos, half, cos), emit.fma(sinc, half, sinc)
    slope = build.fdiv(emit.sub(cos, sinc), emit.add(safe, safe))
    series = polynomial(emit, [k * weight for k, weight in enumerate(sines)][1:], s)
    return x, cos, sinc, build.select(near, series, slope)


def make_rotation(dtype: str, width: int) -> CoordinateMap:
    """Rotations of LANES tokens, and their gradient."""
    from numba import njit

    lanes, size, num_coords, limit = LANES, width * width, width * (width - 1) // 2, largest_angle(dtype)
    num_angles = 2 if width == 4 else 1
    # Vectors of the scratch: coordinates, the step, the matrix or its cotangent, and per angle x its cosine, sin(x) / x and the
    # derivative of that by x^2.
    step_at = num_coords * lanes
    matrix = step_at + lanes
    angle, cosine, ratio, slope, scratch = (matrix + (size + k * num_angles) * lanes for k in range(5))

    def turns(emit: Any, w: Any) -> list[Lane]:
        tape, step = [], emit[w, step_at]
        return [Lane(emit, tape, emit.mul(x, step)) for x in emit.load_rows(w, 0, num_coords, lanes)]

    @simd(dtype, lanes)
    def trigonometry(emit: Any, w: Any) -> None:
        for k, square in enumerate(squared_angles(turns(emit, w))):
            for place, vector in zip((angle, cosine, ratio, slope), functions_of(emit, square.vector)):
                emit[w, place + k * lanes] = vector

    def formula(emit: Any, w: Any) -> tuple[list[Lane], list[Lane]]:
        leaves, trig = turns(emit, w), []
        for k, square in enumerate(squared_angles(leaves)):
            cos, sinc, moved = (emit[w, place + k * lanes] for place in (cosine, ratio, slope))
            # d cos(x) / d(x^2) = -sin(x) / (2 x).
            down = emit.mul(sinc, emit.constant(-0.5))
            pair = (cos, down), (sinc, moved)
            trig.append(tuple(Lane(emit, square.tape, vector, [(square, slope)]) for vector, slope in pair))
        return leaves, rotation_matrix(leaves, trig)

    @simd(dtype, lanes)
    def multiply_out(emit: Any, w: Any) -> None:
        emit.store_rows(w, matrix, [entry.vector for entry in formula(emit, w)[1]], lanes)

    @simd(dtype, lanes)
    def pull_matrix(emit: Any, w: Any) -> None:
        leaves, entries = formula(emit, w)
        for entry, adjoint in zip(entries, emit.load_rows(w, matrix, size, lanes)):
            # One lane may stand in two places of the matrix.
            entry.adjoint = adjoint if entry.adjoint is None else emit.add(entry.adjoint, adjoint)
        pull_lanes(leaves[0].tape)
        pulled, step = [leaf.adjoint for leaf in leaves], emit[w, step_at]
        emit[w, step_at] = emit.dot(pulled, emit.load_rows(w, 0, num_coords, lanes))
        emit.store_rows(w, 0, [emit.mul(adjoint, step) for adjoint in pulled], lanes)

    @njit(inline="always")
    def prepare(w):
        trigonometry(w)
        for place in range(num_angles * lanes):
            x = w[angle + place]
            if x > limit:
                w[cosine + place], w[ratio + place] = math.cos(x), math.sin(x) / x
                w[slope + place] = (w[cosine + place] - w[ratio + place]) / (2.0 * x * x)
        return 0, 0.0

    @njit(inline="always")
    def fill(w, squarings, norm):
        multiply_out(w)
        return matrix

    @njit(inline="always")
    def pull_back(w, squarings, norm):
        pull_matrix(w)

    return CoordinateMap(dtype, scratch, num_coords, 0, step_at, None, matrix, prepare, fill, pull_back)
