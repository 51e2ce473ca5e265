"""Languages: answers against solvers written apart, formats, automata, streams, scores."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
import torch

from shippo_lab.tasks.languages import LANGUAGES, Automaton, LanguageTask, automaton_of, minimal_automaton
from shippo_lab.tasks.streams import NO_TARGET


def solve(name: str, sentence: list[int]) -> int:
    """The answer of one sentence, as a person would find it."""
    if name == "parity":
        return 1 if sentence.count(2) % 2 == 0 else 2
    if name == "even-pairs":
        return 1 if sentence[0] == sentence[-1] else 2
    if name == "cycle":
        return 4 + (sentence.count(2) - sentence.count(3)) % 5
    if name == "majority":
        return Counter(sentence).most_common(1)[0][0]
    spelling = "?+-*=01234" if name == "arithmetic" else "?01234+-*()="
    text = "".join(spelling[token] for token in sentence)
    assert re.fullmatch(r"[-+*()0-4]+=", text)
    first_digit = 5 if name == "arithmetic" else 1
    return first_digit + eval(text[:-1]) % 5


def machine_of(name: str) -> Automaton:
    """The automaton of a language that has one."""
    machine = automaton_of(name)
    assert machine is not None
    return machine


def order_of_group(machine: Automaton) -> int:
    group = machine.group()
    assert group is not None
    return group.order


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
    assert len(answers) == {"parity": 2, "even-pairs": 2, "majority": len(answers)}.get(name, 5)
    assert max(answers) < task.vocab_size


@pytest.mark.parametrize("name", [name for name in LANGUAGES if name != "brackets"])
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
        elif name == "brackets":
            expected = {4: 1, 5: 1, 6: 1, 7: 1, 8: 1}
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
    assert seen["brackets"] == set(range(1, 12))
    assert seen["majority"] == set(range(1, 64))
    assert [LanguageTask(name=name).vocab_size for name in LANGUAGES] == [3, 3, 9, 10, 12, 64]


def test_short_expressions_with_brackets():
    shapes = {1: "d=", 2: "-d=", 3: "(d)=", 4: "(-d)=", 5: "(dod)="}
    for length, shape in shapes.items():
        for sentence, _ in sentences_of(LanguageTask(name="brackets", min_length=length, max_length=length), range(50)):
            text = "".join("?01234+-*()="[token] for token in sentence)
            assert re.sub(r"[0-4]", "d", re.sub(r"(?<=[0-4])[-+*]", "o", text)) == shape


def test_products_are_twice_as_frequent_in_brackets():
    counts = Counter()
    for sentence, _ in sentences_of(LanguageTask(name="brackets", min_length=5, max_length=5), range(4000)):
        counts[sentence[2]] += 1
    for token, share in ((6, 0.25), (7, 0.25), (8, 0.5)):
        assert abs(counts[token] / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5


def test_automata_answer_as_the_tasks_do():
    """Each automaton, run over the letters of a sentence, ends in a state with the right answer."""
    for name in ("parity", "even-pairs", "cycle", "arithmetic"):
        machine = machine_of(name)
        answers: dict[object, set[int]] = {}
        for sentence, asked in sentences_of(LanguageTask(name=name), range(300)):
            if name == "arithmetic":
                operators = [1, *sentence[1:-1:2]]
                letters = [5 * (operator - 1) + digit - 5 for operator, digit in zip(operators, sentence[::2])]
            else:
                letters = [token - 1 for token in sentence]
            state = 0
            for letter in letters:
                state = machine.table[letter, state]
            answers.setdefault(machine.answers[state], set()).add(asked[len(sentence) - 1])
        # One answer of the task for one answer of the machine, and the other way round.
        assert all(len(found) == 1 for found in answers.values())
        assert len(set.union(*answers.values())) == len(answers)


def test_automata_have_the_sizes_of_theory():
    parity, pairs, cycle, sums = (machine_of(name) for name in ("parity", "even-pairs", "cycle", "arithmetic"))
    assert (parity.num_states, parity.invertible, parity.forgetting) == (2, ("a", "b"), ())
    assert (pairs.num_states, pairs.invertible, pairs.forgetting) == (5, (), ("a", "b"))
    assert pairs.group() is None
    assert (cycle.num_states, cycle.forgetting, order_of_group(cycle)) == (5, (), 5)
    # A finished sum and a running term, both modulo 5; only a factor that is not 0 can be undone.
    assert sums.num_states == 25
    assert sums.invertible == ("*1", "*2", "*3", "*4")
    assert len(sums.forgetting) == 11
    assert order_of_group(sums) == 4
    assert automaton_of("brackets") is automaton_of("majority") is None


def test_machines_are_made_small():
    """A count modulo 12 that only answers whether it is divisible by 3 has three states."""
    machine = minimal_automaton(0, ["+1"], lambda count, letter: (count + 1) % 12, lambda count: count % 3 == 0)
    assert machine.num_states == 3
    assert machine.table.tolist() == [[1, 2, 0]]
    assert machine.answers == (True, False, False)


def test_needs_say_what_was_computed():
    needs = {name: LanguageTask(name=name).needs for name in LANGUAGES}
    assert "2 of 2 letters permute them, 0 forget" in needs["parity"]
    assert "group of order 2, which needs a right action of width 2" in needs["parity"]
    assert "0 of 2 letters permute them, 2 forget" in needs["even-pairs"]
    assert "group of order 5, which needs a right action of width 2" in needs["cycle"]
    assert "25 states; 4 of 15 letters permute them, 11 forget" in needs["arithmetic"]
    assert all("No finite automaton" in needs[name] for name in ("brackets", "majority"))


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

    perfect = task.evaluate(knowing(10), 100, 32)
    assert (perfect.accuracy, perfect.last, perfect.num_sentences) == (1.0, 1.0, 100)
    assert perfect.by_length == dict.fromkeys(range(3, 11), 1.0)
    short = task.evaluate(knowing(5), 100, 32)
    assert short.by_length == {length: float(length <= 5) for length in range(3, 11)}
    lengths = np.array([len(sentence) for sentence, _ in sentences_of(task, range(100))])
    assert short.last == pytest.approx((lengths <= 5).mean())
    assert short.accuracy == pytest.approx(lengths[lengths <= 5].sum() / lengths.sum())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LanguageTask(name="dyck"), "`name` is 'dyck'; expected one of 'parity'"),
        (lambda: LanguageTask(min_length=9, max_length=8), "`min_length` is 9 and `max_length` is 8"),
        (lambda: LanguageTask(min_length=0), "`min_length` is 0; expected a positive integer"),
        (lambda: LanguageTask(name="arithmetic", min_length=1), "expected 2 <= min_length"),
        (lambda: LanguageTask(name="brackets", every=True), "`every` is True with name 'brackets'"),
        (lambda: LanguageTask(seed=2**64), "`seed` is"),
        (lambda: LanguageTask().batch([0], "test"), "`split` is 'test'"),
        (lambda: LanguageTask().evaluate(lambda tokens: torch.zeros(2, 40, 2), 2), r"\(2, 40, 2\); expected \(2, 40, 3\)"),
    ],
)
def test_bad_calls_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
