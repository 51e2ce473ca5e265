"""Tables and pictures: layouts, facts, and the picture of the lift."""

import io
import json

from rich.console import Console

from shippo_ssm.lab.pictures import overview
from shippo_ssm.lab.tables import as_data, as_latex, as_markdown, as_text, facts, lines


def test_layouts_show_both_sources_and_the_verdict(toy, toy_result):
    found = lines(toy, toy_result)
    assert [line.source for line in found] == ["ours", "ours", "paper"]
    assert found[0].cells == ("0.0003 ± 0.00014", "–")
    assert found[2].cells == ("2.44e-07 ± 4.6e-07", "1")
    markdown = as_markdown(toy, toy_result)
    assert "| Right | ours | 1.5e-07 ± 7.1e-08 | 1 ± 0 | holds: falls -> 0 |" in markdown
    assert "DOES NOT HOLD: falls -> 0" in markdown
    assert "tab:toy" in markdown
    latex = as_latex(toy, toy_result)
    assert latex.startswith(r"\begin{tabular}")
    assert r"Plain\_one & ours & 0.0003 $\pm$ 0.00014 & -- \\" in latex
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


def test_the_picture_of_the_lift(tmp_path):
    overview(tmp_path / "overview.svg")
    assert "<svg" in (tmp_path / "overview.svg").read_text()
