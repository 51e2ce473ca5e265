"""Transport-MQAR: targets against a loop over dictionaries, frequencies, streams, metadata, scores."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from shippo_lab.tasks.mqar import (
    BIND,
    LIBRARIES,
    MODULUS,
    OP,
    OPERATION_BINS,
    QUERY,
    TransportMQAR,
    inverse_library,
    operation_library,
)
from shippo_lab.tasks.streams import NO_TARGET


def replay(events, row: int, library: list[list[list[int]]]):
    """One example, event by event: every OP multiplies every stored value. Yields what each QUERY should hold."""
    stored: dict[int, list[int]] = {}
    bound: dict[int, list[int]] = {}
    age: dict[int, int] = {}
    touched: dict[int, set[int]] = {}
    kinds, keys, operations = (part[row].tolist() for part in (events.kind, events.key, events.operation))
    values = events.value[row].tolist()
    for t, kind in enumerate(kinds):
        if kind == BIND:
            stored[keys[t]], bound[keys[t]], age[keys[t]], touched[keys[t]] = values[t], values[t], 0, set()
        elif kind == OP:
            matrix = library[operations[t]]
            columns = list(zip(*matrix))
            changed = {j for j, column in enumerate(columns) if any(entry != (i == j) for i, entry in enumerate(column))}
            for key, value in stored.items():
                stored[key] = [sum(v * entry for v, entry in zip(value, column)) % 31 for column in columns]
                age[key] += 1
                touched[key] |= changed
        else:
            yield t, stored[keys[t]], age[keys[t]], [j not in touched[keys[t]] for j in range(4)], bound[keys[t]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_targets_equal_an_independent_recomputation(library):
    """1,000 examples of each library, with few keys so that rebinding, old bindings and many operations all occur."""
    task = TransportMQAR(library=library, length=40, num_active=5, seed=3)
    matrices = operation_library(library).tolist()
    events = task.batch(range(1000), "eval")
    num_queries = 0
    for row in range(1000):
        asked = torch.zeros(task.length, dtype=torch.bool)
        for t, target, age, untouched, bound in replay(events, row, matrices):
            asked[t] = True
            num_queries += 1
            assert events.target[row, t].tolist() == target
            assert events.operations_since[row, t] == age
            assert events.untouched[row, t].tolist() == untouched
            assert all(x == y for x, y, same in zip(target, bound, untouched) if same)
        assert torch.equal(asked, events.asked[row])
    assert num_queries > 9000
    assert (events.unmixed >= events.untouched).all()
    assert (events.target[~events.asked] == NO_TARGET).all()
    assert (events.operations_since[~events.asked] == -1).all()


def test_targets_at_the_size_of_the_paper():
    events = TransportMQAR(length=1024).batch(range(4), "train")
    matrices = operation_library("nonreducible").tolist()
    for row in range(4):
        for t, target, *_ in replay(events, row, matrices):
            assert events.target[row, t].tolist() == target


def test_event_frequencies_are_within_sampling_error():
    task = TransportMQAR()
    events = task.batch(range(200))
    kinds = events.kind[:, 1:]
    for kind, probability in ((BIND, 0.22), (OP, 0.50), (QUERY, 0.28)):
        error = (probability * (1 - probability) / kinds.numel()) ** 0.5
        assert abs(float((kinds == kind).double().mean()) - probability) < 4 * error
    assert (events.kind[:, 0] == BIND).all()

    def uniform(counts: torch.Tensor) -> bool:
        """A chi-square statistic within five standard deviations of its mean."""
        expected = counts.sum() / len(counts)
        free = len(counts) - 1
        return abs(float(((counts - expected) ** 2 / expected).sum()) - free) < 5 * (2 * free) ** 0.5

    assert uniform(torch.bincount(events.operation[events.kind == OP], minlength=13).double())
    assert uniform(torch.bincount(events.value[events.kind == BIND].flatten(), minlength=31).double())
    # 32 of the 256 keys in every example, all of them equally often.
    active = torch.zeros(200, 256)
    active.scatter_(1, torch.where(events.key < 256, events.key, events.key[:, :1]), 1.0)
    assert active.sum(1).max() == 32
    assert abs(float(active.sum(0).mean()) - 25) < 1
    assert active.sum(0).min() > 5


def test_a_query_asks_any_bound_key_with_equal_chance():
    """With 4 active keys, all bound after a while, each key of an example is asked a quarter of the time."""
    task = TransportMQAR(length=400, num_active=4)
    events = task.batch(range(100))
    late = events.asked.clone()
    late[:, :100] = False
    shares = []
    for row in range(100):
        keys = events.key[row, late[row]]
        shares += [(keys == key).double().mean().item() for key in keys.unique()]
    assert len(shares) == 400
    # A share is a mean of about 84 draws of probability 1/4.
    assert abs(np.mean(shares) - 0.25) < 1e-6
    assert abs(np.std(shares) - (0.25 * 0.75 / 84) ** 0.5) < 0.01


def test_operations_are_invertible():
    for library in LIBRARIES:
        operations = operation_library(library)
        assert operations.shape == (13, 4, 4)
        assert (operations @ inverse_library(library) % MODULUS == np.eye(4)).all()


def test_the_operations_generate_all_matrices():
    """I + E_ij of every pair: with the identity they span E_ij, and E_ij E_ji = E_ii, over every field."""
    elementary = operation_library("nonreducible")[:12] - np.eye(4, dtype=np.int64)
    assert (elementary.sum((1, 2)) == 1).all()
    assert (elementary.sum(0) == 1 - np.eye(4)).all()


def test_quarter_turns_are_real_rotations():
    operations = operation_library("rotation")
    real = np.where(operations > 15, operations - 31, operations)
    assert (real @ real.swapaxes(1, 2) == np.eye(4)).all()
    assert (np.linalg.det(real).round() == 1).all()
    # Four quarter turns are one turn, two are not; the last operation is the identity.
    squares = real @ real
    assert (squares @ squares == np.eye(4)).all()
    assert [(square == np.eye(4)).all() for square in squares] == [False] * 12 + [True]


def test_an_example_depends_on_seed_split_and_index_alone():
    task = TransportMQAR(length=64, seed=5)
    whole = task.batch(range(8))
    for part, again in zip(whole, task.batch([6, 2])):
        assert torch.equal(part[[6, 2]], again)
    longer = dataclasses.replace(task, length=200).batch(range(8))
    for part, more in zip(whole, longer):
        assert torch.equal(part, more[:, :64])
    assert not torch.equal(whole.tokens, dataclasses.replace(task, seed=6).batch(range(8)).tokens)


def test_training_and_evaluation_do_not_meet():
    """No example stands in both splits, or under two indices, or under two seeds."""
    seen = set()
    for seed in (0, 1):
        task = TransportMQAR(length=32, seed=seed)
        for split in ("train", "eval"):
            tokens = task.batch(range(1500), split).tokens
            seen |= {row.numpy().tobytes() for row in tokens}
    assert len(seen) == 6000


def test_without_rebinding_every_key_is_bound_once():
    events = TransportMQAR(library="rotation", length=60, num_active=3, rebind=False).batch(range(200))
    bindings = events.kind == BIND
    assert bindings.sum(1).max() == 3
    for row in range(200):
        keys = events.key[row, bindings[row]]
        assert len(keys.unique()) == len(keys)
    # After the last binding operations and queries keep their proportion, 0.50 to 0.28.
    rest = events.kind[:, 30:]
    share = float((rest == OP).sum() / ((rest == OP) | (rest == QUERY)).sum())
    assert abs(share - 0.50 / 0.78) < 0.03


def test_unmixed_coordinates_are_multiples_of_what_was_bound():
    """Among transvections and one scaling, a coordinate that is touched and unmixed was scaled."""
    task = TransportMQAR(length=40, num_active=3)
    events, matrices = task.batch(range(300)), task.operations.tolist()
    powers, seen = {pow(3, k, MODULUS) for k in range(MODULUS)}, 0
    for row in range(300):
        for t, target, _, untouched, bound in replay(events, row, matrices):
            for j in range(4):
                if events.unmixed[row, t, j] and not untouched[j]:
                    assert j == 0
                    assert any(target[j] == bound[j] * power % MODULUS for power in powers)
                    seen += 1
    assert seen > 50


def test_the_untouched_predictor_scores_where_the_no_right_row_of_the_paper_lies():
    for length, exact, coordinate in ((128, 0.064, 0.23), (512, 0.029, 0.13)):
        scores = TransportMQAR(length=length).evaluate(lambda tokens: torch.zeros(*tokens.shape[:2], 4, 31), num_examples=320)
        assert abs(scores.untouched_exact - exact) < 0.006
        assert abs(scores.untouched_coordinate - coordinate) < 0.01


def test_scores_of_known_answers():
    """A model that knows all answers, one that is off by one in the last coordinate, and one that knows fresh bindings only."""
    task = TransportMQAR(length=48, num_active=4)

    def answering(change):
        start = 0

        def model(tokens):
            nonlocal start
            events = task.batch(range(start, start + len(tokens)), "eval")
            assert torch.equal(events.tokens, tokens)
            start += len(tokens)
            answer = change(events.target.clamp_min(0), events)
            return torch.nn.functional.one_hot(answer, MODULUS).float()

        return model

    def last_wrong(target, events):
        return torch.cat([target[..., :3], (target[..., 3:] + 1) % MODULUS], -1)

    def fresh_only(target, events):
        return torch.where((events.operations_since == 0).unsqueeze(-1), target, (target + 1) % MODULUS)

    perfect = task.evaluate(answering(lambda target, events: target), 50, 16)
    assert (perfect.coordinate, perfect.exact) == (1.0, 1.0)
    assert sum(row["num_queries"] for row in perfect.bins) == perfect.num_queries
    assert [row["from_operations"] for row in perfect.bins] == list(OPERATION_BINS[: len(perfect.bins)])
    wrong = task.evaluate(answering(last_wrong), 50, 16)
    assert (wrong.coordinate, wrong.exact) == (pytest.approx(0.75), 0.0)
    fresh = task.evaluate(answering(fresh_only), 50, 16)
    assert fresh.bins[0]["exact"] == 1.0
    assert all(row["exact"] == 0.0 for row in fresh.bins[1:])
    assert fresh.exact == pytest.approx(fresh.bins[0]["num_queries"] / fresh.num_queries)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"library": "shears"}, "`library` is 'shears'; expected one of 'nonreducible'"),
        ({"length": 0}, "`length` is 0"),
        ({"num_active": 300}, "`num_active` is 300; expected 1 to num_keys = 256"),
        ({"p_op": 0.6}, "a sum of 1"),
        ({"p_op": 0.78, "p_query": 0.0}, "p_query > 0"),
        ({"seed": -1}, "`seed` is -1"),
    ],
)
def test_bad_tasks_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TransportMQAR(**change)


def test_bad_calls_are_refused():
    task = TransportMQAR(length=8)
    with pytest.raises(ValueError, match="`split` is 'test'"):
        task.batch([0], "test")
    with pytest.raises(ValueError, match=r"logits of shape \(2, 8, 31\); expected \(2, 8, 4, 31\)"):
        task.evaluate(lambda tokens: torch.zeros(*tokens.shape[:2], 31), 2)
