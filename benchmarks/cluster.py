"""Estimate what a model on many ranks exchanges and keeps, from its shape.

    python -m benchmarks.cluster --d-model 2048 --layers 48 --length 1048576 --ranks 64

A rank's bytes on the wire come from the shapes of the messages: per layer and batch row G (N + P^2 + N P) numbers in the
forward pass, twice G N P in the backward one, and the halos of convolution and cell, both ways; every rank receives those of
all others. Activations are what a layer keeps for its backward pass, without activation checkpointing.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A model and the ranks that share its sequences."""

    d_model: int = 2048
    layers: int = 48
    d_state: int = 32
    group_width: int = 4
    expand: int = 2
    d_conv: int = 4
    length: int = 1 << 20
    ranks: int = 64
    gigabytes: float = 64.0
    """Memory of a rank that activations may take."""

    @property
    def groups(self) -> int:
        """G."""
        return self.expand * self.d_model // self.group_width

    @property
    def message(self) -> int:
        """Bytes of a rank's summaries, forward and backward, per layer and row."""
        order, width = self.d_state, self.group_width
        return 4 * self.groups * ((order + width**2 + order * width) + 2 * order * width)

    @property
    def halo(self) -> int:
        """Bytes of a rank's halos of convolution and cell, per layer and row."""
        return 4 * ((self.d_conv - 1) * self.expand * self.d_model + self.groups * (self.d_state + self.group_width))

    @property
    def received(self) -> float:
        """Bytes that a rank receives per token of its own and layer."""
        # Back, the gradients of all halos are summed over the ranks, which moves each of them about twice.
        row = (self.message + self.halo) * (self.ranks - 1) + 2 * self.halo * self.ranks
        return row * self.ranks / self.length

    @property
    def activations(self) -> int:
        """Bytes of activations per token and layer: inputs of norm and projections, branch, gate, operands of the scan."""
        order, width, channels = self.d_state, self.group_width, self.expand * self.d_model
        scan = self.groups * (3 * width + 2 * order + 2 + width**2)
        return 4 * (3 * self.d_model + 5 * channels + scan)

    @property
    def parameters(self) -> int:
        """Weights of all layers."""
        order, channels = self.d_state, self.expand * self.d_model
        coordinates = self.group_width * (self.group_width - 1) // 2
        controller = channels * self.groups * (2 * order + 4 + coordinates)
        return self.layers * (3 * channels * self.d_model + controller)

    @property
    def min_ranks(self) -> int:
        """Ranks over which one sequence must be cut for its activations to fit."""
        return max(1, -(-self.length * self.layers * self.activations // int(self.gigabytes * 2**30)))


def table(cluster: Cluster) -> str:
    """The estimate as Markdown."""
    share = cluster.received / cluster.activations
    rows = [
        ("groups G", f"{cluster.groups:,}"),
        ("weights", f"{cluster.parameters / 1e9:.2f} billion"),
        ("activations of a token in one layer", f"{cluster.activations / 1024:.1f} KiB"),
        (
            "activations of one sequence in all layers",
            f"{cluster.length * cluster.layers * cluster.activations / 2**40:.2f} TiB",
        ),
        (f"smallest number of ranks with {cluster.gigabytes:.0f} GiB each that hold one sequence", f"{cluster.min_ranks:,}"),
        ("a rank's summaries per layer and batch row, forward and backward", f"{cluster.message / 1024:.0f} KiB"),
        ("its halos of convolution and cell", f"{cluster.halo / 1024:.0f} KiB"),
        ("received per token of a rank and layer", f"{cluster.received / 1024:.2f} KiB"),
        ("the same as a share of the token's activations", f"{100 * share:.1f} %"),
        ("moved by FSDP per rank and step, for any number of tokens", f"{3 * 4 * cluster.parameters / 2**30:.1f} GiB"),
    ]
    head = f"{cluster.layers} layers of width {cluster.d_model}, T = {cluster.length:,}, {cluster.ranks} sequence ranks"
    return "\n".join([f"| {head} | |", "| --- | --- |", *(f"| {what} | {number} |" for what, number in rows)]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in vars(Cluster()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    print(table(Cluster(**vars(parser.parse_args()))))
