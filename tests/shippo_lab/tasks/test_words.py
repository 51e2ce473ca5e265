"""Group words: products against permutations, representations against their laws, streams, scores, an exact memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from shippo_lab.tasks.streams import Sequences, philox, uniform
from shippo_lab.tasks.words import GROUPS, Group, WordTask, named_group
from shippo_ssm.collapse import collapse
from shippo_ssm.scan import transport_scan

ORDERS = {"A5": 60, "S5": 120, "S4": 24, "S3": 6, "Z60": 60, "A4xZ5": 60}


def quaternions() -> Group:
    """The eight unit quaternions, on themselves: their faithful representation is of quaternionic type."""
    return Group.generate("Q8", [(1, 2, 3, 0, 7, 4, 5, 6), (4, 5, 6, 7, 2, 3, 0, 1)])


def test_philox_gives_the_published_words():
    """Known answers of Random123 for philox4x32-10."""
    zeros, ones = np.zeros(1, dtype=np.uint64), np.full(1, 0xFFFFFFFF, dtype=np.uint64)
    assert philox((zeros,) * 4, 0)[:, 0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((ones,) * 4, 2**64 - 1)[:, 0].tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_uniform_numbers_are_uniform_and_belong_to_their_counter():
    draws = uniform(3, 1, range(2000), 50)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, 20, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 50
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 0.1
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.1
    assert np.array_equal(uniform(3, 1, [1999, 2**40], 7)[0], draws[1999, :7])
    for other in (uniform(4, 1, range(3), 50), uniform(3, 0, range(3), 50), uniform(3, 1, range(2**32, 2**32 + 3), 50)):
        assert not np.isin(other, draws[:3]).any()


@pytest.mark.parametrize("name", GROUPS)
def test_tables_are_products_of_permutations(name):
    group = named_group(name)
    assert group.order == ORDERS[name]
    images = group.permutations.tolist()
    place = {tuple(image): number for number, image in enumerate(images)}
    rng = np.random.default_rng(0)
    for a, b in rng.integers(0, group.order, (500, 2)).tolist():
        assert group.table[a, b] == place[tuple(images[b][point] for point in images[a])]
    everything = np.arange(group.order)
    assert (group.table[0] == everything).all()
    assert (group.table[everything, group.inverses] == 0).all()
    assert (group.table == group.table.T).all() == (name == "Z60")


def test_elements_are_the_groups_they_are_called():
    def sign(image) -> int:
        return (-1) ** sum(a > b for a, b in itertools.combinations(image, 2))

    assert {tuple(image) for image in named_group("S5").permutations} == set(itertools.permutations(range(5)))
    even = {image for image in itertools.permutations(range(5)) if sign(image) == 1}
    assert {tuple(image) for image in named_group("A5").permutations} == even
    # Z60 has an element of order 60, A4 x Z5 has none above 15.
    for name, largest in (("Z60", 60), ("A4xZ5", 15)):
        group = named_group(name)
        assert max(group.generated_by([g]) for g in range(group.order)) == largest


@pytest.mark.parametrize("group", [*map(named_group, GROUPS), quaternions()], ids=lambda group: group.name)
def test_irreducible_representations(group):
    """Homomorphisms into O(d), irreducible by the criterion of this library, inequivalent, and complete."""
    table = group.table
    characters = []
    for irrep in group.irreps:
        width = irrep.shape[-1]
        assert np.abs(irrep[:, None] @ irrep[None] - irrep[table]).max() < 1e-9
        assert np.abs(irrep @ irrep.swapaxes(1, 2) - np.eye(width)).max() < 1e-9
        assert collapse(torch.from_numpy(irrep)).irreducible
        characters.append(np.trace(irrep, axis1=1, axis2=2))
    overlap = np.array(characters) @ np.array(characters).T / group.order
    assert np.abs(overlap - np.diag(np.diag(overlap))).max() < 1e-9
    assert set(np.diag(overlap).round(9)) <= {1.0, 2.0, 4.0}
    assert (np.array(characters)[:, 0] ** 2 / np.diag(overlap)).sum() == pytest.approx(group.order)


def test_dimensions_of_irreducible_representations():
    sizes = {name: sorted(irrep.shape[-1] for irrep in named_group(name).irreps) for name in GROUPS}
    assert sizes["A5"] == [1, 3, 3, 4, 5]
    assert sizes["S5"] == [1, 1, 4, 4, 5, 5, 6]
    assert sizes["S4"] == [1, 1, 2, 3, 3]
    assert sizes["S3"] == [1, 1, 2]
    assert sizes["Z60"] == [1, 1] + [2] * 29
    assert sizes["A4xZ5"] == [1] + [2] * 7 + [3, 6, 6]
    assert sorted(irrep.shape[-1] for irrep in quaternions().irreps) == [1, 1, 1, 1, 4]


@pytest.mark.parametrize("name", GROUPS)
def test_targets_are_products_of_permutations(name):
    task = WordTask(group=name, length=12, seed=2)
    images = task.structure.permutations.tolist()
    words = task.batch(range(50), "eval")
    assert words.tokens.shape == words.target.shape == (50, 12)
    for tokens, target in zip(words.tokens.tolist(), words.target.tolist()):
        product = list(range(len(images[0])))
        for token, answer in zip(tokens, target):
            product = [images[token][point] for point in product]
            assert images[answer] == product
    assert words.tokens.max() < task.vocab_size


@pytest.mark.parametrize(("group", "elements"), [("A5", 2), ("A5", 6), ("A5", 12), ("S5", 4), ("S5", 8), ("S3", 5)])
def test_words_over_generating_sets(group, elements):
    task = WordTask(group=group, elements=elements, length=60)
    assert len(task.alphabet) == elements
    assert 0 not in task.alphabet
    tokens = task.batch(range(200)).tokens
    assert tokens.unique().tolist() == task.alphabet.tolist()
    assert task.structure.generated_by(task.alphabet) == task.structure.order
    assert len(task.batch(range(200)).target.unique()) == task.structure.order
    assert np.array_equal(task.alphabet, WordTask(group=group, elements=elements, seed=9).alphabet)


def test_all_elements_are_drawn_equally_often():
    tokens = WordTask(length=100).batch(range(600)).tokens
    counts = torch.bincount(tokens.flatten(), minlength=60).double()
    assert abs(float(((counts - 1000) ** 2 / 1000).sum()) - 59) < 5 * (2 * 59) ** 0.5


def test_a_word_depends_on_seed_split_and_index_alone():
    task = WordTask(length=20, seed=5)
    whole = task.batch(range(30))
    again = task.batch([17, 3], length=9)
    assert torch.equal(again.tokens, whole.tokens[[17, 3], :9])
    assert torch.equal(again.target, whole.target[[17, 3], :9])


def test_training_and_evaluation_do_not_meet():
    seen = set()
    for seed in (0, 1):
        for split in ("train", "eval"):
            seen |= {row.numpy().tobytes() for row in WordTask(length=16, seed=seed).batch(range(2000), split).tokens}
    assert len(seen) == 8000


def memory(task: WordTask):
    """An exact SHiPPO memory: row i of the identity is the start of group i, R(token) acts, what is left is R(product).

    R is the smallest irreducible representation that is faithful and in SO(P).
    """
    irreps = task.structure.irreps
    faithful = (irrep for irrep in irreps if len(np.unique(irrep.round(6) + 0.0, axis=0)) == len(irrep))
    right = torch.from_numpy(next(irrep for irrep in faithful if (np.linalg.det(irrep) > 0).all())).float()
    width = right.shape[-1]

    def model(tokens):
        batch, length = tokens.shape
        actions = right[tokens][:, :, None].expand(-1, -1, width, -1, -1).contiguous()
        none = torch.zeros(batch, length, width, width)
        one = torch.ones(batch, length, width, 1)
        state = torch.eye(width).expand(batch, width, width)[:, :, None].contiguous()
        y, _ = transport_scan(none, one, one, one[..., 0], torch.zeros(width, 1), actions, initial_state=state)
        return torch.einsum("btij,gij->btg", y, right)

    return model


@pytest.mark.parametrize("name", ["A5", "S5", "S4", "Z60"])
def test_an_exact_memory_solves_the_task(name):
    task = WordTask(group=name, length=200)
    scores = task.evaluate(memory(task), num_examples=16)
    assert scores.prefix == 1.0
    assert scores.horizon(0.99) == 200


def test_scores_of_a_model_that_loses_track():
    """Right up to element 7 in every word, in a quarter of the words up to element 10, never later."""
    task = WordTask(length=16)
    calls = 0

    def model(tokens):
        nonlocal calls
        words = task.batch(range(calls, calls + len(tokens)), "eval")
        assert torch.equal(words.tokens, tokens)
        answer = words.target.clamp_min(0)
        wrong = torch.zeros_like(answer, dtype=torch.bool)
        wrong[:, 10:] = True
        wrong[torch.arange(calls, calls + len(tokens)) % 4 != 0, 7:] = True
        calls += len(tokens)
        return torch.nn.functional.one_hot(torch.where(wrong, (answer + 1) % 60, answer), task.vocab_size).float()

    scores = task.evaluate(model, 40, 16)
    assert scores.by_position == (1.0,) * 7 + (0.25,) * 3 + (0.0,) * 6
    assert scores.prefix == pytest.approx((7 + 0.75) / 16)
    assert (scores.horizon(0.99), scores.horizon(0.5), scores.horizon(0.2)) == (7, 7, 10)


def test_a_length_can_be_given_to_the_evaluation():
    task = WordTask(length=4)
    assert len(task.evaluate(memory(task), 8, length=33).by_position) == 33


def test_your_own_group():
    task = WordTask(group=quaternions(), length=5)
    assert isinstance(task.batch([0]), Sequences)
    assert task.vocab_size == 8
    assert task.evaluate(memory(task), 8).prefix == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WordTask(group="M11"), "`group` is 'M11'; expected one of 'A5'"),
        (lambda: WordTask(length=0), "`length` is 0; expected at least 1"),
        (lambda: WordTask(elements=60), "`elements` is 60; expected 'all' or a number from 1 to 59"),
        (lambda: WordTask(elements="odd"), "`elements` is 'odd'"),
        (lambda: WordTask(elements=1), "no 1 elements were found that generate A5"),
        (lambda: WordTask(seed=-1), "`seed` is -1"),
        (lambda: WordTask().batch([0], "test"), "`split` is 'test'; expected one of 'train', 'eval'"),
        (lambda: WordTask().batch([]), "`indices` is empty"),
        (lambda: WordTask().batch([-1]), "`indices` is .-1."),
        (lambda: WordTask().batch([0], length=0), "`length` is 0"),
        (lambda: WordTask().evaluate(memory(WordTask()), 0), "`num_examples` is 0"),
        (lambda: Group.generate("x", [(0, 1, 1)]), r"`generators` is .\(0, 1, 1\)"),
        (lambda: Group.generate("x", [(0, 1), (0, 2, 1)]), r"`generators` is .*\(0, 2, 1\)"),
        (lambda: Group.generate("x", []), "at least one"),
        (lambda: Group.generate("S7", [(1, 0, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6, 0)]), "more than 1024 elements"),
    ],
)
def test_bad_calls_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_logits_of_a_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"logits of shape \(2, 16, 61\); expected \(2, 16, 60\)"):
        WordTask().evaluate(lambda tokens: torch.zeros(*tokens.shape, 61), 2)
