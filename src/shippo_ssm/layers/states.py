"""States of layers and models: the records, and functions to copy, move, select, repeat, join, save and load them.

A state is a tensor, or a tuple, named tuple or list of states, or `None`; every tensor has the sequences B as its first axis.
The functions serve a `ShippoState`, the state of any other mixer, and the list of states of a whole model alike. Plain tuples
pass through `torch.compile`, `torch.export` and checkpointing without registration.

    after = states.clone(before)                          # a copy that later in-place steps leave alone
    beams = states.select(states.repeat(after, 4), rows)
    states.save(after, "session.safetensors")
    after = states.load("session.safetensors", like=model.init_state(1))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shippo_ssm.scan.algebra import outer, per_group

State = TypeVar("State")


def map_states(change: Callable[..., Tensor], state: State, *others: State) -> State:
    """The state whose tensors are change(tensor, ..), for one state or several of one form."""
    for other in others:
        check_form("map_states", other, state)
    return _map(change, state, *others)


def clone(state: State) -> State:
    """A copy in memory of its own."""
    return _map(Tensor.clone, state)


def detach(state: State) -> State:
    """The same state outside the autograd graph."""
    return _map(Tensor.detach, state)


def to(state: State, target: torch.device | torch.dtype | str) -> State:
    """The state on another device, or its floating tensors in another dtype."""
    if isinstance(target, torch.dtype):
        return _map(lambda tensor: tensor.to(target) if tensor.is_floating_point() else tensor, state)
    return _map(lambda tensor: tensor.to(target), state)


def select(state: State, rows: Tensor | Sequence[int] | int) -> State:
    """The sequences `rows`, in any order and with repeats (as in beam search); a single number keeps its axis."""
    wanted = torch.as_tensor([rows] if isinstance(rows, int) else rows)
    count = batch_size(state)
    if wanted.numel() and not -count <= int(wanted.min()) <= int(wanted.max()) < count:
        raise ValueError(f"select: `rows` is {wanted.tolist()}; expected numbers below {count}, the sequences of the state")
    wanted = wanted % max(1, count)
    return _map(lambda tensor: tensor.index_select(0, wanted.to(tensor.device)), state)


def repeat(state: State, times: int) -> State:
    """Every sequence `times` times, the copies next to each other."""
    return _map(lambda tensor: tensor.repeat_interleave(times, dim=0), state)


def concatenate(parts: Sequence[State]) -> State:
    """One state of all the sequences of several, in their order."""
    if not parts:
        raise ValueError("concatenate: `parts` is empty; expected at least one state")
    for part in parts[1:]:
        check_form("concatenate", part, parts[0], rows=False)
    return _map(lambda *tensors: torch.cat(tensors), *parts)


def at(state: State, position: int) -> State:
    """The state after `position` (-1 is the last) of one that holds the states after all positions."""
    return _map(lambda tensor: tensor[position], state)


def batch_size(state: Any) -> int:
    """The number of sequences, B."""
    for _, tensor in named_tensors(state):
        return tensor.shape[0]
    raise ValueError("batch_size: `state` holds no tensor; expected the state of a layer or model")


def num_bytes(state: Any) -> int:
    """Bytes of all its tensors."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(state))


def save(state: Any, path: str | Path) -> Path:
    """Write `state` to the safetensors file `path`; `load(path, like=layer.init_state(1))` reads it."""
    from safetensors.torch import save_file

    path = Path(path)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named_tensors(state)}
    # Written aside and renamed: a process that is killed leaves the old file or the new one.
    part = path.with_name(path.name + ".part")
    save_file(tensors, part)
    part.replace(path)
    return path


def load(path: str | Path, like: State) -> State:
    """Read the state in the file `path`.

    Args:
        path: a file that `save` wrote.
        like: a state of the same model, such as `model.init_state(1)`: it gives the form, the shapes apart from B, and devices.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"load: {str(path)!r} is a folder, pipe or device; expected a file of `save`")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"load: {str(path)!r} is damaged or no safetensors file ({error}); expected a file of `save`"
        ) from None
    names = [name for name, _ in named_tensors(like)]
    if sorted(names) != sorted(tensors):
        raise ValueError(
            f"load: the file has {sorted(tensors)}; expected {sorted(names)}; give `like` from the model that the state came of"
        )
    order = iter(names)
    state = _map(lambda tensor: tensors[next(order)].to(tensor.device), like)
    check_form("load", state, like, rows=False)
    if len(counts := {len(tensor) for tensor in tensors.values()}) > 1:
        raise ValueError(f"load: the file has tensors of {sorted(counts)} sequences; expected one number of them")
    return state


def check_form(op: str, state: Any, like: Any, rows: bool = True) -> None:
    """Check that `state` has the tensors of `like`, of the same shapes and dtypes; with `rows` also as many sequences."""
    ours, theirs = dict(named_tensors(state)), dict(named_tensors(like))
    if list(ours) != list(theirs):
        raise ValueError(f"{op}: a state has {list(ours)}; expected {list(theirs)}; the states belong to different models")
    skip = 0 if rows else 1
    for name, tensor in ours.items():
        other = theirs[name]
        if tensor.shape[skip:] != other.shape[skip:] or tensor.dtype != other.dtype:
            sequences = "" if rows else ", in everything but the sequences"
            raise ValueError(
                f"{op}: `{name}` of a state is {_form(tensor)}; expected {_form(other)}{sequences}; it belongs to another model"
            )


def named_tensors(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state with their names: the fields and indices that lead to them, joined by dots."""
    if isinstance(state, Tensor):
        yield name or "state", state
    elif isinstance(state, (tuple, list)):
        fields = getattr(state, "_fields", range(len(state)))
        for field, part in zip(fields, state):
            yield from named_tensors(part, f"{name}.{field}" if name else str(field))
    elif state is not None:
        raise _not_a_state(name or "state", state)


def describe(self: Any) -> str:
    """`repr` of a state: names, shapes and dtypes instead of numbers."""
    parts = [f"{name}={_form(part) if isinstance(part, Tensor) else repr(part)}" for name, part in zip(self._fields, self)]
    return f"{type(self).__name__}({', '.join(parts)})"


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _not_a_state(name: str, thing: Any) -> ValueError:
    return ValueError(f"states: `{name}` is a {type(thing).__name__}; expected tensors, tuples and lists of them")


def _map(change: Callable[..., Tensor], first: Any, *others: Any) -> Any:
    if isinstance(first, Tensor):
        return change(first, *others)
    if first is None:
        return None
    if not isinstance(first, (tuple, list)):
        raise _not_a_state("state", first)
    parts = [_map(change, *part) for part in zip(first, *others)]
    if isinstance(first, list):
        return parts
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


class CellState(NamedTuple):
    """What a later segment of the cell needs: the memory H_T and the last source U_T as its two factors.

    Args:
        memory: [B, G, N, P], or [num_sequences, G, N, P] after packed sequences.
        write: [B, Q, N], or [B, Q, r, N] for rank-r writes.
        value: [B, G, P], or [B, G, r, P].
    """

    memory: Tensor
    write: Tensor
    value: Tensor

    @property
    def source(self) -> Tensor:
        """U_T = write value^T, [B, G, N, P], summed over the rank."""
        write, value = (t.unsqueeze(2) if t.ndim == 3 else t for t in (self.write, self.value))
        return outer(per_group(write, value.shape[1], 1), value)

    __repr__ = describe


class ShippoState(NamedTuple):
    """What a `Shippo` layer carries from one call to the next; its size does not depend on the length read so far.

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

    # The functions of this module as methods; beam search calls `select` `reorder`.
    clone, detach, to, select, reorder, repeat, save = clone, detach, to, select, select, repeat, save
    __repr__ = describe


_NAMES = ("conv", *CellState._fields, "controller")


def check_state(op: str, state: ShippoState, count: int, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
    """Check every tensor of a `state` of `count` sequences: its shape behind that axis, device, dtype and layout; one dtype in
    the cell."""
    if not isinstance(state, ShippoState) or not isinstance(state.cell, CellState):
        raise ValueError(
            f"{op}: `state` is a {type(state).__name__}; expected a ShippoState; make one with init_state(batch_size)"
        )
    for name, tensor in zip(_NAMES, (state.conv, *state.cell, state.controller)):
        expected = (count, *shapes[name]) if name in shapes else None
        if tensor is None and expected is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != expected:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
            raise ValueError(
                f"{op}: `{name}` of `state` has shape {shape}; expected {expected}; the state belongs to another "
                "model or batch, make one with init_state(batch_size)"
            )
        if tensor.device != device:
            raise ValueError(
                f"{op}: `{name}` of `state` is on {tensor.device}; expected {device}; move it with state.to(device)"
            )
        wanted = state.cell.memory.dtype if name in ("write", "value") else tensor.dtype
        if tensor.dtype != wanted or not wanted.is_floating_point or tensor.layout != torch.strided:
            raise ValueError(
                f"{op}: `{name}` of `state` is {tensor.layout} {tensor.dtype}; expected strided tensors of one floating dtype; "
                "convert the whole state with state.to(dtype)"
            )
