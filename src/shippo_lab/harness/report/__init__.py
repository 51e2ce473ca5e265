"""The report: one self-contained HTML page with theory, evidence, speed and an interactive panel.

`assets/page.html` is the page, a template of Jinja; `sections.py` renders its parts. A missing result is shown with the
command that makes it.
"""

from collections.abc import Iterable
from pathlib import Path

from shippo_lab.harness.experiment import Experiment


def render(experiments: Iterable[Experiment]) -> str:
    """The page as text, experiments in their order; the checks of the theory are run now."""
    from shippo_lab.harness.report import sections
    from shippo_lab.harness.store import versions
    from shippo_lab.theory import CHECKS, run_check

    checks = [run_check(name, check) for name, check in CHECKS.items()]
    page = sections.ENVIRONMENT.get_template("page.html")
    return page.render(vars(sections), experiments=experiments, checks=checks, versions=versions())


def write(out: Path, experiments: Iterable[Experiment]) -> Path:
    """Write the report to `out`, an HTML file, and return its path."""
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"out is {out}; expected a name that ends in .html")
    # Before anything is computed, since it may fail.
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(experiments), encoding="utf-8")
    return out
