"""Languages: answers against solvers written apart, formats, streams, scores."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
import torch

from shippo_lab.tasks.languages import LANGUAGES, LanguageTask
from shippo_lab.tasks.streams import NO_TARGET


def solve(name: str, sentence: list[int]) -> int:
    """The answer of one sentence, as a person would find it."""
    if name == "parity":
        return 1 if sentence.count(2) % 2 == 0 else 2
    if name == "even-pairs":
        return 1 if sentence[0] == sentence[-1] else 2
    if name == "cycle":
        return 4 + (sentence.count(2) - sentence.count(3)) % 5
    text = "".join("?+-*=01234"[token] for token in sentence)
    assert re.fullmatch(r"[-+*0-4]+=", text)
    return 5 + eval(text[:-1]) % 5


def sentences_of(task: LanguageTask, indices, split="eval"):
    """Token lists without padding, with the positions and values of their answers."""
    batch = task.batch(indices, split)
    assert batch.tokens.shape == batch.target.shape == (len(indices), task.width)
    for tokens, target in zip(batch.tokens.tolist(), batch.target.tolist()):
        length = sum(token != 0 for token in tokens)
        assert tokens[length:] == [0] * (task.width - length)
        yield tokens[:length], {t: answer for t, answer in enumerate(target) if answer != NO_TARGET}


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize(("shortest", "longest"), [(3, 40), (40, 100)])
def test_answers_equal_an_independent_solver(name, shortest, longest):
    task = LanguageTask(name=name, min_length=shortest, max_length=longest, seed=1)
    answers = set()
    for sentence, asked in sentences_of(task, range(400)):
        assert asked == {len(sentence) - 1: solve(name, sentence)}
        answers |= set(asked.values())
        assert max(sentence) < task.vocab_size
    assert len(answers) == {"parity": 2, "even-pairs": 2}.get(name, 5)
    assert max(answers) < task.vocab_size


@pytest.mark.parametrize("name", LANGUAGES)
def test_answers_at_every_position_are_those_of_the_beginnings(name):
    task = LanguageTask(name=name, max_length=30, every=True)
    last_only = LanguageTask(name=name, max_length=30)
    pairs = zip(sentences_of(task, range(150)), sentences_of(last_only, range(150)))
    for (sentence, asked), (same, only) in pairs:
        assert sentence == same
        assert asked[len(sentence) - 1] == only[len(sentence) - 1]
        if name == "arithmetic":
            # A digit ends a sentence; the '=' repeats the answer of the last digit.
            assert sorted(asked) == [*range(0, len(sentence), 2), len(sentence) - 1]
            assert all(asked[t] == solve(name, [*sentence[: t + 1], 4]) for t in range(0, len(sentence), 2))
        else:
            assert sorted(asked) == list(range(len(sentence)))
            assert all(asked[t] == solve(name, sentence[: t + 1]) for t in asked)


def test_lengths_are_uniform_and_as_published():
    for name in LANGUAGES:
        lengths = Counter(len(sentence) for sentence, _ in sentences_of(LanguageTask(name=name, max_length=7), range(2000)))
        expected = {3: 1, 4: 1, 5: 1, 6: 1, 7: 1}
        if name == "arithmetic":
            expected = {4: 2, 6: 2, 8: 1}
        assert sorted(lengths) == sorted(expected)
        assert all(abs(lengths[length] - 400 * share) < 100 for length, share in expected.items())


def test_tokens_of_the_published_formats():
    seen = {
        name: {token for sentence, _ in sentences_of(LanguageTask(name=name), range(300)) for token in sentence}
        for name in LANGUAGES
    }
    assert seen["parity"] == seen["even-pairs"] == {1, 2}
    assert seen["cycle"] == {1, 2, 3}
    assert seen["arithmetic"] == set(range(1, 10))
    assert [LanguageTask(name=name).vocab_size for name in LANGUAGES] == [3, 3, 9, 10]


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_sentence_depends_on_seed_split_and_index_alone(name):
    task = LanguageTask(name=name, seed=4)
    whole = task.batch(range(40))
    again = task.batch([31, 7])
    assert torch.equal(again.tokens, whole.tokens[[31, 7]])
    assert torch.equal(again.target, whole.target[[31, 7]])
    for other in (task.batch(range(40), "eval"), LanguageTask(name=name, seed=5).batch(range(40))):
        assert (other.tokens != whole.tokens).any(1).sum() >= 38


def test_training_and_evaluation_do_not_meet():
    """Long sentences of both splits and of two seeds are all different."""
    for name in LANGUAGES:
        seen = set()
        for seed in (0, 1):
            task = LanguageTask(name=name, min_length=60, max_length=80, seed=seed)
            for split in ("train", "eval"):
                seen |= {row.numpy().tobytes() for row in task.batch(range(300), split).tokens}
        assert len(seen) == 1200


def test_scores_of_known_answers():
    """A model that knows all answers, and one that knows those of short sentences."""
    task = LanguageTask(name="cycle", min_length=3, max_length=10, every=True)

    def knowing(longest):
        start = 0

        def model(tokens):
            nonlocal start
            answer = task.batch(range(start, start + len(tokens)), "eval").target.clamp_min(0)
            start += len(tokens)
            answer = torch.where((tokens != 0).sum(1, keepdim=True) <= longest, answer, 0)
            return torch.nn.functional.one_hot(answer, 9).float()

        return model

    lengths = np.array([len(sentence) for sentence, _ in sentences_of(task, range(100))])
    assert task.evaluate(knowing(10), 100, 32) == 1.0
    assert task.evaluate(knowing(5), 100, 32) == pytest.approx(lengths[lengths <= 5].sum() / lengths.sum())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LanguageTask(name="dyck"), "`name` is 'dyck'; expected one of 'parity'"),
        (lambda: LanguageTask(min_length=9, max_length=8), "`min_length` is 9 and `max_length` is 8"),
        (lambda: LanguageTask(min_length=0), "`min_length` is 0; expected a positive integer"),
        (lambda: LanguageTask(name="arithmetic", min_length=1), "expected 2 <= min_length"),
        (lambda: LanguageTask(seed=2**64), "`seed` is"),
        (lambda: LanguageTask().batch([0], "test"), "`split` is 'test'"),
        (lambda: LanguageTask().evaluate(lambda tokens: torch.zeros(2, 40, 2), 2), r"\(2, 40, 2\); expected \(2, 40, 3\)"),
    ],
)
def test_bad_calls_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
