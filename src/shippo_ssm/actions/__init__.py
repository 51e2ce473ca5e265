"""Right actions R_t: factors, families and the dense exponential."""

from shippo_ssm.actions.base import Factor, RightAction
from shippo_ssm.actions.expm import expm
from shippo_ssm.actions.exponential import DenseExp, Dissipative, Lie, Structured
from shippo_ssm.actions.factors import Diagonal, RankOne, Rotation, Shear
from shippo_ssm.actions.families import Identity, Oracle, get_family
from shippo_ssm.actions.orthogonal import Orthogonal
from shippo_ssm.actions.split import SplitFlow

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
