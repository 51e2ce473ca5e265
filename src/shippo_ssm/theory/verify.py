"""`verify`: runs the checks, prints their table and writes it as JSON.

A check that raises is a row that does not hold, with the exception in place of what was measured, so that one broken
part does not hide the others."""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shippo_ssm import __version__
from shippo_ssm.theory.registry import CHECKS, Check, CheckResult


def run_check(name: str, check: Check) -> CheckResult:
    """The row of one check; an exception becomes a row that does not hold."""
    try:
        return check()
    except Exception as error:
        return CheckResult(
            name=name, statement=name.replace("_", " "), place="", measured=f"raised {type(error).__name__}: {error}",
            residual=math.nan, bound=0.0, sense="<=",
        )  # fmt: skip


def _table(rows: Sequence[CheckResult], seconds: float, wide: bool) -> Table:
    failed = sum(not row.holds for row in rows)
    summary = f"{len(rows)} statements in {seconds:.1f} s: " + ("all hold" if not failed else f"{failed} do not hold")
    table = Table(caption=summary, caption_justify="left", show_lines=False)
    table.add_column("statement", ratio=5)
    if wide:
        table.add_column("what is measured", ratio=5)
    table.add_column("residual", justify="right", no_wrap=True)
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("holds", justify="center", no_wrap=True)
    for row in rows:
        mark = "[green]yes[/]" if row.holds else "[bold red]NO[/]"
        relation = "\u2264" if row.sense == "<=" else "\u2265"
        measured = (escape(row.measured),) if wide else ()
        place = f" [dim]({escape(row.place)})[/]" if row.place else ""
        numbers = f"{row.residual:.1e}", f"{relation} {row.bound:.0e}"
        table.add_row(f"{escape(row.statement)}{place}", *measured, *numbers, mark)
    return table


def _write(out: Path, rows: Sequence[CheckResult], seconds: float) -> Path:
    path = out / "verify.json" if out.is_dir() else out
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [row.record for row in rows]
    report = {"version": __version__, "seconds": round(seconds, 2), "holds": all(row.holds for row in rows), "rows": records}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return path


def _select(only: str | Sequence[str] | None) -> list[str]:
    """Names of the checks that contain one of the given parts, in the order of the paper."""
    parts = [only] if isinstance(only, str) else list(only or ())
    unknown = [part for part in parts if not any(part in name for name in CHECKS)]
    if unknown:
        close = difflib.get_close_matches(unknown[0], CHECKS, 3, 0.4) or list(CHECKS)[:3]
        raise ValueError(
            f"verify: `only` is {unknown[0]!r}; expected a part of the name of a check, such as {', '.join(close)}; all of "
            "them are the keys of shippo_ssm.theory.CHECKS"
        )
    return [name for name in CHECKS if not parts or any(part in name for part in parts)]


def verify(
    *,
    out: Path | None = None,
    only: str | Sequence[str] | None = (),
    console: Console | None = None,
    wide: bool = True,
) -> int:
    """Runs the checks and prints a table: statement, what is measured, residual, bound, holds.

    Args:
        out: a JSON file to write, or an existing folder that gets `verify.json`.
        only: names of checks (keys of `CHECKS`), or parts of names; all of them by default.
        console: where to print; standard output by default.
        wide: whether the table says what is measured; without, it fits into 80 columns.

    Returns:
        0 when every statement holds, 1 otherwise.

    Example:
        >>> from shippo_ssm.theory import verify
        >>> verify(only=["rotation_example"], console=Console(quiet=True))
        0
    """
    names = _select(only)
    console = Console() if console is None else console
    start = time.perf_counter()
    rows = [run_check(name, CHECKS[name]) for name in names]
    seconds = time.perf_counter() - start
    console.print(_table(rows, seconds, wide), width=max(console.width, 100) if wide else None)
    if out is not None:
        console.print(f"written: {_write(Path(out), rows, seconds)}", markup=False, soft_wrap=True)
    return 0 if all(row.holds for row in rows) else 1
