"""Our own backends, through the public call."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from benchmarks.peers.base import Candidate, Peer, diagonal_recurrence, same_recurrence, torch_candidate
from benchmarks.problem import NAMES


def ours(backend: str, how: str, *, leaves: tuple[str, ...] = NAMES, name: str = "", quick: bool = False) -> Peer:
    """A backend of `transport_scan` as a peer of the others."""

    def prepare(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
        from shippo_ssm.scan import transport_scan

        def solve(given: Mapping[str, Tensor]) -> Tensor:
            operands = (given[name] for name in leaves)
            return transport_scan(*operands, backend=backend)[0]

        return torch_candidate(solve, inputs, leaves, cotangent)

    task = same_recurrence if "right" in leaves else diagonal_recurrence
    return Peer(
        name=name or f"shippo {backend}",
        kind="ours",
        how=how,
        leaves=leaves,
        task=task,
        prepare=prepare,
        quick=quick,
        compiles=backend == "fused",
    )


OUR_PEERS = (
    ours("fused", "compiled kernels, sequential, streamed", quick=True),
    ours("fused", "compiled kernels, the easier problem", leaves=NAMES[:-1], name="shippo fused, no right"),
    ours("chunked", "moving frame, matrix products"),
    ours("associative", "parallel prefix"),
)
