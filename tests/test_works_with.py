"""The page "Works with" cannot go stale: marks, committed outcome, pinned versions and page agree."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

from docs import fill
from tests.conftest import Outcomes
from tests.works_with import INTEGRATIONS, marked

ROOT = Path(__file__).parents[1]
AGAIN = "run `make works-with` and `python docs/generate.py`"


def test_the_committed_outcome_is_that_of_the_marked_tests():
    marks = marked(ROOT)
    assert {test: outcome["route"] for test, outcome in fill.load(ROOT, "works-with").items()} == marks, AGAIN
    assert set(marks.values()) == set(INTEGRATIONS)


def test_every_integration_passed_on_the_pinned_versions():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    for test, outcome in fill.load(ROOT, "works-with").items():
        assert outcome["passed"], f"{test} has no case that passed; {AGAIN}"
        assert not outcome["failed"], f"{test} failed; {AGAIN}"
        assert outcome["versions"] == {name: pins[name] for name in INTEGRATIONS[outcome["route"]]}, AGAIN


def test_a_failure_is_on_the_page(tmp_path):
    result = fill.load(ROOT, "works-with")
    next(iter(result.values()))["failed"]["a case"] = "broken"
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "works-with.json").write_text(json.dumps(result))
    assert "1 FAILED" in fill.works_with(tmp_path)


def test_a_run_writes_what_happened(tmp_path):
    """Outcomes replace those of the same test, others stay, and a test that has lost its mark goes."""
    (first, route), *rest = marked(ROOT).items()
    path = tmp_path / "outcome.json"
    kept = {"route": route, "versions": {}, "passed": {"b": "", "d": ""}, "failed": {}, "skipped": {}}
    path.write_text(json.dumps({"tests/gone.py::test_gone": {}, first: kept, **{test: {"kept": True} for test, _ in rest}}))
    outcomes = Outcomes(path)
    for case, outcome in (("a", "passed"), ("b", "failed"), ("c", "skipped")):
        flags = {"outcome": outcome, "passed": outcome == "passed", "skipped": outcome == "skipped", "when": "call"}
        longrepr = ("file", 1, "Skipped: no such machine") if outcome == "skipped" else None
        report = SimpleNamespace(nodeid=f"{first}::{case}", longrepr=longrepr, user_properties=[("works_with", route)], **flags)
        outcomes.pytest_runtest_logreport(report)
    outcomes.pytest_sessionfinish()
    written = json.loads(path.read_text())
    assert written.keys() == marked(ROOT).keys()
    assert all(written[test] == {"kept": True} for test, _ in rest)
    assert written[first]["passed"] == {"a": "", "d": ""}
    assert written[first]["failed"] == {"b": "see the run"}
    assert written[first]["skipped"] == {"c": "no such machine"}
