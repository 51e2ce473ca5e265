"""The decode step: a few tokens of a layer, without gradients, as its projections and two compiled operators.

Data path: the in-projection [B, T, (r + 1) D] goes through `branch` (convolution and SiLU) to x [B, T, r D]; the controller's
projections of x, as one matrix product where they are plain linear layers, go with x and the gate through `cell` (everything
else up to the out-projection). Both write into tensors that the caller made: the next state may be the old one, or hold the
state after every position. `_step_kernels.py` is the machine code. While tracing, the same two are operators of torch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shippo_ssm._private import values_visible
from shippo_ssm.actions.base import Inline
from shippo_ssm.engine import launch
from shippo_ssm.layers._step_kernels import (
    ROWS,
    Branch,
    Cell,
    CellCase,
    Norm,
    Product,
    build_branch,
    build_cell,
    build_norm,
    build_product,
)

# Numbers of state that make a row of the batch worth a thread of its own.
_ROW = 1 << 15
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
# Tokens up to which products in bfloat16 are our own, and multiplications that are worth a thread.
FEW, _PRODUCT = 4, 1 << 19
_lock = threading.Lock()


def branch(
    projected: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, next_window: Tensor, every: bool
) -> None:
    """x = silu(bias + sum_k weight_k projected_{t-K+1+k}) per channel, behind `window`.

    Args:
        projected: [B T, row]; its first channels are convolved.
        window: [B, K - 1, channels].
        weight, bias: [K, channels] and [channels].
        x: [B T, channels], written.
        next_window: written; as `window`, or [T, B, K - 1, channels] with `every`.
    """
    if not values_visible(projected):
        torch.ops.shippo.step_branch(projected, window, weight, bias, x, next_window, every)
        return
    _run_branch(projected, window, weight, bias, x, next_window, every)


def _run_branch(
    projected: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, next_window: Tensor, every: bool
) -> None:
    (tokens, row), batch = projected.shape, window.shape[0]
    length = tokens // max(1, batch)
    taps, channels = weight.shape
    addresses = map(_address, (projected, window, weight, bias, x, next_window))
    operands = Branch._make((*addresses, channels, row, length, batch * (taps - 1) * channels if every else 0))
    storage = _NAMES[x.dtype]
    constants = {"storage": storage, "dtype": _arithmetic(storage), "taps": taps, "has_bias": bias is not None}
    launch(build_branch, batch, operands, fewest=_ROW // (channels * length) + 1, **constants)


class RMSNorm(nn.RMSNorm):
    """y = u / sqrt(mean(u^2) + eps) weight over the last axis; without gradients on the CPU one compiled operator."""

    def forward(self, input: Tensor) -> Tensor:
        weight, eps = self.weight, self.eps
        plain = not torch.is_grad_enabled() and values_visible(input) and input.dtype in DTYPES and input.is_contiguous()
        if not plain or eps is None or weight.dtype != input.dtype or not values_visible(weight):
            return super().forward(input)
        y = torch.empty(input.shape, dtype=input.dtype)
        channels, storage = input.shape[-1], _NAMES[input.dtype]
        operands = Norm(input.data_ptr(), weight.data_ptr(), y.data_ptr(), channels)
        constants = {"storage": storage, "dtype": _arithmetic(storage), "eps": eps}
        launch(build_norm, input.numel() // channels, operands, fewest=_ROW // channels + 1, **constants)
        return y


def _arithmetic(storage: str) -> str:
    return "float64" if storage == "float64" else "float32"


def cell(
    x: Tensor,
    projected: Tensor,
    raw: Sequence[Tensor],
    right: Tensor | None,
    inline: Inline | None,
    parameters: Sequence[Tensor | None],
    norm_eps: float,
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    out: Tensor,
    every: bool,
) -> None:
    """out = silu(gate) (norm(read_gate read^T H) + skip x) with H moved through every position.

    Args:
        x: [B T, r D].
        projected: [B T, row]; its last D channels are the gate.
        raw: projections of the controller, write [B T, G r N], read [B T, G N], scalars [B T, 4 G] and, with `inline`,
            coordinates [B T, G K]; or all of them in one tensor, in this order.
        right: R [B T, G, P, P] where it is given.
        inline: how R is computed where it is not; with neither there is no right action.
        parameters: scalar_bias [4, G], right_bias [G, K], drift_log [G, N], skip [G, P] and the norm's weight [D]; `None` for
            what the layer does not have.
        norm_eps: epsilon of the norm.
        before: memory, write and value of the state that is entered.
        after: the same after the last position, written; with a leading T axis with `every`.
        out: [B T, D], written.
    """
    if not values_visible(x):
        words = ("", [], "", False) if inline is None else (inline.kind, list(inline.sizes), inline.diagonal, inline.bounded)
        torch.ops.shippo.step_cell(x, projected, raw, right, *words, *parameters, norm_eps, *before, *after, out, every)
        return
    _run_cell(x, projected, raw, right, inline, parameters, norm_eps, before, after, out, every)


def _run_cell(
    x: Tensor,
    projected: Tensor,
    raw: Sequence[Tensor],
    right: Tensor | None,
    inline: Inline | None,
    parameters: Sequence[Tensor | None],
    norm_eps: float,
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    out: Tensor,
    every: bool,
) -> None:
    memory = before[0]
    batch, groups, order, width = memory.shape
    length, channels = x.shape[0] // max(1, batch), groups * width
    rank = x.shape[1] // channels
    scalar_bias, right_bias, drift_log, skip, norm = parameters
    num_coordinates = 0 if inline is None or right_bias is None else right_bias.shape[1]
    item, counts = x.element_size(), (groups * rank * order, groups * order, 4 * groups, groups * num_coordinates)
    if len(raw) == 1:
        start, row = _address(raw[0]), raw[0].shape[-1]
        places = [start, start + item * counts[0], start + item * sum(counts[:2]), start + item * sum(counts[:3])]
        rows = [row] * 4
    else:
        places, rows = [_address(tensor) for tensor in raw], list(counts)
        places += [0] * (4 - len(raw))
    gate = _address(projected) + item * (projected.shape[1] - channels)
    given = map(_address, (right, scalar_bias, right_bias, drift_log, skip, norm, *before, *after, out))
    ends = (rank * channels, projected.shape[1], *rows, groups, length, batch if every else 0)
    case = _case(
        x.dtype, memory.dtype, order, width, rank, num_coordinates, inline, right is not None,
        None if norm is None else norm_eps,
    )  # fmt: skip
    operands = Cell._make((_address(x), gate, *places, *given, *ends))
    launch(build_cell, batch, operands, fewest=_ROW // (channels * order * length) + 1, case=case)


@functools.lru_cache
def _case(
    storage: torch.dtype, dtype: torch.dtype, order: int, width: int, rank: int, num_coordinates: int,
    inline: Inline | None, given: bool, norm_eps: float | None,
) -> CellCase:  # fmt: skip
    has_right = given or inline is not None
    return CellCase(_NAMES[storage], _NAMES[dtype], order, width, rank, num_coordinates, inline, has_right, norm_eps)


def _address(tensor: Tensor | None) -> int:
    """Where the numbers of a contiguous tensor begin; 0 for `None`."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous()
    return tensor.data_ptr()


# Under fake tensors, `torch.compile` and `torch.export` the two are operators that write into their arguments.
_library = torch.library.Library("shippo", "FRAGMENT")
_library.define(
    "step_branch(Tensor projected, Tensor window, Tensor weight, Tensor? bias, Tensor(a!) x, Tensor(b!) next_window, "
    "bool every) -> ()"
)
_library.define(
    "step_cell(Tensor x, Tensor projected, Tensor[] raw, Tensor? right, str kind, int[] sizes, str diagonal, bool bounded, "
    "Tensor scalar_bias, Tensor? right_bias, Tensor drift_log, Tensor skip, Tensor? norm, float norm_eps, Tensor memory, "
    "Tensor write, Tensor value, Tensor(a!) next_memory, Tensor(b!) next_write, Tensor(c!) next_value, Tensor(d!) out, "
    "bool every) -> ()"
)


def _cell_op(x, projected, raw, right, kind, sizes, diagonal, bounded, *rest) -> None:
    *parameters, norm_eps, m, w, v, next_m, next_w, next_v, out, every = rest
    inline = Inline(kind, tuple(sizes), diagonal, bounded) if kind else None
    _run_cell(x, projected, raw, right, inline, parameters, norm_eps, (m, w, v), (next_m, next_w, next_v), out, every)


_library.impl("step_branch", _run_branch, "CPU")
_library.impl("step_cell", _cell_op, "CPU")
for _name in ("step_branch", "step_cell"):
    torch.library.register_fake(f"shippo::{_name}", lambda *arguments: None, lib=_library)


def project(linears: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    """x [tokens, D] through linear layers without bias: one product with one matrix where they are plain, else one call each.

    The weights of plain layers are laid one after another in memory, once, so that all of them are one matrix; they keep their
    values, names and shapes. Layers that an adapter, a hook or a quantisation has taken hold of are called as they are.
    """
    if values_visible(x) and all(map(_is_plain, linears)):
        weight = _one_matrix([linear.weight for linear in linears])
        if weight is not None:
            # Half-precision products of few tokens are slow in torch where the processor has no instructions for them.
            few = x.dtype == weight.dtype == torch.bfloat16 and x.shape[0] <= FEW and x.is_contiguous()
            return [_product(x, weight) if few and weight.shape[1] % ROWS == 0 else torch.mm(x, weight)]
    return [linear(x).contiguous() for linear in linears]


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, columns] times the transpose [columns, rows] of a contiguous matrix."""
    (tokens, columns), rows = x.shape, weight.shape[1]
    out = torch.empty(tokens, rows, dtype=x.dtype)
    operands = Product(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, columns, tokens)
    fewest = _PRODUCT // (ROWS * columns * tokens) + 1
    launch(build_product, rows // ROWS, operands, fewest=fewest, storage="bfloat16", dtype="float32")
    return out


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.bias is None and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of `module` does more than its class says: hooks, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _one_matrix(weights: list[Tensor]) -> Tensor | None:
    """The transpose [D, sum of rows] of the weights [rows, D] as one matrix; `None` where they cannot be one."""
    first = weights[0]
    if first.is_inference():
        return None
    columns, item = first.shape[1], first.element_size()
    # Nothing of the below is taken on trust: weights may have been moved, replaced or loaded since the last call.
    total, place, together = 0, first.data_ptr(), True
    for weight in weights:
        plain = type(weight) is nn.Parameter and weight.dtype == first.dtype and weight.device == first.device
        if not plain or weight.shape[1] != columns:
            return None
        together = together and weight.data_ptr() == place and weight.is_contiguous()
        total += weight.shape[0]
        place += weight.numel() * item
    storage = first.untyped_storage()
    inside = storage.data_ptr() <= first.data_ptr() and place <= storage.data_ptr() + storage.nbytes()
    if not (together and inside):
        # A tensor made in inference mode could never be trained again.
        with _lock, torch.inference_mode(False), torch.no_grad():
            matrix = torch.cat([weight.detach() for weight in weights])
            for weight, rows in zip(weights, matrix.split([weight.shape[0] for weight in weights])):
                weight.data = rows
    return first.as_strided((columns, total), (1, columns))
