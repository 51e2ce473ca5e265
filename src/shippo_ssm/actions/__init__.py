"""Right actions R_t: factors, families, the dense exponential, and the collapse criterion."""

from __future__ import annotations

from shippo_ssm.actions.audit import ActionRow, collapse_of_model
from shippo_ssm.actions.banks import Banks, Recurrence, bank
from shippo_ssm.actions.base import Factor, RightAction
from shippo_ssm.actions.collapse import Reduction, collapse
from shippo_ssm.actions.expm import expm
from shippo_ssm.actions.factors import Diagonal, RankOne, Rotation, Shear
from shippo_ssm.actions.families import DenseExp, Identity, Lie, Oracle, SplitFlow, get_family

__all__ = [
    "ActionRow",
    "Banks",
    "DenseExp",
    "Diagonal",
    "Factor",
    "Identity",
    "Lie",
    "Oracle",
    "RankOne",
    "Recurrence",
    "Reduction",
    "RightAction",
    "Rotation",
    "Shear",
    "SplitFlow",
    "bank",
    "collapse",
    "collapse_of_model",
    "expm",
    "get_family",
]
