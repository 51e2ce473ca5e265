"""The paper's tables and figures, each from one command: claim, protocol, numbers, verdict.

`names()` lists the experiments and `get(name)` loads one. An experiment file defines `EXPERIMENT`, an `Experiment`; a new one
is added by a line in `_MODULES`. Models and kernels that only one experiment needs stand beside its claim.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shippo_ssm.lab.experiment import Experiment

# Name on the command line -> module in this folder. Modules load on first use.
_MODULES = {
    "paired": "paired.claim",
    "projection": "projection.claim",
    "groups": "groups",
    "mqar": "mqar.claim",
    "suffix": "suffix",
    "rotation": "rotation.claim",
    "start": "start.claim",
    "words": "tracking.words",
    "languages": "tracking.languages",
    "mqar-plain": "tracking.recall",
}


def names() -> tuple[str, ...]:
    """The experiments, in the order of the paper."""
    return tuple(_MODULES)


def get(name: str) -> Experiment:
    """Load an experiment by its name.

    Raises:
        ValueError: there is none of that name.

    Example:
        >>> from shippo_ssm.experiments import get
        >>> get("paired").title
        'Paired noncommutative transport'
    """
    if name not in _MODULES:
        raise ValueError(f"experiments: `name` is {name!r}; expected one of {', '.join(_MODULES)}; see `shippo list`")
    return importlib.import_module(f"{__name__}.{_MODULES[name]}").EXPERIMENT


def all_experiments() -> tuple[Experiment, ...]:
    """All of them, loaded."""
    return tuple(map(get, names()))
