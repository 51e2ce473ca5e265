"""Correctness before speed: outputs and gradients against the reference loop in float64.

Data path: `oracle` runs `shippo_ssm.scan`'s reference in double precision on the arguments that a peer's task makes of the
leaves (the named inputs of the problem), and returns y and the gradient of every leaf. `check` holds a candidate's results
against it by RMS error ratio, |got - want| / |want| in the root mean square, and raises `Disagreement` above the tolerance;
a candidate that fails is never timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

TOLERANCE = 2e-5
# Positions per call of the reference, and rows of the batch at a time: both bound what autograd keeps and scatters.
_SEGMENT = 8
_ROWS = 4

Task = Callable[[Mapping[str, Tensor]], dict[str, Any]]


class Disagreement(Exception):
    """A result that is not what the float64 reference says; its time means nothing."""


def oracle(task: Task, leaves: Mapping[str, Tensor], cotangent: Tensor) -> dict[str, Tensor]:
    """y and the gradients of <y, cotangent> with respect to each leaf, in float64 by the reference loop.

    Args:
        task: makes the arguments of `transport_scan` from leaves; differentiable, and row by row along the batch.
        leaves: named inputs; all but `drift` have the batch as first dimension.
        cotangent: [B, T, G, P].

    Returns:
        "y" and one gradient under each leaf's name.
    """
    total: dict[str, Tensor] = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in leaves.items()}
    outputs = []
    with one_thread():
        for start in range(0, cotangent.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            doubles = {name: _rows(name, leaf, rows).double().requires_grad_() for name, leaf in leaves.items()}
            y = _by_segments(task(doubles))
            gradients = torch.autograd.grad(y, list(doubles.values()), cotangent[rows].double(), materialize_grads=True)
            for name, gradient in zip(doubles, gradients):
                _rows(name, total[name], rows).add_(gradient)
            outputs.append(y.detach())
    return {"y": torch.cat(outputs), **total}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: a loop of small operations loses more by waiting for a second one than it gains."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def error_ratio(got: Any, want: Any) -> float:
    """RMS of got - want over RMS of want; infinite where shapes differ or a number is not finite.

    Example:
        >>> error_ratio([1.0, 1.1], [1.0, 1.0])
        0.0707...
    """
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return float("inf")
    difference = np.subtract(got, want, dtype=np.float64)
    norm = np.linalg.norm(want.astype(np.float64, copy=False))
    ratio = float(np.linalg.norm(difference) / norm) if norm > 0 else float(np.linalg.norm(difference))
    return ratio if np.isfinite(ratio) else float("inf")


def check(name: str, got: Mapping[str, Any], want: Mapping[str, Any], tolerance: float = TOLERANCE) -> dict[str, float]:
    """RMS error ratio of each result, all within the tolerance.

    Args:
        name: whose results these are, for the message.
        got: results by name, tensors or arrays.
        want: what they should be; every name in `got` must be here.
        tolerance: largest RMS error ratio.

    Raises:
        Disagreement: naming the results that are off.

    Example:
        >>> check("half", {"y": [0.5]}, {"y": [1.0]})
        Traceback (most recent call last):
        benchmarks.gate.Disagreement: half disagrees with the float64 reference: y off by 5.0e-01 (tolerance 2.0e-05)
    """
    if not got:
        raise Disagreement(f"{name} returned nothing to check")
    errors = {key: error_ratio(as_array(result), as_array(want[key])) for key, result in got.items()}
    wrong = {key: error for key, error in errors.items() if not error <= tolerance}
    if wrong:
        listed = ", ".join(f"{key} off by {error:.1e}" for key, error in wrong.items())
        raise Disagreement(f"{name} disagrees with the float64 reference: {listed} (tolerance {tolerance:.1e})")
    return errors


def _by_segments(arguments: dict[str, Any]) -> Tensor:
    """y of the reference loop, segment by segment: gradients of slices stay small, the recurrence is the same."""
    from shippo_ssm.scan import transport_scan

    drift = arguments.pop("drift")
    pieces = {name: tensor.split(_SEGMENT, dim=1) for name, tensor in arguments.items() if tensor is not None}
    state, outputs = None, []
    for segment in zip(*pieces.values()):
        named = dict(zip(pieces, segment))
        y, state = transport_scan(**named, drift=drift, initial_state=state, output_final_state=True, backend="reference")
        outputs.append(y)
    return torch.cat(outputs, dim=1)


def _rows(name: str, leaf: Tensor, rows: slice) -> Tensor:
    return leaf if name == "drift" else leaf[rows]


def as_array(result: Any) -> np.ndarray:
    """A tensor of any library as a NumPy array."""
    if not isinstance(result, Tensor):
        return np.asarray(result)
    # NumPy has no bfloat16.
    return (result.float() if result.dtype == torch.bfloat16 else result).detach().cpu().numpy()
