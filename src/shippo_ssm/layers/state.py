"""The state of a layer between calls: convolution windows and the cell's state, as nested named tuples of tensors.

Plain tuples pass through `torch.compile`, `torch.export` and checkpointing without registration. What one can do with a state
stands in `states.py`, for states of any kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shippo_ssm.layers import states
from shippo_ssm.layers.cell import CellState


class ShippoState(NamedTuple):
    """What a `Shippo` layer carries from one call to the next; its size does not depend on how much has been read.

    Args:
        conv: [B, d_conv - 1, r D], the last inputs of the short convolution.
        cell: the `CellState`.
        controller: [B, K - 1, D], the last inputs of the controller's own convolution; `None` without one.

    Example:
        >>> import torch
        >>> from shippo_ssm.layers import Shippo
        >>> state = Shippo(8, d_state=4).init_state(2)
        >>> state.reorder(torch.tensor([1, 1, 0])).batch_size
        3
    """

    conv: Tensor
    cell: CellState
    controller: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """The number of sequences, B."""
        return self.conv.shape[0]

    def tensors(self) -> list[Tensor]:
        """All of its tensors."""
        return [self.conv, *self.cell] + ([] if self.controller is None else [self.controller])

    def detach(self) -> ShippoState:
        """The same numbers outside the graph."""
        return states.detach(self)

    def clone(self) -> ShippoState:
        """The same numbers in memory of their own."""
        return states.clone(self)

    def to(self, target: torch.device | torch.dtype | str) -> ShippoState:
        """The state on another device, or in another dtype."""
        return states.to(self, target)

    def select(self, rows: Tensor | Sequence[int] | int) -> ShippoState:
        """The sequences `rows`, with repeats as beam search wants them."""
        return states.select(self, rows)

    def reorder(self, index: Tensor) -> ShippoState:
        """`select`, as beam search calls it."""
        return states.select(self, index)

    def repeat(self, times: int) -> ShippoState:
        """Every sequence `times` times."""
        return states.repeat(self, times)

    def save(self, path: str | Path) -> Path:
        """Write the state to a safetensors file; `states.load(path, like=layer.init_state(1))` reads it."""
        return states.save(self, path)


def check_state(op: str, state: ShippoState, expected: dict[str, tuple[int, ...]], device: torch.device) -> None:
    """`state` has the shapes `expected` of this layer's states, by name, and lies on its `device`."""
    if not isinstance(state, ShippoState):
        raise ValueError(
            f"{op}: `state` is a {type(state).__name__}; expected a ShippoState; make one with init_state(batch_size)"
        )
    tensors = {"conv": state.conv, **state.cell._asdict(), "controller": state.controller}
    for name, tensor in tensors.items():
        shape = None if tensor is None else tuple(tensor.shape)
        if shape != expected.get(name):
            raise ValueError(
                f"{op}: `{name}` of `state` has shape {shape}; expected {expected.get(name)}; the state belongs to another "
                "model or batch, make one with init_state(batch_size)"
            )
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{op}: `{name}` of `state` is on {tensor.device}; expected {device}; move it with state.to(device)"
            )


# The states of all layers are a list, to which the functions of `states` apply as they are.
detach_states, reorder_states = states.detach, states.select
