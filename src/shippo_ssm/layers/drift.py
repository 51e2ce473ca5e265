"""Where the diagonal left generator starts: drift [G, N], all entries negative."""

from __future__ import annotations

import numpy as np

DRIFTS = ("geometric", "s4d-real", "legs")


def initial_drift(kind: str, d_state: int, memory_length: float = 4096.0) -> list[float]:
    """The N = d_state entries that every group starts from.

    "geometric" goes from -1 / memory_length to -1 in equal ratios: every time scale between the longest memory and a token.
    "s4d-real" is a_n = -(n + 1), the eigenvalues of the LegS operator, one time scale per slot. "legs" takes the normal part
    of the LegS operator, A + p p^T with p_n = sqrt(n + 1/2), whose eigenvalues have one real part, -1/2, and keeps that real
    part: a diagonal real drift cannot turn, so all slots forget equally slowly and selection is left to write and read.
    """
    if kind not in DRIFTS:
        raise ValueError(f"Shippo: `drift_init` is {kind!r}; expected one of {', '.join(map(repr, DRIFTS))}")
    if kind == "geometric":
        return (-np.geomspace(1 / memory_length, 1.0, d_state)).tolist()
    order = np.arange(d_state, dtype=np.float64)
    if kind == "s4d-real":
        return (-(order + 1)).tolist()
    # Loads on first use: few layers need the measures.
    from shippo_ssm.projection import LegS

    scale = np.sqrt(2 * order + 1)
    normal = LegS(d_state).A(1.0) + 0.5 * np.outer(scale, scale)
    return np.linalg.eigvals(normal).real.tolist()
