"""What the panel of the report works on: a memory of two channels, written once, and the numbers it must show.

A signal f: [0, 1] -> R^2 is compressed into N = 24 LegS coefficients per channel, C [24, 2]. Then operations arrive:
the frame of the memory turns by an angle (a rotation) and slants (a shear), in either order. With R the product of the
two, the past as it stands in the new frame is f(tau)^T R. A transported memory has acted on its coefficients, C R, and
reads Phi(tau)^T C R; a memory that can only write still holds C and reads Phi(tau)^T C.

The page gets C, the signal on a grid, and nothing else; it computes Phi, R and both read-outs itself, for as many
coefficients as the reader keeps. `read_back` is the same computation on the library's own names, and the tests hold the
page against it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

ORDER = 24
GRID = 201
ORDERS = ("turn-shear", "shear-turn")


def signal(t: Any) -> np.ndarray:
    """A growing spiral with a tremor, [.., 2]; its two channels differ, so that a turn of the frame shows."""
    t = np.asarray(t, dtype=float)
    radius, angle = 0.25 + 0.8 * t, 1.0 + 9.5 * t
    return np.stack([radius * np.cos(angle) + 0.1 * np.sin(41 * t), 0.7 * radius * np.sin(angle)], axis=-1)


def coefficients() -> np.ndarray:
    """C(1) [24, 2]: the projection of the signal on the first 24 LegS functions of its whole past."""
    from shippo_ssm.projection import LegS, ProjectionMemory

    return ProjectionMemory(LegS(ORDER)).project(signal, 1.0)


def panel_data() -> dict[str, Any]:
    """What the page embeds as JSON: `coefficients` [24][2] and `signal` [201][2] on an even grid of [0, 1]."""
    grid = np.linspace(0.0, 1.0, GRID)
    return {"coefficients": coefficients().round(9).tolist(), "signal": signal(grid).round(9).tolist()}


class ReadBack(NamedTuple):
    """What the panel shows for one setting: relative errors of both read-outs, and how far the two orders are apart in each."""

    fixed_error: float
    transported_error: float
    wanted_gap: float
    fixed_gap: float
    transported_gap: float


def action(turn: float, shear: float, order: str) -> np.ndarray:
    """R [2, 2]: a rotation by `turn` radians and a shear, the first operation as the first factor."""
    from shippo_ssm.actions import Rotation, Shear

    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; expected one of {', '.join(ORDERS)}")
    first, second = Rotation(2, 0, 1).dense(turn).double().numpy(), Shear(2, 0, 1).dense(shear).double().numpy()
    return first @ second if order == "turn-shear" else second @ first


def read_back(turn: float, shear: float, order: str, keep: int = ORDER) -> ReadBack:
    """The numbers of the panel, computed by the library.

    Args:
        turn: angle in radians.
        shear: coefficient of the shear.
        order: "turn-shear" or "shear-turn".
        keep: how many of the coefficients are kept, 1 to 24.

    Example:
        >>> shown = read_back(0.5, 0.0, "turn-shear")
        >>> shown.transported_error < 0.05 < shown.fixed_error
        True
    """
    from shippo_ssm.projection import LegS

    grid = np.linspace(0.0, 1.0, GRID)
    basis, kept = LegS(ORDER).basis(1.0, grid)[:, :keep], coefficients()[:keep]
    right, other = (action(turn, shear, name) for name in (order, *(name for name in ORDERS if name != order)))
    read = {
        "wanted": lambda matrix: signal(grid) @ matrix,
        "fixed": lambda matrix: basis @ kept,
        "transported": lambda matrix: basis @ (kept @ matrix),
    }
    size = np.linalg.norm(read["wanted"](right))
    error = {name: float(np.linalg.norm(of(right) - read["wanted"](right)) / size) for name, of in read.items()}
    gap = {name: float(np.linalg.norm(of(right) - of(other)) / size) for name, of in read.items()}
    return ReadBack(error["fixed"], error["transported"], gap["wanted"], gap["fixed"], gap["transported"])
