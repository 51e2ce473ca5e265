"""Explicit SIMD inside Numba kernels: a Python function that is run once, while compiling, to write vector instructions.

`@simd(dtype, lanes)` turns a *trace* into something a kernel can call. The trace receives an `Emitter` and the call's
arguments (arrays become `Pointer`s, integers stay integers, a named tuple of them stays one); loops and lists in it are
Python's and therefore unrolled, while `Emitter.blocks` and `Variable` make a loop that exists at run time:

    @simd("float32", 8)
    def dot(emit, x, y, out, i):                      # out[i] = sum_n x[n] y[n],   n < 100
        total = emit.variable()
        for n in emit.blocks(100):                    # n runs over blocks of eight lanes
            total.set(emit.fma(emit.load(x, n), emit.load(y, n), total.get()))
        emit.store_sums(out, i, [total.get()])

An array of int16 holds the bits of bfloat16 numbers, which NumPy does not know. LLVM's own vectorisers give up where arrays may
overlap or a loop writes several of them. LLVM splits a vector that is wider than the registers, so a trace is portable.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm._private import target_machine

# Explicit mantissa bits, largest exponent, and degree of the polynomial for 2^f on |f| <= 1/2.
_FORMATS = {"float32": (23, 127, 5), "float64": (52, 1023, 11)}
# Bits of numbers that are not computed with as they are.
_SHORT = {"bfloat16": 16, "int8": 8}


def simd_lanes(dtype: str, length: int) -> int:
    """Lanes of a vector along an axis of `length`: 64 bytes where that divides the axis, otherwise 32, at least four lanes."""
    half = 32 // np.dtype(dtype).itemsize
    if length % (2 * half) == 0:
        return 2 * half
    return half if length > 4 else 4


def register_lanes(dtype: str) -> int:
    """Lanes of one vector register of this processor, at least four."""
    return max(4, (64 if _has("avx512f") else 32) // np.dtype(dtype).itemsize)


def tile_columns(dtype: str, lanes: int) -> int:
    """Columns, or entries, of a tile of vectors of `lanes`: sums take half of the vector registers, operands the rest."""
    registers = 32 if _has("avx512f") else 16
    return max(1, registers // 2 * register_lanes(dtype) // max(lanes, register_lanes(dtype)))


@functools.cache
def _has(feature: str) -> bool:
    """Whether the processor that is compiled for has a feature."""
    return f"+{feature}" in target_machine()[2].split(",")


def simd(dtype: str, lanes: int) -> Callable[[Callable[..., None]], Any]:
    """Decorator: make `trace(emit, *arguments)` callable from a kernel, with vectors of `lanes` elements of `dtype`.

    A trace is written out wherever it is called.
    """
    from numba.core import types
    from numba.extending import intrinsic

    def decorate(trace: Callable[..., None]) -> Any:
        def definition(typing_context: Any, *argument_types: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
                operands = (_operand(context, builder, *pair) for pair in zip(argument_types, arguments))
                trace(Emitter(builder, dtype, lanes), *operands)
                return context.get_dummy_value()

            return types.void(*argument_types), generate

        # Numba reads the parameter list from the signature; a bare *args would arrive as one tuple.
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = ["typing_context", *list(inspect.signature(trace).parameters)[1:]]
        signature = inspect.Signature([inspect.Parameter(name, positional) for name in names])
        vars(definition)["__signature__"] = signature
        definition.__name__ = trace.__name__
        return intrinsic(definition)

    return decorate


def _operand(context: Any, builder: Any, kind: Any, argument: Any) -> Any:
    """An argument of Numba's type `kind` as a trace sees it."""
    from numba.core import cgutils, types

    if isinstance(kind, types.Array):
        address = context.make_array(kind)(context, builder, argument).data
        return Pointer(address, "bfloat16" if kind.dtype == types.int16 else "")
    if isinstance(kind, types.BaseNamedTuple):
        record: Any = kind
        fields = zip(record, cgutils.unpack_tuple(builder, argument, len(record)))
        return record.instance_class(*(_operand(context, builder, *field) for field in fields))
    return argument


class Pointer(NamedTuple):
    """The first element of an array. Numbers in "bfloat16" or "int8" `storage` are float32 when loaded; bfloat16 is rounded to
    when stored."""

    address: Any
    storage: str = ""


class Variable:
    """A vector that a run-time loop reads and writes; LLVM keeps it in a register where one is free."""

    def __init__(self, emit: Emitter, start: Any) -> None:
        self._builder = emit.builder
        self._slot = emit.cgutils.alloca_once(emit.builder, emit.vector)
        emit.builder.store(start, self._slot)

    def get(self) -> Any:
        return self._builder.load(self._slot)

    def set(self, value: Any) -> None:
        self._builder.store(value, self._slot)


class Emitter:
    """Writes vector instructions of one dtype and width. Vectors are LLVM values; indices count elements."""

    def __init__(self, builder: Any, dtype: str, lanes: int) -> None:
        from llvmlite import ir
        from numba.core import cgutils

        self.builder, self.dtype, self.lanes, self.cgutils = builder, dtype, lanes, cgutils
        self.index = ir.IntType(64)
        self.scalar = {"float32": ir.FloatType(), "float64": ir.DoubleType()}[dtype]
        self.vector = ir.VectorType(self.scalar, lanes)
        self.add, self.sub, self.mul = builder.fadd, builder.fsub, builder.fmul
        # Types are called for their constants.
        self._ir, self._int32 = ir, ir.IntType(32)
        self._itemsize = np.dtype(dtype).itemsize
        # Lanes of a block that are in use: see `blocks`.
        self._active = lanes

    def constant(self, value: float) -> Any:
        """A vector with `value` in every lane."""
        return self.vector([float(np.dtype(self.dtype).type(value))] * self.lanes)

    def variable(self) -> Variable:
        """A vector variable that starts at zero."""
        return Variable(self, self.constant(0.0))

    def at(self, base: Any, *offsets: Any) -> Any:
        """The index base + offsets."""
        terms = [base, *offsets]
        total = sum(term for term in terms if isinstance(term, int))
        values = [term for term in terms if not isinstance(term, int)]
        return functools.reduce(self.builder.add, [*values, self._as_index(total)] if total or not values else values)

    def times(self, index: Any, factor: int) -> Any:
        """The index `index * factor`."""
        return index * factor if isinstance(index, int) else self.builder.mul(index, self._as_index(factor))

    def blocks(self, length: Any) -> Iterator[Any]:
        """First lanes of the blocks that cover `range(length)`; the last one may hold fewer than `lanes` elements.

        The body is traced once for whole blocks and once more for the rest: single elements where `length` is an argument.
        """
        static = isinstance(length, int)
        whole = length // self.lanes if static else self.builder.sdiv(length, self._as_index(self.lanes))
        start = self.times(whole, self.lanes)
        for block in self.each(whole):
            yield self.times(block, self.lanes)
        self._active = length - start if static else 1
        if not static:
            for element in self.each(self.builder.sub(length, start)):
                yield self.builder.add(start, element)
        elif self._active:
            yield self._as_index(start)
        self._active = self.lanes

    def each(self, length: Any) -> Iterator[Any]:
        """The numbers of `range(length)`, one after another: a run-time loop unless there is at most one."""
        if isinstance(length, int) and length < 2:
            yield from [self._as_index(0)] * length
        else:
            with self.cgutils.for_range(self.builder, self._as_index(length)) as loop:
                yield loop.index

    def strips(self, length: int, size: int) -> Iterator[tuple[Any, int]]:
        """(start, count) of the strips of `size` that cover `range(length)`: a run-time loop, and the rest as one more."""
        whole, rest = divmod(length, size)
        for strip in self.each(whole):
            yield self.times(strip, size), size
        if rest:
            yield self._as_index(whole * size), rest

    def pointer(self, address: Any, storage: str) -> Pointer:
        """The array of `storage` numbers that an integer argument is the address of; see `Pointer` for short ones."""
        if storage not in _SHORT:
            return Pointer(self.builder.inttoptr(address, self.scalar.as_pointer()))
        return Pointer(self.builder.inttoptr(address, self._ir.IntType(_SHORT[storage]).as_pointer()), storage)

    def load_columns(self, array: Pointer, index: Any, count: int) -> list[Any]:
        """The columns of the block [lanes, count] of `array` that starts at `index`; missing lanes are zero."""
        if self._active < self.lanes:
            return [self._gather(array, self.at(index, column), count) for column in range(count)]
        wide = self._load(self._ir.VectorType(self.scalar, self.lanes * count), array, index)
        return [self._shuffle(wide, wide, [lane * count + column for lane in range(self.lanes)]) for column in range(count)]

    def store_columns(self, array: Pointer, index: Any, columns: Sequence[Any]) -> None:
        """Write columns as the block [lanes, count] of `array` that starts at `index`."""
        count = len(columns)
        if self._active < self.lanes:
            for column, vector in enumerate(columns):
                self._scatter(vector, array, self.at(index, column), count)
            return
        # One vector after another, doubled until all are one; then lane by lane.
        parts, width = [*columns], self.lanes
        while len(parts) > 1:
            parts += parts[-1:] * (len(parts) % 2)
            both = list(range(2 * width))
            parts, width = [self._shuffle(a, b, both) for a, b in zip(parts[::2], parts[1::2])], 2 * width
        order = [column * self.lanes + lane for lane in range(self.lanes) for column in range(count)]
        self._store(self._shuffle(parts[0], parts[0], order), array, index)

    def load(self, array: Pointer, index: Any, *, padded: bool = False) -> Any:
        """The block of `array` that starts at `index`; missing lanes are zero unless the array is `padded`."""
        if padded or self._active == self.lanes:
            return self._load(self.vector, array, index)
        return self._gather(array, index, 1)

    def _gather(self, array: Pointer, index: Any, stride: int) -> Any:
        """The elements at `index`, index + stride, .. of the lanes in use; zero in the others."""
        vector = self.constant(0.0)
        for lane in range(self._active):
            element = self._load(self.scalar, array, self.at(index, lane * stride))
            vector = self.builder.insert_element(vector, element, self._int32(lane))
        return vector

    def _scatter(self, vector: Any, array: Pointer, index: Any, stride: int) -> None:
        """The way back of `_gather`."""
        for lane in range(self._active):
            element = self.builder.extract_element(vector, self._int32(lane))
            self._store(element, array, self.at(index, lane * stride))

    def store(self, array: Pointer, index: Any, vector: Any, *, padded: bool = False, streamed: bool = False) -> None:
        """Write the block of `array` that starts at `index`; past the caches where it is `streamed`, aligned and whole."""
        if padded or self._active == self.lanes:
            self._store(vector, array, index, streamed)
        else:
            self._scatter(vector, array, index, 1)

    def __getitem__(self, place: tuple[Any, ...]) -> Any:
        """emit[array, index, ..]: the block of a padded array that starts at the sum of the indices."""
        array, *offsets = place
        return self.load(array, self.at(*offsets), padded=True)

    def __setitem__(self, place: tuple[Any, ...], vector: Any) -> None:
        array, *offsets = place
        self.store(array, self.at(*offsets), vector, padded=True)

    def load_rows(self, array: Pointer, start: Any, count: int, stride: int) -> list[Any]:
        """`count` vectors of a padded array, one every `stride` numbers from `start` on."""
        return [self[array, start, i * stride] for i in range(count)]

    def store_rows(self, array: Pointer, start: Any, vectors: Iterable[Any], stride: int) -> None:
        """The way back of `load_rows`."""
        for i, vector in enumerate(vectors):
            self[array, start, i * stride] = vector

    def load_part(self, array: Pointer, index: Any, count: int) -> Any:
        """The `count` numbers of `array` from `index` on as first lanes; nothing is said about the others."""
        part = self._load(self._ir.VectorType(self.scalar, count), array, index)
        return part if count == self.lanes else self._shuffle(part, part, [min(lane, count - 1) for lane in range(self.lanes)])

    def store_part(self, array: Pointer, index: Any, vector: Any, count: int) -> None:
        """The first `count` lanes of `vector` to `array` from `index` on."""
        part = vector if count == self.lanes else self._shuffle(vector, vector, list(range(count)))
        self._store(part, array, index)

    def store_first(self, array: Pointer, index: Any, vector: Any) -> None:
        """array[index] = the first lane of `vector`."""
        self._store(self.builder.extract_element(vector, self._int32(0)), array, index)

    def splat(self, array: Pointer, index: Any) -> Any:
        """array[index] in every lane."""
        number = self._load(self.scalar, array, index)
        first = self.builder.insert_element(self.vector(self._ir.Undefined), number, self._int32(0))
        return self._shuffle(first, first, [0] * self.lanes)

    def copy(self, array: Pointer, index: Any, target: Pointer, place: Any, length: int) -> None:
        """target[place : place + length] = array[index : index + length], widened where they are stored short."""
        for start in range(0, length, self.lanes):
            count = min(self.lanes, length - start)
            kind = self.scalar if count == 1 else self._ir.VectorType(self.scalar, count)
            self._store(self._load(kind, array, self.at(index, start)), target, self.at(place, start))

    def forget(self) -> None:
        """Numbers that were stored are loaded again from here on: LLVM would keep more of them than there are registers."""
        self.builder.asm(self._ir.FunctionType(self._ir.VoidType(), []), "", "~{memory}", [], True)

    def prefetch(self, array: Pointer, index: Any, length: int, *, writes: bool = False) -> None:
        """Ask for the cache lines of array[index : index + length], to read or write them; an address outside does no harm."""
        line = 8 * 64 // _SHORT.get(array.storage, 8 * self._itemsize)
        byte, flag = self._ir.IntType(8).as_pointer(), self._int32
        kind = self._ir.FunctionType(self._ir.VoidType(), [byte, flag, flag, flag])
        function = self.cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        # To be kept in all levels, data.
        hints = [flag(hint) for hint in (int(writes), 3, 1)]
        for start in range(0, length, line):
            address = self.builder.gep(array.address, [self.at(index, start)])
            self.builder.call(function, [self.builder.bitcast(address, byte), *hints])

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a b + c, fused where the processor can."""
        return self.intrinsic("fmuladd", a, b, c)

    def sqrt(self, a: Any) -> Any:
        return self.intrinsic("sqrt", a)

    def intrinsic(self, name: str, *vectors: Any) -> Any:
        """LLVM's own function `name` of vectors."""
        kind = self._ir.FunctionType(self.vector, [self.vector] * len(vectors))
        name = f"llvm.{name}.v{self.lanes}f{8 * self._itemsize}"
        return self.builder.call(self.cgutils.get_or_insert_function(self.builder.module, kind, name), list(vectors))

    def dot(self, a: Sequence[Any], b: Sequence[Any]) -> Any:
        """sum_i a_i b_i, lane by lane."""
        total = self.mul(a[0], b[0])
        for x, y in zip(a[1:], b[1:]):
            total = self.fma(x, y, total)
        return total

    def exp2(self, z: Any) -> Any:
        """2^z; zero where the result would be subnormal, infinite where it would overflow, NaN for NaN.

        z = r + f with r an integer and |f| <= 1/2; 2^f is a polynomial and r is added to its exponent bits.
        """
        builder, ir = self.builder, self._ir
        mantissa, bias, degree = _FORMATS[self.dtype]
        bits = ir.VectorType(ir.IntType(8 * self._itemsize), self.lanes)
        top = self.constant(bias + 1)
        z = builder.select(builder.fcmp_ordered(">", z, top), top, z)
        # Adding 1.5 * 2^mantissa rounds to an integer and leaves it in the low bits.
        magic = self.constant(1.5 * 2.0**mantissa)
        shifted = builder.fadd(z, magic)
        f = builder.fsub(z, builder.fsub(shifted, magic))
        coefficients = exp2_coefficients(degree)
        power = self.constant(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            power = self.fma(power, f, self.constant(coefficient))
        exponent = builder.shl(builder.bitcast(shifted, bits), bits([mantissa] * self.lanes))
        scaled = builder.bitcast(builder.add(builder.bitcast(power, bits), exponent), self.vector)
        kept = builder.fcmp_unordered(">=", z, self.constant(1 - bias))
        return builder.select(kept, scaled, self.constant(0.0))

    @contextlib.contextmanager
    def when_any(self, vector: Any) -> Iterator[None]:
        """What is traced inside runs only where a lane of `vector` is not zero; results leave it by stores alone."""
        kind = self._ir.IntType(self.lanes)
        bits = self.builder.bitcast(self.builder.fcmp_unordered("!=", vector, self.constant(0.0)), kind)
        with self.builder.if_then(self.builder.icmp_unsigned("!=", bits, kind(0))):
            yield

    def fold(self, vector: Any, lanes: int) -> Any:
        """The sum of the parts of `lanes` that `vector` is made of."""
        width = self.lanes
        while width > lanes:
            width //= 2
            low, high = list(range(width)), list(range(width, 2 * width))
            vector = self.builder.fadd(self._shuffle(vector, vector, low), self._shuffle(vector, vector, high))
        return vector

    def store_sums(self, array: Pointer, index: Any, vectors: Sequence[Any], *, streamed: bool = False) -> None:
        """array[index + i] = sum over the lanes of vectors[i]; `streamed` as in `store`, four at a time."""
        for first in range(0, len(vectors), 4):
            four = list(vectors[first : first + 4])
            count = len(four)
            sums = self._four_sums(four + [four[-1]] * (4 - count))
            if count == 4:
                self._store(sums, array, self.at(index, first), streamed)
                continue
            for i in range(count):
                self._store(self.builder.extract_element(sums, self._int32(i)), array, self.at(index, first + i))

    def _four_sums(self, four: list[Any]) -> Any:
        # Transpose and add inside groups of four lanes, so that no shuffle crosses a 128-bit half, then add the groups.
        groups = range(0, self.lanes, 4)
        other = self.lanes

        def merge(a: Any, b: Any, low: list[int], high: list[int]) -> Any:
            return self.add(
                self._shuffle(a, b, [g + i for g in groups for i in low]),
                self._shuffle(a, b, [g + i for g in groups for i in high]),
            )

        zipped = [0, other, 1, other + 1], [2, other + 2, 3, other + 3]
        halves = [0, 1, other, other + 1], [2, 3, other + 2, other + 3]
        total = merge(merge(four[0], four[1], *zipped), merge(four[2], four[3], *zipped), *halves)
        return self.fold(total, 4)

    def _shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, self._ir.VectorType(self._int32, len(lanes))(lanes))

    def _as_index(self, value: Any) -> Any:
        return self.index(value) if isinstance(value, int) else value

    def _element(self, kind: Any, array: Pointer, index: Any) -> Any:
        address = self.builder.gep(array.address, [self._as_index(index)])
        return self.builder.bitcast(address, kind.as_pointer())

    def _load(self, kind: Any, array: Pointer, index: Any) -> Any:
        if array.storage:
            short, long, shift = self._integers(kind, _SHORT[array.storage])
            loaded = self.builder.load(self._element(short, array, index))
            loaded.align = _SHORT[array.storage] // 8
            if array.storage == "int8":
                return self.builder.sitofp(self.builder.sext(loaded, long), kind)
            return self.builder.bitcast(self.builder.shl(self.builder.zext(loaded, long), shift(16)), kind)
        loaded = self.builder.load(self._element(kind, array, index))
        loaded.align = self._itemsize
        return loaded

    def _store(self, value: Any, array: Pointer, index: Any, streamed: bool = False) -> None:
        if array.storage:
            assert array.storage == "bfloat16"
            value, size = self._rounded(value), 2
        else:
            size = self._itemsize
        stored = self.builder.store(value, self._element(value.type, array, index))
        stored.align = size
        if streamed:
            # A store past the caches must be aligned as a whole.
            stored.align = size * value.type.count
            stored.set_metadata("nontemporal", self.builder.module.add_metadata([self._int32(1)]))

    def _rounded(self, value: Any) -> Any:
        """The bits of `value` in bfloat16: to the nearest, ties to even; a NaN stays one."""
        build, (short, long, number) = self.builder, self._integers(value.type, 16)
        count = getattr(value.type, "count", 1)
        if _has("avx512bf16") and count in (4, 8, 16):
            # LLVM has no word for this instruction but in a type that llvmlite does not know; its results fill a register.
            lanes = max(8, count)
            kind = self._ir.FunctionType(self._ir.VectorType(self._ir.IntType(16), lanes), [value.type])
            bits = build.asm(kind, "vcvtneps2bf16 $1, $0", "=v,v", [value], False)
            return bits if count == lanes else self._shuffle(bits, bits, list(range(count)))
        bits = build.bitcast(value, long)
        odd = build.and_(build.lshr(bits, number(16)), number(1))
        rounded = build.lshr(build.add(build.add(bits, odd), number(0x7FFF)), number(16))
        rounded = build.select(build.fcmp_unordered("uno", value, value), number(0x7FC0), rounded)
        return build.trunc(rounded, short)

    def _integers(self, kind: Any, bits: int) -> tuple[Any, Any, Callable[[int], Any]]:
        """Integers of `bits` and of 32 bits in the place of float32 numbers `kind`, and constants of the latter."""
        short, count = self._ir.IntType(bits), getattr(kind, "count", None)
        if count is None:
            return short, self._int32, self._int32
        long = self._ir.VectorType(self._int32, count)
        return self._ir.VectorType(short, count), long, lambda value: long([value] * count)


def exp2_coefficients(degree: int) -> list[float]:
    """Coefficients, lowest first, of a polynomial for 2^f on |f| <= 1/2 that is exactly 1 at f = 0: (2^f - 1) / f is
    interpolated at Chebyshev points, so that decays close to one keep their full relative accuracy."""

    def slope(f: np.ndarray) -> np.ndarray:
        return np.expm1(f * math.log(2.0)) / np.where(f == 0.0, 1.0, f) + np.where(f == 0.0, math.log(2.0), 0.0)

    interpolant = np.polynomial.Chebyshev.interpolate(slope, degree - 1, domain=[-0.5, 0.5])
    return [1.0, *interpolant.convert(kind=np.polynomial.Polynomial).coef.tolist()]
