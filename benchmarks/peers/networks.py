"""Other models of the same width D = G P: what the time of a scan would buy elsewhere. They compute something else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.base import Candidate, Peer


def _recurrent(kind: Callable[..., nn.Module]) -> Callable[[Mapping[str, Tensor], Tensor], Candidate]:
    def prepare(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
        x = inputs["value"].flatten(2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = kind(x.shape[-1], x.shape[-1], batch_first=True)
        return _candidate(lambda model, given: model(given)[0], network, x, cotangent.flatten(2))

    return prepare


class Attention(nn.Module):
    """Causal attention of four heads with queries, keys and values given."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


def _attention(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
    return _candidate(lambda model, given: model(given), Attention(), inputs["value"].flatten(2), cotangent.flatten(2))


def _candidate(run: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor, cotangent: Tensor) -> Candidate:
    def forward() -> Tensor:
        with torch.no_grad():
            return run(model, x)

    def both_of(model: nn.Module, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        leaf = x.detach().requires_grad_()
        y = run(model, leaf)
        gradients = torch.autograd.grad(y, [leaf, *model.parameters()], cotangent)
        names = ["input", *(name for name, _ in model.named_parameters())]
        return {"y": y.detach(), **dict(zip(names, gradients))}

    return Candidate(
        forward=forward,
        both=lambda: both_of(model, x, cotangent),
        expected=lambda: both_of(copy.deepcopy(model).double(), x.double(), cotangent.double()),
    )


def _peer(name: str, how: str, prepare: Callable[[Mapping[str, Tensor], Tensor], Candidate]) -> Peer:
    return Peer(name=name, kind="other model", how=how, cannot="another model", leaves=(), prepare=prepare, quick=False)


NETWORK_PEERS = (
    _peer("nn.GRU", "oneDNN, width D", _recurrent(nn.GRU)),
    _peer("nn.LSTM", "oneDNN, width D", _recurrent(nn.LSTM)),
    _peer("causal SDPA", "four heads of width D / 4, projections left out", _attention),
)
