"""Right actions R_t: factors, families and the dense exponential.

`collapse`, `bank` and `collapse_of_model`, which analyse a set of them, live in `shippo_ssm.collapse`, above this room; they
can be taken from here too and load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shippo_ssm.actions.base import Factor, RightAction
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

if TYPE_CHECKING:
    from shippo_ssm.collapse import ActionRow as ActionRow
    from shippo_ssm.collapse import Banks as Banks
    from shippo_ssm.collapse import Reduction as Reduction
    from shippo_ssm.collapse import bank as bank
    from shippo_ssm.collapse import collapse as collapse
    from shippo_ssm.collapse import collapse_of_model as collapse_of_model

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


def __getattr__(name: str) -> Any:
    above = importlib.import_module("shippo_ssm.collapse")
    if name in above.__all__:
        return getattr(above, name)
    raise AttributeError(f"module 'shippo_ssm.actions' has no attribute {name!r}")
