"""Compiled kernels on disk: object code and the names in it, as JSON; nothing is unpickled.

A file is `MAGIC`, a digest of the rest, one line of JSON, and object code. Object code is run, so a file is read only if
nobody but this user could have written it: a regular file, not a link, in a directory of this user, both without write
permission for others. Anything else is ignored with one warning, and the kernel is compiled. Concurrent processes can at worst
write the same file twice.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("shippo_ssm")

MAGIC = b"shippo kernel 3\n"
_warned = False


class _UntrustedError(OSError):
    """Others may have written this file or directory."""


class MachineCode(NamedTuple):
    """A compiled kernel: object code, and the symbols in it that a caller needs."""

    function: str
    """kernel(result, exception, *operands, start, stop), Numba's calling convention."""
    wrapper: str
    """The same as a C function of Python: (self, arguments, keywords)."""
    environments: list[str]
    """Variables for Numba's environment."""
    externals: list[str]
    """What the process has to provide."""
    object_code: bytes


def cache_directory() -> Path | None:
    """Where compiled kernels are kept: `$SHIPPO_CACHE_DIR`, or `shippo-ssm` in `$XDG_CACHE_HOME` or `~/.cache`.

    It need not exist. `None` where there is no home, as in a container whose user has no entry.
    """
    if override := os.environ.get("SHIPPO_CACHE_DIR"):
        return Path(override)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shippo-ssm"
    except RuntimeError:
        return None


def load(folder: Path, name: str) -> MachineCode | None:
    """The kernel of this name; `None` where there is none, or none that can be trusted and used."""
    path = folder / name
    try:
        _check(folder, os.stat(folder), stat.S_ISDIR)
        # A link is not followed, and a pipe without a writer is opened without waiting for one.
        file = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")))
        try:
            _check(path, os.fstat(file), stat.S_ISREG)
            with open(file, "rb", closefd=False) as stream:
                return _unpack(stream.read(), name)
        finally:
            os.close(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, _UntrustedError) or getattr(error, "errno", 0) == errno.ELOOP:
            _warn(error)
        logger.info("cached kernel %s is not usable (%s): compiling again", path, error)
        return None


def save(folder: Path, name: str, code: MachineCode) -> None:
    """Keep a kernel; a directory that cannot be written or trusted costs the next process a compilation."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check(folder, os.stat(folder), stat.S_ISDIR)
        # Written aside, readable by this user alone, and renamed: a reader sees a whole file or none.
        file, part = tempfile.mkstemp(dir=folder, prefix=name, suffix=".part")
        try:
            with open(file, "wb") as stream:
                stream.write(_pack(code, name))
            os.replace(part, folder / name)
        except OSError:
            Path(part).unlink(missing_ok=True)
            raise
    except OSError as error:
        if isinstance(error, _UntrustedError):
            _warn(error)
        logger.info("compiled kernel is not kept: %s", error)


def _check(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Raise where anyone but this user could have put something there. Windows keeps caches per user, and has no such modes."""
    if not is_kind(status.st_mode):
        raise _UntrustedError(f"{path} is not what it should be (mode {stat.filemode(status.st_mode)})")
    if os.name == "posix" and (status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise _UntrustedError(f"{path} belongs to user {status.st_uid} with mode {stat.filemode(status.st_mode)}")


def _warn(error: Exception) -> None:
    global _warned
    if not _warned:
        logger.warning(
            "shippo_ssm: kernels on disk are ignored, since others may have written them: %s; expected files and a directory "
            "that this user owns and nobody else may write (chmod 700), or another $SHIPPO_CACHE_DIR",
            error,
        )
    _warned = True


def _pack(code: MachineCode, name: str) -> bytes:
    *fields, object_code = code
    rest = json.dumps([name, *fields]).encode() + b"\n" + object_code
    return MAGIC + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def _unpack(payload: bytes, name: str) -> MachineCode:
    if not payload.startswith(MAGIC):
        raise ValueError("not a kernel")
    digest, _, rest = payload[len(MAGIC) :].partition(b"\n")
    if digest != hashlib.sha256(rest).hexdigest().encode():
        raise ValueError("damaged")
    signature, _, object_code = rest.partition(b"\n")
    known, *fields = json.loads(signature)
    if known != name:
        raise ValueError("another kernel")
    return MachineCode(*fields, object_code=object_code)
