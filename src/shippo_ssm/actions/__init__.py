"""Right actions R_t: factors, families, the dense exponential, and the collapse criterion."""

from __future__ import annotations

from shippo_ssm.actions.base import Factor, RightAction
from shippo_ssm.actions.expm import expm
from shippo_ssm.actions.factors import Diagonal, RankOne, Rotation, Shear
from shippo_ssm.actions.families import DenseExp, Identity, Lie, Oracle, SplitFlow, get_family

__all__ = [
    "DenseExp",
    "Diagonal",
    "Factor",
    "Identity",
    "Lie",
    "Oracle",
    "RankOne",
    "RightAction",
    "Rotation",
    "Shear",
    "SplitFlow",
    "expm",
    "get_family",
]
