"""Sweeps: growth with T, and corners that are checked."""

import pytest
import torch

from benchmarks import sweeps
from benchmarks.gate import Disagreement
from benchmarks.problem import Shape, make_inputs
from benchmarks.roof import PASSES


@pytest.mark.parametrize("exponent", [1.0, 1.3])
def test_growth_finds_the_exponent(exponent):
    points = [
        {"shape": {"batch": 64 // t, "length": t}, "forward": {"median": 64 / t * 1e-6 * t**exponent}} for t in (1, 4, 16, 64)
    ]
    assert sweeps.growth(points, "forward") == pytest.approx(exponent)


def test_shapes_keep_the_tokens_and_reach_the_end():
    shapes = sweeps.length_shapes()
    assert shapes[0].length == 1024
    assert shapes[-1].length == 65536
    assert all(0.95 < shape.batch * shape.length / sweeps.TOKENS <= 1 for shape in shapes)
    assert any(shape.length & (shape.length - 1) for shape in shapes)


@pytest.mark.parametrize("window", [None, 96])
def test_a_corner_that_is_wrong_late_is_seen(helpers, window):
    inputs, cotangent = make_inputs(Shape(batch=1, length=224, groups=3, order=2, width=2))
    # Forgets within the small window of this test.
    inputs["step"] = 50 * inputs["step"]

    def late(leaves):
        y = helpers.reference(leaves)
        return torch.cat([y[:, :-4], 1.01 * y[:, -4:]], dim=1)

    assert sweeps.check_corner(helpers.peer_of(helpers.reference), inputs, cotangent, window) < 1e-5
    with pytest.raises(Disagreement):
        sweeps.check_corner(helpers.peer_of(late), inputs, cotangent, window)


def test_lengths_are_cut_from_the_same_tokens_and_timed():
    shapes = [Shape(batch=12 // length, length=length, groups=2, order=4, width=2) for length in (3, 5, 12)]
    points = sweeps.measure_lengths(shapes, rounds=2, budget=0.5, rate=1e9)
    assert [point["shape"]["length"] for point in points] == [3, 5, 12]
    for point in points:
        assert point["errors"]["shippo fused"] < 1e-5
        assert all(point[scan_pass]["median"] > 0 and point[scan_pass]["over_roof"] > 0 for scan_pass in PASSES)
