"""The work that is measured: the sizes of one scan, and inputs for it that stay tame at any length.

Data path: a `Shape` (B, T, G, N, P) and a seed give `make_inputs`, float32 tensors named as in `transport_scan`, and a
cotangent for its output. Rows of the batch are independent of each other; only `drift` is shared by all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("value", "write", "read", "step", "drift", "right")
# Distinct right actions of one problem; each position draws one of them.
_POOL = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of one scan; the defaults are the shape at which targets are stated."""

    batch: int = 16
    length: int = 512
    groups: int = 64
    order: int = 32
    width: int = 4
    sets: int | None = None
    """Writes and reads of a position, Q; one for each group by default."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"Shape: `{name}` is {size}; expected at least 1")

    @property
    def num_sets(self) -> int:
        """Q as a number."""
        return self.groups if self.sets is None else self.sets

    @property
    def cells(self) -> int:
        """Updates of one [N, P] state in the whole scan, B T G."""
        return self.batch * self.length * self.groups

    def __str__(self) -> str:
        shared = "" if self.sets is None else f" Q{self.sets}"
        return f"B{self.batch} T{self.length} G{self.groups} N{self.order} P{self.width}{shared}"


def make_inputs(shape: Shape, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of `transport_scan` by name, and a cotangent for y, float32.

    The slowest mode forgets over about a hundred positions and the right actions are rotations by about 0.2, so that states
    neither vanish nor grow at any length.

    Args:
        shape: the sizes.
        seed: of all random numbers.

    Returns:
        value [B, T, G, P], write and read [B, T, Q, N], step [B, T, G], drift [G, N], right [B, T, G, P, P]; and [B, T, G, P].

    Example:
        >>> inputs, cotangent = make_inputs(Shape(batch=1, length=3, groups=2, order=4, width=2))
        >>> inputs["right"].shape, cotangent.shape
        (torch.Size([1, 3, 2, 2, 2]), torch.Size([1, 3, 2, 2]))
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    lead = (shape.batch, shape.length, shape.groups)
    order, width = shape.order, shape.width
    angles = 0.1 * normal(_POOL, width, width).double()
    rotations = torch.linalg.matrix_exp(angles - angles.mT).float()
    inputs = {
        "value": normal(*lead, width),
        "write": normal(*lead[:2], shape.num_sets, order) / order**0.5,
        "read": normal(*lead[:2], shape.num_sets, order) / order**0.5,
        "step": 0.01 * torch.exp(0.5 * normal(*lead)),
        "drift": -torch.arange(1, order + 1).float() * torch.exp(0.1 * normal(shape.groups, 1)),
        "right": rotations[torch.randint(_POOL, lead, generator=generator)],
    }
    return inputs, normal(*lead, width)
