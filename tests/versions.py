"""Run the core tests with the oldest and the newest versions that are supported; outcome in results/versions.json.

    python tests/versions.py [--end oldest|newest] [--keep FOLDER] [tests ..]

Every end is a folder of exact versions (`pip install --target`) in front of the packages of the current environment, which
provides the rest. torch is installed with its dependencies: a wheel for Linux on x86-64 cannot be imported without CUDA,
2 to 5 GB in all. `--without torch` leaves the installed one in place. What `--keep` has already is not installed again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "results" / "versions.json"
ENDS = {
    "oldest": {"torch": "2.13.0", "numba": "0.60.0", "llvmlite": "0.43.0", "numpy": "1.26.4", "scipy": "1.11.4"},
    "newest": {"torch": "2.15.0", "numba": "0.68.1", "llvmlite": "0.50.0"},
}
NAMED = ["torch", "numba", "llvmlite", "numpy", "scipy"]
CORE = ["tests/shippo_ssm/engine", "tests/shippo_ssm/scan", "tests/shippo_ssm/actions", "tests/shippo_ssm/layers"]


def install(end: str, folder: Path, without: list[str]) -> None:
    """Install the versions of one end into `folder`."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:", "--target", str(folder)]
    wanted = {
        name: f"{name}=={version}"
        for name, version in ENDS[end].items()
        if name not in without and not (folder / f"{name}-{version}.dist-info").exists()
    }
    if "torch" in wanted:
        subprocess.run([*pip, wanted.pop("torch")], check=True)
    if wanted:
        subprocess.run([*pip, "--no-deps", "--upgrade", *wanted.values()], check=True)


def run(end: str, folder: Path, tests: list[str]) -> int:
    """Run the tests with the versions in `folder` and keep the outcome; the exit code of pytest."""
    path, report = os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT)]), folder / "report.xml"
    environment = os.environ | {"PYTHONPATH": path, "SHIPPO_CACHE_DIR": str(folder / "kernels")}
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *tests]
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    keep(end, installed(environment), tests, report, interrupted=code == 2)
    return code


def installed(environment: dict[str, str]) -> dict[str, str]:
    """The versions that a process with this environment imports."""
    code = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {NAMED}}}))"
    return json.loads(subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout)


def keep(end: str, versions: dict[str, str], tests: list[str], report: Path, interrupted: bool) -> None:
    """Write the outcome of one end into the result file."""
    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    run = {"versions": versions, "tests": tests, "interrupted": interrupted}
    result[end] = {**run, **outcome(report.read_text(encoding="utf-8"))}
    RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def outcome(report: str) -> dict[str, Any]:
    """Counts, those that passed also by file, and failed tests of a JUnit report."""
    counts: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": [], "files": {}}
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
            if "skipped" not in kinds:
                counts["files"][case.get("classname")] = counts["files"].get(case.get("classname"), 0) + 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=CORE)
    parser.add_argument("--end", choices=[*ENDS], help="only one of them")
    parser.add_argument("--without", nargs="+", default=[], metavar="PACKAGE", help="leave the installed version in place")
    parser.add_argument("--keep", type=Path, help="where versions are installed; a temporary folder by default")
    options = parser.parse_args()
    codes = []
    with tempfile.TemporaryDirectory() as scratch:
        for end in [options.end] if options.end else [*ENDS]:
            folder = (options.keep or Path(scratch)) / end
            install(end, folder, options.without)
            codes.append(run(end, folder, options.tests))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
