"""Blocks of LANES matrices in the lanes of SIMD vectors: [LANES, entries] in memory, [entries, LANES] in a scratch array.

The scratch may be wider than the memory: float32 numbers are transposed first and widened after, and back. Readers and
writers are inlined: names that Numba gives to functions could meet those of a kernel that another process has compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shippo_ssm.engine.emitter import Emitter, simd

# float32 numbers of one vector register; torch knows its width without a compiler being loaded.
LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
# Blocks between a prefetch and its use: the processor's own prefetching ends with every page.
AHEAD = 8


def transposed(emit: Any, rows: list[Any]) -> list[Any]:
    """As many vectors as each has elements, a power of two, transposed by exchanging blocks of 1, 2, 4 and more elements."""
    from llvmlite import ir

    count, rows = len(rows), list(rows)
    mask, distance = ir.VectorType(ir.IntType(32), count), 1
    while distance < count:
        low = mask([p if not p & distance else count + p - distance for p in range(count)])
        high = mask([p + distance if not p & distance else count + p for p in range(count)])
        for i in range(count):
            if not i & distance:
                a, b = rows[i], rows[i | distance]
                rows[i], rows[i | distance] = emit.builder.shuffle_vector(a, b, low), emit.builder.shuffle_vector(a, b, high)
        distance *= 2
    return rows


def block_reader(dtype: str, arithmetic: str, entries: int, turned: int = 0) -> Callable[..., None]:
    """read(array, first, here, w, target): the `here` rows of `entries` numbers from row `first` on, zeros in the lanes left.

    The memory holds numbers of `dtype`, the scratch of `arithmetic`. `turned` is P if rows are P x P matrices to transpose.
    """
    from numba import njit

    @simd(arithmetic, LANES)
    def read_block(emit: Any, array: Any, base: Any, w: Any, target: Any) -> None:
        outside, build = Emitter(emit.builder, dtype, LANES), emit.builder
        outside.prefetch(array, emit.at(base, AHEAD * LANES * entries), LANES * entries)
        for chunk, count in emit.strips(entries, LANES):
            if entries == 1:
                columns = [outside.load(array, base, padded=True)]
            else:
                starts = [emit.at(base, chunk, lane * entries) for lane in range(LANES)]
                columns = transposed(emit, [outside.load_part(array, start, count) for start in starts])[:count]
            for entry, vector in enumerate(columns):
                wide, place = vector if dtype == arithmetic else build.fpext(vector, emit.vector), emit.at(chunk, entry)
                if turned:
                    side = emit.at(turned)
                    place = emit.at(emit.times(build.urem(place, side), turned), build.udiv(place, side))
                emit.store(w, emit.at(target, emit.times(place, LANES)), wide, padded=True)
            emit.forget()

    @njit(inline="always")
    def read(array, first, here, w, target):
        if here == LANES:
            read_block(array, first * entries, w, target)
        else:
            for entry in range(entries):
                place = target + (entry % turned * turned + entry // turned if turned else entry) * LANES
                for lane in range(LANES):
                    w[place + lane] = array[(first + lane) * entries + entry] if lane < here else 0.0

    return read


def block_writer(dtype: str, arithmetic: str, entries: int) -> Callable[..., None]:
    """write(w, source, array, first, here): the way back of a reader."""
    from numba import njit

    @simd(arithmetic, LANES)
    def write_block(emit: Any, w: Any, source: Any, array: Any, base: Any) -> None:
        outside = Emitter(emit.builder, dtype, LANES)
        outside.prefetch(array, emit.at(base, AHEAD * LANES * entries), LANES * entries, writes=True)
        for chunk, count in emit.strips(entries, LANES):
            columns = [emit.load(w, emit.at(source, emit.times(emit.at(chunk, i), LANES)), padded=True) for i in range(count)]
            if dtype != arithmetic:
                columns = [emit.builder.fptrunc(column, outside.vector) for column in columns]
            if entries == 1:
                outside.store(array, base, columns[0], padded=True)
                continue
            for lane, vector in enumerate(transposed(emit, columns + columns[-1:] * (LANES - count))):
                outside.store_part(array, emit.at(base, chunk, lane * entries), vector, count)

    @njit(inline="always")
    def write(w, source, array, first, here):
        if here == LANES:
            write_block(w, source, array, first * entries)
        else:
            for lane in range(here):
                for entry in range(entries):
                    array[(first + lane) * entries + entry] = w[source + entry * LANES + lane]

    return write
