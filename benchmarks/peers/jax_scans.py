"""The recurrence in JAX under `jit`: `lax.scan`, a fused step on XLA:CPU, and `lax.associative_scan`, a tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from benchmarks.peers.base import Candidate, require, same_peer
from benchmarks.problem import NAMES

_REMEDY = "install the `bench` extra"


def _sequential(leaves: dict[str, Any]) -> Any:
    """y [B, T, G, P] by `lax.scan` over time."""
    jax, jnp = require("jax", _REMEDY), require("jax.numpy", _REMEDY)

    def cell(state: Any, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        value, write, read, step, right = inputs
        left = jnp.exp(step[..., None] * leaves["drift"])
        state = left[..., None] * (state @ right) + write[..., :, None] * value[..., None, :]
        return state, jnp.einsum("bgn,bgnp->bgp", read, state)

    batch, _, groups, order = leaves["write"].shape
    start = jnp.zeros((batch, groups, order, leaves["value"].shape[-1]), leaves["value"].dtype)
    timed = tuple(jnp.moveaxis(leaves[name], 1, 0) for name in ("value", "write", "read", "step", "right"))
    return jnp.moveaxis(jax.lax.scan(cell, start, timed)[1], 0, 1)


def _tree(leaves: dict[str, Any]) -> Any:
    """y [B, T, G, P] by `lax.associative_scan` over affine maps."""
    jax, jnp = require("jax", _REMEDY), require("jax.numpy", _REMEDY)

    def compose(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
        left, right, update = second
        return left * first[0], first[1] @ right, left[..., None] * (first[2] @ right) + update

    left = jnp.exp(leaves["step"][..., None] * leaves["drift"])
    update = leaves["write"][..., :, None] * leaves["value"][..., None, :]
    states = jax.lax.associative_scan(compose, (left, leaves["right"], update), axis=1)[2]
    return jnp.einsum("btgn,btgnp->btgp", leaves["read"], states)


def _prepare(solve: Callable[[dict[str, Any]], Any]) -> Callable[[Mapping[str, Tensor], Tensor], Candidate]:
    def prepare(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
        jax, jnp = require("jax", _REMEDY), require("jax.numpy", _REMEDY)
        leaves = {name: jnp.asarray(inputs[name].numpy()) for name in NAMES}
        dy = jnp.asarray(cotangent.numpy())
        forward = jax.jit(solve)

        @jax.jit
        def both(given: dict[str, Any], dy: Any) -> dict[str, Any]:
            y, pull = jax.vjp(solve, given)
            return {"y": y, **pull(dy)[0]}

        return Candidate(
            forward=lambda: forward(leaves).block_until_ready(), both=lambda: jax.block_until_ready(both(leaves, dy))
        )

    return prepare


JAX_PEERS = (
    same_peer(name="jax.lax.scan", how="jit, fused step on XLA:CPU", prepare=_prepare(_sequential), compiles=True),
    same_peer(
        name="jax.lax.associative_scan",
        how="jit, tree",
        cannot="keeps all states",
        prepare=_prepare(_tree),
        quick=False,
        compiles=True,
    ),
)
