"""The page "Works with" cannot go stale: marks, committed outcome, pinned versions and page agree."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

from docs.works_with import PAGE, RESULT, ROUTES, marked, page, read
from tests.conftest import Routes

ROOT = Path(__file__).parents[1]
AGAIN = "run `make works-with` and `python docs/generate.py`"


def test_the_committed_outcome_is_that_of_the_marked_tests():
    marks = marked(ROOT)
    assert {test: outcome["route"] for test, outcome in read(ROOT).items()} == marks, AGAIN
    assert set(marks.values()) == set(ROUTES)


def test_every_route_passed_on_the_pinned_versions():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    for test, outcome in read(ROOT).items():
        assert outcome["passed"], f"{test} has no case that passed; {AGAIN}"
        assert not outcome["failed"], f"{test} failed; {AGAIN}"
        assert outcome["versions"] == {name: pins[name] for name in ROUTES[outcome["route"]]}, AGAIN


def test_the_page_shows_the_outcome(tmp_path):
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page(ROOT), AGAIN
    result = read(ROOT)
    next(iter(result.values()))["failed"]["a case"] = "broken"
    (tmp_path / RESULT).parent.mkdir()
    (tmp_path / RESULT).write_text(json.dumps(result))
    assert "1 FAILED" in page(tmp_path)


def test_a_run_writes_what_happened(tmp_path):
    """Outcomes replace those of the same test, others stay, and a test that has lost its mark goes."""
    (first, route), *rest = marked(ROOT).items()
    path = tmp_path / "outcome.json"
    kept = {"route": route, "versions": {}, "passed": {"b": "", "d": ""}, "failed": {}, "skipped": {}}
    path.write_text(json.dumps({"tests/gone.py::test_gone": {}, first: kept, **{test: {"kept": True} for test, _ in rest}}))
    routes = Routes(path)
    for case, outcome in (("a", "passed"), ("b", "failed"), ("c", "skipped")):
        flags = {"outcome": outcome, "passed": outcome == "passed", "skipped": outcome == "skipped", "when": "call"}
        longrepr = ("file", 1, "Skipped: no such machine") if outcome == "skipped" else None
        report = SimpleNamespace(nodeid=f"{first}::{case}", longrepr=longrepr, user_properties=[("works_with", route)], **flags)
        routes.pytest_runtest_logreport(report)
    routes.pytest_sessionfinish()
    written = json.loads(path.read_text())
    assert written.keys() == marked(ROOT).keys()
    assert all(written[test] == {"kept": True} for test, _ in rest)
    assert written[first]["passed"] == {"a": "", "d": ""}
    assert written[first]["failed"] == {"b": "see the run"}
    assert written[first]["skipped"] == {"c": "no such machine"}
