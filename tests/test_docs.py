"""The examples of the README, the docs and the docstrings run as they stand."""

import doctest
import importlib
import json
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import shippo_ssm
from benchmarks import cluster
from docs import fill, notebook
from shippo_lab.harness.store import write_json

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
MODULES = sorted(module.name for module in pkgutil.walk_packages(shippo_ssm.__path__, "shippo_ssm."))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of `page` in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python") and page != ROOT / notebook.PAGE],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python_examples_run(page, tmp_path, monkeypatch):
    """All Python blocks of a page, one after another in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)
    assert len(namespace) > 2


def test_the_notebook_is_its_page_and_runs(tmp_path, monkeypatch):
    """`examples/train_your_own.ipynb`: cell after cell, in an empty folder; the page's own blocks are these cells."""
    written = (ROOT / notebook.NOTEBOOK).read_text()
    assert written == notebook.notebook(ROOT)
    code = ["".join(cell["source"]) for cell in json.loads(written)["cells"] if cell["cell_type"] == "code"]
    assert code == [block.strip() for block in blocks(ROOT / notebook.PAGE, "python")]
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for index, cell in enumerate(code):
        exec(compile(cell, f"cell {index}", "exec"), namespace)
    assert {path.name for path in tmp_path.iterdir()} >= {"gestures", "writer", "forecast", "loss.svg"}
    assert all(values[-1] < 0.5 * values[0] for values in namespace["losses"].values())


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name.endswith("__main__"):
        pytest.skip("importing it would run the command")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


def test_readme_shows_what_it_promises():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    commands = "\n".join(blocks(ROOT / "README.md", "bash"))
    assert "make demo" in commands
    assert "make test" in commands
    assert blocks(ROOT / "README.md", "python")
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / target).exists(), f"README links to {target}, which is not there"


@pytest.mark.parametrize("page", fill.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_generated_regions_are_current(page):
    """Numbers and tables of the pages are those of `results/` and of the code; `python docs/generate.py` renews them."""
    assert page.read_text(encoding="utf-8") == fill.fill(page.read_text(encoding="utf-8"))


def test_a_changed_result_changes_the_pages(tmp_path):
    """The comparison above can fail: every part reads its result."""

    def shown(region: str) -> str:
        return fill.fill(f"<!-- generated: {region} -->old<!-- end -->", tmp_path)

    row = {"name": "no-right-r8", "label": "No-right r = 8", "config": {"steps": 7, "rank": 8}, "seeds": [0]}
    row |= {"metrics": {"nmse": [3.21e-4], "pair_nmse": [0.987]}, "curves": {}, "notes": {}, "seconds": 1.0}
    content = {"experiment": "paired", "preset": "full", "rows": [row], "versions": {"torch": "2"}, "wall_seconds": 120.0}
    write_json(tmp_path / "results" / "paired.json", content)
    assert shown("metric paired no-right-r8 pair_nmse").endswith("-->0.987<!-- end -->")
    assert shown("metric paired no-right-r8 other").endswith("-->–<!-- end -->")
    beside = json.loads((ROOT / "results" / "beside-mamba.json").read_text())
    assert {"SHiPPO", "SHiPPO without right action", "Mamba", "Transformer"} == beside["tasks"]["words"].keys()
    for run in beside["tasks"]["words"]["Mamba"]["runs"]:
        run["scores"]["16"] = 0.777
    write_json(tmp_path / "results" / "beside-mamba.json", beside)
    assert "| 0.777 |" in shown("beside-scores words 16=16")
    bench = json.loads((ROOT / "results" / "bench.json").read_text())
    bench["sections"]["scan"]["roofs"]["both"]["seconds"] = 0.0
    write_json(tmp_path / "results" / "bench.json", bench)
    assert "-->0 %<!--" in shown("scan-speed roof")
    (tmp_path / fill.PUBLISHED).parent.mkdir(parents=True)
    shutil.copy(ROOT / fill.PUBLISHED, tmp_path / fill.PUBLISHED)
    row |= {"name": "s5-8", "metrics": {"prefix_256": [0.5, 0.75]}}
    write_json(tmp_path / "results" / "words.json", content | {"experiment": "words", "rows": [row]})
    assert "| – | – | 62.5 (50.0) |" in shown("tracking-words")
    assert "| PD-SSM | 100 | 100 | 100 |" in shown("tracking-words")
    with pytest.raises(KeyError, match="no-such-part"):
        shown("no-such-part")


def test_estimates_for_clusters():
    small, large = cluster.Cluster(ranks=8), cluster.Cluster(ranks=16)
    assert large.received > small.received
    assert "| groups G | 64 |" in cluster.table(cluster.Cluster(d_model=128))


def test_the_pictures_of_the_pages_are_there():
    static = ROOT / "docs" / "_static"
    drawn = {str(path.relative_to(static)) for path in static.rglob("*")}
    for page in PAGES:
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} shows {target}, which is not there"
    assert set(fill.lab_pages(ROOT).pictures()) <= drawn


def test_every_page_is_in_the_contents():
    """Each page of the docs is in the contents of another, and no page is named there that does not exist."""
    listed = set()
    for index in (ROOT / "docs").rglob("*.md"):
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", index.read_text(), flags=re.DOTALL | re.MULTILINE):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(index.parent / name).resolve() for name in names}
    pages = {page.with_suffix("").resolve() for kind in ("*.md", "*.rst") for page in (ROOT / "docs").rglob(kind)}
    built = (ROOT / "docs" / "_build").resolve()
    assert listed == {page for page in pages if built not in page.parents} - {(ROOT / "docs" / "index").resolve()}


def test_makefile_has_the_targets_that_the_pages_name():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {word for page in PAGES for word in re.findall(r"\bmake ([a-z]+)", "\n".join(blocks(page, "bash")))}
    assert named <= targets
    assert {"setup", "demo", "test", "bench", "docs"} <= targets
