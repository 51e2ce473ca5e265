"""Compile a kernel for this machine on first use and keep its machine code on disk.

A kernel is written as a *builder*: a module-level function that takes compile-time constants (sizes, ranks) and returns
a plain Python function kernel(operands, start, stop), where `operands` is a named tuple of flat arrays, integers and
further named tuples. `compile_kernel` runs the builder and compiles what it returns.

Nothing here imports Numba until then. What our kernels need from the compiler (the SLP vectoriser) is put back before
Numba's compiler lock is released, so that other users of Numba in the process never see it. Machine code is kept below
`cache_directory()`, one file for each (builder, constants, operand types, source text, processor, Numba version):
concurrent processes can at worst write the same file twice. A directory that cannot be written, or a damaged file, costs
a compilation and nothing else.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shippo_ssm import _private
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
_PART = ".part"


def cache_directory() -> Path | None:
    """Where compiled kernels are kept: `$SHIPPO_CACHE_DIR`, or `shippo-ssm` in the user's cache directory.

    Returns:
        The directory; it need not exist and need not be writable. `None` where there is no home, as in a container whose user
        has no entry.
    """
    if override := os.environ.get("SHIPPO_CACHE_DIR"):
        return Path(override)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "shippo-ssm"
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "shippo-ssm" / "Cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "shippo-ssm"
        return Path.home() / ".cache" / "shippo-ssm"
    except RuntimeError:
        return None


def compile_kernel(builder: Callable[..., Callable], kinds: Kinds, constants: dict[str, Any]) -> Kernel:
    """The machine code of `builder(**constants)` for operands of these kinds, from disk or compiled now."""
    import numba
    from llvmlite import binding

    digest = _digest(builder, kinds, constants)
    folder = cache_directory() if Path(inspect.getfile(builder)).exists() else None
    file = None if folder is None else folder / f"{builder.__name__}-{digest}.kernel"
    function: Any = builder(**constants)
    # Machine code is linked by name. Numba counts names in each process anew, so one from disk could meet a stranger.
    function.__name__ = function.__qualname__ = f"{function.__name__}_{digest}"
    # Fused multiply-add is the only liberty that the kernels' own arithmetic takes.
    dispatcher: Any = numba.njit(function, nogil=True, fastmath={"contract"}, error_model="numpy", boundscheck=False)
    with _private.slp_vectorizer():
        result = _load(file, dispatcher.targetctx)
        if result is None:
            # Traces may name instructions that LLVM has no words for.
            binding.initialize_native_asmparser()
            name = f"{builder.__name__}({', '.join(f'{k}={v}' for k, v in constants.items())})"
            begin = time.perf_counter()
            _announce(name)
            dispatcher.compile((_record_type(iter(kinds)), numba.int64, numba.int64))
            logger.info(COMPILED, name, time.perf_counter() - begin)
            (result,) = dispatcher.overloads.values()
            _save(file, result)
        # Not the dispatcher: it would look up the type of every operand again, which takes longer than a short kernel.
        return Kernel(result.entry_point, result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


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
    from numba.core.registry import cpu_target

    fields = [(kind.__qualname__, kind._fields) if hasattr(kind, "_fields") else str(kind) for kind in kinds]
    target: Any = cpu_target.target_context
    machine = (target.codegen().magic_tuple(), LANES, numba.__version__, platform.python_version())
    what = (builder.__module__, builder.__qualname__, fields, sorted(constants.items()), machine)
    digest = hashlib.sha256(repr(what).encode())
    for file in sorted(_sources(builder) | set(Path(__file__).parent.glob("*.py"))):
        if file.exists():
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
            left += [taken for taken in vars(inspect.getmodule(thing) or builder).values() if _ours(taken)]
    return files


def _ours(thing: Any) -> bool:
    """Whether `thing` is a function or class of this package."""
    return (inspect.isfunction(thing) or inspect.isclass(thing)) and thing.__module__.startswith("shippo_ssm.")


def _announce(name: str) -> None:
    global _announced
    logger.info("compiling %s for this machine", name)
    if not _announced and sys.stderr is not None and sys.stderr.isatty():
        place = cache_directory() or "memory only, since there is no home directory"
        print(f"shippo: compiling kernels for this machine, once; kept in {place}", file=sys.stderr, flush=True)
    _announced = True


def _load(file: Path | None, target: Any) -> Any:
    if file is None:
        return None
    try:
        payload = file.read_bytes()
    except OSError:
        return None
    try:
        return _private.unpack_compiled(target, payload)
    except Exception as error:
        logger.info("cached kernel %s is not usable (%s): compiling again", file, error)
        return None


def _save(file: Path | None, result: Any) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _remove_old_parts(file.parent)
        # Written aside and renamed, so that a reader sees a whole file or none.
        part = tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.name, suffix=_PART, delete=False)  # noqa: SIM115
        try:
            with part:
                part.write(_private.pack_compiled(result))
            os.replace(part.name, file)
        except OSError:
            Path(part.name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.info("compiled kernel is not kept: %s", error)


def _remove_old_parts(folder: Path) -> None:
    """Remove what killed processes were writing; what is younger than an hour may still be written."""
    for part in folder.glob(f"*{_PART}"):
        if time.time() - part.stat().st_mtime > 3600:
            part.unlink(missing_ok=True)
