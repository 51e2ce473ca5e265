"""Tests marked with an integration: `@pytest.mark.works_with("PEFT")`, on a function or a class.

`make works-with` runs them, writes their outcome to `results/works-with.json` (a plugin in `tests/conftest.py`) and fills
`docs/works-with.md`. `tests/test_works_with.py` compares marks, file and page.
"""

from __future__ import annotations

import ast
from pathlib import Path

# Integration -> the packages whose versions matter to it.
INTEGRATIONS: dict[str, tuple[str, ...]] = {
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


def marked(root: Path) -> dict[str, str]:
    """Test -> integration, as the marks in the test files say; a test is `file::function` or `file::Class`."""
    found = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "works_with(" in text else ():
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.works_with":
                    found[f"{path.relative_to(root).as_posix()}::{node.name}"] = ast.literal_eval(mark.args[0])
    return found
