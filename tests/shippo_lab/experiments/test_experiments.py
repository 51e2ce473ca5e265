"""The claims: their tables of the paper, verdicts that can fail, and the main figure."""

import copy

import pytest

from shippo_lab.experiments import all_experiments, groups, projection
from shippo_lab.experiments.paired import experiment as paired
from shippo_lab.experiments.paired.figure import main_evidence
from shippo_lab.harness.experiment import FinishedRow, Result, paper_numbers, paper_row, paper_tables

RIGHT = {"oracle", "learned-true", "learned-zero", "learned-random", "selective"}


def row(name, label="", config=None, **metrics):
    return FinishedRow(name, label or name, {"steps": 5, **(config or {})}, [0, 1], metrics, {"step": []}, {}, 1.0)


def result(experiment, *rows):
    return Result(experiment, "full", {r.name: r for r in rows}, {"torch": "2.0"}, 60.0, "here")


@pytest.fixture
def good():
    """A result that shows what the paper claims."""
    rows = [row("solver", nmse=[0.0, 0.0], pair_nmse=[0.0, 0.0], pair_r2=[1.0, 1.0])]
    for rank, error in ((1, 4e-4), (2, 3.5e-4), (4, 3e-4), (8, 2.5e-4)):
        metrics = {"nmse": [error] * 2, "pair_nmse": [1.0, 1.000001], "pair_r2": [0.0, 0.0], "order_averaged_bound": [2e-4] * 2}
        rows.append(row(f"no-right-r{rank}", f"No-right r = {rank}", {"rank": rank}, **metrics))
    for config in paired.EXPERIMENT.rows():
        if config.name in RIGHT:
            metrics = {"nmse": [1e-7, 2e-7], "pair_nmse": [1e-7, 2e-7], "pair_r2": [1.0, 1.0], "identity_pair_nmse": [1.0, 1.0]}
            rows.append(row(config.name, config.label, **metrics))
    return result("paired", *rows)


def check_experiment(experiment):
    """What every experiment says of itself: a claim, a protocol, a short preset, its tables, highlights that it has."""
    assert experiment.claim
    assert experiment.protocol
    assert "smoke" in experiment.presets
    assert all(table.label.startswith("tab:") for table in experiment.tables)
    ours, columns = {row.name for row in experiment.rows()}, {column.key for column in experiment.columns}
    assert all(row in ours and metric in columns for row, metric, _ in experiment.highlights)


def test_every_experiment_names_a_table_of_the_paper_and_its_rows():
    for experiment in all_experiments():
        check_experiment(experiment)
    for module, key in ((paired, "paired"), (paired, "right-transport"), (groups, "groups"), (projection, "projection")):
        ours = {config.name for config in module.EXPERIMENT.rows()}
        assert set(paper_numbers()[key].rows) <= ours


def test_paper_numbers_cover_all_tables():
    expected = {"paired", "right-transport", "projection", "groups", "suffix"}
    expected |= {f"mqar-{part}" for part in ("coordinate", "exact", "summary", "parameters")}
    assert set(paper_numbers()) == expected
    assert paper_row(paper_tables("paired", "right-transport"), "selective")["pair_nmse"] == [5.58e-5, 8.12e-5]
    assert paper_row(paper_tables("groups"), "learned-g2")["pair_nmse"] == [1.6e-5, None]
    assert paper_row(paper_tables("paired"), "nothing") == {}
    summary, exact = paper_numbers()["mqar-summary"].rows, paper_numbers()["mqar-exact"].rows
    for name, numbers in exact.items():
        assert round(numbers["exact_4096"][0], 3) == pytest.approx(summary[name]["exact_4096"][0], abs=1.1e-3)
    suffix = paper_numbers()["suffix"].rows
    for metric, (difference, _) in suffix["difference"].items():
        assert suffix["zeroed"][metric][0] - suffix["normal"][metric][0] == pytest.approx(difference, abs=1.1e-4)


def test_a_good_result_holds_in_every_row(good):
    verdicts = paired.judge(good)
    assert set(verdicts) == set(good.rows)
    assert all(verdict.holds for verdict in verdicts.values()), verdicts


@pytest.mark.parametrize(
    ("name", "metric", "values"),
    [
        ("no-right-r4", "pair_nmse", [0.9, 1.0]),
        ("no-right-r8", "nmse", [4e-4, 4e-4]),
        ("oracle", "pair_nmse", [1e-6, 1e-6]),
        ("selective", "pair_nmse", [1e-3, 1e-3]),
        ("learned-zero", "identity_pair_nmse", [0.9, 1.0]),
        ("solver", "pair_nmse", [1e-3, 1e-3]),
    ],
)
def test_a_row_that_does_not_show_the_claim_fails(good, name, metric, values):
    bad = copy.deepcopy(good)
    bad.rows[name].metrics[metric] = values
    assert not paired.judge(bad)[name].holds


def test_verdicts_of_groups_and_projection():
    audit = result(
        "groups",
        row("learned-g2", pair_nmse=[1e-5, 1e-5], off_block=[0.1, 0.12]),
        row("oracle-g2", pair_nmse=[1.0, 1.0], off_block=[0.1, 0.102]),
        row("oracle-g4", pair_nmse=[1e-8, 1e-8], off_block=[0.0, 0.0]),
    )
    assert all(verdict.holds for verdict in groups.judge(audit).values())
    audit.rows["oracle-g2"].metrics["pair_nmse"] = [0.5, 0.5]
    assert not groups.judge(audit)["oracle-g2"].holds
    table = result("projection", row("no-right", nmse=[1e-3, 1.2e-3]), row("oracle", nmse=[1e-4, 2e-4]))
    assert all(verdict.holds for verdict in projection.judge(table).values())
    table.rows["oracle"].metrics["nmse"] = [2e-3, 2e-3]
    assert not projection.judge(table)["oracle"].holds


def test_the_main_figure(good, tmp_path):
    main_evidence(good, tmp_path / "deep" / "paired.png")
    assert (tmp_path / "deep" / "paired.png").read_bytes().startswith(b"\x89PNG")
    good.rows = {"oracle": good.rows["oracle"]}
    with pytest.raises(ValueError, match="lacks no-right"):
        main_evidence(good, tmp_path / "no.png")
