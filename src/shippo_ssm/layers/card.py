"""One position of the two-point cell on a card, as one operator: static shapes, no word between card and host.

Data path: the operands of `shippo_cell_step` and the state that is entered go to one kernel (`_triton_kernels.py`), which gives
y and the next memory. It serves generation, which needs no gradients; a CUDA graph can hold it after a first call has tuned it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shippo_ssm.engine import launch_card, needs_torch, packs
from shippo_ssm.scan.triton import SILENT, configs, obstacle


def takes_card_step(value: Tensor, memory: Tensor) -> bool:
    """Whether `card_step` serves tensors like these: on a card with Triton, and nobody asks for gradients."""
    if value.device.type == "cpu" or torch.is_grad_enabled() or not value.numel():
        return False
    return obstacle(value) is None and not needs_torch(value, memory)


@torch.library.custom_op("shippo::card_step", mutates_args=())
def card_step(
    value: Tensor,
    write: Tensor,
    read: Tensor,
    step: Tensor,
    mix: Tensor,
    drift: Tensor,
    right: Tensor | None,
    memory: Tensor,
    last_write: Tensor,
    last_value: Tensor,
) -> tuple[Tensor, Tensor]:
    """y [B, G, P] and the next memory [B, G, N, P]; `value` [B, G, (r,) P] and the rest as in `shippo_cell_step`."""
    import triton.language as tl

    from shippo_ssm.layers import _triton_kernels as kernels

    batch, groups, order, width = memory.shape
    y, after = value.new_empty(batch, groups, width), torch.empty_like(memory, memory_format=torch.contiguous_format)
    tensors = {"value": value, "write": write, "read": read, "step": step, "mix": mix, "drift": drift, "right": right}
    tensors |= {"memory": memory, "last_write": last_write, "last_value": last_value}
    arguments: dict[str, Any] = {name: None if given is None else given.contiguous() for name, given in tensors.items()}
    arguments |= {
        "y": y,
        "after": after,
        "groups": groups,
        "crowd": 1 << (batch * groups - 1).bit_length(),
        "N": order,
        "P": width,
        "RANK": value.numel() // (batch * groups * width),
        "HAS_RIGHT": right is not None,
        "VARYING": drift.ndim == 3,
        "DTYPE": tl.float64 if memory.dtype == torch.float64 else tl.float32,
        "PACKED": packs(memory),
    }
    launch_card(kernels.cell_step, lambda sizes: (-(-groups // sizes["BG"]), batch), arguments, step_configs(order, width))
    return y, after


@card_step.register_fake
def _(value: Tensor, write: Tensor, read: Tensor, step: Tensor, mix: Tensor, drift: Tensor, right: Any, *state: Tensor) -> Any:
    memory = state[0]
    return value.new_empty(*memory.shape[:2], memory.shape[3]), torch.empty_like(memory, memory_format=torch.contiguous_format)


def step_configs(order: int, width: int) -> tuple[Any, ...]:
    """Those of the scan, without its rounds."""
    choices = configs(order, width, **SILENT)
    return tuple(
        config._replace(sizes=tuple(size for size in config.sizes if size[0] in ("BG", "HALVES"))) for config in choices
    )
