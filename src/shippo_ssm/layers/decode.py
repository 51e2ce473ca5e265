"""The decode step: a few tokens of a layer, without gradients, as its projections and two compiled operators.

Data path: `recall_facts` says whether a layer can go this way, and where its weights lie. The in-projection [B, T, (r + 1) D]
goes through `branch` (convolution and SiLU) to x [B, T, r D]; the controller's projections of x go with x and the gate through
`cell` (everything else up to the out-projection). Both write into tensors that the caller made: the next state may be the old
one, or hold the state after every position. Projections that are plain linear layers, or several of them that read the same x,
are one `product`, which reads the weights as they lie in memory: float32, float64, bfloat16, or the rows of int8 of torchao.
Layers that an adapter, a hook or another quantisation has taken hold of are called as they are. `_step_kernels.py` is the
machine code. While tracing, branch and cell are operators of torch, and projections are called.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shippo_ssm._dtypes import compute_dtype
from shippo_ssm._private import int8_rows, is_plain, values_visible
from shippo_ssm.actions.base import Inline
from shippo_ssm.engine import launch_integers
from shippo_ssm.layers._step_kernels import (
    ROWS,
    Branch,
    Cell,
    CellCase,
    Matrix,
    Product,
    build_branch,
    build_cell,
    build_product,
)

if TYPE_CHECKING:
    from shippo_ssm.layers.shippo import Shippo

# Numbers of state that make a row of the batch worth a thread of its own.
_ROW = 1 << 15
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
_ARITHMETIC = {"float32": "float32", "float64": "float64", "bfloat16": "float32"}
# Tokens up to which products are our own, and multiplications that are worth a thread.
FEW, _PRODUCT = 64, 1 << 20


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
    constants = {"storage": storage, "dtype": _ARITHMETIC[storage], "taps": taps, "has_bias": bias is not None}
    launch_integers(build_branch, batch, operands, fewest=_ROW // (channels * length) + 1, **constants)


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
    launch_integers(build_cell, batch, operands, fewest=_ROW // (channels * order * length) + 1, case=case)


@functools.lru_cache
def _case(
    storage: torch.dtype, dtype: torch.dtype, order: int, width: int, rank: int, num_coordinates: int,
    inline: Inline | None, given: bool, norm_eps: float | None,
) -> CellCase:  # fmt: skip
    has_right = given or inline is not None
    return CellCase(_NAMES[storage], _NAMES[dtype], order, width, rank, num_coordinates, inline, has_right, norm_eps)


def _address(tensor: Tensor | None) -> int:
    """Where the numbers of a contiguous tensor begin; 0 for `None`."""
    return 0 if tensor is None else tensor.data_ptr()


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


class Linear(nn.Linear):
    """y = x weight^T + bias; few tokens without gradients on the CPU are one compiled operator, as fast as memory is read."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not values_visible(input):
            return super().forward(input)
        weights = weights_of((self,)) if input.is_contiguous() and 0 < input.numel() <= FEW * input.shape[-1] else None
        if weights is None or weights.dtype != input.dtype or weights.columns != input.shape[-1]:
            return super().forward(input)
        return product(weights, input.view(-1, weights.columns)).view(*input.shape[:-1], weights.rows)


class Weights(NamedTuple):
    """Weights of linear layers that read the same x, as `product` takes them."""

    matrices: list[Matrix]
    dtype: torch.dtype
    """Of x and of the result."""
    stored: str
    """Dtype of the weights."""
    columns: int
    rows: int
    """Of all weights together."""
    items: int


def weights_of(linears: Sequence[nn.Linear]) -> Weights | None:
    """Up to four plain linear layers as they are in memory; `None` where one of them has to be called."""
    matrices, rows, items = [], 0, 0
    dtype = stored = columns = None
    for linear in linears:
        if type(linear) not in (nn.Linear, Linear):
            return None
        weight, bias = linear._parameters["weight"], linear._parameters["bias"]
        if weight is None:
            return None
        scale, numbers, own = 0, weight, weight.dtype
        if not is_plain(weight):
            by_rows = int8_rows(weight)
            if by_rows is None:
                return None
            numbers, scale = by_rows[0], by_rows[1].data_ptr()
        found = (own, numbers.dtype, numbers.shape[1])
        alike = dtype is None or found == (dtype, stored, columns)
        plain = own in _NAMES and numbers.is_contiguous() and (bias is None or (is_plain(bias) and bias.dtype == own))
        if not (alike and plain) or len(numbers) < ROWS:
            return None
        dtype, stored, columns = found
        matrices.append(Matrix(numbers.data_ptr(), 0 if bias is None else bias.data_ptr(), scale, len(numbers)))
        rows += len(numbers)
        items += -(-len(numbers) // ROWS)
    if dtype is None or stored is None or not columns:
        return None
    matrices += [Matrix(0, 0, 0, 0)] * (4 - len(matrices))
    return Weights(matrices, dtype, "int8" if stored == torch.int8 else _NAMES[dtype], columns, rows, items)


def product(weights: Weights, x: Tensor) -> Tensor:
    """x [tokens, columns], contiguous, times the transposes of all weights: [tokens, rows], side by side."""
    matrices, dtype, stored, columns, rows, items = weights
    tokens, storage = x.shape[0], _NAMES[dtype]
    out = torch.empty(tokens, rows, dtype=dtype)
    operands = Product(x.data_ptr(), out.data_ptr(), tokens, columns, rows, *matrices)
    fewest = _PRODUCT // (ROWS * columns * tokens) + 1
    launch_integers(build_product, items, operands, fewest, storage=storage, weights=stored, dtype=_ARITHMETIC[storage])
    return out


def project(weights: Weights | None, linears: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    """x [tokens, D] through linear layers: one product where they are plain, else one call each."""
    if weights is not None and x.shape[0] <= FEW:
        return [product(weights, x)]
    return [linear(x).contiguous() for linear in linears]


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of `module` does more than its class says: hooks, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


class Facts(NamedTuple):
    """What a decode step needs of a layer and is the same for every token."""

    dtype: torch.dtype
    """Of u, of the projections and of the convolution."""
    kept: torch.dtype
    """Of the memory."""
    conv: tuple[Tensor, Tensor | None]
    parameters: tuple[Tensor | None, ...]
    """As `cell` takes them."""
    linears: tuple[Sequence[nn.Linear], ...]
    """In-projection, the controller's projections, out-projection."""
    weights: tuple[Weights | None, ...]
    """The same in memory; `None` for those that have to be called."""
    inline: Inline | None
    """How the right action is computed, where the cell can do it."""


class Known(NamedTuple):
    """Facts, and where everything stood that they were taken from."""

    facts: Facts | None
    switches: tuple[bool, bool]
    children: list[tuple[dict[str, Any], str, Any]]
    """Modules and parameters: who holds it, under which name, and what it was."""
    modules: list[nn.Module]
    hooks: list[dict[int, Any]]
    tensors: Sequence[Tensor]
    addresses: list[int]

    def hold(self, switches: tuple[bool, bool]) -> bool:
        """Whether nothing was switched, replaced, moved or hooked since."""
        if self.switches != switches or any(self.hooks):
            return False
        for holder, name, child in self.children:
            if holder.get(name) is not child:
                return False
        for module in self.modules:
            if "forward" in module.__dict__:
                return False
        return [tensor.data_ptr() for tensor in self.tensors] == self.addresses


_known: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()


def recall_facts(layer: Shippo) -> Facts | None:
    """`facts_of` a layer of plain CPU tensors, looked up anew only where something was switched, replaced, moved or hooked."""
    known, controller = _known.get(layer), layer.controller
    switches = layer.use_right, controller.zero_suffix
    if known is not None and known.hold(switches):
        return known.facts
    facts, modules = facts_of(layer), [*layer.children(), *controller.children()]
    if any(map(is_hooked, modules)):
        # Not remembered: a hook may hold the layer, which would then never go.
        _known.pop(layer, None)
        return facts
    children = [(m._modules, name, child) for m in (layer, controller) for name, child in m._modules.items()]
    children += [(m._parameters, name, child) for m in (layer, *modules) for name, child in m._parameters.items()]
    tensors = [child for _, _, child in children if isinstance(child, Tensor) and is_plain(child)]
    hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    _known[layer] = Known(facts, switches, children, modules, hooks, tensors, addresses)
    return facts


def facts_of(layer: Shippo) -> Facts | None:
    """What a decode step of `layer` needs; `None` where it is served by the ordinary way alone: other dtypes or devices than
    it knows, or somebody listens to a module that it does not call."""
    controller, conv, norm = layer.controller, layer.conv, layer.read_norm
    silent = (conv, controller, layer.right, norm)
    if controller.zero_suffix or any(module is not None and is_hooked(module) for module in silent):
        return None
    dtype, kept = conv.weight.dtype, layer.drift_log.dtype
    parameters = (
        controller.scalar_bias, controller.right_bias, layer.drift_log, layer.skip, None if norm is None else norm.weight,
    )  # fmt: skip
    if dtype not in DTYPES or kept != compute_dtype(dtype):
        return None
    for tensor in (conv.weight, conv.bias, *parameters):
        if tensor is not None and not (tensor.device.type == "cpu" and tensor.is_contiguous()):
            return None
    projections, inline = controller.projections, None
    if controller.right_proj is not None:
        projections, inline = (projections, layer.right.inline) if layer.use_right else (projections[:-1], None)
    linears = ([layer.in_proj], projections, [layer.out_proj])
    seen = values_visible(conv.weight)
    weights = tuple(weights_of(group) if seen and not any(map(is_hooked, group)) else None for group in linears)
    weights = tuple(None if group is None or group.dtype != dtype else group for group in weights)
    return Facts(dtype, kept, (conv.weight, conv.bias), parameters, linears, weights, inline)
