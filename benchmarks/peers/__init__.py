"""What a user would pick instead of our kernels, each behind the same small interface.

Data path: a `Peer` loads what it needs (or raises `Missing` with the reason) and makes from named inputs a `Candidate`, two
nullary callables: `forward()` gives y, `both()` gives y and the gradients of its leaves. `task` says in the words of
`transport_scan` what the peer computes, so that one reference can judge them all; `cannot` says what it leaves out.
`peers()` is the registry in the order in which tables show it.
"""

from __future__ import annotations

from benchmarks.peers.base import Candidate, Missing, Peer
from benchmarks.peers.diagonal import DIAGONAL_PEERS
from benchmarks.peers.jax_scans import JAX_PEERS
from benchmarks.peers.networks import NETWORK_PEERS
from benchmarks.peers.ours import OUR_PEERS
from benchmarks.peers.torch_scans import TORCH_PEERS

__all__ = ["Candidate", "Missing", "Peer", "peers"]


def peers() -> tuple[Peer, ...]:
    """All candidates: ours, the same recurrence by others, easier recurrences, other models of the same width."""
    return (*OUR_PEERS, *JAX_PEERS, *TORCH_PEERS, *DIAGONAL_PEERS, *NETWORK_PEERS)
