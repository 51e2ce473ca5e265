"""Text: splits that share no paragraph, windows against the text itself, bits of known models."""

from __future__ import annotations

import math
from pydoc_data.topics import topics

import pytest
import torch

from shippo_lab.tasks.text import SHARED_CHARACTERS, SHARES, SPLITS, TextTask, bits, digest, splits


def text_of(split: str) -> str:
    return "\n".join(topics[name] for name in splits("topics")[split])


def test_every_topic_stands_in_one_split():
    names = [name for split in SPLITS for name in splits("topics")[split]]
    assert sorted(names) == sorted(topics)
    sizes = [len(text_of(split)) for split in SPLITS]
    assert [round(size / sum(sizes), 1) for size in sizes] == [0.8, 0.1, 0.1]


def test_splits_share_no_paragraph():
    found = []
    for split in SPLITS:
        paragraphs = {
            " ".join(paragraph.split()) for name in splits("topics")[split] for paragraph in topics[name].split("\n\n")
        }
        found.append({paragraph for paragraph in paragraphs if len(paragraph) >= SHARED_CHARACTERS})
    assert len(set.union(*found)) == sum(len(paragraphs) for paragraphs in found)
    assert min(len(paragraphs) for paragraphs in found) > 50


def test_packages_of_the_library_stand_in_one_split():
    names = [name for split in SPLITS for name in splits("library")[split]]
    assert len(names) == len(set(names))
    assert {"argparse", "asyncio", "json"} <= set(names)
    assert not {"test", "pydoc_data", "site-packages"} & set(names)
    sizes = [TextTask(corpus="library").num_tokens(split) for split in SPLITS]
    assert sum(sizes) > 5_000_000
    for size, share in zip(sizes, SHARES["library"]):
        assert abs(size / sum(sizes) - share) < 0.01
    assert digest("library") != digest("topics")
    assert b"import" in bytes(TextTask(length=4096, corpus="library").batch([0], "test").tokens[0].tolist())


@pytest.mark.parametrize("split", SPLITS)
def test_windows_are_pieces_of_the_text(split):
    task, whole = TextTask(length=40), text_of(split).encode()
    batch = task.batch(range(30), split)
    assert batch.tokens.shape == batch.target.shape == (30, 40)
    assert torch.equal(batch.tokens[:, 1:], batch.target[:, :-1])
    for tokens, target in zip(batch.tokens, batch.target):
        assert bytes([*tokens.tolist(), int(target[-1])]) in whole
    assert task.num_tokens(split) == len(whole)


def test_windows_of_an_evaluation_follow_one_another():
    task = TextTask(length=100)
    number = task.num_windows("test")
    whole = text_of("test").encode()
    assert bytes(task.batch(range(number), "test").target.flatten().tolist()) == whole[1 : 100 * number + 1]
    assert len(whole) - 1 - 100 * number < 100
    assert task.text(task.batch([0], "test").tokens[0]) == whole[:100].decode(errors="replace")


def test_a_window_depends_on_seed_and_index_alone():
    task = TextTask(length=50, seed=2)
    whole = task.batch(range(40))
    assert torch.equal(task.batch([33, 2]).tokens, whole.tokens[[33, 2]])
    assert not torch.equal(TextTask(length=50, seed=3).batch(range(40)).tokens, whole.tokens)
    assert len({row.numpy().tobytes() for row in whole.tokens}) == 40


def test_bits_of_known_models():
    target = torch.tensor([[0, 1], [1, 1]])
    logits = torch.tensor([0.75, 0.25]).log().expand(2, 2, 2)
    expected = torch.tensor([[-math.log2(0.75), 2.0], [2.0, 2.0]], dtype=torch.float64)
    assert torch.allclose(bits(logits, target), expected)

    task = TextTask(length=100)
    letters = torch.bincount(task.batch(range(task.num_windows("test")), "test").target.flatten(), minlength=task.vocab_size)
    chance = letters.double() / letters.sum()
    unigram = task.evaluate(lambda tokens: chance.clamp_min(1e-9).log().expand(*tokens.shape, -1), split="test")
    entropy = -float((chance[chance > 0] * chance[chance > 0].log2()).sum())
    assert unigram.bits_per_token == pytest.approx(entropy, abs=1e-6)


def test_bits_per_character_count_characters_in_bytes():
    """Eight bits for each byte: more than eight for a character, by the bytes that characters have in these windows."""
    task = TextTask(length=500)
    split = max(SPLITS[1:], key=lambda split: task.num_tokens(split) - len(text_of(split)))
    scores = task.evaluate(lambda tokens: torch.zeros(*tokens.shape, 256), split=split)
    windows = task.num_windows(split)
    text = text_of(split).encode()[1 : 500 * windows + 1].decode(errors="ignore")
    assert scores.bits_per_token == pytest.approx(8)
    assert scores.bits_per_character == pytest.approx(8 * 500 * windows / len(text), rel=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextTask(corpus="word"), "`corpus` is 'word'"),
        (lambda: TextTask(length=0), "`length` is 0; expected 1 to"),
        (lambda: TextTask(length=10**7), "the length of the shortest split"),
        (lambda: TextTask(seed=-1), "`seed` is -1"),
        (lambda: TextTask().batch([0], "eval"), "`split` is 'eval'; expected one of 'train', 'validation', 'test'"),
        (lambda: TextTask().batch([10**6], "test"), "`indices` is .1000000.; expected 0 to"),
        (lambda: TextTask().batch([], "test"), "`indices` is empty"),
        (lambda: TextTask().evaluate(lambda tokens: torch.zeros(2, 256, 9), 2), r"expected \(2, 256, 256\)"),
    ],
)
def test_bad_calls_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
