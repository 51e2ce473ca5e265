"""Compile the CPU kernels of a layer before they are needed."""

from __future__ import annotations

import time
from typing import Any

import torch

from shippo_ssm.layers.shippo import Shippo


def warmup(
    d_model: int = 128,
    *,
    batch_size: int = 2,
    length: int = 64,
    dtype: torch.dtype = torch.float32,
    training: bool = True,
    decoding: bool = True,
    **options: Any,
) -> float:
    """Compile the CPU kernels of `Shippo(d_model, **options)` and keep them on disk, so that no later process waits for them.

    Kernels belong to the sizes of a group (`d_state`, `group_width`), the right action, the dtype and the processor; few depend
    on `d_model`, `batch_size` or `length`, where large operands have a kernel of their own.

    Args:
        d_model: width of the layer.
        batch_size: sequences of the call.
        length: positions of the call.
        dtype: of the weights and inputs.
        training: whether to compile the backward pass.
        decoding: whether to compile the step of one token.
        options: of `Shippo`.

    Returns:
        The seconds it took; a fraction of one where the kernels were on disk already.

    Example:
        >>> from shippo_ssm import warmup
        >>> warmup(16, d_state=8, training=False, decoding=False) > 0
        True
    """
    begin = time.perf_counter()
    layer = Shippo(d_model, dtype=dtype, **options)
    u = torch.randn(batch_size, length, d_model, dtype=dtype)
    with torch.set_grad_enabled(training):
        y = layer(u)
        if training:
            y.sum().backward()
    if decoding:
        with torch.no_grad():
            layer.eval().step(u[:, 0], layer.init_state(batch_size))
    return time.perf_counter() - begin
