"""Where the diagonal left generator starts: drift [G, N], all entries negative."""

from __future__ import annotations

import numpy as np

DRIFTS = ("geometric", "s4d-real", "legs")


def initial_drift(kind: str, d_state: int, memory_length: float = 4096.0) -> list[float]:
    """The N entries that every group starts from.

    "geometric" goes from -1 / memory_length to -1 in equal ratios: every time scale between the longest memory and a token.
    "s4d-real" is a_n = -(n + 1), the eigenvalues of the LegS operator, one time scale per slot. "legs" takes the normal part
    of the LegS operator, A + p p^T with p_n = sqrt(n + 1/2), whose eigenvalues have one real part, -1/2, and keeps that real
    part: a diagonal real drift cannot turn, so all slots forget equally slowly and selection is left to write and read.

    Args:
        kind: "geometric", "s4d-real" or "legs".
        d_state: N.
        memory_length: tokens that the slowest slot remembers at a unit step, for "geometric".

    Example:
        >>> initial_drift("s4d-real", 3)
        [-1.0, -2.0, -3.0]
        >>> initial_drift("geometric", 3, 100.0)
        [-0.01, -0.1, -1.0]
    """
    if kind not in DRIFTS:
        raise ValueError(f"Shippo: `drift_init` is {kind!r}; expected one of {', '.join(map(repr, DRIFTS))}")
    if kind == "geometric":
        if memory_length < 1:
            raise ValueError(f"Shippo: `memory_length` is {memory_length}; expected at least one token")
        return (-np.geomspace(1 / memory_length, 1.0, d_state)).tolist()
    order = np.arange(d_state, dtype=np.float64)
    if kind == "s4d-real":
        return (-(order + 1)).tolist()
    # Loads on first use: few layers need the measures.
    from shippo_ssm.projection import LegS

    scale = np.sqrt(2 * order + 1)
    normal = LegS(d_state).A(1.0) + 0.5 * np.outer(scale, scale)
    return np.linalg.eigvals(normal).real.tolist()
