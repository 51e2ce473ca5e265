"""State tracking: rows train and score, the group in what was learned is found, verdicts can fail."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from shippo_lab.experiments.tracking import languages, learned, plain_mqar, words
from shippo_lab.experiments.tracking.curriculum import drawn_lengths, word_loss, word_stages
from shippo_lab.harness.experiment import FinishedRow, Result, Session
from shippo_lab.tasks.words import WordTask, named_group


def test_a_representation_is_recognised_and_named():
    group = named_group("A5")
    three = group.irreps[1]
    actions = np.zeros((60, 2, 4, 4))
    actions[:, 0, :3, :3], actions[:, 0, 3, 3] = three, 1.0
    actions[:, 1] = np.linalg.qr(np.random.default_rng(0).standard_normal((60, 4, 4)))[0]
    first, second = learned.distance(actions, group)
    assert first < 1e-6
    assert 1.0 < second < 2.0
    counts = learned.multiplicities(learned.class_traces(actions, group), group)
    assert counts[0].round(6).tolist() == [1, 1, 0, 0, 0]
    assert learned.summary({"distance": [first, second]}) == {"distance": first, "representations": 1.0}
    assert abs(counts[1] - counts[1].round()).max() > 0.01


def test_classes_are_closed_and_characters_are_orthogonal():
    for name in ("S3", "A4xZ5", "S5"):
        group = named_group(name)
        sizes = np.array([len(own) for own in group.classes])
        assert sizes.sum() == group.order
        for own in group.classes:
            moved = group.table[group.table[:, own], group.inverses[:, None]]
            assert set(moved.ravel().tolist()) == set(own.tolist())
        products = group.characters * sizes / group.order @ group.characters.T
        assert abs(products - np.diag(np.diag(products))).max() < 1e-6


@pytest.mark.parametrize("name", ["orthogonal", "none", "lstm", "s5-8"])
def test_rows_of_words_train_and_score(name):
    config = next(row for row in words.rows(words.SMOKE) if row.name == name)
    config = dataclasses.replace(config, train_length=4, layer=config.layer | {"d_state": 4})
    result = words.train(config, (1,), Session())
    assert {"prefix_16", "prefix_256", "last_256"} <= set(result.metrics)
    assert ("identity" in result.metrics) == (name in ("orthogonal", "s5-8"))
    assert ("distance" in result.metrics) == (name == "orthogonal")
    assert len(result.notes["positions"]) == len(result.curves["by_position"])
    assert all(0 <= numbers[0] <= 1 for key, numbers in result.metrics.items() if key.startswith("prefix"))


def test_a_step_of_words_has_the_same_tokens_at_every_length():
    task = WordTask(group="S3", length=16, seed=3)
    loss_at = word_loss(torch.nn.Embedding(6, 6), task, 40, tokens=96)
    counts = [loss_at(step)[1] for step in range(40)]
    assert all(80 < count <= 96 for count in counts)
    assert set(drawn_lengths(word_stages(16), 3, 1000)[700:]) == set(range(8, 17))


@pytest.mark.parametrize("pairs", [False, True])
def test_the_curriculum_ends_whole_and_begins_with_pairs_where_asked(pairs):
    stages = word_stages(40, pairs)
    ends = [until for until, _, _ in stages]
    assert ends == sorted(set(ends))
    assert ends[-1] == 1.0
    assert max(drawn_lengths(stages, 0, 1000)[:200]) == (2 if pairs else 3)
    assert max(longest for _, _, longest in stages) == 40


def test_languages_ask_at_every_token_in_training():
    config = dataclasses.replace(languages.SMOKE, layer={"d_state": 4, "d_model": 16}, tokens=40)
    trainee = languages.language(config, 0, "parity", 10)
    seen = []
    head = trainee.model.get_submodule("head")
    head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[:-1].numel()))
    for step in (0, 9):
        _, tokens = trainee.loss_at(step)
        assert seen.pop() == tokens <= 40
    assert set(trainee.scores["end"]()) == {"parity", "parity_40"}


def test_languages_train_and_score():
    config = dataclasses.replace(languages.rows(languages.SMOKE)[0], layer={"d_state": 4, "d_model": 16})
    result = languages.train(config, (0,), Session())
    assert result.metrics["average"][0] == pytest.approx(np.mean([result.metrics[name][0] for name in languages.LANGUAGES]))


def test_plain_recall_trains_and_scores():
    config = dataclasses.replace(plain_mqar.rows(plain_mqar.SMOKE)[0], layer={"d_state": 4, "d_model": 16})
    result = plain_mqar.train(config, (0,), Session())
    assert set(result.metrics) == {column.key for column in plain_mqar.EXPERIMENT.columns}
    assert all(numbers[0] < 0.2 for numbers in result.metrics.values())


def test_verdicts_can_fail():
    def judged(name: str, layer: dict[str, str], **metrics: list[float]) -> bool:
        row = FinishedRow(name, name, {"layer": layer}, [0, 1], metrics, {}, {}, 1.0)
        return words.judge(Result("words", "full", {name: row}, {}, 1.0))[name].holds

    assert judged("s5", {}, prefix_16=[1.0, 0.99], prefix_64=[1.0, 0.97], prefix_256=[0.95, 0.9])
    assert not judged("s5", {}, prefix_16=[1.0, 0.98], prefix_64=[1.0, 0.97], prefix_256=[0.95, 0.9])
    assert judged("none", {"right": "none"}, prefix_256=[0.1, 0.1])
    assert not judged("none", {"right": "none"}, prefix_256=[0.1, 0.6])
