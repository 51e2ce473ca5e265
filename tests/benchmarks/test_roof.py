"""The roof is the arithmetic it says, the copy a copy, and timings are fair."""

import time

import numpy as np
import pytest
import torch

from benchmarks import timer
from benchmarks.machine import Stream
from benchmarks.problem import Shape
from benchmarks.roof import bytes_moved, fma_work, roof, traffic


def test_bytes_by_hand():
    # Per cell: step 1, write 32, read 32, value 4, right 16, y 4; backward the same with dy, and gradients of all inputs.
    cells = 16 * 512 * 64
    assert Shape().cells == cells
    assert bytes_moved(Shape(), "forward") == 4 * cells * 89
    assert bytes_moved(Shape(), "both") == 4 * cells * (89 + 89 + 85)
    assert bytes_moved(Shape(), "forward", has_right=False) == 4 * cells * 73


def test_work_by_hand():
    # N (3 P + 10) and the cheaper of N P^2 and the frame's 2 P^3 + 2 P^2.
    assert fma_work(Shape(batch=1, length=1, groups=1), "forward") == 32 * 22 + 160
    assert fma_work(Shape(batch=1, length=1, groups=1, order=4), "forward") == 4 * 22 + 4 * 16
    assert fma_work(Shape(), "both") > 2 * fma_work(Shape(), "forward")
    assert fma_work(Shape(), "forward", has_right=False) < fma_work(Shape(), "forward")


def test_the_larger_term_is_active():
    slow_memory = roof(Shape(), "forward", bandwidth=1e9, fma_rate=1e12)
    assert slow_memory.active == "bandwidth"
    assert slow_memory.seconds == pytest.approx(4 * Shape().cells * 89 / 1e9)
    slow_units = roof(Shape(), "forward", bandwidth=1e12, fma_rate=1e9)
    assert slow_units.active == "fma"
    assert slow_units.seconds == pytest.approx(fma_work(Shape(), "forward") / 1e9)


def test_an_unknown_pass_is_refused():
    with pytest.raises(ValueError, match="scan_pass"):
        traffic(Shape(), "backward")


def test_the_copy_is_as_fast_as_a_copy():
    # A slow copy would make a low roof, under which every kernel looks good.
    copy_ = Stream(1 << 18, [(85, 4)])
    source = torch.ones(1 << 24)
    target = torch.ones_like(source)

    def rate(call, num_bytes):
        best = float("inf")
        for _ in range(5):
            begin = time.thread_time()
            call()
            best = min(best, time.thread_time() - begin)
        return num_bytes / best

    assert rate(copy_, copy_.num_bytes) > 0.4 * rate(lambda: target.copy_(source), 2 * source.nbytes)


def test_the_copy_moves_what_it_says():
    copy_ = Stream(1000, [(5, 2)])
    copy_.source[:] = np.arange(copy_.source.size) % 7
    copy_()
    ((*_, sink),) = copy_.passes
    source = copy_.source.reshape(copy_.items, 5, -1)
    want = np.stack([source[:, 0] + source[:, 2] + source[:, 4], source[:, 1] + source[:, 3]], axis=1)
    np.testing.assert_array_equal(sink.reshape(want.shape), want)
    assert copy_.num_bytes == 4 * 1000 * 7
    with pytest.raises(ValueError, match="passes"):
        Stream(10, [(1, 2)])


def test_slow_ones_drop_out_and_all_are_timed(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timer.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timer.time, "sleep", lambda _: None)
    order = []

    def call(name, seconds):
        def run_once():
            order.append(name)
            clock[0] += seconds

        return run_once

    timings = timer.interleave({"fast": call("fast", 1.0), "slow": call("slow", 9.0)}, rounds=3, budget=10.0)
    assert order == ["fast", "slow", "fast", "fast"]
    assert timings["slow"].repeats == 1
    assert timings["fast"].median == 1.0


def test_quantiles():
    timing = timer.summarize([float(i) for i in range(11)])
    assert (timing.p20, timing.median, timing.p80) == (2.0, 5.0, 8.0)
    with pytest.raises(ValueError, match="empty"):
        timer.summarize([])
