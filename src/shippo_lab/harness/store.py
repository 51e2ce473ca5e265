"""Files of a run: atomic writes, tensors, JSON, and the folders that hold them.

runs/NAME/manifest.json          experiment, preset and row configurations of the run
runs/NAME/units/ROW.s0-s4.json   one file per finished unit (a row and the seeds trained together)
runs/NAME/checkpoints/...        one file per unfinished unit
runs/NAME/result.json            the joined rows; all that `table` and `figure` read
runs/NAME/.lock                  locked while a process runs in the folder
"""

import dataclasses
import io
import json
import os
import pickle
import platform
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

RUNS = Path("runs")
AGAIN = "run the experiment again"
NUMBER = (int, float)
_TYPE_NAMES = {dict: "an object", list: "a list", str: "a text", int: "an integer"}


def checked_fields(content: Any, where: str, **types: Any) -> dict[str, Any]:
    """The named fields of a JSON object, each of its type; anything else is a `ValueError` that names `where`."""
    expected = f"expected an object with {', '.join(types)}; {AGAIN}"
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds {reprlib.repr(content)}; {expected}")
    for key, kind in types.items():
        if key not in content:
            raise ValueError(f"{where} has no {key!r}; {expected}")
        if not isinstance(content[key], kind) or isinstance(content[key], bool):
            kind_name = _TYPE_NAMES.get(kind, "a number")
            raise ValueError(f"{where} has {reprlib.repr(content[key])} as {key!r}; expected {kind_name}; {AGAIN}")
    return {key: content[key] for key in types}


@contextmanager
def as_user_error(source: Any) -> Iterator[None]:
    """Turn errors from the content of a file into a `ValueError` that names the file."""
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{source} has unexpected content ({what}); expected what a run writes; make it again") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process, until it ends; a folder that another one holds is a `ValueError`."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(regular(folder / ".lock"), "ab") as file:
        try:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(f"another process is running in {folder}; wait until it ends, or choose another --out") from None
        except OSError:
            # A file system without locks (some network drives): run without one.
            pass
        yield


def regular(path: Path) -> Path:
    """The path itself; a pipe, a device or a folder, on which a read may wait for ever, is a `ValueError`."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file; remove it, or choose another --out")
    return path


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that a reader, or a kill, never sees part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        # For example a full disk.
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; floats keep every bit (shortest round-trip form)."""
    write_atomic(path, (json.dumps(content, indent=1, allow_nan=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; a damaged one is a `ValueError` that names it."""
    try:
        return json.loads(regular(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it and run the experiment again") from error


def save_checkpoint(path: Path, tensors: dict[str, Any], meta: dict[str, Any]) -> None:
    """Write tensors (or state dictionaries) and a JSON-able `meta` as one file, atomically."""
    data = io.BytesIO()
    torch.save({"tensors": tensors, "meta": json.dumps(meta)}, data)
    write_atomic(path, data.getvalue())


def load_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Read what `save_checkpoint` wrote; `None` if the file does not exist."""
    if not regular(path).exists():
        return None
    try:
        found = torch.load(path, weights_only=True)
        return found["tensors"], dict(json.loads(found["meta"]))
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError) as error:
        kind = type(error).__name__
        raise ValueError(f"{path} is not a checkpoint of a run ({kind}); delete it to start this row again") from error


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    from shippo_ssm import __version__

    found = {"shippo_ssm": __version__, "torch": torch.__version__, "numpy": numpy.__version__}
    return found | {"python": platform.python_version(), "machine": platform.machine()}


def as_json(config: Any) -> dict[str, Any]:
    """A configuration dataclass as JSON values, tuples as lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def checkout() -> Path | None:
    """The folder of the source checkout this package runs from, or `None` for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "pyproject.toml").exists() and (root / "src" / "shippo_ssm").exists() else None


def committed() -> Path:
    """The folder of the results that come with the package: `results/` of the checkout, or inside the wheel."""
    return (checkout() or Path(__file__).resolve().parents[1]) / "results"


def figures() -> Path:
    """The folder of the figures that come with the package, as SVG: in the docs of the checkout, or inside the wheel."""
    root = checkout()
    return root / "docs" / "_static" / "figures" if root else Path(__file__).resolve().parents[1] / "figures"
