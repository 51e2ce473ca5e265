"""What a layer learned of a group: are its right actions a representation, and which one?

A group of channels holds a representation where R(a) R(b) = R(ab). Its character, the trace of R on each conjugacy
class, is then a sum of the irreducible ones, and the multiplicities say which. One faithful representation solves the
task.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from shippo_lab.tasks.words import Group, WordTask
from shippo_ssm.collapse import realised_actions

# A group of channels whose distance is below this holds a representation.
CLOSE = 0.1


def distance(actions: np.ndarray, group: Group) -> np.ndarray:
    """Per group of channels, the root mean square over all pairs of ||R(a) R(b) - R(ab)||_F / sqrt(P): 0 for a representation,
    about sqrt(2) for unrelated matrices.
    """
    width = actions.shape[-1]
    squares = [((actions[a] @ actions - actions[group.table[a]]) ** 2).sum((-2, -1)).mean(0) for a in range(group.order)]
    return np.sqrt(np.mean(squares, axis=0) / width)


def class_traces(actions: np.ndarray, group: Group) -> np.ndarray:
    """[G, classes]: the mean trace of R on each conjugacy class."""
    traces = np.trace(actions, axis1=-2, axis2=-1)
    return np.stack([traces[own].mean(0) for own in group.classes], axis=1)


def multiplicities(traces: np.ndarray, group: Group) -> np.ndarray:
    """[G, irreps]: how often each irreducible real representation is in a character, <chi, chi_i> / <chi_i, chi_i>."""
    weights = np.array([len(own) for own in group.classes]) / group.order
    true = group.characters
    return (traces * weights) @ true.T / (true**2 @ weights)


def report(model: nn.Module, task: WordTask) -> dict[str, Any]:
    """JSON-able: per group of channels of the first layer the distance from a representation, its character, multiplicities."""
    tokens = torch.arange(task.structure.order).unsqueeze(1)
    actions = next(iter(realised_actions(model, tokens).values())).double().numpy()
    traces = class_traces(actions, task.structure)
    return {
        "distance": distance(actions, task.structure).tolist(),
        "traces": traces.tolist(),
        "multiplicities": multiplicities(traces, task.structure).tolist(),
    }


def summary(found: dict[str, Any]) -> dict[str, float]:
    """Of a report: the smallest distance from a representation, and how many groups of channels are close to one."""
    distances = np.array(found["distance"])
    return {"distance": float(distances.min()), "representations": float((distances < CLOSE).sum())}
