"""The report: one self-contained HTML page with theory, evidence, speed and an interactive panel.

`assets/page.html` has one mark per part (`<!-- evidence -->`), which `sections.py` renders. A missing result is shown
with the command that makes it.
"""

import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from shippo_lab.harness.experiment import Experiment


def _asset(name: str) -> str:
    return resources.files("shippo_lab.harness.report").joinpath("assets", name).read_text(encoding="utf-8")


def render(experiments: Iterable[Experiment]) -> str:
    """The page as text, experiments in their order; the checks of the theory are run now."""
    from shippo_lab.harness.report import sections
    from shippo_lab.harness.store import versions
    from shippo_lab.theory import CHECKS, run_check

    parts = {
        "style": _asset("style.css"),
        "overview": sections.picture("overview", "Overview of the lift from HiPPO to SHiPPO"),
        "panel": _asset("panel.html"),
        "evidence": "".join(map(sections.evidence, experiments)),
        "theory": sections.theory([run_check(name, check) for name, check in CHECKS.items()]),
        "speed": sections.speed(),
        "footer": "<p>shippo-ssm {shippo_ssm}, torch {torch}, Python {python}, {machine}.</p>".format(**versions()),
        # "</script>" in a string would end the element.
        "data": json.dumps(sections.panel_data(), separators=(",", ":")).replace("<", "\\u003c"),
        "script": _asset("panel.js"),
    }
    page = _asset("page.html")
    for name, fragment in parts.items():
        mark = f"<!-- {name} -->"
        assert page.count(mark) == 1, f"page.html has no single place for {name}"
        page = page.replace(mark, fragment)
    return page


def write(out: Path, experiments: Iterable[Experiment]) -> Path:
    """Write the report to `out`, an HTML file, and return its path."""
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"out is {out}; expected a name that ends in .html")
    # Before anything is computed, since it may fail.
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(experiments), encoding="utf-8")
    return out
