"""Blocks of eight matrices in the lanes of SIMD vectors: [LANES, entries] in memory, [entries, LANES] in a scratch array.

The scratch may be wider than the memory: float32 numbers are transposed first and widened after, and back. A kernel
built from these is compiled as a whole, so machine code that is kept on disk stays consistent with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from shippo_ssm.engine.emitter import Emitter

LANES = 8


def transposed(emit: Any, rows: list[Any]) -> list[Any]:
    """Eight vectors of eight elements, transposed by exchanging blocks of 1, 2 and 4 elements."""
    from llvmlite import ir

    mask, rows = ir.VectorType(ir.IntType(32), LANES), list(rows)
    for distance in (1, 2, 4):
        low = mask([p if not p & distance else LANES + p - distance for p in range(LANES)])
        high = mask([p + distance if not p & distance else LANES + p for p in range(LANES)])
        for i in range(LANES):
            if not i & distance:
                a, b = rows[i], rows[i | distance]
                rows[i], rows[i | distance] = emit.builder.shuffle_vector(a, b, low), emit.builder.shuffle_vector(a, b, high)
    return rows


def gather(
    emit: Any,
    dtype: str,
    source: Any,
    base: Any,
    w: Any,
    target: int,
    entries: int,
    place: Callable[[int], int] = lambda entry: entry,
) -> None:
    """Read LANES rows of `entries` numbers of `dtype`; entry e goes to the vector `place(e)` of the scratch."""
    outside = Emitter(emit.builder, dtype, LANES)
    for chunk in range(0, entries, LANES):
        rows = [outside.load(source, emit.at(base, lane * entries + chunk), padded=True) for lane in range(LANES)]
        for entry, vector in enumerate(transposed(emit, rows), chunk):
            wide = vector if dtype == emit.dtype else emit.builder.fpext(vector, emit.vector)
            emit.store(w, target + place(entry) * LANES, wide, padded=True)


def scatter(emit: Any, dtype: str, w: Any, source: Any, out: Any, base: Any, entries: int, raised: Container[int] = ()) -> None:
    """Write LANES rows of `entries` numbers of `dtype`, one added to the entries that are `raised`."""
    outside, one = Emitter(emit.builder, dtype, LANES), emit.constant(1.0)
    for chunk in range(0, entries, LANES):
        rows = [emit.load(w, emit.at(source, entry * LANES), padded=True) for entry in range(chunk, chunk + LANES)]
        rows = [emit.add(row, one) if entry in raised else row for entry, row in enumerate(rows, chunk)]
        if dtype != emit.dtype:
            rows = [emit.builder.fptrunc(row, outside.vector) for row in rows]
        for lane, vector in enumerate(transposed(emit, rows)):
            outside.store(out, emit.at(base, lane * entries + chunk), vector, padded=True)
