"""Families of right actions, one a file, and their names."""

from shippo_ssm.actions.families.dense import DenseExp
from shippo_ssm.actions.families.dissipative import Dissipative
from shippo_ssm.actions.families.identity import Identity
from shippo_ssm.actions.families.lie import Lie
from shippo_ssm.actions.families.oracle import Oracle
from shippo_ssm.actions.families.orthogonal import Orthogonal
from shippo_ssm.actions.families.split import SplitFlow
from shippo_ssm.actions.families.structured import Structured
from shippo_ssm.actions.family import RightAction

__all__ = [
    "FAMILIES",
    "DenseExp",
    "Dissipative",
    "Identity",
    "Lie",
    "Oracle",
    "Orthogonal",
    "SplitFlow",
    "Structured",
    "get_family",
]

FAMILIES = {
    "orthogonal": Orthogonal,
    "dissipative": Dissipative,
    "split": SplitFlow,
    "structured": Structured,
    "dense": DenseExp,
    "none": Identity,
}


def get_family(right: str | RightAction, width: int, bounded: bool = False) -> RightAction:
    """The family for a name of `FAMILIES`, held to ||R||_2 <= 1 where `bounded`, or the given family if it has this width."""
    if isinstance(right, RightAction):
        if right.width != width:
            raise ValueError(
                f"get_family: `right` has width {right.width}; expected {width}; build it with the group width of the layer"
            )
        return right
    if not isinstance(right, str) or right not in FAMILIES:
        choices = ", ".join(repr(name) for name in FAMILIES)
        raise ValueError(f"get_family: `right` is {right!r}; expected one of {choices} or a RightAction")
    grows = right in ("split", "structured", "dense")
    return FAMILIES[right](width, bounded=bounded) if grows else FAMILIES[right](width)
