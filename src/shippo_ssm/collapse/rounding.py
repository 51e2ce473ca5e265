"""Exact actions from trained ones: the finite group that they nearly generate, and its exact representation.

The right actions of a trained model are only nearly a representation: R(a) R(b) differs from R(ab) by a hundredth or so, and
the error grows with the length of a word. Matrices that nearly multiply like a finite group are close to some that do so
exactly. `nearest_representation` finds them: it closes the actions under products, reads the multiplication table off the
nearest elements, and averages R(a) <- polar(mean over b of R(ab) R(b)^T), which squares the error in every round.
`exact_right` runs a model with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from shippo_ssm.actions import RightAction
from shippo_ssm.collapse.audit import realised_actions
from shippo_ssm.collapse.reduction import Array, as_family

# Averaging converges quadratically or not at all.
ROUNDS = 12
EXACT = 1e-12


class Representation(NamedTuple):
    """A finite group of orthogonal matrices near some actions."""

    elements: Tensor
    """[order, P, P], float64: R(a) R(b) = R(table[a, b]) to the last digits."""
    table: Tensor
    """[order, order], integers."""
    moved: float
    """The largest distance ||R - nearest element||_F / sqrt(P) of the actions."""


def _nearest(actions: Array, elements: Array) -> tuple[np.ndarray, Array]:
    """Of every matrix, the index of the nearest element and the distance ||.||_F / sqrt(P)."""
    flat, known = (family.reshape(len(family), -1) for family in (actions, elements))
    squares = (flat**2).sum(1)[:, None] - 2 * flat @ known.T + (known**2).sum(1)
    index = squares.argmin(1)
    return index, np.sqrt(np.maximum(squares[np.arange(len(flat)), index], 0.0) / actions.shape[-1])


def _polar(matrices: Array) -> Array:
    """The nearest orthogonal matrices."""
    left, _, right = np.linalg.svd(matrices)
    return left @ right


def _distinct(actions: Array, elements: Array, tol: float, max_order: int) -> Array:
    """`elements`, and of the actions one of each that is further than `tol` from all of them; at most `max_order` + 1."""
    far = actions[_nearest(actions, elements)[1] > tol] if len(elements) else actions
    while len(far) and len(elements) <= max_order:
        elements, far = np.concatenate([elements, far[:1]]), far[_nearest(far, far[:1])[1] > tol]
    return elements


def nearest_representation(actions: Any, *, tol: float = 0.4, max_order: int = 256) -> Representation | None:
    """The finite group of orthogonal matrices that `actions` nearly belong to, or `None`.

    Args:
        actions: matrices [M, P, P], repeated or not, of all elements of the group or of some that generate it.
        tol: matrices closer than this, as ||.||_F / sqrt(P), are one element. The elements of a group must be further apart.
        max_order: largest number of elements.

    Example:
        >>> import math, torch
        >>> from shippo_ssm.actions import Rotation
        >>> from shippo_ssm.collapse import nearest_representation
        >>> quarter = Rotation(2, 0, 1).dense(torch.tensor(math.pi / 2 + 0.01))
        >>> found = nearest_representation(quarter.unsqueeze(0))
        >>> len(found.elements), round(found.moved, 3)
        (4, 0.01)
    """
    given, _ = as_family(actions)
    generators = elements = _distinct(given, given[:0], tol, max_order)
    # Products of an element that is new with the generators, until none is new.
    fresh = generators
    while len(fresh) and len(elements) <= max_order:
        products = (fresh[:, None] @ generators).reshape(-1, *fresh.shape[1:])
        grown = _distinct(_polar(products), elements, tol, max_order)
        fresh, elements = grown[len(elements) :], grown
    order = len(elements)
    if order > max_order:
        return None
    # Of an element that was given several times the mean.
    index, _ = _nearest(given, elements)
    means = [given[index == place].mean(0) if (index == place).any() else elements[place] for place in range(order)]
    elements = _polar(np.stack(means))
    table = _nearest((elements[:, None] @ elements).reshape(-1, *elements.shape[1:]), elements)[0].reshape(order, order)
    every = np.arange(order)
    if any((np.sort(table, axis) != (every[:, None] if axis == 0 else every)).any() for axis in (0, 1)):
        return None
    residual = np.inf
    for _ in range(ROUNDS):
        elements = _polar(np.stack([(elements[row] @ elements.mT).mean(0) for row in table]))
        residual = max(float(np.abs(elements[a] @ elements - elements[table[a]]).max()) for a in every)
        if residual < EXACT:
            break
    moved = float(_nearest(given, elements)[1].max())
    if residual > 1e3 * EXACT or moved > tol:
        return None
    return Representation(torch.from_numpy(elements), torch.from_numpy(table), moved)


@final
class Rounded(RightAction):
    """The nearest exact action to that of `family`, per group of channels; gradients are those of `family`.

    Args:
        family: the trained right action.
        found: per group of channels its `Representation`; where it is `None` the action stays as it is.
    """

    def __init__(self, family: RightAction, found: list[Representation | None]) -> None:
        super().__init__(family.width, family.coordinates, family.bounded)
        self.family = family
        self.elements = [None if known is None else known.elements.float() for known in found]

    def dense(self, coords: Tensor, step: Tensor | float) -> Tensor:
        right = self.family.dense(coords, step)
        with torch.no_grad():
            change = torch.zeros_like(right)
            for own, to, known in zip(right.unbind(-3), change.unbind(-3), self.elements):
                if known is not None:
                    elements = known.to(right)
                    # Orthogonal matrices have one norm: the nearest is that with the largest product.
                    nearest = torch.einsum("...pq,kpq->...k", own, elements).argmax(-1)
                    to.copy_(elements[nearest] - own)
        return right + change

    def generator(self, coords: Tensor) -> Tensor:
        return self.family.generator(coords)

    @property
    def stable(self) -> bool:
        return self.family.stable


@contextlib.contextmanager
def exact_right(
    model: nn.Module, inputs: Any, *, tol: float = 0.4, max_order: int = 256
) -> Iterator[dict[str, list[Representation | None]]]:
    """Run `model` with exact right actions while the context lasts, wherever its own nearly generate a finite group.

    Args:
        model: a module that is, or contains, `Shippo` layers; no weight is changed.
        inputs: what to read the trained actions from, as in `collapse_of_model`: every token once or more.
        tol: as in `nearest_representation`.
        max_order: as in `nearest_representation`.

    Yields:
        Per layer and group of channels the `Representation`; `None` where the actions stay as they are.
    """
    modules = {name or type(model).__name__: module for name, module in model.named_modules()}
    actions = realised_actions(model, inputs)
    found = {
        name: [nearest_representation(own, tol=tol, max_order=max_order) for own in given.unbind(1)]
        for name, given in actions.items()
    }
    families = {name: right for name in found if isinstance(right := getattr(modules[name], "right", None), RightAction)}
    try:
        for name, family in families.items():
            modules[name].right = Rounded(family, found[name])
        yield found
    finally:
        for name, family in families.items():
            modules[name].right = family
