"""Stacked training: the optimiser against torch's, seeds as if alone, interruption without a trace."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shippo_lab.experiments import groups, projection
from shippo_lab.experiments.paired import experiment as paired
from shippo_lab.harness.experiment import Session, TrainConfig
from shippo_lab.harness.stacked import Layout, adamw_step, nmse, r_squared

SHORT: dict[str, Any] = {"steps": 14, "eval_every": 6}


def short_rows():
    base = paired.PairedConfig(batch=16, eval_batches=2, num_seeds=3, **SHORT)
    chosen = [row for row in paired.rows(base) if row.name in ("no-right-r2", "oracle", "learned-random", "selective")]
    found = [pytest.param(paired.train, row, id=row.name) for row in chosen]
    audit = next(row for row in groups.rows(replace(base, audit_examples=32)) if row.name == "learned-g2")
    found.append(pytest.param(groups.train, audit, id=audit.name))
    small = projection.ProjectionConfig(batch=4, eval_batches=1, num_seeds=3, length=16, **SHORT)
    found.append(pytest.param(projection.train, projection.rows(small)[1], id="projection"))
    return found


def test_optimiser_is_torchs_with_each_seed_clipped_alone():
    torch.manual_seed(0)
    start = torch.randn(3, 7)
    ours = TrainConfig(learning_rate=0.01, weight_decay=0.1, clip=0.5)
    state = {"flat": start.clone(), "first": torch.zeros(3, 7), "second": torch.zeros(3, 7)}
    alone = [torch.nn.Parameter(row.clone()) for row in start]
    theirs = [torch.optim.AdamW([p], lr=0.01, weight_decay=0.1) for p in alone]
    for count in range(1, 30):
        grad = torch.randn(3, 7) * torch.tensor([[10.0], [0.01], [1.0]])
        adamw_step(state, grad, count, ours)
        for row, parameter, optimiser in zip(grad, alone, theirs):
            parameter.grad = row.clone()
            torch.nn.utils.clip_grad_norm_([parameter], 0.5)
            optimiser.step()
    torch.testing.assert_close(state["flat"], torch.stack([p.detach() for p in alone]), rtol=1e-5, atol=1e-6)


def test_layout_splits_what_it_joins():
    layout = Layout({"a": (2, 3), "b": (4,)})
    seeds = [{"a": torch.randn(2, 3), "b": torch.randn(4)} for _ in range(3)]
    parts = layout.split(layout.join(seeds))
    assert torch.equal(parts["a"][1], seeds[1]["a"])
    assert torch.equal(parts["b"][2], seeds[2]["b"])
    with pytest.raises(AssertionError):
        layout.join([{"a": torch.zeros(2, 3), "b": torch.zeros(5)}])


def test_scores():
    target = torch.tensor([[[1.0, 0.0], [3.0, 0.0]]])
    assert nmse(torch.zeros_like(target), target).item() == 1.0
    assert nmse(torch.ones(1, 1, 1) * 1e-4, torch.zeros(1, 1, 1)).item() == pytest.approx(1.0)
    # Squared error 10 over centred power 2.
    assert r_squared(torch.zeros_like(target), target).item() == pytest.approx(-4.0)
    assert r_squared(target, target).item() == 1.0


@pytest.mark.parametrize(("train", "row"), short_rows())
def test_a_stack_of_seeds_equals_separate_runs(train, row):
    together = train(row, (0, 1, 2), Session())
    for place, seed in enumerate((0, 1, 2)):
        alone = train(row, (seed,), Session())
        for name, values in together.metrics.items():
            assert alone.metrics[name][0] == pytest.approx(values[place], rel=1e-4, abs=1e-6), (name, seed)


@pytest.mark.parametrize(("train", "row"), short_rows())
def test_an_interrupted_run_ends_with_the_same_numbers(train, row, tmp_path, monkeypatch):
    monkeypatch.setattr("shippo_lab.harness.stacked.SAVE_SECONDS", 0.0)
    whole = train(row, (0, 1), Session())
    saves = 0

    class Interrupted(Session):
        def save(self, tensors, meta):
            nonlocal saves
            super().save(tensors, meta)
            saves += 1
            if saves in (3, 9):
                raise KeyboardInterrupt

    checkpoint = tmp_path / "unit.pt"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(row, (0, 1), Interrupted(checkpoint=checkpoint))
    resumed = train(row, (0, 1), Session(checkpoint=checkpoint))
    assert saves == 9
    assert resumed.metrics == whole.metrics
    assert resumed.curves == whole.curves


def test_evaluations_are_where_they_should_be():
    row = paired.rows(paired.PairedConfig(batch=8, eval_batches=1, num_seeds=1, **SHORT))[1]
    reports = []
    result = paired.train(row, (0,), Session(notify=reports.append))
    assert result.curves["step"] == [6, 12, 14]
    assert result.metrics["nmse"] == result.curves["nmse"][-1]
    assert reports[-1].step == 14
    assert torch.get_num_threads() >= 1
