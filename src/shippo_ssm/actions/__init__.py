"""Right actions R_t: factors, families and the dense exponential."""

from shippo_ssm.actions.base import Factor
from shippo_ssm.actions.expm import expm
from shippo_ssm.actions.factors import Diagonal, RankOne, Rotation, Shear
from shippo_ssm.actions.families import (
    DenseExp,
    Dissipative,
    Identity,
    Lie,
    Oracle,
    Orthogonal,
    SplitFlow,
    Structured,
    get_family,
)
from shippo_ssm.actions.family import RightAction

__all__ = [
    "DenseExp",
    "Diagonal",
    "Dissipative",
    "Factor",
    "Identity",
    "Lie",
    "Oracle",
    "Orthogonal",
    "RankOne",
    "RightAction",
    "Rotation",
    "Shear",
    "SplitFlow",
    "Structured",
    "expm",
    "get_family",
]
