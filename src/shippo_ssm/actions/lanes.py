"""Right actions inside another kernel: LANES groups of a token at a time, one per SIMD lane.

A family says in `RightAction.inline` which of the maps below computes it; the kernel that holds the map fills in coordinates
and steps and finds the matrices. A family that says nothing hands over its matrices, made by `dense`.
"""

from __future__ import annotations

from shippo_ssm.actions._expm_kernels import expm_lanes
from shippo_ssm.actions._rotation_kernels import rotation_lanes
from shippo_ssm.actions._split_kernels import split_lanes
from shippo_ssm.actions.base import Inline
from shippo_ssm.actions.expm import kernel_scheme
from shippo_ssm.engine import LaneMap


def right_lanes(dtype: str, width: int, inline: Inline) -> LaneMap:
    """The map from coordinates [K, LANES] and steps [LANES] to matrices [P P, LANES] that `inline` asks for."""
    if inline.kind == "rotation":
        return rotation_lanes(dtype, width)
    if inline.kind == "split":
        return split_lanes(dtype, width, inline.sizes, inline.bounded)
    return expm_lanes(dtype, width, kernel_scheme(dtype, "float64", width), inline)
