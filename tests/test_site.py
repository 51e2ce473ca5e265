"""The built docs, as a visitor meets them: a strict build, and a walk through all pages on a wide and a narrow screen."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shippo_lab.experiments import all_experiments
from shippo_lab.harness import report
from tests.browser import open_at

ROOT = Path(__file__).parents[1]
PICTURES = {"index", "tutorial", "train-your-own", "body-frame", "beside-mamba", "performance"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """All pages, built once with warnings as errors, and the report beside them."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(folder / "trees")]
    done = subprocess.run([*command, str(ROOT / "docs"), str(folder / "html")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "html"


def test_the_api_has_no_broken_lists(site):
    """Fields are described once, and a description such as "P." is text, not the beginning of a list."""
    pages = {path.stem: path.read_text() for path in (site / "api").glob("*.html")}
    assert len(pages) > 8
    for name, page in pages.items():
        assert "Alias for field number" not in page, name
        assert not re.search(r"<ol[^>]*>\s*<li>(<p>)?\s*(</p>)?</li>", page), name
    assert re.search(r"<strong>num_groups</strong>[^<]*(<[^>]*>)*[^<]*–[^<]*G\.", pages["layers"])


def test_the_performance_page_is_folded(site):
    page = (site / "performance.html").read_text()
    assert page.count("<details>") == page.count("</details>") >= 5
    assert page.index("<h2>Targets") < page.index("<details>")


@pytest.fixture(scope="module")
def written_report(tmp_path_factory):
    return report.write(tmp_path_factory.mktemp("report") / "report.html", all_experiments())


# What is wider than the screen and in nothing that scrolls by itself.
STICKING = """const scrolls = e => { for (; e; e = e.parentElement) {
      if (e !== document.body && /auto|scroll|hidden/.test(getComputedStyle(e).overflowX)) return true;
    } return false; };
    return [...document.querySelectorAll('article *, main *')].filter(e => e.getBoundingClientRect().width > 0 &&
      e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e) && !e.closest('.skip, .visually-hidden'))
      .map(e => e.outerHTML.slice(0, 100));"""
# Numbers in tables that go on in another line.
BROKEN_NUMBERS = """const found = [], range = document.createRange();
    for (const cell of document.querySelectorAll('td')) {
      const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      for (let node; (node = walk.nextNode());) {
        for (const match of node.data.matchAll(/[0-9][0-9.,]*(e[-+]?[0-9]+)?/g)) {
          range.setStart(node, match.index);
          range.setEnd(node, match.index + match[0].length);
          const tops = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
          if (tops.size > 1 && !node.parentElement.closest('code')) found.push(match[0]);
        }
      }
    }
    return found;"""


@pytest.mark.chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_and_are_quiet(width, site, browser, written_report):
    pages = {path.relative_to(site).with_suffix("").as_posix(): path for path in sorted(site.rglob("*.html"))}
    assert len(pages) > 30
    for name, path in (pages | {"report": written_report}).items():
        browser.get_log("browser")
        open_at(browser, path, width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, name
        assert browser.execute_script(STICKING) == [], name
        assert browser.execute_script(BROKEN_NUMBERS) == [], name
        broken = "return [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
        assert browser.execute_script(broken) == [], name
        if name in PICTURES:
            sizes = browser.execute_script("return [...document.querySelectorAll('article img')].map(i => i.clientWidth)")
            assert max(sizes) > 0.6 * min(width, 700), name
        assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == [], name
