"""Transport-MQAR by depth: rows, a smoke run with its interventions, verdicts that can fail, the figure."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shippo_lab.experiments import get
from shippo_lab.experiments.mqar import depth
from shippo_lab.experiments.mqar.experiment import PAPER
from shippo_lab.experiments.mqar.model import EventEmbedding, build_model
from shippo_lab.harness.experiment import FinishedRow, Result
from shippo_lab.harness.runner import run

NAMES = [f"{model}-{layers}" for layers in (1, 2) for model in ("no-right", "direct-single-exp", "struct-split")]


def test_rows_have_the_options_of_mqar_and_one_or_two_layers():
    rows = {row.name: row for row in get("mqar-depth").rows("paper")}
    assert list(rows) == [*NAMES, "no-right-1-plain", "struct-split-1-plain"]
    for name, row in rows.items():
        assert row.n_layers == int(name.split("-1")[0] == name) + 1
        assert row.num_seeds == (3 if name in NAMES[:3] else 1)
        assert (row.mixer, row.right) == ("shippo", {"n": "none", "d": "dense", "s": "split"}[name[0]])
        assert (row.start, row.bounded, row.right_rate) == ("plain" if name.endswith("plain") else "unit", True, 0.3)
        assert row.expand == (1 if row.right == "dense" else 2)
        same = {"name": "", "label": "", "n_layers": 4, "num_seeds": 3, "right": "none", "expand": 2, "start": "unit"}
        same["right_rate"] = 1.0
        assert dataclasses.replace(row, **same) == dataclasses.replace(PAPER, name="")
    toy = get("mqar-depth").rows("toy")
    assert [row.name for row in toy] == NAMES
    assert all((row.num_seeds, row.num_keys, row.num_active, row.length) == (3, 8, 4, 64) for row in toy)


def test_the_plain_start_has_random_values_in_the_same_channels_and_is_a_function_of_the_seed():
    config = dataclasses.replace(depth.rows(depth.SMOKE, deep_seeds=1, plain=True)[-1], d_model=16)
    tables = []
    for start, seed in (("plain", 0), ("plain", 0), ("plain", 1), ("unit", 0)):
        torch.rand(1)
        embedding = build_model(dataclasses.replace(config, start=start), seed).embedding
        assert isinstance(embedding, EventEmbedding)
        tables.append(embedding.table.weight[-1 - 4 * 31 : -1])
    plain, again, other, unit = tables
    assert torch.equal(plain, again)
    assert not torch.equal(plain, other)
    used, expected = ((table != 0).unflatten(0, (4, 31)).any(1) for table in (plain, unit))
    assert torch.equal(used, expected)
    assert not torch.equal(plain, unit)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Result:
    return run(get("mqar-depth"), "smoke", out=tmp_path_factory.mktemp("depth"), jobs=1)


def test_smoke_run_scores_interventions_at_one_layer(smoke, tmp_path):
    assert list(smoke.rows) == NAMES
    for name, row in smoke.rows.items():
        assert all(0 <= row.mean(f"exact_{length}") <= 1 for length in (128, 512))
        for prefix in ("zeroed", "identity"):
            assert (f"{prefix}_exact_512" in row.metrics) == (name == "struct-split-1")
            assert (f"{prefix}_exact_512_by_operations" in row.curves) == (name == "struct-split-1")
    figure = get("mqar-depth").figure
    assert figure is not None
    figure(smoke, tmp_path / "depth.png")
    assert (tmp_path / "depth.png").stat().st_size > 10_000


def verdict(name: str, layers: int = 1, **metrics: list[float]) -> bool | None:
    """The verdict on a row with one length and two seeds, where the predictor has 0.02."""
    metrics = {f"{key}_128": numbers for key, numbers in {"untouched_exact": [0.02, 0.02], **metrics}.items()}
    row = FinishedRow(name, name, {"n_layers": layers, "eval_lengths": [128]}, [0, 1], metrics, {}, {}, 1.0)
    found = depth.judge(Result("mqar-depth", "paper", {name: row}, {}, 1.0)).get(name)
    return None if found is None else found.holds


def test_verdicts_can_fail():
    assert verdict("no-right-1", exact=[0.024, 0.01])
    assert not verdict("no-right-1", exact=[0.026, 0.01])
    assert verdict("direct-single-exp-1", exact=[0.021, 0.03])
    assert not verdict("direct-single-exp-1", exact=[0.019, 0.03])
    assert verdict("struct-split-1", exact=[0.03, 0.03], zeroed_exact=[0.02, 0.01])
    assert not verdict("struct-split-1", exact=[0.03, 0.03], zeroed_exact=[0.02, 0.03])
    assert not verdict("struct-split-1", exact=[0.03, 0.02], zeroed_exact=[0.02, 0.01])
    assert verdict("struct-split-2", layers=2, exact=[0.0, 0.0]) is None
