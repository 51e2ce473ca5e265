"""The realised right actions of a model: block sizes, commutators and effective rank, per layer and group.

Hooks collect R_t = `right_actions(u)` of every mixer, B T actions per group, for `collapse` and, with the moves A = R - I,

    commutator           root mean square of ||R_s R_t - R_t R_s||_F over all pairs (s, t)
    relative commutator  the same over the mean of ||A||_F^2
    effective rank       exp(entropy) of the shares of the squared singular values of the moves as rows [B T, P^2]

With K the map X -> (R_t X - X R_t)_t and C = sum vec(R) vec(R)^T, the mean over all pairs is exactly tr(K^T K C) / (B T)^2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shippo_ssm.collapse.reduction import Array, as_family, collapse, commutator_gram
from shippo_ssm.layers import Mixer


@dataclass(frozen=True, slots=True)
class ActionRow:
    """The realised right actions of one group of one layer."""

    layer: str
    group: int
    num_actions: int
    blocks: tuple[int, ...]
    status: str
    """ "irreducible", "reducible" or "cannot decide"."""
    residual: float
    commutator: float
    relative_commutator: float
    effective_rank: float


def effective_rank(moves: Array) -> float:
    """exp(entropy) of the shares of the squared singular values of the moves as rows; 0 if all moves are 0."""
    values = np.linalg.svd(moves.reshape(len(moves), -1), compute_uv=False) ** 2
    total = values.sum()
    if total == 0.0:
        return 0.0
    shares = values[values > 0.0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()))


def audit(layer: str, group: int, actions: Tensor, tol: float | None) -> ActionRow:
    """The row of the actions [M, P, P] of one group."""
    family, _ = as_family(actions)
    moves = family - np.eye(family.shape[-1])
    # The commutators of R and of R - I agree; those of R - I keep more digits.
    flat = moves.reshape(len(moves), -1)
    commutator = float(np.sqrt(max(np.sum(commutator_gram(moves) * (flat.T @ flat)), 0.0))) / len(moves)
    size = float((moves**2).sum()) / len(moves)
    relative, found = commutator / size if size > 0.0 else 0.0, collapse(actions, tol)
    form = found.blocks, found.status, found.residual
    return ActionRow(layer, group, len(family), *form, commutator, relative, effective_rank(moves))


def realised_actions(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The right actions R [B T, G, P, P] of every mixer of a model that has them, in the order of their first run.

    The model runs once, in evaluation mode, without gradients, on `inputs` as in `collapse_of_model`.
    """
    names = {module: name or type(model).__name__ for name, module in model.named_modules() if isinstance(module, Mixer)}
    found: dict[str, list[Tensor]] = {}

    def collect(module: Mixer[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        right = module.right_actions(args[0] if args else kwargs["u"])
        if right is not None:
            found.setdefault(names[module], []).append(right.detach().flatten(0, 1))

    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs if isinstance(inputs, Sequence) else (inputs,), {})
    training = {module: module.training for module in model.modules()}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(collect, with_kwargs=True))
        try:
            model.eval()(*args, **kwargs)
        finally:
            for module, mode in training.items():
                module.training = mode
    return {name: torch.cat(parts) for name, parts in found.items()}


def collapse_of_model(model: nn.Module, inputs: Any, *, tol: float | None = None) -> list[ActionRow]:
    """Whether the right actions of a trained layer or model couple channels, per layer and group.

    Args:
        model: a module that is, or contains, mixers with right actions.
        inputs: a tensor, a sequence of positional arguments or a mapping of keyword arguments.
        tol: noise in the actions relative to their norm, as in `collapse`.

    Returns:
        One row per layer and group, in the order in which the layers first run.

    Example:
        >>> import torch
        >>> from shippo_ssm import Shippo
        >>> from shippo_ssm.collapse import collapse_of_model
        >>> layer = Shippo(8, d_state=4, dt_min=1.0, dt_max=1.0)
        >>> collapse_of_model(layer, torch.randn(2, 8, 8))[0].status
        'irreducible'
    """
    found = realised_actions(model, inputs)
    if not found:
        kind = type(model).__name__
        raise ValueError(f"collapse_of_model: `model` is a {kind} without right actions; expected a Shippo layer with them")
    return [audit(name, group, own, tol) for name, actions in found.items() for group, own in enumerate(actions.unbind(1))]
