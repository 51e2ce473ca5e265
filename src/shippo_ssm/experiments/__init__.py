"""The paper's tables and figures, each from one command: claim, protocol, numbers, verdict.

`names()` lists the experiments and `get(name)` loads one. An experiment file defines `EXPERIMENT`, an `Experiment`; a
new one is added by a line in `_MODULES`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shippo_ssm.experiments.core import Experiment

# Name on the command line -> module in this folder. Modules load on first use.
_MODULES = {
    "paired": "paired",
    "projection": "projection",
    "groups": "groups",
    "mqar": "mqar",
    "suffix": "suffix",
    "rotation": "rotation",
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
        raise ValueError(f"there is no experiment {name!r}; choose one of {', '.join(_MODULES)}")
    return importlib.import_module(f"shippo_ssm.experiments.{_MODULES[name]}").EXPERIMENT
