"""The page "Architecture" shows the code as it is, and a call of the layer stays short."""

from pathlib import Path

import pytest

from docs.architecture import PAGE, PICTURE, arranged, import_graph, page, path_of_a_call, picture

ROOT = Path(__file__).parents[1]


def test_a_call_is_short():
    """`Shippo(d)(x)` from the call to machine code and back: few functions, in few files."""
    path = path_of_a_call()
    assert len(path) <= 36
    assert len({call.file for call in path}) <= 12
    # What is counted is the whole way: from the layer to the threads that run machine code.
    assert path[0][1:] == ("layers/mixer.py", "Mixer.forward")
    assert {call.name for call in path} >= {"Shippo.run", "Orthogonal.dense", "launch", "_run", "scan"}


@pytest.mark.parametrize(("file", "made"), [(PAGE, page), (PICTURE, picture)])
def test_the_page_shows_the_code(file, made):
    """`python docs/generate.py` writes both again."""
    assert (ROOT / file).read_text(encoding="utf-8") == made()


def test_every_import_can_be_followed_down_the_picture():
    graph = import_graph()
    rows, lines = arranged(graph)
    height = {place: index for index, row in enumerate(rows) for place in row}
    drawn = {(line[0], line[-1]) for line in lines}
    assert all([height[place] for place in line] == list(range(height[line[0]], height[line[-1]] - 1, -1)) for line in lines)
    reached = {room: {room} for room in graph}
    for row in rows:
        for room in graph.keys() & set(row):
            reached[room] |= {far for upper, lower in drawn if upper == room for far in reached[lower]}
    assert all(below <= reached[room] for room, below in graph.items())


def test_the_picture_keeps_out_what_follows():
    rows, lines = arranged({"low": set(), "middle": {"low"}, "high": {"low", "middle"}, "other": {"high", "low"}})
    assert rows == [["low"], ["middle"], ["high"], ["other"]]
    assert lines == [["middle", "low"], ["high", "middle"], ["other", "high"]]
