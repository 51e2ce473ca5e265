"""How time grows: with T at a constant number of tokens, with N, with P and with G; widths P at a constant G P; shared writes.

Data path: each `Shape` of a sweep is checked on a corner (first row, first and last group) against the float64 reference,
with a cotangent that is zero elsewhere, and then timed with its copy. The T sweep cuts the same tokens into sequences of each
length and times all lengths in turn, so that what else the machine does falls on all of them; `growth` fits log(time per
sequence) against log T, and a linear scan has exponent 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gate import TOLERANCE, as_array, check, oracle
from benchmarks.machine import Stream, fma_rate
from benchmarks.peers import Candidate, Missing, Peer, peers
from benchmarks.problem import Shape, make_inputs
from benchmarks.roof import PASSES, bytes_moved, roof, traffic
from benchmarks.timer import interleave

TOKENS = 65536
WIDTHS = (1, 2, 4, 8, 16)
# Positions at either end of a long sequence on which the T sweep checks it.
WINDOW = 4096


def length_shapes(tokens: int = TOKENS) -> list[Shape]:
    """Shapes with B T = `tokens` (nearly so for a length that is no power of two) and T from 1,024 on."""
    lengths = (1024, 2048, 3000, 4096, 8192, 16384, 32768, 65536)
    return [Shape(batch=tokens // length, length=length) for length in lengths if length <= tokens]


def size_shapes(base: Shape) -> dict[str, list[Shape]]:
    """Shapes that differ from `base` in one of N, P, G, T; lengths that are no powers of two included."""
    return {
        "order": [replace(base, order=order) for order in (8, 16, 24, 32, 64, 128)],
        "width": [replace(base, width=width) for width in (1, 2, 3, 4, 5, 8, 16)],
        "groups": [replace(base, groups=groups) for groups in (1, 16, 64, 256)],
        "length": [replace(base, length=length) for length in (100, 500, 512, 1000)],
    }


def growth(points: list[dict[str, Any]], scan_pass: str) -> float:
    """Exponent e of time per sequence ~ T^e, by least squares in the logarithms.

    Example:
        >>> points = [{"shape": {"batch": 4 // t, "length": t}, "forward": {"median": 3.0}} for t in (1, 2, 4)]
        >>> round(growth(points, "forward"), 12)
        1.0
    """
    lengths = [point["shape"]["length"] for point in points]
    if len(set(lengths)) < 2:
        raise ValueError(f"growth: `points` has lengths {lengths}; expected at least two different ones")
    seconds = [point[scan_pass]["median"] / point["shape"]["batch"] for point in points]
    return float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])


def measure_lengths(shapes: list[Shape], *, rounds: int, budget: float, rate: float) -> list[dict[str, Any]]:
    """Times of ours at each shape, all on the same tokens and in turn."""
    (ours,) = (peer for peer in peers() if peer.name == "shippo fused")
    whole = replace(shapes[0], batch=1, length=max(shape.batch * shape.length for shape in shapes))
    inputs, cotangent = make_inputs(whole)
    points: list[dict[str, Any]] = []
    candidates: dict[str, Candidate] = {}
    for shape in shapes:
        cut = {
            name: tensor
            if name == "drift"
            else tensor[0, : shape.batch * shape.length].unflatten(0, (shape.batch, shape.length))
            for name, tensor in {**inputs, "cotangent": cotangent}.items()
        }
        given = cut.pop("cotangent")
        error = check_corner(ours, cut, given, WINDOW)
        points.append({"shape": asdict(shape), "errors": {ours.name: error}, "peers": {}})
        candidates[str(shape)] = ours.prepare(cut, given)
    named = {str(shape): shape for shape in shapes}
    for scan_pass, records in _time(candidates, named, whole, rounds=rounds, budget=budget, rate=rate).items():
        for point, record in zip(points, records.values()):
            point[scan_pass] = record
    return points


def measure_point(shape: Shape, names: tuple[str, ...], *, rounds: int, budget: float, rate: float) -> dict[str, Any]:
    """Times of the named peers at one shape: ours first; its times stand at the top level, the others' under `peers`."""
    inputs, cotangent = make_inputs(shape)
    by_name = {peer.name: peer for peer in peers()}
    chosen: dict[str, Candidate] = {}
    point: dict[str, Any] = {"shape": asdict(shape), "errors": {}, "peers": {}}
    for name in names:
        try:
            point["errors"][name] = check_corner(by_name[name], inputs, cotangent)
            chosen[name] = by_name[name].prepare(inputs, cotangent)
        except Missing as error:
            point["peers"][name] = {"status": "missing", "reason": str(error)}
    shapes = dict.fromkeys(chosen, shape)
    for scan_pass, records in _time(chosen, shapes, shape, rounds=rounds, budget=budget, rate=rate).items():
        for name, record in records.items():
            if name == names[0]:
                point[scan_pass] = record
            else:
                point["peers"].setdefault(name, {"status": "ok"})[scan_pass] = record
    return point


def _time(
    candidates: dict[str, Candidate], shapes: dict[str, Shape], whole: Shape, *, rounds: int, budget: float, rate: float
) -> dict[str, dict[str, Any]]:
    """Pass -> name -> timing over the roof of its shape: all in turn, beside a copy of what `whole` moves."""
    found: dict[str, dict[str, Any]] = {}
    for scan_pass in PASSES:
        calls = {
            name: candidate.forward if scan_pass == "forward" else candidate.both for name, candidate in candidates.items()
        }
        copy = Stream(whole.cells, traffic(whole, scan_pass))
        calls = {"copy": copy, **{name: call for name, call in calls.items() if call is not None}}
        for call in calls.values():
            call()
        timings = interleave(calls, rounds=rounds, budget=budget)
        bandwidth = bytes_moved(whole, scan_pass) / timings.pop("copy").median
        found[scan_pass] = {}
        for name, timing in timings.items():
            limit = roof(shapes[name], scan_pass, bandwidth, rate)
            found[scan_pass][name] = timing.as_dict() | {"over_roof": timing.median / limit.seconds, "active": limit.active}
    return found


def check_corner(
    peer: Peer, inputs: dict[str, Tensor], cotangent: Tensor, window: int | None = None, tolerance: float = TOLERANCE
) -> float:
    """Largest RMS error ratio of y and all gradients on the first row, first and last group. Raises `Disagreement`.

    With a `window`, a sequence of more than twice that length is checked on its first and on its last `window` positions, with
    a cotangent on the last eighth of them: what was stored before the window has been forgotten there, by e^-25 and more for
    these inputs and a window of 4096, so that the reference may begin at the window.
    """
    length, groups = cotangent.shape[1], sorted({0, cotangent.shape[2] - 1})
    spans, seen = [(0, length)], 0
    if window is not None and length > 2 * window:
        spans, seen = [(0, window), (length - window, length)], length - window // 8
    masked = torch.zeros_like(cotangent)
    masked[:1, seen:, groups] = cotangent[:1, seen:, groups]
    candidate = peer.prepare(inputs, masked)
    assert candidate.both is not None
    assert peer.task is not None
    results = {name: torch.tensor(_corner(name, as_array(got), groups)) for name, got in candidate.both().items()}
    corner = {name: _corner(name, inputs[name], groups) for name in peer.leaves}
    # The spans are rows of one batch for the reference; the cotangent, and with it every gradient, is zero but in the last.
    want = oracle(peer.task, _rows(corner, spans), _rows({"": masked[:1, :, groups]}, spans)[""])
    head = {"y": want["y"][:-1]}
    want = {name: tensor if name == "drift" else tensor[-1:] for name, tensor in want.items()}
    got = _rows(results, spans[-1:])
    got["y"], want["y"] = (y[:, seen - length :] if seen else y for y in (got["y"], want["y"]))
    errors = list(check(peer.name, got, want, tolerance).values())
    if len(spans) > 1:
        errors += check(peer.name, {"y": results["y"][:, :window]}, head, tolerance).values()
    return max(errors)


def measure(*, rounds: int, budget: float) -> dict[str, Any]:
    """All sweeps: T, then N, P, G and odd lengths with `jax.lax.scan` beside."""
    rate = fma_rate()
    lengths = measure_lengths(length_shapes(), rounds=rounds, budget=budget, rate=rate)
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "constant_tokens": lengths,
        "exponent": {scan_pass: growth(lengths, scan_pass) for scan_pass in PASSES},
    }
    names = ("shippo fused", "jax.lax.scan")
    for letter, shapes in size_shapes(Shape(batch=4)).items():
        result[letter] = [measure_point(shape, names, rounds=rounds, budget=budget / 4, rate=rate) for shape in shapes]
    return result


def measure_widths(
    *, rounds: int, budget: float, batch: int = 16, length: int = 512, channels: int = 256, widths: Sequence[int] = WIDTHS
) -> dict[str, Any]:
    """Groups of every width at the same number of channels G P, wide ones with `jax.lax.scan` beside."""
    rate, points = fma_rate(), []
    for width in widths:
        shape = Shape(batch=batch, length=length, groups=channels // width, width=width)
        names = ("shippo fused", "jax.lax.scan") if width >= 8 else ("shippo fused",)
        points.append(measure_point(shape, names, rounds=rounds, budget=budget, rate=rate))
    return {"threads": torch.get_num_threads(), "points": points}


def measure_shared(*, rounds: int, budget: float, base: Shape | None = None, counts: Sequence[int] = (1, 4)) -> dict[str, Any]:
    """Shared writes and reads beside one for each group, Q = G, all in turn; `over_own` is the ratio of their times."""
    base, rate = base or Shape(), fma_rate()
    (ours,) = (peer for peer in peers() if peer.name == "shippo fused")
    shapes = {str(shape): shape for shape in (base, *(replace(base, sets=sets) for sets in counts))}
    candidates: dict[str, Candidate] = {}
    points = {}
    for name, shape in shapes.items():
        inputs, cotangent = make_inputs(shape)
        candidates[name] = ours.prepare(inputs, cotangent)
        points[name] = {"shape": asdict(shape), "error": _check_shared(ours, inputs, cotangent)}
    for scan_pass, records in _time(candidates, shapes, base, rounds=rounds, budget=budget, rate=rate).items():
        for name, record in records.items():
            points[name][scan_pass] = record | {"over_own": record["median"] / records[str(base)]["median"]}
    return {"threads": torch.get_num_threads(), "points": list(points.values())}


def _check_shared(peer: Peer, inputs: dict[str, Tensor], cotangent: Tensor) -> float:
    """Largest RMS error ratio of one row against the float64 reference with one write and read for each group."""
    assert peer.task is not None
    row = {name: tensor if name == "drift" else tensor[:1] for name, tensor in inputs.items()}
    shared = cotangent.shape[2] // row["write"].shape[2]
    spread = row | {name: row[name].repeat_interleave(shared, dim=2) for name in ("write", "read")}
    want = oracle(peer.task, {name: spread[name] for name in peer.leaves}, cotangent[:1])
    for name in ("write", "read"):
        want[name] = want[name].unflatten(2, (-1, shared)).sum(3)
    candidate = peer.prepare(row, cotangent[:1])
    assert candidate.both is not None
    return max(check(peer.name, candidate.both(), want).values())


def _rows(named: dict[str, Tensor], spans: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Each span of positions as a row of its own."""
    return {
        name: tensor if name == "drift" else torch.cat([tensor[:, start:stop] for start, stop in spans])
        for name, tensor in named.items()
    }


def _corner(name: str, array: Any, groups: list[int]) -> Any:
    return array[groups] if name == "drift" else array[:1, :, groups]
