"""The report: a self-contained page that says what it has not, and, in headless Chromium, looks and works as it should."""

import itertools
import json
import math
import re
import sys
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from shippo_lab.experiments import all_experiments, get, names
from shippo_lab.harness import report
from shippo_lab.harness.report import sections
from shippo_lab.harness.store import write_json
from shippo_lab.theory import CHECKS, run_check
from shippo_ssm.actions import Rotation, Shear
from shippo_ssm.projection import LegS
from tests.browser import open_at


def some_checks():
    """Two checks of the theory, and one that does not hold."""
    chosen = {name: CHECKS[name] for name in ("rotation_example", "controlled_path_is_nonlinear")}
    failed = replace(CHECKS["rotation_example"](), name="failed", statement="Two & two < five", residual=math.nan)
    return chosen | {"failed": lambda: failed}


TARGET = {"at_least": False, "required": 4, "goal": 1.5}
BENCH = {
    "mode": "quick",
    "date": "2026-01-01",
    "machine": {"processor": "A processor", "cores": 2, "simd": "AVX2"},
    "verdict": [
        {**TARGET, "what": "forward time over its roof", "reached": 2.0, "result": "required"},
        {**TARGET, "what": "ahead of a peer", "reached": None, "result": "not measured", "why": "it is missing"},
        {**TARGET, "what": "memory", "reached": 9.0, "result": "missed"},
    ],
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page as a reader of the checkout gets it, with fewer checks."""
    out = tmp_path_factory.mktemp("report") / "deep" / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shippo_lab.theory.CHECKS", some_checks())
        return report.write(out, all_experiments())


def shown(browser) -> dict[str, str]:
    names = ("fixed-error", "transported-error", "wanted-gap", "fixed-gap", "transported-gap", "turn-out", "keep-out")
    return {name: browser.find_element("id", name).text for name in names}


def percent(value: str) -> float:
    return float(value.replace("\u00a0%", "").replace(" %", ""))


class ReadBack(NamedTuple):
    """What the panel shows for one setting: relative errors of both read-outs, and how far the two orders are apart in each."""

    fixed_error: float
    transported_error: float
    wanted_gap: float
    fixed_gap: float
    transported_gap: float


def action(turn: float, shear: float, order: str) -> np.ndarray:
    """R [2, 2]: a rotation by `turn` radians and a shear, the first operation as the first factor."""
    first, second = Rotation(2, 0, 1).dense(turn).double().numpy(), Shear(2, 0, 1).dense(shear).double().numpy()
    return first @ second if order == "turn-shear" else second @ first


def read_back(turn: float, shear: float, order: str, keep: int = sections.ORDER) -> ReadBack:
    """The numbers of the panel for `keep` coefficients, computed by the library."""
    grid = np.linspace(0.0, 1.0, sections.GRID)
    basis, kept = LegS(sections.ORDER).basis(1.0, grid)[:, :keep], np.array(sections.panel_data()["coefficients"])[:keep]
    right, other = (action(turn, shear, name) for name in (order, *({"turn-shear", "shear-turn"} - {order})))
    read = {
        "wanted": lambda matrix: sections.signal(grid) @ matrix,
        "fixed": lambda matrix: basis @ kept,
        "transported": lambda matrix: basis @ (kept @ matrix),
    }
    size = np.linalg.norm(read["wanted"](right))
    error = {name: float(np.linalg.norm(of(right) - read["wanted"](right)) / size) for name, of in read.items()}
    gap = {name: float(np.linalg.norm(of(right) - of(other)) / size) for name, of in read.items()}
    return ReadBack(error["fixed"], error["transported"], gap["wanted"], gap["fixed"], gap["transported"])


def test_nothing_is_fetched(page):
    text = page.read_text()
    outside = [
        target
        for target in re.findall(r"""(?:src|href|action|data|srcset)\s*=\s*["']([^"']*)["']""", text)
        if not target.startswith(("#", "data:"))
    ]
    assert not outside
    style, script = sections.asset("style.css"), sections.asset("panel.js")
    assert not re.search(r"url\(|@import|https?:", style)
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|https?:", script)


def test_every_place_is_filled(page):
    text = page.read_text()
    assert "<!-- " not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    for part in ("what", "try", "evidence", "theory", "speed", "again"):
        section = text.split(f'<section id="{part}"')[1].split("</section>")[0]
        assert len(re.sub(r"<[^>]+>", "", section).split()) > 20, f"section {part} says nothing"


def test_every_experiment_is_there_or_said_to_be_missing(page):
    text = page.read_text()
    for name in names():
        part = text.split(f'id="{name}"')[1].split("<h3")[0]
        assert "<table>" in part or f"<code>shippo run {name}</code>" in part


def test_a_checkout_without_results_says_which_commands_make_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shippo_lab.harness.store.checkout", lambda: None)
    fragment = "".join(map(sections.evidence, all_experiments()))
    for name in names():
        assert f"<code>shippo run {name}</code>" in fragment
    assert "<table>" not in fragment


def test_committed_figures_need_no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fragment = sections.picture("overview", "Overview") + sections.evidence(get("paired"))
    assert fragment.count('src="data:image/svg+xml;base64,') == 2
    assert "pip install" not in fragment


def test_a_table_shows_ours_the_papers_and_the_verdict(toy, toy_result):
    table = sections.PARTS.table("toy", ["Model", "NMSE", "R^2", "Verdict"], sections._rows(toy, toy_result))
    assert "0.0003 ± 0.00014" in table
    assert "paper 2.44e\N{NON-BREAKING HYPHEN}07 ± 4.6e\N{NON-BREAKING HYPHEN}07" in table
    assert 'class="holds"' in table
    assert 'class="fails"' in table


def test_the_theory_says_what_does_not_hold():
    fragment = sections.theory([run_check(name, check) for name, check in some_checks().items()])
    assert "<strong>1 of 3 do not hold.</strong>" in fragment
    assert "Two &amp; two &lt; five" in fragment
    assert fragment.count('class="holds"') == 2
    assert fragment.count('class="fails"') == 1
    # A part in which something does not hold is open, another one is folded.
    assert "<details open><summary><strong>Appendix B</strong>" in fragment
    assert "<details><summary><strong>Section 2</strong> All 1 hold." in fragment


def test_the_speed_says_what_fell_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sections, "committed", lambda: tmp_path)
    assert "<code>shippo bench --out runs/bench.json</code>" in sections.speed()
    write_json(tmp_path / "runs" / "bench.json", BENCH)
    fragment = sections.speed()
    assert "reaches what is required" in fragment
    assert "falls short" in fragment
    assert "not measured" in fragment
    write_json(tmp_path / "runs" / "bench.json", {})
    with pytest.raises(ValueError, match=r"bench.json has unexpected content"):
        sections.speed()


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"out is .*report.txt"):
        report.write(tmp_path / "report.txt", ())


def test_the_panel_says_what_the_library_computes():
    """A rotation and a shear in closed form; the coefficients are a projection: fewer of them are never better."""
    turn, shear = 0.7, -0.4
    rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    assert np.allclose(action(turn, shear, "turn-shear"), rotation @ [[1, shear], [0, 1]], atol=1e-6)
    errors = [read_back(turn, 0.0, "turn-shear", keep).transported_error for keep in (4, 8, 12, 16, 20, 24)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.01
    still = read_back(0.0, 0.0, "shear-turn")
    assert still.fixed_error == still.transported_error
    assert still.wanted_gap == 0
    moved = read_back(turn, shear, "shear-turn")
    assert moved.fixed_gap == 0 < moved.wanted_gap
    assert moved.transported_gap == pytest.approx(moved.wanted_gap, rel=0.02)
    data = json.loads(json.dumps(sections.panel_data()))
    assert np.shape(data["coefficients"]) == (24, 2)
    assert np.shape(data["signal"]) == (201, 2)


@pytest.mark.chromium
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen(browser, page, width, scheme, tmp_path):
    open_at(browser, page, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    # Nothing sticks out of the screen, except inside a region that scrolls by itself.
    sticking = browser.execute_script(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .wide, .equation, .skip') && "
        "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert sticking == []
    small = browser.execute_script(
        "return [...document.querySelectorAll('p, td, th, label, figcaption, li')].filter(e => "
        "parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.outerHTML.slice(0, 80))"
    )
    assert small == []
    picture = tmp_path / "screen.png"
    assert browser.save_screenshot(str(picture))
    ink, paper = browser.execute_script("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert abs(brightness[0] - brightness[1]) > 500
    assert (brightness[1] > brightness[0]) == (scheme == "light")
    # The picture is not one flat colour.
    assert picture.stat().st_size > 10_000


@pytest.mark.chromium
def test_no_errors_and_no_requests(browser, page):
    open_at(browser, page, 1280)
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.refresh()
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert asked
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}


@pytest.mark.chromium
def test_the_slider_works_by_keyboard_alone(browser, page):
    """Tab reaches the slider, arrow keys turn the frame, and the numbers are those of the library."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    open_at(browser, page, 1280)
    for _ in range(40):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        if browser.switch_to.active_element.get_attribute("id") == "turn":
            break
    slider = browser.switch_to.active_element
    assert slider.get_attribute("id") == "turn"
    assert browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    before = shown(browser)
    drawn = browser.find_element("id", "plane-transported").get_attribute("d")
    fixed = browser.find_element("id", "plane-fixed").get_attribute("d")
    for _ in range(5):
        slider.send_keys(Keys.ARROW_RIGHT)
    after = shown(browser)
    assert after["turn-out"] != before["turn-out"]
    assert after["fixed-error"] != before["fixed-error"]
    assert browser.find_element("id", "plane-transported").get_attribute("d") != drawn
    # What the fixed memory holds does not depend on what comes later.
    assert browser.find_element("id", "plane-fixed").get_attribute("d") == fixed

    expected = read_back(math.radians(float(slider.get_attribute("value"))), 0.4, "turn-shear")
    assert percent(after["fixed-error"]) == pytest.approx(100 * expected.fixed_error, abs=0.06)
    assert percent(after["transported-error"]) == pytest.approx(100 * expected.transported_error, abs=0.06)
    assert percent(after["wanted-gap"]) == pytest.approx(100 * expected.wanted_gap, abs=0.06)
    assert percent(after["transported-gap"]) == pytest.approx(100 * expected.transported_gap, abs=0.06)
    assert percent(after["fixed-gap"]) == 0

    browser.find_element("id", "shear-first").send_keys(Keys.SPACE)
    other = read_back(math.radians(float(slider.get_attribute("value"))), 0.4, "shear-turn")
    assert percent(shown(browser)["fixed-error"]) == pytest.approx(100 * other.fixed_error, abs=0.06)
    keep = browser.find_element("id", "keep")
    keep.send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * 4)
    fewer = read_back(math.radians(float(slider.get_attribute("value"))), 0.4, "shear-turn", keep=6)
    assert shown(browser)["keep-out"] == "6"
    assert percent(shown(browser)["transported-error"]) == pytest.approx(100 * fewer.transported_error, abs=0.06)
    browser.find_element("id", "reset").send_keys(Keys.ENTER)
    assert percent(shown(browser)["fixed-error"]) == percent(shown(browser)["transported-error"])


@pytest.mark.chromium
def test_it_can_be_read_by_a_screen_reader(browser, page):
    """Every control has a name, every image a text, headings do not skip a level, ids are unique."""
    open_at(browser, page, 390)
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('input, button')].filter(e => !(e.labels && e.labels.length) && "
        "!e.textContent.trim()).map(e => e.outerHTML)"
    )
    assert unnamed == []
    assert browser.execute_script("return [...document.querySelectorAll('img:not([alt]), svg:not([aria-label])')].length") == 0
    levels = browser.execute_script("return [...document.querySelectorAll('h1, h2, h3, h4')].map(e => +e.tagName[1])")
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(levels))
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
