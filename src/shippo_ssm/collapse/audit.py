"""What the right actions of a model really do: block sizes, commutators and effective rank, per layer and group.

Data path. Every mixer inside the model is watched while the model runs once, without gradients, on the given inputs; what its
`right_actions(u)` gives for its own input u are its realised actions R_t, B T of them per group. Each set goes through
`collapse` and these measures:

    commutator           root mean square of ||R_s R_t - R_t R_s||_F over all pairs (s, t)
    relative commutator  the same over the mean of ||A||_F^2, A = R - I: how far the moves are from commuting, whatever
                         their size
    effective rank       exp(entropy) of the shares of the squared singular values of the moves A as rows [B T, P^2]: the
                         number of directions that the actions use, 0 when all of them are the identity

The mean over pairs is exact: with K the map X -> (R_t X - X R_t)_t and C = sum vec(R) vec(R)^T it is
tr(K^T K C) / (B T)^2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shippo_ssm.collapse.reduction import Array, as_family, collapse, commutator_gram
from shippo_ssm.layers import Mixer


@dataclass(frozen=True, kw_only=True, slots=True)
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


def commutator_norm(actions: Array) -> float:
    """Root mean square of ||R_s R_t - R_t R_s||_F over all pairs."""
    flat = actions.reshape(len(actions), -1)
    total = float(np.sum(commutator_gram(actions) * (flat.T @ flat)))
    return float(np.sqrt(max(total, 0.0))) / len(actions)


def effective_rank(moves: Array) -> float:
    """exp(entropy) of the shares of the squared singular values of the moves as rows; 0 if there are none."""
    values = np.linalg.svd(moves.reshape(len(moves), -1), compute_uv=False) ** 2
    total = values.sum()
    if total == 0.0:
        return 0.0
    shares = values[values > 0.0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()))


def audit(layer: str, group: int, actions: Tensor, tol: float | None) -> ActionRow:
    """One row of the report, for the actions [M, P, P] of one group."""
    family, _ = as_family(actions)
    moves = family - np.eye(family.shape[-1])
    # The identity commutes with everything, so the commutators are those of the moves, which keep more digits.
    commutator, size = commutator_norm(moves), float((moves**2).sum()) / len(moves)
    reduction = collapse(actions, tol)
    return ActionRow(
        layer=layer,
        group=group,
        num_actions=len(family),
        blocks=reduction.blocks,
        status=reduction.status,
        residual=reduction.residual,
        commutator=commutator,
        relative_commutator=commutator / size if size > 0.0 else 0.0,
        effective_rank=effective_rank(moves),
    )


def run_once(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, Sequence) and not isinstance(inputs, Tensor):
        model(*inputs)
    else:
        model(inputs)


def realised_actions(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The right actions R [B T, G, P, P] of every mixer that has them, in the order in which the mixers first run.

    Args:
        model: a module that is, or contains, mixers; it runs once, in evaluation mode, without gradients.
        inputs: what the model is called with, as in `collapse_of_model`.
    """
    watched = {name or type(model).__name__: module for name, module in model.named_modules() if isinstance(module, Mixer)}
    found: dict[str, list[Tensor]] = defaultdict(list)

    def watch(name: str):
        def hook(module: Mixer[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            right = module.right_actions(args[0] if args else kwargs["u"])
            if right is not None:
                found[name].append(right.detach().flatten(0, 1))

        return hook

    handles = [module.register_forward_pre_hook(watch(name), with_kwargs=True) for name, module in watched.items()]
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            run_once(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
    return {name: torch.cat(parts) for name, parts in found.items()}


def collapse_of_model(model: nn.Module, inputs: Any, *, tol: float | None = None) -> list[ActionRow]:
    """Whether the right actions of a trained layer or model couple channels, per layer and group.

    Args:
        model: a module that is, or contains, mixers with right actions.
        inputs: what the model is called with: a tensor, a sequence of positional or a mapping of keyword arguments.
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
        raise ValueError(
            f"collapse_of_model: `model` is a {type(model).__name__} without right actions; expected a layer that has them, or "
            "a model made of such layers; give a Shippo layer with a right action"
        )
    return [audit(name, group, own, tol) for name, actions in found.items() for group, own in enumerate(actions.unbind(1))]
