"""Right actions inside another kernel: LANES groups of a token at a time, for families that declare an `inline` kernel."""

from __future__ import annotations

from shippo_ssm.actions._exponential_cpu import expm_lanes
from shippo_ssm.actions._rotation_cpu import rotation_lanes
from shippo_ssm.actions._split_cpu import split_lanes
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
