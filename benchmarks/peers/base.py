"""The interface of a peer, and the tasks that peers solve, written as arguments of `transport_scan`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.gate import Task
from benchmarks.problem import NAMES


class Missing(Exception):
    """Why a peer cannot run here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One peer bound to its inputs."""

    forward: Callable[[], Any]
    """y, without recording for gradients."""
    both: Callable[[], Mapping[str, Any]] | None = None
    """y and the gradients of the leaves by name; `None` where the peer has no backward pass."""
    expected: Callable[[], Mapping[str, Any]] | None = None
    """The right answer, for a peer whose task is not a transported scan: the same model in float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Something that can be timed beside our kernels."""

    name: str
    kind: str
    """"ours", "same recurrence", "easier recurrence" or "other model"."""
    how: str
    """How it works, in a few words."""
    cannot: str = ""
    """What it leaves out."""
    leaves: tuple[str, ...] = NAMES
    """Inputs it takes gradients for."""
    task: Task | None = None
    """Its arguments of `transport_scan`, made of its leaves; `None` for another model."""
    prepare: Callable[[Mapping[str, Tensor], Tensor], Candidate] = field(repr=False)
    """Binds it to inputs and a cotangent; raises `Missing` where it cannot run."""
    quick: bool = True
    """Whether it is fast enough for the quick mode."""
    slow_backward: bool = False
    """Whether its backward pass takes a minute and more at the shape of the targets, so that it is not run."""
    compiles: bool = False
    """Whether its first call compiles, so that this call's time says nothing."""


def same_recurrence(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """H_t = exp(step_t drift) H_{t-1} right_t + write_t value_t^T: all of it."""
    return dict(leaves)


def diagonal_recurrence(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same without a right action."""
    return {name: leaf for name, leaf in leaves.items() if name != "right"}


# A peer that computes all of the recurrence.
same_peer = functools.partial(Peer, kind="same recurrence", task=same_recurrence)


def require(module: str, remedy: str) -> ModuleType:
    """The imported module, or `Missing` with the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"{error}; {remedy}") from error


def torch_candidate(
    solve: Callable[[Mapping[str, Tensor]], Tensor], inputs: Mapping[str, Tensor], leaves: tuple[str, ...], cotangent: Tensor
) -> Candidate:
    """A candidate from a differentiable PyTorch function of named leaves.

    Args:
        solve: named leaves -> y.
        inputs: all inputs of the problem.
        leaves: which of them the function takes.
        cotangent: shape of y.
    """
    plain = {name: inputs[name] for name in leaves}
    recorded = {name: inputs[name].detach().requires_grad_() for name in leaves}

    def forward() -> Tensor:
        with torch.no_grad():
            return solve(plain)

    def both() -> dict[str, Tensor]:
        y = solve(recorded)
        gradients = torch.autograd.grad(y, list(recorded.values()), cotangent)
        return {"y": y.detach(), **dict(zip(recorded, gradients))}

    return Candidate(forward=forward, both=both)
