"""Transport-MQAR as an experiment: models, a training loop that survives kills, interventions, tables and figures."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from shippo_lab.experiments import get, suffix
from shippo_lab.experiments.mqar import experiment as mqar
from shippo_lab.experiments.mqar.ceilings import ceilings
from shippo_lab.experiments.mqar.model import EventEmbedding, MqarConfig, build_model
from shippo_lab.experiments.mqar.scoring import query_loss, train_recall
from shippo_lab.harness import training
from shippo_lab.harness.experiment import Session, paper_numbers
from shippo_lab.harness.runner import run
from shippo_lab.harness.store import checkout
from shippo_lab.harness.tables import as_data, as_markdown
from shippo_lab.tasks.mqar import MODULUS, OP, OPERATION_BINS, WIDTH, TransportMQAR
from shippo_ssm.layers import identity_right
from shippo_ssm.models import count_parameters
from shippo_ssm.models.checkpoint import read_checkpoint


def tiny(name: str, **changes) -> MqarConfig:
    row = next(row for row in mqar.rows(mqar.SMOKE) if row.name == name)
    small = {"d_model": 16, "d_state": 8, "length": 24, "batch": 3, "eval_lengths": (16, 24), "eval_examples": 3}
    return dataclasses.replace(row, **{**small, "curve_examples": 2, "eval_tokens": 48, "eval_every": 2, "steps": 5, **changes})


class Killed(Exception):
    pass


def test_the_protocol_is_the_papers():
    rows = {row.name: row for row in get("mqar").rows("paper")}
    for row in rows.values():
        assert (row.learning_rate, row.weight_decay, row.clip, row.batch, row.length) == (5e-4, 0.01, 1.0, 16, 512)
        assert (row.eval_every, row.eval_examples, row.eval_lengths) == (250, 640, (128, 512, 2048, 4096))
        assert (row.num_keys, row.num_active, row.library, row.num_seeds) == (256, 32, "nonreducible", 3)
    assert {name: row.steps for name, row in rows.items()} == dict.fromkeys(mqar.MODELS, 5000) | {"untouched": 0}
    assert [*get("mqar").presets] == [*get("suffix").presets] == ["paper", "smoke"]
    assert set(paper_numbers()["mqar-exact"].rows) == set(mqar.MODELS)


@pytest.mark.parametrize("name", mqar.MODELS)
def test_parameter_counts_are_the_papers(name):
    """The paper gives totals, in millions; ours are counted on models without storage."""
    row = mqar.model_row(MqarConfig(), name)
    with torch.device("meta"):
        # The embedding's row of zeros, for what an event does not have, is never trained.
        ours = (count_parameters(build_model(row, 0)) - row.d_model) / 1e6
    paper = paper_numbers()["mqar-parameters"].rows[name]["parameters"][0] / 1e6
    assert abs(ours / paper - 1) <= (0.12 if name == "direct-single-exp" else 0.05), ours


def test_embedding_is_the_sum_of_what_an_event_has():
    task = TransportMQAR(length=40)
    embedding = EventEmbedding(task, 8)
    tokens = task.batch([0]).tokens
    rows = embedding.table.weight
    out = embedding(tokens)
    assert out.shape == (1, 40, 8)
    for t in range(40):
        kind, key, operation, *value = tokens[0, t].tolist()
        expected = rows[kind]
        if kind == OP:
            expected = expected + rows[3 + 256 + operation]
        else:
            expected = expected + rows[3 + key]
        if kind == 0:
            expected = expected + sum(rows[3 + 256 + 13 + 31 * j + v] for j, v in enumerate(value))
        torch.testing.assert_close(out[0, t], expected)
    assert len(rows) == 3 + 256 + 13 + 4 * 31 + 1
    assert rows[-1].abs().max() == 0


@torch.no_grad()
def test_the_start_keeps_keys_from_values_and_answers_with_what_it_is_shown():
    config = MqarConfig(mixer="gru", n_layers=1)
    model, task = build_model(config, 10), config.task(10)
    assert isinstance(model.embedding, EventEmbedding)
    others, values = model.embedding.table.weight[:-1].split([3 + task.num_keys + task.num_operations, WIDTH * MODULUS])
    assert not (others @ values.T).any()
    shown = torch.randint(MODULUS, (64, WIDTH), generator=torch.Generator().manual_seed(0))
    stored = values[shown + MODULUS * torch.arange(WIDTH)].sum(1)
    assert torch.equal(model.head(stored).argmax(-1), shown)
    # What a transvection leaves in a column has a square with the phase of the sum, for every character: cos, sin in turn.
    groups = stored[:, : config.d_model // 2].unflatten(-1, (-1, 2, WIDTH))
    added = torch.view_as_complex((groups[..., 0] + groups[..., 1]).contiguous())
    targets = values[(shown[:, 0] + shown[:, 1]) % MODULUS, : config.d_model // 2].unflatten(-1, (-1, 2, WIDTH))[..., 0]
    phase = added**2 / torch.view_as_complex(targets.contiguous())
    assert ((phase.real > 0.999 * phase.abs()) | (added.abs() < 1e-3)).all()


@pytest.mark.parametrize("name", mqar.MODELS)
def test_every_model_learns_and_answers_causally(name):
    """A few large steps lower the loss on their batch, and a later event does not change an earlier answer."""
    config = tiny(name)
    model = build_model(config, 0)
    events = config.task(0).batch(range(8))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = query_loss(model, events)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    model.eval()
    other = events.tokens.clone()
    other[:, 20:] = config.task(1).batch(range(8)).tokens[:, 20:]
    with torch.no_grad():
        torch.testing.assert_close(model(events.tokens)[:, :20], model(other)[:, :20])
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["direct-single-exp", "struct-split"])
def test_a_memory_of_the_full_size_does_not_overflow_before_it_has_learned(name):
    """Right actions that stretch by a third per event would end float32 within these 512."""
    row = next(row for row in get("mqar").rows("paper") if row.name == name)
    model = build_model(row, 10)
    with torch.no_grad():
        loss = query_loss(model, row.task(10).batch(range(1)))
    assert abs(loss - math.log(MODULUS)) < 0.1


def test_the_loss_is_the_mean_over_queries_and_coordinates():
    config = tiny("no-right")
    model = build_model(config, 0)
    events = config.task(0).batch(range(3))
    logits = model(events.tokens).log_softmax(-1)
    total = [
        -logits[b, t, j, events.target[b, t, j]] for b in range(3) for t in range(24) if events.asked[b, t] for j in range(4)
    ]
    torch.testing.assert_close(query_loss(model, events), torch.stack(total).mean())


@pytest.mark.parametrize("name", ["struct-split", "gru"])
def test_a_killed_run_ends_with_the_same_numbers(name, tmp_path, monkeypatch):
    """Killed after every single checkpoint in turn, the run goes on and gives what an undisturbed one gives."""
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    config = tiny(name)
    whole = mqar.train(config, (1,), Session())

    kills = 0

    class Mortal(Session):
        def save(self, tensors, meta):
            super().save(tensors, meta)
            raise Killed

    for _ in range(30):
        session = Mortal(checkpoint=tmp_path / "checkpoints" / "unit.pt")
        try:
            again = mqar.train(config, (1,), session)
            break
        except Killed:
            kills += 1
    else:
        pytest.fail("the run never ended")
    assert kills == 5 + 2  # every step and every length
    assert again.metrics == whole.metrics
    assert again.curves == whole.curves


def test_curves_and_profiles(tmp_path):
    config = tiny("no-right", eval_lengths=(48,), eval_examples=20)
    result = mqar.train(config, (0,), Session())
    assert result.curves["step"] == [2, 4, 5]
    for key in ("loss", "coordinate", "exact"):
        assert [len(numbers) for numbers in result.curves[key]] == [1, 1, 1]
    profile = result.curves["untouched_exact_48_by_operations"]
    assert len(profile) == len(OPERATION_BINS)
    # Right after a binding everything is untouched; what is known falls with every operation, and old bins are empty here.
    assert profile[0] == [1.0]
    assert 1 > profile[1][0] > profile[4][0]
    assert profile[-1] == [None]
    assert result.notes["tokens_per_second"] > 0


def test_ceilings_rise_with_what_is_known():
    task = TransportMQAR(length=128)
    found = ceilings(task, 40)
    for accuracy in ("coordinate", "exact"):
        within = [found[f"{name}_{accuracy}_128"] for name in ("untouched", "within_1", "within_2", "within_3")]
        assert within == sorted(within)
        assert within[0] < within[1]
        assert found[f"untouched_{accuracy}_128"] < found[f"unmixed_{accuracy}_128"]
    blank = task.evaluate(lambda tokens: torch.zeros(*tokens.shape[:-1], 4, 31), 40)
    assert found["untouched_exact_128"] == pytest.approx(blank.untouched_exact)
    assert found["untouched_coordinate_128"] == pytest.approx(blank.untouched_coordinate)
    # Fewer active keys are bound more recently, and more of a binding is untouched.
    fewer, more = (ceilings(TransportMQAR(length=128, num_active=keys), 40) for keys in (20, 40))
    assert fewer["untouched_exact_128"] > more["untouched_exact_128"]


@pytest.fixture(scope="module")
def smoke_runs(tmp_path_factory):
    """`mqar` and `suffix` by the runner, in a folder of their own."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trained = run(get("mqar"), "smoke", jobs=1, only=("struct-split", "no-right", "untouched"))
        counterfactual = run(get("suffix"), "smoke", jobs=1)
        yield folder, trained, counterfactual


def test_smoke_run_has_rows_tables_and_a_figure(smoke_runs, tmp_path):
    _, trained, _ = smoke_runs
    assert set(trained.rows) == {"struct-split", "no-right", "untouched"}
    for name, row in trained.rows.items():
        assert all(0 <= row.mean(f"{key}_{length}") <= 1 for key in ("coordinate", "exact") for length in (128, 512))
        if name != "untouched":
            reference = trained.rows["untouched"]
            assert row.metrics["untouched_exact_128"] == reference.metrics["exact_128"]
    data = as_data(get("mqar"), trained)
    assert data["rows"][0]["paper"]["exact_4096"]
    assert "StructGen-Split" in as_markdown(get("mqar"), trained)
    figure = get("mqar").figure
    assert figure is not None
    figure(trained, tmp_path / "mqar.png")
    assert (tmp_path / "mqar.png").stat().st_size > 10_000


def test_suffix_scores_the_weights_that_were_trained(smoke_runs):
    folder, trained, counterfactual = smoke_runs
    assert set(counterfactual.rows) == {"normal", "zeroed", "identity"}
    assert counterfactual.rows["normal"].metrics["exact_512"] == trained.rows["struct-split"].metrics["exact_512"]
    config, notes = read_checkpoint(folder / "runs" / "mqar-smoke" / "weights" / "struct-split.s0")
    assert (config.right, notes["steps"]) == ("split", 6)
    # Trained here and now, the same model comes out.
    row = next(row for row in mqar.rows(mqar.SMOKE) if row.name == "struct-split")
    fresh = build_model(row, 0)
    train_recall(fresh, row, 0, Session())
    loaded = suffix.trained_model(suffix.rows("smoke")[0], 0).state_dict()
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, loaded[name])


def test_interventions_change_the_answers():
    """Right actions far from the identity: a zeroed suffix and R -> I give other logits, and not the same ones."""
    config = tiny("struct-split")
    model = build_model(config, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "right_proj" in name:
                parameter.normal_(std=0.2)
    tokens = config.task(0).batch(range(2)).tokens
    answers = {}
    with torch.no_grad():
        for name, (_, context) in suffix.INTERVENTIONS.items():
            with context(model):
                answers[name] = model(tokens)
        with identity_right(model):
            assert torch.equal(model(tokens), answers["identity"])
        assert torch.equal(model(tokens), answers["normal"])
    assert (answers["normal"] - answers["zeroed"]).abs().max() > 1e-4
    assert (answers["normal"] - answers["identity"]).abs().max() > 1e-4
    assert (answers["zeroed"] - answers["identity"]).abs().max() > 1e-6


def test_suffix_without_weights_names_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(suffix.rows("paper")[0], d_model=16, n_layers=1)
    with pytest.raises(ValueError, match="shippo run mqar --preset paper --row struct-split"):
        suffix.train(config, (0,), Session())


def committed(name):
    root = checkout()
    assert root is not None
    return json.loads((root / "results" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["mqar", "suffix"])
def test_committed_results_are_those_of_the_protocol(name):
    content = committed(name)
    rows = {row.name: row for row in get(name).rows(content["preset"])}
    assert [row["name"] for row in content["rows"]] == list(rows)
    for row in content["rows"]:
        config = rows[row["name"]]
        assert row["config"]["steps"] == config.steps
        assert row["config"]["eval_examples"] == 640
        assert row["config"]["eval_lengths"] == [128, 512, 2048, 4096]
        assert all(0 <= number <= 1 for numbers in row["metrics"].values() for number in numbers)


def test_the_committed_counterfactual_is_of_the_committed_model():
    trained = next(row["metrics"] for row in committed("mqar")["rows"] if row["name"] == suffix.ROW)
    normal = next(row["metrics"] for row in committed("suffix")["rows"] if row["name"] == "normal")
    for name, numbers in trained.items():
        # Another process may round a logit otherwise: a tie may fall the other way, no more.
        assert normal[name] == pytest.approx(numbers, abs=2e-5), name
