"""States as values: copy, move, pick rows, repeat, join, save and load whatever a mixer carries from one call to the next.

A state is a tensor, or a tuple, named tuple or list of states, or `None`; every tensor has the sequences B as its first axis.
So these functions serve a `ShippoState`, the state of any other mixer, and the list of states of a whole model alike.

    after = states.clone(before)                          # a copy that later in-place steps leave alone
    beams = states.select(states.repeat(after, 4), rows)
    states.save(after, "session.safetensors")
    after = states.load("session.safetensors", like=model.init_state(1))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


def map_states(change: Callable[..., Tensor], state: State, *others: State) -> State:
    """The state whose tensors are change(tensor, ..), for one state or several of one form."""
    for other in others:
        check_form("map_states", other, state)
    return _map(change, state, *others)


def clone(state: State) -> State:
    """The same numbers in memory of their own."""
    return map_states(Tensor.clone, state)


def detach(state: State) -> State:
    """The same numbers outside the graph."""
    return map_states(Tensor.detach, state)


def to(state: State, target: torch.device | torch.dtype | str) -> State:
    """The state on another device, or its floating tensors in another dtype."""
    if isinstance(target, torch.dtype):
        return map_states(lambda tensor: tensor.to(target) if tensor.is_floating_point() else tensor, state)
    return map_states(lambda tensor: tensor.to(target), state)


def select(state: State, rows: Tensor | Sequence[int] | int) -> State:
    """The sequences `rows`, with repeats and in any order as beam search wants them; a single number keeps its axis."""
    wanted = torch.as_tensor([rows] if isinstance(rows, int) else rows)
    count = batch_size(state)
    if wanted.numel() and not -count <= int(wanted.min()) <= int(wanted.max()) < count:
        raise ValueError(f"select: `rows` is {wanted.tolist()}; expected numbers below {count}, the sequences of the state")
    wanted = wanted % max(1, count)
    return map_states(lambda tensor: tensor.index_select(0, wanted.to(tensor.device)), state)


def repeat(state: State, times: int) -> State:
    """Every sequence `times` times, the copies beside each other."""
    return map_states(lambda tensor: tensor.repeat_interleave(times, dim=0), state)


def concatenate(parts: Sequence[State]) -> State:
    """One state of all the sequences of several, in their order."""
    if not parts:
        raise ValueError("concatenate: `parts` is empty; expected at least one state")
    for part in parts[1:]:
        check_form("concatenate", part, parts[0], rows=False)
    return _map(lambda *tensors: torch.cat(tensors), *parts)


def at(state: State, position: int) -> State:
    """The state after `position` (-1 is the last) of one that was kept after every position."""
    return map_states(lambda tensor: tensor[position], state)


def batch_size(state: Any) -> int:
    """The number of sequences, B."""
    for _, tensor in named_tensors(state):
        return tensor.shape[0]
    raise ValueError("batch_size: `state` holds no tensor; expected the state of a layer or model")


def num_bytes(state: Any) -> int:
    """Bytes of all its tensors."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(state))


def save(state: Any, path: str | Path) -> Path:
    """Write `state` to the safetensors file `path`."""
    from safetensors.torch import save_file

    path = Path(path)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named_tensors(state)}
    # Written aside and renamed: a process that is killed leaves the old file or the new one.
    part = path.with_name(path.name + ".part")
    save_file(tensors, part)
    part.replace(path)
    return path


def load(path: str | Path, like: State) -> State:
    """The state in the file `path`.

    Args:
        path: a file of `save`.
        like: a state of the same model, such as `model.init_state(1)`: its form, shapes apart from B, and devices are taken.
    """
    from safetensors.torch import load_file

    tensors = load_file(path)
    names = [name for name, _ in named_tensors(like)]
    if sorted(names) != sorted(tensors):
        raise ValueError(
            f"load: the file has {sorted(tensors)}; expected {sorted(names)}; give `like` from the model that the state came of"
        )
    order = iter(names)
    state = _map(lambda tensor: tensors[next(order)].to(tensor.device), like)
    check_form("load", state, like, rows=False)
    return state


def check_form(op: str, state: Any, like: Any, rows: bool = True) -> None:
    """`state` has the tensors of `like`, of the same shapes and dtypes; with `rows` also as many sequences."""
    ours, theirs = dict(named_tensors(state)), dict(named_tensors(like))
    if list(ours) != list(theirs):
        raise ValueError(f"{op}: a state has {list(ours)}; expected {list(theirs)}; the states belong to different models")
    skip = 0 if rows else 1
    for name, tensor in ours.items():
        other = theirs[name]
        if tensor.shape[skip:] != other.shape[skip:] or tensor.dtype != other.dtype:
            what, wanted = (f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (tensor, other))
            sequences = "" if rows else ", in everything but the sequences"
            raise ValueError(f"{op}: `{name}` of a state is {what}; expected {wanted}{sequences}; it belongs to another model")


def named_tensors(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state with their names: the fields and places that lead to them, with dots between."""
    if isinstance(state, Tensor):
        yield name or "state", state
    elif isinstance(state, (tuple, list)):
        fields = getattr(state, "_fields", range(len(state)))
        for field, part in zip(fields, state):
            yield from named_tensors(part, f"{name}.{field}" if name else str(field))
    elif state is not None:
        raise _not_a_state(name or "state", state)


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
