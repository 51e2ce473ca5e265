"""Tables and pictures: layouts, facts, and the picture of the lift."""

import io
import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from shippo_lab.experiments import all_experiments
from shippo_lab.harness import store
from shippo_lab.harness.experiment import Column, Progress, RowConfig, Verdict
from shippo_lab.harness.plots import overview
from shippo_lab.harness.progress import Display
from shippo_lab.harness.runner import Unit
from shippo_lab.harness.tables import as_data, as_markdown, as_text, facts, lines, show
from tests.shippo_lab.harness.conftest import finished


def test_layouts_show_both_sources_and_the_verdict(toy, toy_result):
    found = lines(toy, toy_result)
    assert [line.source for line in found] == ["ours", "ours", "paper"]
    assert found[0].cells == ("0.0003 ± 0.00014", "–")
    assert found[2].cells == ("2.44e-07 ± 4.6e-07", "1")
    markdown = as_markdown(toy, toy_result)
    assert "| Right | ours | 1.5e-07 ± 7.1e-08 | 1 ± 0 | holds: falls -> 0 |" in markdown
    assert "DOES NOT HOLD: falls -> 0" in markdown
    assert "tab:toy" in markdown
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(as_text(toy, toy_result))
    assert "does not hold: falls" in console.export_text()
    data = json.loads(json.dumps(as_data(toy, toy_result)))
    assert data["rows"][1]["paper"]["nmse"] == [2.44e-7, 4.61e-7]
    assert [row["holds"] for row in data["rows"]] == [False, True]


def test_facts_name_a_spread_and_a_table_only_where_there_is_one(toy, toy_result):
    whole = "here: preset full, 5 steps, 2 seeds, 1.0 minutes, torch 2.0; mean ± sample standard deviation; paper: tab:toy"
    assert facts(toy, toy_result) == whole
    toy_result.rows = {"right": toy_result.rows["right"]._replace(seeds=[0])}
    assert facts(toy, toy_result) == "here: preset full, 5 steps, 1 seed, 1.0 minutes, torch 2.0; paper: tab:toy"


def printed(thing, width=80):
    file = io.StringIO()
    Console(width=width, file=file).print(thing)
    return file.getvalue()


def test_labels_and_verdicts_are_shown_as_they_are(toy, toy_result):
    """Brackets are no markup, a bar no column."""
    label = r"[red]R[/] | [b \macro{x} $y$"
    toy_result.rows = {"right": toy_result.rows["right"]._replace(label=label)}
    toy = replace(toy, title="[/] title", judge=lambda result: {"right": Verdict(True, "[bold]falls")})
    assert label in printed(as_text(toy, toy_result), 160)
    assert "holds: [bold]falls" in printed(as_text(toy, toy_result), 160)
    assert "[/] title" in printed(as_text(toy, toy_result, narrow=True))
    assert r"\| [b" in as_markdown(toy, toy_result)


def test_a_diverged_row_is_shown(toy, toy_result):
    inf, nan = float("inf"), float("nan")
    bad = finished("right", "Right", nmse=[inf, -inf], r2=[nan, 1.0])
    toy_result.rows = {"right": bad._replace(notes={"diverged_at": "step 3"})}
    for text in (
        as_markdown(toy, toy_result),
        printed(as_text(toy, toy_result), 160),
        printed(as_text(toy, toy_result, narrow=True)),
    ):
        assert "diverged" in text
        assert text.count("nan") >= 2
    assert as_data(toy, toy_result)["rows"][0]["label"] == "Right"


def test_a_short_budget_is_not_judged(toy, toy_result):
    toy_result.preset = "smoke"
    markdown = as_markdown(toy, toy_result)
    assert "HOLD" not in markdown
    assert "holds" not in markdown
    assert "too short to be judged" in markdown
    assert [row["holds"] for row in as_data(toy, toy_result)["rows"]] == [None, None]


def test_columns_without_a_number_are_left_out(toy, toy_result):
    more = replace(toy, columns=(*toy.columns, Column(key="other", label="Other length")))
    assert as_markdown(more, toy_result) == as_markdown(toy, toy_result)


def test_a_narrow_terminal_gets_what_matters(toy, toy_result):
    """Name, numbers without their spread, the paper's below, verdict: each whole; every column where asked or piped."""
    columns = tuple(Column(key=f"m{index}", label=f"Metric {index}") for index in range(8))
    many = replace(toy, columns=(*toy.columns, *columns), main=("nmse", "r2"))
    for row in toy_result.rows.values():
        row.metrics.update({column.key: row.metrics["nmse"] for column in columns})
    for width, terminal, wide, narrow in ((80, True, False, True), (80, True, True, False), (80, False, False, False)):
        file = io.StringIO()
        console = Console(width=width, file=file, force_terminal=terminal, color_system=None)
        show(console, many, toy_result, wide=wide)
        text = file.getvalue()
        assert ("Metric 7" not in text) == narrow
        assert ("--wide shows every column" in text) == narrow
        if narrow:
            assert max(map(len, text.splitlines())) <= 80
            ours, paper = next((a, b) for a, b in pairwise(text.splitlines()) if a.strip().startswith("Right"))
            assert ours.split() == ["Right", "ours", "1.5e-07", "1", "holds"]
            assert paper.split() == ["paper", "2.44e-07", "1"]
            assert "does not" in text
        else:
            assert "1.5e-07 ± 7.1e-08" in text
            assert "holds: falls -> 0" in text


@pytest.mark.parametrize("experiment", all_experiments(), ids=lambda experiment: experiment.name)
def test_a_terminal_of_80_columns_cuts_no_word(experiment):
    """Of committed results, with their long labels and three columns of numbers."""
    try:
        result = experiment.result(store.committed() / f"{experiment.name}.json")
    except FileNotFoundError:
        pytest.skip("no committed result")
    text = printed(as_text(experiment, result, narrow=True))
    verdicts = experiment.verdicts(result).values()
    body = text.split("results/")[0]
    assert "…" not in body
    assert body.count("does not hold") == sum(not verdict.holds for verdict in verdicts)
    assert body.count("holds") == sum(verdict.holds for verdict in verdicts)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [60, 140])
def test_a_terminal_shows_a_line_per_running_unit(width):
    file = io.StringIO()
    display = Display(Console(width=width, file=file, force_terminal=True, color_system=None))
    units = [Unit(place, RowConfig(name=f"[row]-{place}", steps=20_000), (0, 1)) for place in range(2)]
    with display.show("paired", units, {0, 1}):
        display.progress(Progress(0, 20_000, 20_000, {}))
        display.finished(0)
        display.progress(Progress(1, 10_000, 20_000, {f"metric_{place}": 0.123 for place in range(9)}))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "")
    last = [line for line in plain.splitlines() if line][-2:]
    assert last[0].startswith("[row]-1.s0-s1  step 10000/20000  metric_0 0.123")
    # Three quarters of the work: one of two units, and half of the other.
    assert last[1].startswith(f"paired: {'█' * 18}{'░' * 6} 1/2 done")
    assert max(map(len, last)) <= width


def test_the_picture_of_the_lift(tmp_path):
    overview(tmp_path / "overview.svg")
    assert "<svg" in (tmp_path / "overview.svg").read_text()
