"""Machine code of closed-form rotations and of their gradient: LANES tokens at a time, one per SIMD lane.

The formulas are those of `rotations.py`, run once on `Lane`s instead of tensors while compiling: a `Lane` is a vector of
numbers that remembers how it was made, so that the gradient comes from the same formula, by the chain rule backwards
through what was remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shippo_ssm.actions._trig import cosine_series, largest_angle, polynomial, sine_and_cosine, sine_series, square_root
from shippo_ssm.actions.rotations import rotation_matrix, squared_angles
from shippo_ssm.engine import LANES, LaneMap, block_reader, block_writer, simd

# sqrt of this is below pi / 4, where the series of sine and cosine hold.
SMALL = 0.6


class Lane:
    """A vector with its derivatives by the lanes it was made from; `adjoint` is the derivative of the result by it."""

    def __init__(self, tape: Tape, vector: Any, parents: list[tuple[Lane, Any]]) -> None:
        self.tape, self.vector, self.parents, self.adjoint = tape, vector, parents, None
        tape.lanes.append(self)

    def __add__(self, other: Lane) -> Lane:
        one = self.tape.emit.constant(1.0)
        return Lane(self.tape, self.tape.emit.add(self.vector, other.vector), [(self, one), (other, one)])

    def __neg__(self) -> Lane:
        return self * -1.0

    def __sub__(self, other: Lane) -> Lane:
        return self + -other

    def __rsub__(self, other: float) -> Lane:
        emit = self.tape.emit
        return Lane(self.tape, emit.sub(emit.constant(other), self.vector), [(self, emit.constant(-1.0))])

    def __mul__(self, other: Lane | float) -> Lane:
        emit = self.tape.emit
        if not isinstance(other, Lane):
            factor = emit.constant(other)
            return Lane(self.tape, emit.mul(self.vector, factor), [(self, factor)])
        return Lane(self.tape, emit.mul(self.vector, other.vector), [(self, other.vector), (other, self.vector)])


class Tape:
    """The lanes of one formula in the order in which they were made."""

    def __init__(self, emit: Any) -> None:
        self.emit, self.lanes = emit, []

    def leaf(self, vector: Any) -> Lane:
        return Lane(self, vector, [])

    def run_back(self) -> None:
        """From the adjoints of the results to those of everything else."""
        for lane in reversed(self.lanes):
            if lane.adjoint is None:
                continue
            for parent, slope in lane.parents:
                if parent.adjoint is None:
                    parent.adjoint = self.emit.mul(lane.adjoint, slope)
                else:
                    parent.adjoint = self.emit.fma(lane.adjoint, slope, parent.adjoint)


def build_rotation(dtype: str, width: int, sizes: tuple[int, ...], backward: bool) -> Callable[..., None]:
    """kernel(operands, start, stop) as `coordinate_op` asks for it."""
    return _build(dtype, width, backward)[0]


def rotation_lanes(dtype: str, width: int) -> LaneMap:
    """The rotations of LANES tokens inside another kernel."""
    return _build(dtype, width, False)[1]


def _build(dtype: str, width: int, backward: bool) -> tuple[Callable[..., None], LaneMap]:
    from numba import njit

    lanes, element, size, count_coords = LANES, np.dtype(dtype), width * width, width * (width - 1) // 2
    limit = largest_angle(dtype)
    slopes = [k * weight for k, weight in enumerate(sine_series(dtype))][1:]
    num_angles = 2 if width == 4 else 1
    # Vectors of the scratch: coordinates, the step, the matrix or its cotangent, the gradients, and per angle x its cosine,
    # sin(x) / x and the derivative of that by x^2.
    value, step_at = 0, count_coords * lanes
    matrix = step_at + lanes
    gradient = matrix + size * lanes
    step_gradient = gradient + count_coords * lanes
    angle, cosine, ratio, slope = (step_gradient + lanes + k * num_angles * lanes for k in range(4))

    def load(emit: Any, w: Any, base: int, number: int) -> list[Any]:
        return [emit.load(w, base + k * lanes, padded=True) for k in range(number)]

    def store(emit: Any, w: Any, base: int, vectors: list[Any]) -> None:
        for k, vector in enumerate(vectors):
            emit.store(w, base + k * lanes, vector, padded=True)

    def turns(emit: Any, w: Any) -> tuple[Tape, list[Lane]]:
        tape, (step,) = Tape(emit), load(emit, w, step_at, 1)
        return tape, [tape.leaf(emit.mul(x, step)) for x in load(emit, w, value, count_coords)]

    @simd(dtype, lanes)
    def prepare(emit: Any, w: Any) -> None:
        build = emit.builder
        for k, square in enumerate(squared_angles(turns(emit, w)[1])):
            s = square.vector
            near = build.fcmp_ordered("<", s, emit.constant(SMALL))
            safe = build.select(near, emit.constant(1.0), s)
            x = square_root(emit, safe)
            sin, cos = sine_and_cosine(emit, x)
            cos = build.select(near, polynomial(emit, cosine_series(dtype), s), cos)
            sinc = build.select(near, polynomial(emit, sine_series(dtype), s), build.fdiv(sin, x))
            # One step of Newton's iteration to cos^2 + sin^2 = 1: what is left is rounding without a preferred sign.
            off = emit.fma(emit.mul(sinc, sinc), s, emit.fma(cos, cos, emit.constant(-1.0)))
            half = emit.mul(off, emit.constant(-0.5))
            cos, sinc = emit.fma(cos, half, cos), emit.fma(sinc, half, sinc)
            far = build.fdiv(emit.sub(cos, sinc), emit.add(safe, safe))
            moved = build.select(near, polynomial(emit, slopes, s), far)
            for place, vector in zip((angle, cosine, ratio, slope), (x, cos, sinc, moved)):
                emit.store(w, place + k * lanes, vector, padded=True)

    def formula(emit: Any, w: Any) -> tuple[Tape, list[Lane], list[Lane]]:
        tape, leaves = turns(emit, w)
        trig = []
        for k, square in enumerate(squared_angles(leaves)):
            cos, sinc, moved = (emit.load(w, place + k * lanes, padded=True) for place in (cosine, ratio, slope))
            # d cos(x) / d(x^2) = -sin(x) / (2 x).
            down = emit.mul(sinc, emit.constant(-0.5))
            trig.append((Lane(tape, cos, [(square, down)]), Lane(tape, sinc, [(square, moved)])))
        return tape, leaves, rotation_matrix(leaves, trig)

    @simd(dtype, lanes)
    def multiply_out(emit: Any, w: Any) -> None:
        store(emit, w, matrix, [entry.vector for entry in formula(emit, w)[2]])

    @simd(dtype, lanes)
    def pull_back(emit: Any, w: Any) -> None:
        tape, leaves, entries = formula(emit, w)
        for entry, adjoint in zip(entries, load(emit, w, matrix, size)):
            # One lane may stand in two places of the matrix.
            entry.adjoint = adjoint if entry.adjoint is None else emit.add(entry.adjoint, adjoint)
        tape.run_back()
        pulled = [leaf.adjoint for leaf in leaves]
        (step,) = load(emit, w, step_at, 1)
        store(emit, w, gradient, [emit.mul(adjoint, step) for adjoint in pulled])
        store(emit, w, step_gradient, [emit.dot(pulled, load(emit, w, value, count_coords))])

    read_coords, write_coords = block_reader(dtype, dtype, count_coords), block_writer(dtype, dtype, count_coords)
    read_matrix, write_matrix = block_reader(dtype, dtype, size), block_writer(dtype, dtype, size)

    @njit(inline="always")
    def measure(w):
        prepare(w)
        for place in range(num_angles * lanes):
            x = w[angle + place]
            if x > limit:
                w[cosine + place], w[ratio + place] = math.cos(x), math.sin(x) / x
                w[slope + place] = (w[cosine + place] - w[ratio + place]) / (2.0 * x * x)

    @njit(inline="always")
    def fill(w):
        measure(w)
        multiply_out(w)
        return matrix

    def kernel(operands, start, stop):
        coords, step, right, cotangent, d_coords, d_step, count = operands
        w = np.zeros(slope + num_angles * lanes, dtype=element)
        for block in range(start, stop):
            first = block * lanes
            here = min(lanes, count - first)
            read_coords(coords, first, here, w, value)
            for lane in range(lanes):
                w[step_at + lane] = step[first + lane] if lane < here else 0.0
            if backward:
                measure(w)
                read_matrix(cotangent, first, here, w, matrix)
                pull_back(w)
                write_coords(w, gradient, d_coords, first, here)
                for lane in range(here):
                    d_step[first + lane] = w[step_gradient + lane]
            else:
                fill(w)
                write_matrix(w, matrix, right, first, here)

    return kernel, LaneMap(dtype, slope + num_angles * lanes, value, step_at, fill)
