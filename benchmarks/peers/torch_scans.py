"""The recurrence in PyTorch as users write it: loops with autograd, and the higher-order scans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.base import Candidate, Peer, require, same_peer, torch_candidate
from benchmarks.problem import NAMES


def _cell(state: Tensor, inputs: tuple[Tensor, ...], drift: Tensor) -> tuple[Tensor, Tensor]:
    value, write, read, step, right = inputs
    left = torch.exp(step[..., None] * drift)
    state = left[..., None] * (state @ right) + write[..., :, None] * value[..., None, :]
    return state, torch.einsum("bgn,bgnp->bgp", read, state)


def _start(leaves: Mapping[str, Tensor]) -> Tensor:
    value, write = leaves["value"], leaves["write"]
    return value.new_zeros(value.shape[0], value.shape[2], write.shape[-1], value.shape[-1])


def _loop(leaves: Mapping[str, Tensor]) -> Tensor:
    state, outputs = _start(leaves), []
    timed = [leaves[name] for name in ("value", "write", "read", "step", "right")]
    for t in range(leaves["value"].shape[1]):
        state, y = _cell(state, tuple(tensor[:, t] for tensor in timed), leaves["drift"])
        outputs.append(y)
    return torch.stack(outputs, dim=1)


def _unbound_loop(leaves: Mapping[str, Tensor]) -> Tensor:
    state, outputs = _start(leaves), []
    # One `unbind` has one gradient, a stack; indexing position by position adds a whole tensor for each position.
    timed = [leaves[name].unbind(1) for name in ("value", "write", "read", "step", "right")]
    for inputs in zip(*timed):
        state, y = _cell(state, inputs, leaves["drift"])
        outputs.append(y)
    return torch.stack(outputs, dim=1)


def _associative(leaves: Mapping[str, Tensor]) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    def compose(first: Any, second: Any) -> Any:
        left, right, update = second
        return left * first[0], first[1] @ right, left.unsqueeze(-1) * (first[2] @ right) + update

    left = torch.exp(leaves["step"].unsqueeze(-1) * leaves["drift"])
    update = leaves["write"].unsqueeze(-1) * leaves["value"].unsqueeze(-2)
    maps = tuple(tensor.transpose(0, 1).contiguous() for tensor in (left, leaves["right"], update))
    states = associative_scan(compose, maps, dim=0, combine_mode="generic")[2]
    return torch.einsum("btgn,tbgnp->btgp", leaves["read"], states)


def _higher_order_scan(leaves: Mapping[str, Tensor]) -> Tensor:
    from torch._higher_order_ops.scan import scan

    def cell(state: Tensor, inputs: Any) -> Any:
        left, right, update, read = inputs
        state = left.unsqueeze(-1) * (state @ right) + update
        return state, torch.einsum("bgn,bgnp->bgp", read, state)

    left = torch.exp(leaves["step"].unsqueeze(-1) * leaves["drift"])
    update = leaves["write"].unsqueeze(-1) * leaves["value"].unsqueeze(-2)
    timed = tuple(tensor.transpose(0, 1).contiguous() for tensor in (left, leaves["right"], update, leaves["read"]))
    return scan(cell, _start(leaves), timed, dim=0)[1].transpose(0, 1)


def _prepare(solve: Callable[[Mapping[str, Tensor]], Tensor], module: str = "torch") -> Any:
    def prepare(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
        require(module, "this PyTorch has no such operator")
        return torch_candidate(solve, inputs, NAMES, cotangent)

    return prepare


def _higher_order(name: str, how: str, cannot: str, solve: Callable[[Mapping[str, Tensor]], Tensor]) -> Peer:
    module = f"torch._higher_order_ops.{name}"
    options: dict[str, Any] = {"prepare": _prepare(solve, module), "quick": False, "compiles": True}
    return same_peer(name=f"torch {name}", how=f"higher-order operator, {how}", cannot=f"{cannot}; private API", **options)


TORCH_PEERS = (
    same_peer(name="PyTorch loop", how="autograd, x[:, t]: what a user writes first", prepare=_prepare(_loop), quick=False),
    same_peer(name="PyTorch loop, unbind", how="autograd, the loop written with care", prepare=_prepare(_unbound_loop)),
    _higher_order("associative_scan", 'combine_mode="generic", a tree', "keeps all states", _associative),
    _higher_order("scan", "a while loop", "keeps all updates", _higher_order_scan),
)
