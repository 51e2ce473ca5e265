"""Argument checks of the layers; every message names the argument, what came, what was expected, and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor

from shippo_ssm.layers.state import ShippoState
from shippo_ssm.scan.checks import check_cu_seqlens


def check_input(op: str, u: Tensor, letters: tuple[str, ...], d_model: int) -> None:
    """`u` is a floating tensor [.., d_model] with as many dimensions as `letters`."""
    layout = f"[{', '.join(letters)}]"
    if not isinstance(u, Tensor) or u.ndim != len(letters) or u.shape[-1] != d_model:
        got = f"shape {tuple(u.shape)}" if isinstance(u, Tensor) else type(u).__name__
        raise ValueError(f"{op}: `u` is {got}; expected {layout} with d_model = {d_model}; reshape or project it first")
    if not u.is_floating_point():
        raise ValueError(f"{op}: `u` has dtype {u.dtype}; expected a floating dtype; embed token ids first")


def check_mask(op: str, attention_mask: Tensor | None, u: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """The mask [B, T] as bool; integers must be 0 or 1."""
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, u.shape[0], u.shape[1], u.device)
    if attention_mask is None:
        return None
    if cu_seqlens is not None:
        raise ValueError(
            f"{op}: `attention_mask` came with `cu_seqlens`; expected one of them; leave padding out of packed sequences"
        )
    shape = tuple(u.shape[:2])
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != shape:
        got = f"shape {tuple(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"{op}: `attention_mask` is {got}; expected [B, T] = {shape}, one entry per position of `u`")
    if attention_mask.dtype == torch.bool:
        return attention_mask
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise ValueError(
            f"{op}: `attention_mask` has dtype {attention_mask.dtype}; expected bool or integers 0 and 1; pass the padding "
            "mask, not an additive one"
        )
    if not torch.compiler.is_compiling() and not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(f"{op}: `attention_mask` has entries other than 0 and 1; expected 1 at real positions, 0 at padding")
    return attention_mask.bool()


def check_state(op: str, state: ShippoState, expected: dict[str, tuple[int, ...]], device: torch.device) -> None:
    """`state` has the shapes `expected` of this layer's states, by name, and lies on its `device`."""
    if not isinstance(state, ShippoState):
        raise ValueError(
            f"{op}: `state` is a {type(state).__name__}; expected a ShippoState; make one with init_state(batch_size)"
        )
    cell = state.cell
    tensors = {
        "conv": state.conv,
        "memory": cell.memory,
        "write": cell.write,
        "value": cell.value,
        "controller": state.controller,
    }
    for name, tensor in tensors.items():
        shape = None if tensor is None else tuple(tensor.shape)
        if shape != expected.get(name):
            raise ValueError(
                f"{op}: `{name}` of `state` has shape {shape}; expected {expected.get(name)}; the state belongs to another "
                "model or batch, make one with init_state(batch_size)"
            )
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{op}: `{name}` of `state` is on {tensor.device}; expected {device}; move it with state.to(device)"
            )
