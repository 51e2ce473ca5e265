"""MQAR: answers against a dictionary, the placement of queries against its law, streams, scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shippo_lab.tasks.plain_mqar import MQAR, POWER, without_repetition
from shippo_lab.tasks.streams import NO_TARGET


@pytest.mark.parametrize(
    "task",
    [
        MQAR(),
        MQAR(length=256, num_pairs=64),
        MQAR(vocab_size=64, length=32, num_pairs=8),
        MQAR(vocab_size=10, length=16, num_pairs=4),
    ],
    ids=lambda task: f"{task.length}-{task.num_pairs}",
)
def test_answers_equal_a_dictionary(task):
    half, pairs = task.vocab_size // 2, task.num_pairs
    recall = task.batch(range(200), "eval")
    assert recall.tokens.shape == recall.target.shape == (200, task.length)
    for tokens, target in zip(recall.tokens.tolist(), recall.target.tolist()):
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < half for key in keys)
        assert all(half <= value < task.vocab_size for value in values)
        stored = dict(zip(keys, values))
        asked = [t for t, answer in enumerate(target) if answer != NO_TARGET]
        assert sorted(tokens[t] for t in asked) == sorted(keys)
        assert all(target[t] == stored[tokens[t]] for t in asked)
        assert all(t >= 2 * pairs and t % 2 == 0 for t in asked)
        rest = [token for t, token in enumerate(tokens) if t >= 2 * pairs and t not in asked]
        assert all(0 <= token < task.vocab_size for token in rest)


def test_every_key_and_value_is_drawn():
    task = MQAR(vocab_size=20, length=8, num_pairs=2)
    tokens = task.batch(range(3000)).tokens
    keys = torch.bincount(tokens[:, [0, 2]].flatten(), minlength=20)
    values = torch.bincount(tokens[:, [1, 3]].flatten(), minlength=20)
    assert keys[1:10].min() > 550
    assert values[10:].min() > 500
    assert keys[10:].sum() == keys[0] == values[:10].sum() == 0
    fill = torch.bincount(MQAR(vocab_size=20, length=64, num_pairs=2).batch(range(500)).tokens[:, 4:].flatten(), minlength=20)
    assert fill.min() > 1000


def test_choices_without_repetition_are_shuffles():
    draws = np.random.default_rng(0).random((6000, 3))
    chosen = without_repetition(draws, 3)
    orders, counts = np.unique(chosen, axis=0, return_counts=True)
    assert len(orders) == 6
    assert abs(counts - 1000).max() < 150


def test_queries_follow_the_power_law():
    """The first key takes place n with probability proportional to n^(POWER - 1); the second likewise among the others."""
    task = MQAR(vocab_size=32, length=20, num_pairs=2)
    recall = task.batch(range(20000))
    tokens, asked = recall.tokens, recall.asked[:, 4:]
    first, second = (((tokens[:, 4:] == tokens[:, [2 * k]]) & asked).int().argmax(1) // 2 for k in (0, 1))
    weight = torch.arange(1, 9, dtype=torch.float64) ** (POWER - 1)
    weight /= weight.sum()
    share = torch.bincount(first, minlength=8).double() / 20000
    assert (share - weight).abs().max() < 0.015
    others = weight[None] * (1 - torch.eye(8)) / (1 - weight[:, None])
    expected = weight @ others
    share = torch.bincount(second, minlength=8).double() / 20000
    assert (share - expected).abs().max() < 0.015
    assert (first != second).all()


def test_a_sequence_depends_on_seed_split_and_index_alone():
    task = MQAR(seed=3)
    whole = task.batch(range(20))
    again = task.batch([12, 5])
    assert torch.equal(again.tokens, whole.tokens[[12, 5]])
    assert torch.equal(again.target, whole.target[[12, 5]])


def test_training_and_evaluation_do_not_meet():
    seen = set()
    for seed in (0, 1):
        for split in ("train", "eval"):
            seen |= {row.numpy().tobytes() for row in MQAR(seed=seed).batch(range(500), split).tokens}
    assert len(seen) == 2000


def test_scores_of_known_answers():
    task = MQAR(vocab_size=32, length=16, num_pairs=4)

    def lookup(known):
        def model(tokens):
            logits = torch.zeros(*tokens.shape, 32)
            for row, line in enumerate(tokens.tolist()):
                stored = dict(list(zip(line[0:8:2], line[1:8:2]))[:known])
                for t, token in enumerate(line):
                    logits[row, t, stored.get(token, 0)] = 1.0
            return logits

        return model

    assert task.evaluate(lookup(4), 30, 8) == 1.0
    assert task.evaluate(lookup(3), 30, 8) == 0.75


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MQAR(length=63), "`length` is 63 with `num_pairs` = 4; expected an even length"),
        (lambda: MQAR(length=14), "at least 4 num_pairs"),
        (lambda: MQAR(num_pairs=0), "`num_pairs` is 0"),
        (lambda: MQAR(vocab_size=8), "`vocab_size` is 8; expected an even number of at least"),
        (lambda: MQAR(seed=-3), "`seed` is -3"),
        (lambda: MQAR().batch([0], "test"), "`split` is 'test'"),
        (lambda: MQAR().evaluate(lambda tokens: torch.zeros(2, 64, 4096), 2), r"expected \(2, 64, 8192\)"),
    ],
)
def test_bad_calls_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_diverged_model_knows_nothing():
    """The largest of NaNs is some class, which would be right by chance."""
    from shippo_lab.tasks import LanguageTask, TextTask, TransportMQAR, WordTask

    def nan(size, *more):
        return lambda tokens: torch.full((*tokens.shape[:2], *more, size), float("nan"))

    assert MQAR(vocab_size=20, length=12, num_pairs=2).evaluate(nan(20), 8) == 0
    assert WordTask(length=4).evaluate(nan(60), 8).prefix == 0
    language = LanguageTask(name="parity", max_length=4)
    assert language.evaluate(nan(language.vocab_size), 8) == 0
    assert TransportMQAR(length=16).evaluate(nan(31, 4), 8).coordinate == 0
    assert math.isnan(TextTask(length=8).evaluate(nan(256), 2).bits_per_token)
