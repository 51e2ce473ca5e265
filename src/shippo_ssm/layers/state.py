"""The state of a layer between calls: convolution windows and the cell's state, as nested named tuples of tensors.

Plain tuples pass through `torch.compile`, `torch.export` and checkpointing without registration. `detach` cuts the graph
for truncated backpropagation, `reorder` picks rows for beam search, `to` moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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

    def detach(self) -> ShippoState:
        """The same numbers outside the graph."""
        return self._map(Tensor.detach)

    def reorder(self, index: Tensor) -> ShippoState:
        """Rows `index` [new B] of the batch, with repeats as beam search wants them."""
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def to(self, device: torch.device | str) -> ShippoState:
        """The state on another device; dtypes stay."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> ShippoState:
        controller = None if self.controller is None else change(self.controller)
        return ShippoState(change(self.conv), CellState(*(change(tensor) for tensor in self.cell)), controller)


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


def detach_states(states: Sequence[ShippoState]) -> list[ShippoState]:
    """`detach` for the states of all layers of a backbone."""
    return [state.detach() for state in states]


def reorder_states(states: Sequence[ShippoState], index: Tensor) -> list[ShippoState]:
    """`reorder` for the states of all layers of a backbone."""
    return [state.reorder(index) for state in states]
