"""The examples of the README, the docs and the docstrings run as they stand."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import shippo_ssm

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(module.name for module in pkgutil.walk_packages(shippo_ssm.__path__, "shippo_ssm."))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of `page` in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_examples_run(page, tmp_path, monkeypatch):
    """All Python blocks of a page, one after another in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)
    assert len(namespace) > 2


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name.endswith("__main__"):
        pytest.skip("importing it would run the command")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


def test_readme_shows_what_it_promises():
    text = (ROOT / "README.md").read_text()
    commands = "\n".join(blocks(ROOT / "README.md", "bash"))
    assert "make demo" in commands
    assert "make test" in commands
    assert blocks(ROOT / "README.md", "python")
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / target).exists(), f"README links to {target}, which is not there"


def test_makefile_has_the_targets_that_the_pages_name():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {word for page in PAGES for word in re.findall(r"\bmake ([a-z]+)", "\n".join(blocks(page, "bash")))}
    assert named <= targets
    assert {"setup", "demo", "test", "bench", "docs"} <= targets
