"""The report: one self-contained HTML page with the theory, the evidence, the speed, and a panel with a memory to turn.

Data path: `assets/page.html` holds the words and one mark per place to fill (`<!-- evidence -->`). `evidence.py`
renders the result files of the experiments, `theory.py` the checks of the theory, `speed.py` the benchmark file, each
as an HTML fragment; `panel.py` gives the coefficients that `assets/panel.js` works on. `write` puts all of it into one
file that needs no network. What has not been run yet is named on the page with the command that makes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from shippo_ssm.lab.experiment import Experiment


def _asset(name: str) -> str:
    return resources.files("shippo_ssm.lab.report").joinpath("assets", name).read_text(encoding="utf-8")


def render(experiments: Iterable[Experiment], *, checks: Path | None = None, bench: Path | None = None) -> str:
    """The page as text; arguments as in `write`."""
    from shippo_ssm.lab.report import evidence, speed, theory
    from shippo_ssm.lab.report.panel import panel_data
    from shippo_ssm.lab.store import versions

    parts = {
        "style": _asset("style.css"),
        "overview": evidence.overview(),
        "panel": _asset("panel.html"),
        "evidence": evidence.section(experiments),
        "theory": theory.section(checks),
        "speed": speed.section(bench),
        "footer": "<p>shippo-ssm {shippo_ssm}, torch {torch}, Python {python}, {machine}.</p>".format(**versions()),
        # "<" in a string would end the script element.
        "data": json.dumps(panel_data(), separators=(",", ":")).replace("<", "\\u003c"),
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
    """Write the report to `out` and return its path.

    Args:
        out: an HTML file; folders on the way are made.
        experiments: what the evidence shows, in order.
        checks: JSON of `shippo verify --out`; by default the checks are run now.
        bench: JSON of `shippo bench --out`; by default the one that comes with the package.

    Raises:
        ValueError: `out` does not end in .html, or a file that was named is not there.
    """
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"out is {out}; expected a name that ends in .html")
    for name, command, path in (("checks", "verify", checks), ("bench", "bench", bench)):
        if path is not None and not path.exists():
            raise ValueError(
                f"{name} is {path}, which does not exist; leave it out, or make it with `shippo {command} --out {path}`"
            )
    # A folder that cannot be made is found before anything is computed.
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(experiments, checks=checks, bench=bench), encoding="utf-8")
    return out
