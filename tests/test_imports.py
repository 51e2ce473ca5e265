"""Imports point one way: a room may lean only on the rooms below it."""

import subprocess
import sys

import pytest

import shippo_ssm
from docs.architecture import PACKAGE, ROOMS, imported_rooms, room_of

# Room -> rooms it may import. Modules at the top of the package that are not rooms serve all of them.
BELOW = {
    "projection": set(),
    "tasks": {"projection"},
    "engine": set(),
    "scan": {"engine"},
    "actions": {"engine"},
    "collapse": {"scan", "actions", "layers"},
    "layers": {"engine", "scan", "actions", "projection"},
    "models": {"layers", "scan", "actions"},
    "theory": {"projection", "scan", "actions", "layers"},
    "lab": {"theory", "layers", "actions", "projection"},
    "experiments": {"engine", "lab", "models", "layers", "scan", "actions", "collapse", "tasks", "projection"},
}
BELOW["cli"] = set(BELOW)


def upward_imports(room: str, source: str) -> set[str]:
    return imported_rooms(source) - BELOW[room] - {room}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_upward_import(path):
    room = room_of(path)
    if room in ROOMS:
        assert not upward_imports(room, path.read_text())
    elif room != "__init__":
        assert not imported_rooms(path.read_text()), "a module that serves all rooms leans on none"


def test_every_room_has_its_place():
    assert set(BELOW) == set(ROOMS)


def test_an_upward_import_is_found():
    assert upward_imports("scan", "def f():\n    from shippo_ssm.layers import Shippo") == {"layers"}
    assert upward_imports("tasks", "import shippo_ssm.scan.reference") == {"scan"}
    assert upward_imports("layers", "from shippo_ssm import scan") == set()
    assert upward_imports("lab", "from shippo_ssm.experiments import get") == {"experiments"}


@pytest.mark.parametrize(
    "module", ["shippo_ssm", "shippo_ssm.scan", "shippo_ssm.actions", "shippo_ssm.layers", "shippo_ssm.cli"]
)
def test_importing_does_not_load_heavy_libraries(module):
    heavy = "{'numba', 'matplotlib', 'transformers', 'jax'}"
    code = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_public_names():
    assert shippo_ssm.__version__
    for name in shippo_ssm.__all__:
        assert getattr(shippo_ssm, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = shippo_ssm.no_such_name
