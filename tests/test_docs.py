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
from docs import beside, front, notebook, tracking
from shippo_ssm.experiments import all_experiments
from shippo_ssm.lab.pages import PAGE, Pages, with_parts
from shippo_ssm.lab.store import write_json

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


def test_the_page_beside_mamba_shows_its_result(tmp_path):
    assert (ROOT / beside.PAGE).read_text() == beside.page(ROOT)
    result = json.loads((ROOT / beside.RESULT).read_text())
    assert {"SHiPPO", "SHiPPO without right action", "Mamba", "Transformer"} == result["runs"].keys()
    for run in result["runs"]["Mamba"]:
        run["accuracy"]["16"] = 0.777
    write_json(tmp_path / beside.RESULT, result)
    assert "| 0.777 |" in beside.page(tmp_path)


def test_the_page_of_state_tracking_shows_published_numbers_beside_ours(tmp_path):
    page = (ROOT / tracking.PAGE).read_text()
    assert page == with_parts(page, tracking.parts(ROOT))
    write_json(tmp_path / tracking.PUBLISHED, json.loads((ROOT / tracking.PUBLISHED).read_text()))
    row = {"name": "s5-8", "label": "S5", "config": {"steps": 7}, "metrics": {"prefix_256": [0.5, 0.75]}}
    write_json(tmp_path / "results" / "words.json", {"rows": [row]})
    assert "| – | – | 62.5 (50.0) |" in tracking.words(tmp_path)
    assert "| PD-SSM | 100 | 100 | 100 |" in tracking.words(tmp_path)
    assert "60.8" in tracking.languages(tmp_path)


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


def test_the_pages_show_the_committed_results():
    """Numbers on the results page and the first ones are those of the result files; `python docs/generate.py` renews them."""
    assert (ROOT / PAGE).read_text() == Pages(ROOT, all_experiments()).results_page()
    for name, to in front.PAGES.items():
        page = (ROOT / name).read_text()
        assert page == with_parts(page, front.parts(ROOT, to))


def test_a_changed_result_changes_the_pages(tmp_path):
    """The comparison above can fail: a result file gives its own numbers, its budget, and a verdict."""
    pages = Pages(tmp_path, all_experiments())
    row = {"name": "no-right-r8", "label": "No-right r = 8", "config": {"steps": 7, "rank": 8}, "seeds": [0]}
    row |= {"metrics": {"nmse": [3.21e-4], "pair_nmse": [0.987]}, "curves": {}, "notes": {}, "seconds": 1.0}
    content = {"experiment": "paired", "preset": "full", "rows": [row], "versions": {"torch": "2"}, "wall_seconds": 120.0}
    write_json(tmp_path / "results" / "paired.json", content)
    page = pages.results_page()
    assert "| preset full, 7 steps, 1 seed, 2.0 minutes |" in page
    assert "0.000321" in page
    assert "DOES NOT HOLD" in page
    assert "| 0.987 |" in page
    for name in ("bench", "rotation", "body-frame"):
        shutil.copy(ROOT / "results" / f"{name}.json", tmp_path / "results")
    assert "| 0.987 | **–** |" in front.results(tmp_path, "")
    bench = json.loads((ROOT / "results" / "bench.json").read_text())
    bench["sections"]["scan"]["roofs"]["both"]["seconds"] = 0.0
    write_json(tmp_path / "results" / "bench.json", bench)
    assert " 0 % of the speed" in front.speed(tmp_path, "")
    short = row | {"name": "no-right", "metrics": {"exact_4096": [0.25]}}
    content |= {"experiment": "mqar", "preset": "quick", "rows": [short]}
    write_json(tmp_path / "results" / "mqar.json", content)
    assert "| 0.2500 (7 of 5,000 steps) |" in pages.highlights()


def test_the_pictures_of_the_pages_are_there():
    drawn = {path.name for path in (ROOT / "docs" / "_static").iterdir()}
    for page in PAGES:
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} shows {target}, which is not there"
    assert set(Pages(ROOT, all_experiments()).pictures()) <= drawn


def test_every_page_is_in_the_contents():
    """Each page of the docs is reached from index.md, and index.md names no page that is not there."""
    listed = set()
    for index in (ROOT / "docs").rglob("index.md"):
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


def test_the_page_on_clusters_shows_its_script_and_result():
    from docs import larger

    page = (ROOT / larger.PAGE).read_text()
    assert page == with_parts(page, larger.parts(ROOT))
    small, large = larger.Cluster(ranks=8), larger.Cluster(ranks=16)
    assert large.received > small.received
    assert small.fewest == larger.Cluster(ranks=8, length=small.length // 2).fewest * 2
    assert "| groups G | 64 |" in larger.table(larger.Cluster(d_model=128))


def test_the_page_on_reading_shows_its_predictors():
    from docs import ceilings

    page = (ROOT / ceilings.PAGE).read_text()
    assert page == with_parts(page, ceilings.parts(ROOT))
    assert "| 32 | " in ceilings.predictors(ROOT)


def test_the_page_on_decoding_shows_its_result():
    from docs import decoding

    page = (ROOT / decoding.PAGE).read_text()
    assert page == with_parts(page, decoding.parts(ROOT))
    assert decoding.name("transformer 16 4096") == "Transformer, batch 16, context 4,096"
