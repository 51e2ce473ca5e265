"""The backward pass of rotations in the moving frame beside the direct way, at widths where a call takes either.

Data path: the operands of `make_inputs`, whose right actions are rotations, and the states that a forward pass keeps go to the
backward kernel of `scan/fused.py` with and without its frame; both sets of gradients are held against each other, and both
are timed in turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gate import check
from benchmarks.problem import Shape, make_inputs
from benchmarks.timer import interleave
from shippo_ssm.scan import Recurrence, fused

WIDTHS = (4, 8, 16)


def measure(*, channels: int = 256, rounds: int, budget: float, batch: int = 16, length: int = 512) -> dict[str, Any]:
    """Times of the backward pass in and out of the frame at every width of `WIDTHS`, G P = `channels`, float32."""
    points = []
    for width in WIDTHS:
        shape = Shape(batch=batch, length=length, groups=channels // width, width=width)
        inputs, dy = make_inputs(shape)
        recurrence = Recurrence(**inputs).normalised()
        case = fused._case(recurrence)
        _, _, kept = fused._scan(*recurrence, None, None, True)
        nothing, calls, results = dy.new_empty(0), {}, {}
        for name in ("frame", "direct"):
            # Written over in every round, as recycled memory is.
            gradient = recurrence.map(torch.empty_like)
            way = case._replace(framed=name == "frame")
            calls[name] = partial(fused._backward, way, recurrence, None, None, kept, dy, None, gradient, nothing)
            calls[name]()
            results[name] = {field: tensor for field, tensor in gradient._asdict().items() if tensor is not None}
        errors = check(f"frame, P = {width}", results["frame"], results["direct"])
        times = interleave(calls, rounds=rounds, budget=budget)
        point = {"width": width, "taken": case.framed, "error": max(errors.values())}
        points.append(point | {name: timing.as_dict() for name, timing in times.items()})
    return {"threads": torch.get_num_threads(), "batch": batch, "length": length, "channels": channels, "points": points}
