"""Transformers' common model tests, taken from the source distribution of the installed version into the test environment.

Its wheel has no tests. Run as a script (`make setup` does it), this file downloads the source with pip and
unpacks the test files as a package beside the installed libraries; nothing of it stands in this repository. Two of its
imports are not in the source distribution either, its export and generation tests: empty classes take their place.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

PACKAGE = "transformers_common_tests"
FILES = ("test_modeling_common", "test_training_mixin", "test_fsdp_mixin", "test_tensor_parallel_mixin")
MISSING = {"exporters/test_export": "ExportTesterMixin", "generation/test_utils": "GenerationTesterMixin"}


def folder() -> Path:
    """Where the package of the installed version stands, or would stand: a folder for the import path."""
    return Path(sys.prefix) / "share" / "shippo-tests" / f"transformers-{version('transformers')}"


def fetch() -> None:
    """Download and unpack it, unless it is there."""
    home = folder() / PACKAGE
    if home.exists():
        return
    name = f"transformers-{version('transformers')}"
    with tempfile.TemporaryDirectory() as temporary:
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", "transformers", "--dest", temporary]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, name.replace("-", "==")], check=True)
        with tarfile.open(Path(temporary) / f"{name}.tar.gz") as archive:
            made = Path(temporary) / PACKAGE
            for file in FILES:
                member = archive.extractfile(f"{name}/tests/{file}.py")
                assert member is not None
                made.mkdir(exist_ok=True)
                (made / f"{file}.py").write_bytes(member.read())
        for file, mixin in MISSING.items():
            (made / file).parent.mkdir()
            (made / f"{file}.py").write_text(f"class {mixin}:\n    pass\n", encoding="utf-8")
        folder().mkdir(parents=True, exist_ok=True)
        shutil.copytree(made, home)


if __name__ == "__main__":
    fetch()
