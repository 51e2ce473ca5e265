"""Imports point one way: a folder of either package imports only those below it, and the library never imports the lab."""

import subprocess
import sys

import pytest

import shippo_ssm
from docs.architecture import LAB, LIBRARY, SOURCE, imported, module_of, modules

# Modules at the top of a package that may import all of it.
FRONT = ("__init__", "__main__")
# Folder or top module -> what it may import. In the lab the harness shows the theory.
BELOW = {
    "shippo_ssm": {
        "dispatch": set(),
        "projection": {"engine"},
        "engine": {"dispatch"},
        "scan": {"dispatch", "engine"},
        "actions": {"dispatch", "engine"},
        "layers": {"dispatch", "engine", "scan", "actions", "projection"},
        "integrations": {"layers", "scan"},
        "models": {"actions", "dispatch", "integrations", "layers"},
        "collapse": {"scan", "actions", "layers"},
    },
    "shippo_lab": {
        "tasks": set(),
        "theory": set(),
        "harness": {"theory"},
        "experiments": {"harness", "tasks"},
        "cli": {"experiments", "harness", "theory", "tasks"},
    },
}


def upward_imports(module: str, source: str) -> set[str]:
    """What `source`, a file of `module`, imports and may not."""
    package, name = module.split(".")
    allowed = {f"{package}.{other}" for other in BELOW[package][name]} | {module}
    if package == "shippo_lab":
        allowed |= {f"shippo_ssm.{other}" for other in BELOW["shippo_ssm"]}
    # Private modules at the top of a package serve all of it; a name of the library's front is no module.
    known = {other for other in imported(source) if other in modules() or other.startswith("shippo_lab.")}
    return known - allowed


def test_no_upward_import():
    wrong = {}
    for path in sorted([*LIBRARY.rglob("*.py"), *LAB.rglob("*.py")]):
        source = path.read_text(encoding="utf-8")
        if (module := module_of(path)) in modules():
            found = upward_imports(module, source)
        else:
            # The front of a package shows what is in it; other modules at its top serve all folders and import none.
            found = imported(source) & set(modules()) if path.stem not in FRONT else set()
            found |= {name for name in imported(source) if path.is_relative_to(LIBRARY) and name.startswith("shippo_lab")}
        if found:
            wrong[str(path.relative_to(SOURCE))] = found
    assert not wrong


def test_every_module_has_its_place():
    assert {f"{package}.{name}" for package, names in BELOW.items() for name in names} == set(modules())


def test_an_upward_import_is_found():
    assert upward_imports("shippo_ssm.scan", "def f():\n    from shippo_ssm.layers import Shippo") == {"shippo_ssm.layers"}
    assert upward_imports("shippo_ssm.projection", "import shippo_ssm.scan.reference") == {"shippo_ssm.scan"}
    assert upward_imports("shippo_ssm.layers", "from shippo_ssm import scan") == set()
    assert upward_imports("shippo_ssm.models", "from shippo_lab import tasks") == {"shippo_lab.tasks"}
    assert upward_imports("shippo_lab.tasks", "from shippo_lab.experiments import get") == {"shippo_lab.experiments"}
    assert upward_imports("shippo_lab.tasks", "from shippo_ssm.layers import Shippo") == set()


def test_importing_loads_no_heavy_library_and_nothing_of_the_lab():
    code = """
import importlib, sys
for name in {names}:
    importlib.import_module(name)
print(*sorted({heavy} & set(sys.modules)))
"""
    library = ["shippo_ssm", *(name for name in modules() if name.startswith("shippo_ssm."))]
    heavy = {"numba", "matplotlib", "transformers", "jax"}
    for names, unwanted in ((library, heavy | {"shippo_lab"}), (["shippo_lab.cli"], heavy)):
        command = [sys.executable, "-c", code.format(names=names, heavy=unwanted)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == ""


def test_public_names():
    assert shippo_ssm.__version__
    for name in shippo_ssm.__all__:
        assert getattr(shippo_ssm, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = shippo_ssm.no_such_name
