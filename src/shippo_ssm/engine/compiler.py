"""Compile a kernel for this machine on first use and keep its machine code on disk.

A kernel is written as a *builder*: a module-level function that takes compile-time constants (sizes, ranks) and returns
a plain Python function kernel(operands, start, stop), where `operands` is a named tuple of flat arrays, integers and
further named tuples. `compile_kernel` runs the builder and compiles what it returns.

Nothing here imports Numba until then. Machine code is kept below `cache_directory()`, one file for each (builder, constants,
operand types, source text, processor, Numba version). Compiling takes no threads: Numba and llvmlite hold one lock each for the
whole process.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm import _private
from shippo_ssm.engine import cache
from shippo_ssm.engine.blocks import LANES

logger = logging.getLogger("shippo_ssm")

# What a field of a record is: the dtype of a flat array, `int`, or the class of a record, followed by its own fields.
Kinds = tuple[Any, ...]


class Kernel(NamedTuple):
    """A compiled kernel. It trusts what it is called with, and holds no GIL while it runs."""

    call: Callable[..., None]
    """call(operands, start, stop) from Python."""
    address: int
    """Of the same as machine code; it stays as long as `call` does."""


# What is logged of a kernel and the seconds it took.
COMPILED = "compiled %s in %.1f s"

_announced = False


def compile_kernel(builder: Callable[..., Callable], kinds: Kinds, constants: dict[str, Any]) -> Kernel:
    """The machine code of `builder(**constants)` for operands of these kinds, from disk or compiled now."""
    folder = cache.cache_directory() if Path(inspect.getfile(builder)).exists() else None
    file = f"{builder.__name__}-{_digest(builder, kinds, constants)}.kernel"
    if folder is not None and (code := cache.load(folder, file)):
        try:
            return link(builder.__name__, code)
        except ValueError as error:
            logger.info("cached kernel %s is not usable (%s): compiling again", file, error)
    result = compile_result(builder, kinds, constants)
    found = _private.object_code(result)
    if found is None:
        return Kernel(result.entry_point, result.library.get_pointer_to_function(result.fndesc.llvm_func_name))
    code = cache.MachineCode(*found)
    if folder is not None:
        cache.save(folder, file, code)
    return link(builder.__name__, code)


def compile_result(builder: Callable[..., Callable], kinds: Kinds, constants: dict[str, Any]) -> Any:
    """What Numba makes of `builder(**constants)` for operands of these kinds."""
    import numba
    from llvmlite import binding

    # Fused multiply-add is the only liberty that the kernels' own arithmetic takes.
    flags: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy", "boundscheck": False}
    dispatcher: Any = numba.njit(builder(**constants), **flags)
    name = f"{builder.__name__}({', '.join(f'{k}={v}' for k, v in constants.items())})"
    # Traces may name instructions that LLVM has no words for.
    binding.initialize_native_asmparser()
    begin = time.perf_counter()
    _announce(name)
    dispatcher.compile((_record_type(iter(kinds)), numba.int64, numba.int64))
    logger.info(COMPILED, name, time.perf_counter() - begin)
    (result,) = dispatcher.overloads.values()
    return result


def link(name: str, code: cache.MachineCode) -> Kernel:
    """Object code in memory, ready to run; it stays for the life of the process."""
    from llvmlite import binding

    _private.start_runtime()
    # LLVM would end the process.
    if missing := [symbol for symbol in code.externals if not binding.address_of_symbol(symbol)]:
        raise ValueError(f"this process does not have {', '.join(missing)}")
    # An engine of its own: the names of two kernels cannot meet.
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code.object_code))
    engine.finalize_object()
    environments = [engine.get_global_value_address(symbol) for symbol in code.environments]
    call = _private.python_function(name, engine.get_function_address(code.wrapper), environments)
    kernel = Kernel(call, engine.get_function_address(code.function))
    engine.detach()
    return kernel


def _record_type(kinds: Iterator[Any]) -> Any:
    """The Numba type that the next of `kinds` stands for."""
    import numba
    from numba.core import types

    kind = next(kinds)
    if isinstance(kind, np.dtype):
        return types.Array(numba.from_dtype(kind), 1, "C")
    if kind is int:
        return types.int64
    return types.BaseTuple.from_types([_record_type(kinds) for _ in kind._fields], kind)


def _digest(builder: Callable, kinds: Kinds, constants: dict[str, Any]) -> str:
    """What machine code is known by: the kernel, the types of its operands, the text it comes from, and this machine."""
    import numba

    fields = [(kind.__qualname__, kind._fields) if hasattr(kind, "_fields") else str(kind) for kind in kinds]
    machine = (_private.target_machine(), LANES, numba.__version__, platform.python_version())
    what = (builder.__module__, builder.__qualname__, fields, sorted(constants.items()), machine)
    digest = hashlib.sha256(repr(what).encode())
    own = {Path(__file__).with_name(f"{name}.py") for name in ("compiler", "emitter", "blocks")}
    for file in filter(Path.exists, sorted(_sources(builder) | own)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _sources(builder: Callable) -> set[Path]:
    """The builder's own file, and those of the package from which it takes functions or classes, however far away."""
    files, left = set(), [builder]
    while left:
        thing = left.pop()
        file = Path(inspect.getfile(thing))
        if file not in files:
            files.add(file)
            names = vars(inspect.getmodule(thing) or builder).values()
            taken = [x for x in names if inspect.isfunction(x) or inspect.isclass(x)]
            left += [x for x in taken if x.__module__.startswith("shippo_ssm.")]
    return files


def _announce(name: str) -> None:
    global _announced
    logger.info("compiling %s for this machine", name)
    if not _announced and sys.stderr is not None and not os.environ.get("SHIPPO_QUIET"):
        place = cache.cache_directory() or "memory only, since there is no home directory"
        line = f"shippo_ssm: compiling CPU kernels, once per machine; kept in {place} (SHIPPO_QUIET=1 hides this line)"
        print(line, file=sys.stderr, flush=True)
    _announced = True
