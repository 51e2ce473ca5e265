"""The paper's tables and figures, each from one command: claim, protocol, numbers, verdict.

`names()` lists the experiments and `get(name)` loads one. A module defines `EXPERIMENT`, an `Experiment`, and stands in
`_MODULES`. Models that only one experiment needs are in its folder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shippo_lab.harness.experiment import Experiment

# Name on the command line -> module in this folder. Modules load on first use.
_MODULES = {
    "paired": "paired.experiment",
    "projection": "projection",
    "groups": "groups",
    "mqar": "mqar.experiment",
    "mqar-depth": "mqar.depth",
    "suffix": "suffix",
    "rotation": "rotation",
    "start": "start",
    "words": "tracking.words",
    "languages": "tracking.languages",
    "mqar-plain": "tracking.plain_mqar",
    "text": "text",
    "watch": "watch",
}


def names() -> tuple[str, ...]:
    """The experiments, in the order of the paper."""
    return tuple(_MODULES)


def get(name: str) -> Experiment:
    """Load an experiment by its name."""
    if name not in _MODULES:
        raise ValueError(f"experiments: `name` is {name!r}; expected one of {', '.join(_MODULES)}; see `shippo list`")
    return importlib.import_module(f"{__name__}.{_MODULES[name]}").EXPERIMENT


def all_experiments() -> tuple[Experiment, ...]:
    """All experiments, loaded."""
    return tuple(map(get, names()))
