"""Right actions inside another kernel: LANES groups of a token at a time, for families that declare an `inline` kernel."""

from __future__ import annotations

from shippo_ssm.actions._exponential_cpu import expm_lanes
from shippo_ssm.actions._rotation_cpu import make_rotation
from shippo_ssm.actions._split_cpu import make_split
from shippo_ssm.actions.expm import kernel_scheme
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.engine import LaneMap


def right_lanes(dtype: str, width: int, inline: Inline) -> LaneMap:
    """The map from coordinates [K, LANES] and steps [LANES] to matrices [P P, LANES] that `inline` asks for."""
    if inline.kind == "rotation":
        return make_rotation(dtype, width).lanes
    if inline.kind == "split":
        return make_split(dtype, width, inline).lanes
    return expm_lanes(dtype, width, kernel_scheme(dtype, "float64", width), inline)
