"""The report: one self-contained HTML page with theory, evidence, speed and an interactive panel.

`assets/page.html` has one mark per part (`<!-- evidence -->`), which `sections.py` renders. A missing result is shown with the
command that makes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from shippo_lab.harness.experiment import Experiment


def _asset(name: str) -> str:
    return resources.files("shippo_lab.harness.report").joinpath("assets", name).read_text(encoding="utf-8")


def render(experiments: Iterable[Experiment], *, checks: Path | None = None, bench: Path | None = None) -> str:
    """The page as text; arguments as in `write`."""
    from shippo_lab.harness.report import sections
    from shippo_lab.harness.store import versions

    parts = {
        "style": _asset("style.css"),
        "overview": sections.overview(),
        "panel": _asset("panel.html"),
        "evidence": sections.evidence(experiments),
        "theory": sections.theory(checks),
        "speed": sections.speed(bench),
        "footer": "<p>shippo-ssm {shippo_ssm}, torch {torch}, Python {python}, {machine}.</p>".format(**versions()),
        # "</script>" in a string would end the element.
        "data": json.dumps(sections.panel_data(), separators=(",", ":")).replace("<", "\\u003c"),
        "script": _asset("panel.js"),
    }
    page = _asset("page.html")
    for name, fragment in parts.items():
        mark = f"<!-- {name} -->"
        assert page.count(mark) == 1, f"page.html has no single place for {name}"
        before, after = page.split(mark)
        page = before + fragment + after
    return page


def write(out: Path, experiments: Iterable[Experiment], *, checks: Path | None = None, bench: Path | None = None) -> Path:
    """Write the report to `out`, an HTML file, and return its path.

    Args:
        experiments: in the order of the page.
        checks: JSON of `shippo verify --out`; by default the checks are run now.
        bench: JSON of `shippo bench --out`; by default the one that comes with the package.
    """
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"out is {out}; expected a name that ends in .html")
    for name, command, path in (("checks", "verify", checks), ("bench", "bench", bench)):
        if path is not None and not path.exists():
            raise ValueError(f"{name} is {path}, which does not exist; make it with `shippo {command} --out {path}`")
    # Before anything is computed, since it may fail.
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(experiments, checks=checks, bench=bench), encoding="utf-8")
    return out
