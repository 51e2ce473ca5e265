"""What the panel of the report works on: a memory of two channels, written once, and the numbers it must show.

A signal f: [0, 1] -> R^2 is compressed into N = 24 LegS coefficients per channel, C [24, 2]. Then operations arrive:
the frame of the memory turns by an angle (a rotation) and slants (a shear), in either order. With R the product of the
two, the past as it stands in the new frame is f(tau)^T R. A transported memory has acted on its coefficients, C R, and
reads Phi(tau)^T C R; a memory that can only write still holds C and reads Phi(tau)^T C.

The page gets C, the signal on a grid, and nothing else; it computes Phi, R and both read-outs itself, for as many
coefficients as the reader keeps. The tests hold it against the same computation on the library's own names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ORDER = 24
GRID = 201


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
