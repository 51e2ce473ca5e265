"""Settings that every test shares: one thread per worker, a fixed seed, a hypothesis profile; outcomes of integrations."""

import os

# Some virtual machines name AMX without the sizes of its tiles: oneDNN's bfloat16 products then end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from tests import works_with
from tests.browser import CHROMIUM, DRIVER, MISSING, start
from tests.interpreted import Interpreter

hypothesis.settings.register_profile("shippo", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("shippo")


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def interpreter():
    """Triton's interpreter in a process of its own."""
    process = Interpreter()
    yield process
    process.close()


def pytest_addoption(parser):
    parser.addoption("--works-with", metavar="PATH", help="write the outcome of the tests marked `works_with` to this file")


def pytest_configure(config):
    # Workers send their reports to the process that started them; only that one writes.
    if config.getoption("--works-with") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(config.getoption("--works-with"))))


def pytest_collection_modifyitems(items):
    for item in items:
        if mark := item.get_closest_marker("works_with"):
            item.user_properties.append(("works_with", mark.args[0]))


class Outcomes:
    """Collects the outcome of marked tests. Cases that did not run keep what the file said; tests that lost their mark go."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.heard: set[str] = set()

    def pytest_runtest_logreport(self, report):
        route = dict(report.user_properties).get("works_with")
        if route is None or (report.when != "call" and report.passed):
            return
        file, *names = report.nodeid.split("::")
        test = f"{file}::{names[0].partition('[')[0]}"
        empty = {"route": route, "versions": {}, "passed": {}, "failed": {}, "skipped": {}}
        outcome = self.result.setdefault(test, empty)
        # Of a test with subtests, only the whole can pass, and only if no subtest has failed or was skipped.
        if report.passed and (isinstance(report, pytest.SubtestReport) or report.nodeid in self.heard):
            return
        self.heard.add(report.nodeid)
        for kind in ("passed", "failed", "skipped"):
            outcome[kind].pop(names[-1], None)
        outcome["versions"] = {name: version(name).partition("+")[0] for name in works_with.INTEGRATIONS[route]}
        reasons = {"passed": "", "failed": "see the run"}
        reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else reasons[report.outcome]
        outcome[report.outcome][names[-1]] = " ".join(reason.split())

    def pytest_sessionfinish(self):
        marked = works_with.marked(Path(__file__).parents[1])
        result = {test: outcome for test, outcome in self.result.items() if test in marked}
        self.path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window; tests that ask for it skip where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(MISSING)
    driver = start(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()
