"""The page "Works with", made from the outcome of the tests: what was tested, on which version, and what was left out.

A test says which route of the ecosystem it walks: `@pytest.mark.works_with("PEFT")`, on a function or a class. The route stands
in `ROUTES`. `make works-with` runs the marked tests and writes their outcome to `results/works-with.json` (a plugin in
`tests/conftest.py`), and makes the page of it. `tests/test_works_with.py` holds marks, file and page against each other.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

PAGE, RESULT = "docs/works-with.md", "results/works-with.json"
# Route -> the packages whose versions matter to it, in the order of the page. A route enters with its first test.
ROUTES: dict[str, tuple[str, ...]] = {
    "Transformers' common tests": ("transformers",),
    "Auto classes": ("transformers",),
    "Generation": ("transformers",),
    "Static cache": ("transformers",),
    "Assisted generation": ("transformers",),
    "Continuous batching": ("transformers",),
    "Pipelines": ("transformers",),
    "Packing": ("transformers",),
    "Trainer": ("transformers", "accelerate"),
    "PEFT": ("peft", "transformers"),
    "torch.compile": ("torch",),
    "torch.export": ("torch",),
    "AOTInductor": ("torch",),
    "ONNX": ("torch", "onnx", "onnxscript", "onnxruntime"),
    "torch.func": ("torch",),
    "DDP": ("torch",),
    "FSDP2": ("torch",),
    "accelerate": ("accelerate",),
    "Offload": ("accelerate", "transformers"),
    "torchao": ("torchao", "transformers"),
    "quantize_dynamic": ("torch",),
    "Lightning": ("lightning",),
    "mamba_ssm's calls": ("torch",),
    "fla's calls": ("torch",),
}
HEAD = """# Works with

Each route below is walked by tests of this repository. The page is made from the outcome of a run: `make works-with` runs the
tests that are marked with a route, writes `results/works-with.json`, and makes this page of it.

| route | versions | outcome | what the tests hold it to |
|---|---|---|---|
"""
SKIPS = """
## Left out

Cases of the tests above that did not run, by reason.

| route | reason | cases |
|---|---|---|
"""


def marked(root: Path) -> dict[str, str]:
    """Test -> route, as the marks in the test files say; a test is `file::function` or `file::Class`."""
    found = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.works_with":
                    found[f"{path.relative_to(root).as_posix()}::{node.name}"] = ast.literal_eval(mark.args[0])
    return found


def read(root: Path) -> dict[str, dict[str, Any]]:
    """Test -> its outcome: `route`, `versions`, and the cases that `passed`, `failed` and were `skipped`, with reasons."""
    path = root / RESULT
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def words(test: str) -> str:
    """The name of a test as a sentence."""
    name = test.split("::")[1].removeprefix("test_").removeprefix("Test")
    return name.replace("_", " ")


def page(root: Path) -> str:
    """docs/works-with.md."""
    result, table, skips = read(root), "", ""
    for route in ROUTES:
        tests = {test: outcome for test, outcome in sorted(result.items()) if outcome["route"] == route}
        if not tests:
            continue
        versions = sorted({f"{name} {version}" for outcome in tests.values() for name, version in outcome["versions"].items()})
        counts = {kind: sum(len(outcome[kind]) for outcome in tests.values()) for kind in ("passed", "failed", "skipped")}
        said = {"passed": "passed", "failed": "FAILED", "skipped": "left out"}
        shown = [f"{count} {said[kind]}" for kind, count in counts.items() if count]
        table += f"| {route} | {', '.join(versions)} | {', '.join(shown)} | {'; '.join(map(words, tests))} |\n"
        reasons: dict[str, list[str]] = {}
        for outcome in tests.values():
            for case, why in sorted((outcome["failed"] | outcome["skipped"]).items()):
                reasons.setdefault(why.replace("<", "&lt;").replace("|", "&#124;"), []).append(f"`{case}`")
        skips += "".join(f"| {route} | {why} | {', '.join(cases)} |\n" for why, cases in sorted(reasons.items()))
    return HEAD + table + (SKIPS + skips if skips else "")


def write(root: Path) -> None:
    """The page, in the checkout `root`."""
    (root / PAGE).write_text(page(root), encoding="utf-8")
