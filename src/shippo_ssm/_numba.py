"""Numba for the fused kernels: compile on first use, keep the machine code on disk, share the work between threads.

A kernel is written as a *builder*: a module-level function that takes compile-time constants (sizes, ranks) and returns
a plain Python function over flat arrays. `jit(builder, signature, **constants)` runs the builder, compiles what it
returns for one explicit signature, and hands back a callable that releases the GIL. `parallel_for(n, body)` cuts
`range(n)` into slices and calls `body(start, stop)` for each of them on our own threads.

    builder + constants + signature --jit--> kernel(arrays..., start, stop) --parallel_for--> results

Nothing here imports Numba until the first `jit`. What our kernels need from the compiler (the SLP vectoriser) is set
under Numba's own global compiler lock and put back before the lock is released, so that other users of Numba in the
process never see it. Machine code is kept below `cache_directory()`, one file for each (builder, constants, signature,
source text, processor, Numba version): concurrent processes can at worst write the same file twice. A directory that
cannot be written, or a damaged file, costs a compilation and nothing else.

Threads are ours rather than Numba's because Numba's default threading layer must not be entered from two Python
threads at once and does not survive a fork. A kernel computes each of its items the same way whatever slice it is
called with, so results do not depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

__all__ = ["cache_directory", "jit", "parallel_for"]

logger = logging.getLogger("shippo_ssm")

# Slices handed out per thread: enough that a core taken away by another process does not hold up the whole call.
_SLICES_PER_THREAD = 4

_kernels: dict[tuple, Callable[..., None]] = {}
_lock = threading.RLock()
_pool: ThreadPoolExecutor | None = None
_announced = False


def cache_directory() -> Path:
    """Where compiled kernels are kept: `$SHIPPO_CACHE_DIR`, or `shippo-ssm` in the user's cache directory.

    Returns:
        The directory; it need not exist and need not be writable.
    """
    if override := os.environ.get("SHIPPO_CACHE_DIR"):
        return Path(override)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "shippo-ssm"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "shippo-ssm" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "shippo-ssm"
    return Path.home() / ".cache" / "shippo-ssm"


def jit(
    builder: Callable[..., Callable[..., None]],
    signature: str,
    *,
    fastmath: frozenset[str] = frozenset({"contract"}),
    **constants: Any,
) -> Callable[..., None]:
    """The machine code of `builder(**constants)` for one signature, from memory, from disk, or compiled now.

    Args:
        builder: module-level function returning the Python function to compile. What it closes over is a compile-time
            constant; everything the kernel calls must stand in the builder's own folder (or in `shippo_ssm._simd`),
            because the cached machine code is keyed by the text of those files.
        signature: Numba signature of the kernel, for instance `"void(float32[::1], int64, int64)"`.
        fastmath: LLVM fast-math flags of the kernel's own arithmetic; the default allows fused multiply-add only.
        constants: keyword arguments of the builder; hashable, with a `repr` that tells them apart.

    Returns:
        A callable taking exactly the arguments of `signature`; it holds no GIL while it runs.

    Example:
        >>> import numpy as np
        >>> def build(factor):
        ...     def scale(x, start, stop):
        ...         for i in range(start, stop):
        ...             x[i] *= factor
        ...     return scale
        >>> x = np.ones(4)
        >>> jit(build, "void(float64[::1], int64, int64)", factor=3.0)(x, 0, 4)
        >>> x.tolist()
        [3.0, 3.0, 3.0, 3.0]
    """
    key = (builder, signature, fastmath, tuple(sorted(constants.items())))
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _compile(builder, signature, fastmath, constants)
    return kernel


def parallel_for(n: int, body: Callable[[int, int], None]) -> None:
    """Call `body(start, stop)` on slices that cover `range(n)`, on as many threads as `torch.get_num_threads()`.

    The calling thread works too, and never waits for a slice that has not been started, so calls may come from several
    Python threads at once or be nested. The first exception of a slice is raised here.

    Args:
        n: number of items.
        body: computes the items `start .. stop - 1`; it must release the GIL to gain from threads, and its result for
            an item must not depend on the slice the item comes in.

    Example:
        >>> seen = []
        >>> parallel_for(5, lambda start, stop: seen.extend(range(start, stop)))
        >>> sorted(seen)
        [0, 1, 2, 3, 4]
    """
    num_threads = min(torch.get_num_threads(), os.cpu_count() or 1, n)
    if num_threads <= 1:
        if n > 0:
            body(0, n)
        return
    num_slices = min(n, num_threads * _SLICES_PER_THREAD)
    # One shared iterator: `next` is atomic, so threads draw slices from it without a lock.
    slices = iter([(i * n // num_slices, (i + 1) * n // num_slices) for i in range(num_slices)])

    def work() -> None:
        for start, stop in slices:
            body(start, stop)

    helpers = []
    # At interpreter shutdown the pool takes no more work; the calling thread then does all of it.
    with contextlib.suppress(RuntimeError):
        helpers = [_thread_pool().submit(work) for _ in range(num_threads - 1)]
    try:
        work()
    finally:
        running = [helper for helper in helpers if not helper.cancel()]
        failures = [error for helper in running if (error := helper.exception()) is not None]
    if failures:
        raise failures[0]


def _thread_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="shippo")
        return _pool


def _forget_threads() -> None:
    # A forked child inherits neither the pool's threads nor the owner of the lock.
    global _pool, _lock
    _pool = None
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@contextlib.contextmanager
def _compiler_settings() -> Iterator[None]:
    """Numba set up for our kernels, for as long as we hold its global compiler lock."""
    from numba.core import config
    from numba.core.compiler_lock import global_compiler_lock

    # Numba writes its settings to the module at import; they are not declared.
    settings: Any = config
    with global_compiler_lock:
        before = settings.SLP_VECTORIZE
        settings.SLP_VECTORIZE = 1
        try:
            yield
        finally:
            settings.SLP_VECTORIZE = before


def _compile(builder: Callable, signature: str, fastmath: frozenset[str], constants: dict[str, Any]) -> Callable:
    import numba
    from numba.core import sigutils

    dispatcher: Any = numba.njit(
        builder(**constants), nogil=True, fastmath=set(fastmath), error_model="numpy", boundscheck=False
    )
    args, _ = sigutils.normalize_signature(signature)
    magic = dispatcher.targetctx.codegen().magic_tuple()
    name = f"{builder.__module__}.{builder.__qualname__}"
    fingerprint = repr((name, signature, sorted(fastmath), sorted(constants.items()), magic, numba.__version__))
    digest = hashlib.sha256(fingerprint.encode() + platform.python_version().encode())
    # A builder may use any module beside its own, so the text of all of them is part of the key.
    for file in [
        *sorted(Path(inspect.getfile(builder)).parent.glob("*.py")),
        Path(__file__),
        Path(__file__).with_name("_simd.py"),
    ]:
        digest.update(file.read_bytes())
    file = cache_directory() / f"{builder.__name__}-{digest.hexdigest()[:32]}.kernel"
    with _compiler_settings():
        cached = _load(file, dispatcher.targetctx)
        if cached is None:
            _announce(f"{builder.__name__}({', '.join(f'{k}={v}' for k, v in constants.items())})")
            dispatcher.compile(args)
            (result,) = dispatcher.overloads.values()
            _save(file, result)
        else:
            dispatcher.add_overload(cached)
    dispatcher.disable_compile()
    return dispatcher


def _announce(name: str) -> None:
    global _announced
    logger.info("compiling %s for this machine", name)
    if not _announced and sys.stderr is not None and sys.stderr.isatty():
        print(
            f"shippo: compiling kernels for this machine, once; kept in {cache_directory()}",
            file=sys.stderr,
            flush=True,
        )
    _announced = True


def _load(file: Path, target: Any) -> Any:
    from numba.core.compiler import CompileResult

    try:
        payload = file.read_bytes()
    except OSError:
        return None
    try:
        target.refresh()
        return CompileResult._rebuild(target, *pickle.loads(payload))
    except Exception as error:
        logger.info("cached kernel %s is not usable (%s): compiling again", file, error)
        return None


def _save(file: Path, result: Any) -> None:
    from numba.core.serialize import dumps

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        payload = dumps(result._reduce())
        # Written aside and renamed, so that a reader sees a whole file or none.
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=file.name, delete=False) as part:
            part.write(payload)
        os.replace(part.name, file)
    except OSError as error:
        logger.info("compiled kernel is not kept: %s", error)
