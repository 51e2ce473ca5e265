"""The pages of results: what they say of a committed result, and of one that is missing."""

import dataclasses
import json

from docs.result_pages import Pages, unbroken
from shippo_lab.experiments import all_experiments
from shippo_lab.harness.store import checkout


def test_numbers_do_not_break():
    assert unbroken("1.29e-05 ± 2.4e-06") == "1.29e\u201105\u00a0±\u00a02.4e\u201106"


def test_every_committed_page_is_what_would_be_written():
    root = checkout()
    assert root is not None
    pages = Pages(root, all_experiments())
    whole = (root / "docs" / "results.md").read_text(encoding="utf-8")
    assert pages.overview() in whole
    assert pages.highlights() in whole
    for experiment in pages.experiments:
        assert pages.page(experiment.name) in (root / "docs" / "results" / f"{experiment.name}.md").read_text(encoding="utf-8")
    drawn = {path.removeprefix("figures/") for path in pages.pictures() if path.startswith("figures/")}
    assert drawn == {path.name for path in (root / "docs" / "_static" / "figures").iterdir()}


def test_a_page_says_how_many_verdicts_hold(toy, toy_result, tmp_path):
    pages = Pages(tmp_path, (toy,))
    assert "No result is committed yet." in pages.page("toy")
    assert "no result yet" in pages.overview()
    rows = [row._asdict() for row in toy_result.rows.values()]
    content = {"experiment": "toy", "preset": "full", "versions": {"torch": "2.0"}, "wall_seconds": 60.0, "rows": rows}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "toy.json").write_text(json.dumps(content))
    assert "1 of 2 verdicts hold, not: Plain_one." in pages.page("toy")
    assert "| [A toy](results/toy.md) (`toy`) | It runs. | 1 of 2 verdicts hold, not: Plain_one |" in pages.overview()
    unjudged = Pages(tmp_path, (dataclasses.replace(toy, unjudged=("full",)),))
    assert "not judged" in unjudged.overview()
