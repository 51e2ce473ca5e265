"""Tables, figures and files: layouts, verdicts that can fail, results found or missed."""

import copy
import io
import json

import pytest
import torch

from shippo_ssm.experiments import get, groups, names, paired, projection, rotation, store
from shippo_ssm.experiments.core import Result, Row
from shippo_ssm.experiments.figures import main_evidence, overview
from shippo_ssm.experiments.tables import as_data, as_latex, as_markdown, as_text, facts, lines, paper_numbers, paper_row

RIGHT = {"oracle", "learned-true", "learned-zero", "learned-random", "selective"}


def row(name, label="", config=None, **metrics):
    return Row(name, label or name, {"steps": 5, **(config or {})}, [0, 1], metrics, {"step": []}, {}, 1.0)


def result(experiment, *rows):
    versions = {"torch": torch.__version__}
    return Result(experiment, "full", {r.name: r for r in rows}, versions, 60.0, "here")


@pytest.fixture
def good():
    """A result that shows what the paper claims."""
    rows = [row("solver", nmse=[0.0, 0.0], pair_nmse=[0.0, 0.0], pair_r2=[1.0, 1.0])]
    for rank, error in ((1, 4e-4), (2, 3.5e-4), (4, 3e-4), (8, 2.5e-4)):
        metrics = {"nmse": [error] * 2, "pair_nmse": [1.0, 1.000001], "pair_r2": [0.0, 0.0], "order_averaged_bound": [2e-4] * 2}
        rows.append(row(f"no-right-r{rank}", f"No-right r = {rank}", {"rank": rank}, **metrics))
    for config in paired.rows():
        if config.name in RIGHT:
            metrics = {"nmse": [1e-7, 2e-7], "pair_nmse": [1e-7, 2e-7], "pair_r2": [1.0, 1.0], "identity_pair_nmse": [1.0, 1.0]}
            rows.append(row(config.name, config.label, **metrics))
    return result("paired", *rows)


def test_every_experiment_names_a_table_of_the_paper_and_its_rows():
    for name in names():
        experiment = get(name)
        assert experiment.claim
        assert experiment.protocol
        assert "smoke" in experiment.presets
        for key in experiment.tables:
            assert paper_numbers()[key]["label"].startswith("tab:")
    for module, key in ((paired, "paired"), (paired, "right-transport"), (groups, "groups"), (projection, "projection")):
        ours = {config.name for config in module.rows()}
        assert set(paper_numbers()[key]["rows"]) <= ours


def test_paper_numbers_cover_all_tables():
    expected = {"paired", "right-transport", "projection", "groups", "suffix"}
    expected |= {f"mqar-{part}" for part in ("coordinate", "exact", "summary", "parameters")}
    assert set(paper_numbers()) == expected
    assert paper_row(("paired", "right-transport"), "selective")["pair_nmse"] == (5.58e-5, 8.12e-5)
    assert paper_row(("groups",), "learned-g2")["pair_nmse"] == (1.6e-5, None)
    assert paper_row(("paired",), "nothing") == {}
    summary, exact = paper_numbers()["mqar-summary"]["rows"], paper_numbers()["mqar-exact"]["rows"]
    for name, numbers in exact.items():
        assert round(numbers["exact_4096"][0], 3) == pytest.approx(summary[name]["exact_4096"][0], abs=1.1e-3)
    suffix = paper_numbers()["suffix"]["rows"]
    for metric, (difference, _) in suffix["difference"].items():
        assert suffix["zeroed"][metric][0] - suffix["normal"][metric][0] == pytest.approx(difference, abs=1.1e-4)
    with pytest.raises(ValueError, match="no table"):
        paper_row(("nothing",), "oracle")


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


def test_layouts_show_both_sources_and_the_verdict(good):
    from rich.console import Console

    found = lines(paired.EXPERIMENT, good)
    assert [line.source for line in found] == ["ours", "paper"] * 10
    assert found[10].cells[1] == "1.5e-07 ± 7.1e-08"
    assert found[11].cells[1] == "2.44e-07 ± 4.6e-07"
    markdown = as_markdown(paired.EXPERIMENT, good)
    assert "| No-right r = 8 | ours | 0.00025 ± 0 |" in markdown
    assert markdown.count("holds: ") == 10
    assert "tab:paired-transport" in markdown
    latex = as_latex(paired.EXPERIMENT, good)
    assert latex.startswith(r"\begin{tabular}")
    assert r"$\pm$" in latex
    assert r"R $\to$ I" in latex
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(as_text(paired.EXPERIMENT, good))
    assert "holds: sees the order" in console.export_text()
    data = json.loads(json.dumps(as_data(paired.EXPERIMENT, good)))
    assert data["rows"][5]["paper"]["pair_nmse"] == [2.44e-7, 4.61e-7]
    assert data["rows"][5]["holds"]


def test_facts_name_a_spread_and_a_table_only_where_there_is_one(good):
    assert facts(paired.EXPERIMENT, good).startswith("here: preset full, 5 steps, 2 seeds, 1.0 minutes, torch")
    assert "; mean ± sample standard deviation; paper: tab:paired-transport" in facts(paired.EXPERIMENT, good)
    alone = row("split", exact_24=[1.0])._replace(seeds=[0])
    assert "1 seed, 1.0 minutes" in facts(rotation.EXPERIMENT, result("rotation", alone))
    assert facts(rotation.EXPERIMENT, result("rotation", alone)).endswith(f"torch {torch.__version__}")


def test_pictures(good, tmp_path):
    main_evidence(good, tmp_path / "deep" / "paired.png")
    overview(tmp_path / "overview.svg")
    assert (tmp_path / "deep" / "paired.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "overview.svg").read_text()
    good.rows = {"oracle": good.rows["oracle"]}
    with pytest.raises(ValueError, match="lacks no-right"):
        main_evidence(good, tmp_path / "no.png")


def test_checkpoints_keep_tensors_and_meta(tmp_path):
    path = tmp_path / "a" / "unit.safetensors"
    assert store.load_checkpoint(path) is None
    tensors, meta = {"flat": torch.randn(2, 3)}, {"step": 4, "curves": {"nmse": [[0.1, 1e-17]]}}
    store.save_checkpoint(path, tensors, meta)
    loaded, found = store.load_checkpoint(path) or ({}, {})
    assert torch.equal(loaded["flat"], tensors["flat"])
    assert found == meta
    assert [file.name for file in path.parent.iterdir()] == ["unit.safetensors"]
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a checkpoint"):
        store.load_checkpoint(path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    store.write_json(path, {"a": 1})

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        store.write_json(path, {"a": 2})
    assert store.read_json(path) == {"a": 1}
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        store.read_json(path)


def test_results_are_found_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "checkout", lambda: tmp_path / "source")
    with pytest.raises(ValueError, match="shippo run paired"):
        store.find_result("paired")
    shipped = tmp_path / "source" / "results" / "paired.json"
    store.write_json(shipped, {})
    assert store.find_result("paired") == shipped
    store.write_json(tmp_path / "runs" / "paired" / "result.json", {})
    assert store.find_result("paired").parts[0] == "runs"
    with pytest.raises(ValueError, match="--preset smoke"):
        store.find_result("paired", preset="smoke")
    with pytest.raises(ValueError, match="elsewhere"):
        store.find_result("paired", tmp_path / "elsewhere")
    assert store.find_result("paired", shipped) == shipped
