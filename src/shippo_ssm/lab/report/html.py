"""Small pieces of HTML: escaped text, tables that scroll on their own, and the note that stands where a result is missing."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence


def text(value: object) -> str:
    """Escaped text; words in backticks become code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(str(value)))


def table(label: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in a region that scrolls by itself on a narrow screen; cells are HTML, the first of a row is its heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td{_kind(cell)}>{cell}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    # A region that scrolls must be reachable by keyboard.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(label, quote=True)}">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _kind(cell: str) -> str:
    plain = re.sub(r"<[^>]*>", "", cell).strip()
    return ' class="number"' if re.match(r"[-−+]?[\d.]|–", plain) and len(plain) < 60 else ""


def missing(message: str) -> str:
    """The note for what is not there yet; `message` names the command that makes it."""
    return f'<p class="missing">{text(message)}</p>'


def verdict(holds: bool, words: str) -> str:
    """Whether it holds, in words and colour."""
    mark, word = ("holds", "holds") if holds else ("fails", "does not hold")
    return f'<span class="{mark}">{word}</span>' + (f": {text(words)}" if words else "")
