"""Argument checks of the public scans, executed once per call.

Every message names the argument, what came, what was expected, and the remedy. Nothing broadcasts by accident: each
dimension letter gets one size from the first argument that carries it, and every later argument must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shippo_ssm._dtypes import compute_dtype

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def expect_shape(op: str, name: str, tensor: Tensor, letters: Sequence[str], sizes: dict[str, int]) -> None:
    """Check `tensor` against dimension `letters`; letters without a size yet take theirs from it."""
    layout = f"[{', '.join(letters)}]"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{op}: `{name}` is a {type(tensor).__name__}, expected a tensor {layout}; wrap it in torch.as_tensor")
    if tensor.ndim != len(letters):
        raise ValueError(
            f"{op}: `{name}` has {tensor.ndim} dimensions, shape {tuple(tensor.shape)}; expected {len(letters)}, {layout}; "
            "add or remove dimensions to match"
        )
    for axis, (letter, size) in enumerate(zip(letters, tensor.shape)):
        if sizes.setdefault(letter, size) != size:
            raise ValueError(
                f"{op}: `{name}` has {letter} = {size} at dimension {axis}, shape {tuple(tensor.shape)}; expected {layout} "
                f"with {letter} = {sizes[letter]} as in the arguments before it; scans never broadcast, so expand it first"
            )


def expect_placement(op: str, name: str, tensor: Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that `tensor` lies on `device` in one of `dtypes`."""
    if tensor.device != device:
        raise ValueError(f"{op}: `{name}` is on {tensor.device}, expected {device} as the first argument; move it with .to()")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{op}: `{name}` has dtype {got}, expected {wanted}; convert it with .to()")


def check_transport_arguments(
    value: Tensor,
    write: Tensor,
    read: Tensor,
    step: Tensor,
    drift: Tensor,
    right: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    shown: Tensor | None = None,
    *,
    op: str = "transport_scan",
) -> None:
    """Check the arguments of `transport_scan` (shapes in the legend's letters); raises `ValueError`."""
    if not isinstance(value, Tensor) or value.ndim not in (4, 5):
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{op}: `value` is {got}; expected [B, T, G, P], or [B, T, G, r, P] for a rank-r write; "
            "split the channels into groups with unflatten(-1, (G, P))"
        )
    rank = ("r",) if value.ndim == 5 else ()
    sizes: dict[str, int] = {}
    expect_shape(op, "value", value, ("B", "T", "G", *rank, "P"), sizes)
    expect_shape(op, "write", write, ("B", "T", "G", *rank, "N"), sizes)
    expect_shape(op, "read", read, ("B", "T", "G", "N"), sizes)
    expect_shape(op, "step", step, ("B", "T", "G"), sizes)
    if not isinstance(drift, Tensor) or drift.ndim not in (2, 4):
        got = f"shape {tuple(drift.shape)}" if isinstance(drift, Tensor) else type(drift).__name__
        raise ValueError(f"{op}: `drift` is {got}; expected [G, N] (constant) or [B, T, G, N] (time-varying); reshape it")
    expect_shape(op, "drift", drift, ("G", "N") if drift.ndim == 2 else ("B", "T", "G", "N"), sizes)
    if right is not None:
        expect_shape(op, "right", right, ("B", "T", "G", "P", "P"), sizes)
    if shown is not None:
        expect_shape(op, "shown", shown, ("B", "T", "G", *rank, "P"), sizes)
    if value.dtype not in FLOATS:
        raise ValueError(
            f"{op}: `value` has dtype {str(value.dtype).removeprefix('torch.')}; expected float32, float64, bfloat16 or "
            "float16; convert it with .to()"
        )
    num_states = ("S",) if cu_seqlens is not None else ("B",)
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, sizes["B"], sizes["T"], value.device)
        sizes["S"] = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        expect_shape(op, "initial_state", initial_state, (*num_states, "G", "N", "P"), sizes)

    like_value = (value.dtype,)
    # The state's own dtype is welcome where precision matters most: mixed-precision layers keep these in float32.
    sensitive = tuple(dict.fromkeys((value.dtype, compute_dtype(value.dtype))))
    named = {"write": write, "read": read, "right": right, "shown": shown, "step": step, "drift": drift}
    named["initial_state"] = initial_state
    for name, tensor in named.items():
        if tensor is not None:
            dtypes = sensitive if name in ("step", "drift", "initial_state") else like_value
            expect_placement(op, name, tensor, value.device, dtypes)


def check_cu_seqlens(op: str, cu_seqlens: Tensor, batch: int, length: int, device: torch.device) -> None:
    """Check packed sequence boundaries: [num_sequences + 1] integers from 0 to T, non-decreasing, with B = 1."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        got = f"shape {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(
            f"{op}: `cu_seqlens` is {got}; expected a vector of num_sequences + 1 boundaries, such as tensor([0, 3, 7])"
        )
    expect_placement(op, "cu_seqlens", cu_seqlens, device, (torch.int32, torch.int64))
    if batch != 1:
        raise ValueError(f"{op}: `cu_seqlens` came with B = {batch}; expected B = 1; pack the sequences along T")
    if torch.compiler.is_compiling():
        # The values are not known while tracing; the check runs in eager calls.
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(low > high for low, high in pairwise(bounds)):
        raise ValueError(
            f"{op}: `cu_seqlens` is {bounds}; expected non-decreasing boundaries from 0 to T = {length}; "
            "build it with torch.cumsum of the lengths, led by a zero"
        )


def check_affine_arguments(left: Tensor, right: Tensor | None, update: Tensor, initial_state: Tensor | None) -> None:
    """Check the arguments of `block_affine_scan`; raises `ValueError`."""
    op = "block_affine_scan"
    if not isinstance(update, Tensor) or update.ndim < 3:
        got = f"shape {tuple(update.shape)}" if isinstance(update, Tensor) else type(update).__name__
        raise ValueError(f"{op}: `update` is {got}; expected [.., T, N, P]; add the missing dimensions with unsqueeze")
    leading = tuple(f"batch {axis}" for axis in range(update.ndim - 3))
    sizes: dict[str, int] = {}
    expect_shape(op, "update", update, (*leading, "T", "N", "P"), sizes)
    if not isinstance(left, Tensor) or left.ndim not in (update.ndim - 1, update.ndim):
        got = f"shape {tuple(left.shape)}" if isinstance(left, Tensor) else type(left).__name__
        raise ValueError(
            f"{op}: `left` is {got}; expected [.., T, N] (diagonal) or [.., T, N, N] (dense) beside `update` of shape "
            f"{tuple(update.shape)}; match its leading dimensions"
        )
    rows = ("N",) if left.ndim == update.ndim - 1 else ("N", "N")
    expect_shape(op, "left", left, (*leading, "T", *rows), sizes)
    if right is not None:
        expect_shape(op, "right", right, (*leading, "T", "P", "P"), sizes)
    if initial_state is not None:
        expect_shape(op, "initial_state", initial_state, (*leading, "N", "P"), sizes)
    if not (update.is_floating_point() or update.is_complex()):
        raise ValueError(
            f"{op}: `update` has dtype {update.dtype}; expected a floating-point or complex dtype; convert it with .to()"
        )
    for name, tensor in {"left": left, "right": right, "initial_state": initial_state}.items():
        if tensor is not None:
            expect_placement(op, name, tensor, update.device, (update.dtype,))
