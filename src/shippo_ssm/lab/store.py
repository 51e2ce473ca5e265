"""Files of a run: atomic writes, tensors, JSON, and the folders they stand in.

A run lives in one folder:

    runs/NAME/manifest.json          what is run: experiment, preset, seeds, row configurations
    runs/NAME/units/ROW.s0-s4.json   one file per finished unit (a row and the seeds trained together)
    runs/NAME/checkpoints/...        one safetensors file per unfinished unit
    runs/NAME/result.json            the rows put together; all that `table` and `figure` read

Every file is written to a temporary name, flushed to disk and renamed, so that a kill at any moment leaves the old
file or the new one. Nothing is ever unpickled: tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RUNS = Path("runs")


def write_atomic(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a reader, or a kill, never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        # A disk that is full keeps no half of a file.
        temporary.unlink(missing_ok=True)
        raise


def remove_halves(folder: Path) -> None:
    """Remove what a killed `write_atomic` left in a folder in which nobody writes any more."""
    for half in folder.rglob(".*.tmp"):
        half.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; floats keep every bit (shortest round-trip form)."""
    write_atomic(path, (json.dumps(content, indent=1, allow_nan=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; a damaged one is a `ValueError` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    # Bytes that are no text, no JSON, or lists in lists without end.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it and run the experiment again") from error


def save_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write tensors and a JSON-able `meta` as one safetensors file, atomically."""
    from safetensors.torch import save

    held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, save(held, metadata={"meta": json.dumps(meta)}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What `save_tensors` wrote, or `None` where there is no such file."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {})["meta"])
            return {name: file.get_tensor(name).clone() for name in file.keys()}, meta  # noqa: SIM118
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is not a checkpoint of a run ({error}); delete it to start this row again") from error


def versions() -> dict[str, str]:
    """What a result depends on besides its configuration."""
    import numpy

    from shippo_ssm import __version__

    return {
        "shippo_ssm": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def as_json(config: Any) -> dict[str, Any]:
    """A configuration dataclass as JSON-able values, tuples as lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def checkout() -> Path | None:
    """The folder of the source checkout this package runs from, or `None` for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "pyproject.toml").exists() and (root / "src" / "shippo_ssm").exists() else None


def committed() -> Path:
    """The folder of the results that come with the package: `results/` of the checkout, which a wheel has inside."""
    return (checkout() or Path(__file__).resolve().parents[1]) / "results"
