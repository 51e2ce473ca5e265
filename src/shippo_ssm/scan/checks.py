"""Argument checks of the public scans, executed once per call.

Every message names the argument, what came, what was expected, and the remedy. Nothing broadcasts by accident: each
dimension letter gets one size from the first argument that carries it, and every later argument must agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shippo_ssm.dispatch import compute_dtype, is_readable
from shippo_ssm.scan.algebra import Recurrence

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
    """Check that `tensor` lies on `device` in one of `dtypes`, with strides."""
    if tensor.layout != torch.strided:
        raise ValueError(f"{op}: `{name}` has layout {tensor.layout}, expected torch.strided; convert it with .to_dense()")
    if tensor.device != device:
        raise ValueError(f"{op}: `{name}` is on {tensor.device}, expected {device} as the first argument; move it with .to()")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{op}: `{name}` has dtype {got}, expected {wanted}; convert it with .to()")


def check_recurrence(
    op: str, recurrence: Recurrence, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, *, cut: bool = False
) -> None:
    """Check a record as a user gives it, with or without a rank axis (shapes in the legend's letters); raises `ValueError`.

    Where the record is a part of a longer sequence (`cut`), boundaries are those of the whole and may lie outside of it.
    """
    value, drift = recurrence.value, recurrence.drift
    if not isinstance(value, Tensor) or value.ndim not in (4, 5):
        raise ValueError(
            f"{op}: `value` is {_describe(value)}; expected [B, T, G, P], or [B, T, G, r, P] for a rank-r write; "
            "split the channels into groups with unflatten(-1, (G, P))"
        )
    if not isinstance(drift, Tensor) or drift.ndim not in (2, 4):
        raise ValueError(
            f"{op}: `drift` is {_describe(drift)}; expected [G, N] (constant) or [B, T, G, N] (time-varying); reshape it"
        )
    token = ("B", "T", "G")
    source = (*token, "r") if value.ndim == 5 else token
    letters = {
        "value": (*source, "P"),
        "write": ("B", "T", "Q", *source[3:], "N"),
        "read": ("B", "T", "Q", "N"),
        "step": token,
        "drift": (*token, "N")[-drift.ndim :],
        "right": (*token, "P", "P"),
        "seen": (*source, "P"),
    }
    given: dict[str, Any] = recurrence._asdict()
    given = {name: tensor for name, tensor in given.items() if tensor is not None or name not in ("right", "seen")}
    sizes: dict[str, int] = {}
    for name, tensor in given.items():
        expect_shape(op, name, tensor, letters[name], sizes)
        if name == "write" and (sets := sizes["Q"]) != (groups := sizes["G"]) and (sets == 0 or groups % sets):
            raise ValueError(
                f"{op}: `write` has Q = {sets} at dimension 2, shape {tuple(tensor.shape)}; expected a divisor of "
                f"G = {groups}, since groups share it in equal parts; use Q = 1 for all groups or Q = G for one each"
            )
    expect_placement(op, "value", value, value.device, FLOATS)
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, sizes["B"], None if cut else sizes["T"], value.device)
        sizes["S"] = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        expect_shape(op, "initial_state", initial_state, ("B" if cu_seqlens is None else "S", "G", "N", "P"), sizes)
        given["initial_state"] = initial_state
    # The state's own dtype is welcome where precision matters most: mixed-precision layers keep these in float32.
    sensitive = tuple(dict.fromkeys((value.dtype, compute_dtype(value.dtype))))
    for name, tensor in given.items():
        dtypes = sensitive if name in ("step", "drift", "initial_state") else (value.dtype,)
        expect_placement(op, name, tensor, value.device, dtypes)


def check_cu_seqlens(op: str, cu_seqlens: Tensor, batch: int, length: int | None, device: torch.device) -> None:
    """Check packed sequence boundaries: [num_sequences + 1] integers from 0 to T (where known), non-decreasing, with B = 1."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{op}: `cu_seqlens` is {_describe(cu_seqlens)}; expected a vector of num_sequences + 1 boundaries, "
            "such as tensor([0, 3, 7]); build it with torch.cumsum of the lengths, led by a zero"
        )
    expect_placement(op, "cu_seqlens", cu_seqlens, device, (torch.int32, torch.int64))
    if batch != 1:
        raise ValueError(f"{op}: `cu_seqlens` came with B = {batch}; expected B = 1; pack the sequences along T")
    if not is_readable(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    length = bounds[-1] if length is None else length
    if bounds[0] != 0 or bounds[-1] != length or any(low > high for low, high in pairwise(bounds)):
        raise invalid_bounds(op, bounds, length)


def invalid_bounds(op: str, bounds: list[int], length: int) -> ValueError:
    """Error for boundaries of packed sequences that do not fit T = `length`."""
    return ValueError(
        f"{op}: `cu_seqlens` is {bounds}; expected non-decreasing boundaries from 0 to T = {length}; "
        "build it with torch.cumsum of the lengths, led by a zero"
    )


def describe_recurrence(recurrence: Recurrence, cu_seqlens: Tensor | None = None) -> dict[str, Any]:
    """What the ranks of a process group must have alike, in words; and T, which may differ."""
    value, write, _, _, drift, right, _ = recurrence
    return {
        "T": value.shape[1],
        "`value` has B": value.shape[0],
        "`value` has G": value.shape[2],
        "`value` has P": value.shape[-1],
        "`value` has rank": value.shape[3] if value.ndim == 5 else 1,
        "`value` has dtype": str(value.dtype),
        "`write` has Q": write.shape[2],
        "`write` has N": write.shape[-1],
        "`drift` has dimensions": drift.ndim,
        "`right` is there": right is not None,
        "`cu_seqlens` has checksum": checksum(cu_seqlens),
    }


def checksum(cu_seqlens: Tensor | None) -> int | None:
    """A short number that tells boundaries apart."""
    return None if cu_seqlens is None else zlib.crc32(str(cu_seqlens.tolist()).encode())


def check_affine_arguments(left: Tensor, right: Tensor | None, update: Tensor, initial_state: Tensor | None) -> None:
    """Check the arguments of `block_affine_scan`; raises `ValueError`."""
    op = "block_affine_scan"
    if not isinstance(update, Tensor) or update.ndim < 3:
        raise ValueError(
            f"{op}: `update` is {_describe(update)}; expected [.., T, N, P]; add the missing dimensions with unsqueeze"
        )
    leading = tuple(f"batch {axis}" for axis in range(update.ndim - 3))
    sizes: dict[str, int] = {}
    expect_shape(op, "update", update, (*leading, "T", "N", "P"), sizes)
    if not isinstance(left, Tensor) or left.ndim not in (update.ndim - 1, update.ndim):
        raise ValueError(
            f"{op}: `left` is {_describe(left)}; expected [.., T, N] (diagonal) or [.., T, N, N] (dense) beside `update` of "
            f"shape {tuple(update.shape)}; match its leading dimensions"
        )
    rows = ("N",) if left.ndim == update.ndim - 1 else ("N", "N")
    if not (update.is_floating_point() or update.is_complex()):
        raise ValueError(
            f"{op}: `update` has dtype {update.dtype}; expected a floating-point or complex dtype; convert it with .to()"
        )
    letters = {"left": ("T", *rows), "right": ("T", "P", "P"), "initial_state": ("N", "P")}
    for name, tensor in {"left": left, "right": right, "initial_state": initial_state}.items():
        if tensor is not None:
            expect_shape(op, name, tensor, (*leading, *letters[name]), sizes)
            expect_placement(op, name, tensor, update.device, (update.dtype,))


def _describe(given: Any) -> str:
    return f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
