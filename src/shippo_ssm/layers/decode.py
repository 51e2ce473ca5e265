"""The decode step: a few tokens of a `Shippo` layer without gradients, as its projections and two CPU kernels.

Data path: `find_plan` says whether a layer can take this path, and where its weights are in memory; `decode` runs it. The
in-projection [B T, (r + 1) D] goes through `branch` (convolution and SiLU) to x [B T, r D]; the controller's projections of x
go with x and the gate through `cell` (everything else up to the out-projection). Both write into given tensors: the next state
may be the old one, or hold the states after all positions. Plain projections are one compiled product (`linear.py`), others
are called as modules. `_decode_cpu.py` has the kernels; their reference is the layer's own forward pass with
`shippo_cell_step`. While tracing, branch and cell are operators of torch, and projections are called.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm._private import has_global_hooks
from shippo_ssm.actions import RightAction
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.dispatch import STEP_DTYPES, compute_dtype, is_plain, is_readable
from shippo_ssm.engine import launch
from shippo_ssm.engine.run import check_one_device
from shippo_ssm.layers._decode_cpu import Branch, Cell, CellCase, build_branch, build_cell
from shippo_ssm.layers.controller import Controller
from shippo_ssm.layers.conv import ShortConv
from shippo_ssm.layers.linear import ARITHMETIC, MAX_TOKENS, NAMES, Weights, address_of, product, weights_of
from shippo_ssm.layers.mixer import Segment
from shippo_ssm.layers.rows import RMSNorm
from shippo_ssm.layers.states import CellState, ShippoState, check_state

if TYPE_CHECKING:
    from shippo_ssm.layers.shippo import Shippo

# Numbers of state that make a row of the batch worth a thread of its own.
_MIN_STATE = 1 << 15
# The forward methods that the kernels replace; a module with another one is called instead.
_FORWARDS = (ShortConv.forward, Controller.forward, RightAction.forward, RMSNorm.forward)


class DecodePlan(NamedTuple):
    """What a decode step needs of a layer and is the same for every token."""

    dtype: torch.dtype
    """Of u, of the projections and of the convolution."""
    state_dtype: torch.dtype
    conv: tuple[Tensor, Tensor | None]
    parameters: tuple[Tensor | None, ...]
    """As in `CellStep`."""
    linears: tuple[Sequence[nn.Linear], ...]
    """In-projection, the controller's projections of x, out-projection, and the controller's projections of its bottleneck."""
    widths: tuple[list[int], ...]
    """The number of outputs of each."""
    weights: tuple[Weights | None, ...]
    """Their weights in memory; `None` for those that have to be called."""
    inline: Inline | None
    """How the cell kernel computes the right action, where it can."""
    norm_eps: float


def find_plan(layer: Shippo, u: Tensor, state: ShippoState | None, segment: Segment) -> DecodePlan | None:
    """The plan for a call of `layer` without gradients, or `None` where the ordinary forward pass has to serve it."""
    few = not layer.spec.controller_conv if segment.return_all_states else u.shape[1] == 1
    if not segment.whole or not few:
        return None
    plan = cached_plan(layer) if is_readable(u) else make_plan(layer)
    if plan is None or plan.dtype != u.dtype:
        return None
    if state is not None:
        if not isinstance(state, ShippoState) or not isinstance(state.cell, CellState):
            return None
        if is_readable(u) and not all(map(is_plain, (state.conv, *state.cell))):
            return None
        if state.conv.dtype != u.dtype or state.cell.memory.dtype != plan.state_dtype:
            return None
    return plan


def decode(
    layer: Shippo, plan: DecodePlan, u: Tensor, state: ShippoState | None, segment: Segment
) -> tuple[Tensor, ShippoState]:
    """`Shippo.run` by `plan`: the projections, and two kernels between them."""
    batch, length, _ = u.shape
    fresh, all_states = state is None, segment.return_all_states
    if state is None:
        state = layer.init_state(batch, u)
    else:
        check_state("Shippo", state, batch, layer.state_shapes, u.device)
    before = tuple(tensor.contiguous().resolve_neg() for tensor in (state.conv, *state.cell))
    if (fresh or segment.in_place) and not all_states:
        after = before
    else:
        lead = (length,) if all_states else ()
        after = tuple(tensor.new_empty(lead + tensor.shape) for tensor in before)
    tokens, rank = batch * length, layer.spec.write_rank
    (projected,) = _project(plan, 0, u.reshape(tokens, -1).contiguous().resolve_neg())
    x = u.new_empty(tokens, rank * layer.d_inner)
    branch(projected, before[0], *plan.conv, x, after[0], all_states)
    source, own_window, right = x if rank == 1 else x[:, : layer.d_inner].contiguous(), None, None
    if state.controller is not None:
        conv = layer.controller.conv
        assert conv is not None
        source, own_window = conv(source.unsqueeze(1), state.controller)
        source = source.squeeze(1)
    raw = _project(plan, 1, source)
    if plan.linears[3]:
        # The bottleneck is the last of them; its projections stand where those of x would.
        raw = raw[:2] + _project(plan, 3, raw[-1].contiguous()) + raw[2:-1]
    if segment.dt is None:
        dt = _ones(tokens, plan.state_dtype) if is_readable(u) else u.new_ones(tokens, dtype=plan.state_dtype)
    else:
        dt = segment.dt.reshape(tokens).to(plan.state_dtype).contiguous().resolve_neg()
    if plan.inline is None and len(raw) == 4:
        scalar_bias, right_bias = plan.parameters[:2]
        assert scalar_bias is not None
        assert right_bias is not None
        step = F.softplus(raw[2][:, : layer.num_groups].to(plan.state_dtype) + scalar_bias[0]) * dt.unsqueeze(-1)
        coords = raw[3].unflatten(-1, (layer.num_groups, -1)).to(plan.state_dtype) + right_bias
        right = layer.right(coords, step).contiguous()
    out = u.new_empty(tokens, layer.d_inner)
    cell(
        CellStep(
            x, projected, raw, right, plan.inline, plan.parameters, plan.norm_eps, before[1:], after[1:], out, dt, all_states
        )
    )  # fmt: skip
    (y,) = _project(plan, 2, out)
    return y.view(batch, length, -1), ShippoState(after[0], CellState(*after[1:]), own_window)


def _project(plan: DecodePlan, index: int, x: Tensor) -> list[Tensor]:
    """x [tokens, D] through the linear layers `index` of a plan: one product, or one call each; rows may stand apart."""
    weights, widths = plan.weights[index], plan.widths[index]
    if weights is not None and x.shape[0] <= MAX_TOKENS:
        outputs = product(weights, x)
        return [outputs] if len(widths) == 1 else list(outputs.split(widths, 1))
    outputs = [linear(x).to(x.dtype).contiguous().resolve_neg() for linear in plan.linears[index]]
    for output, linear, width in zip(outputs, plan.linears[index], plan.widths[index]):
        if output.shape != (x.shape[0], width):
            raise ValueError(
                f"Shippo: a {type(linear).__name__} in the layer returned {tuple(output.shape)}; expected {(x.shape[0], width)}"
            )
    return outputs


def branch(
    projected: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, next_window: Tensor, all_states: bool
) -> None:
    """x = silu(bias + sum_k weight_k projected_{t-K+1+k}) per channel, behind `window`.

    Args:
        projected: [B T, row]; its first channels are convolved.
        window: [B, K - 1, channels].
        weight, bias: [K, channels] and [channels].
        x: [B T, channels], written.
        next_window: written; as `window`, or [T, B, K - 1, channels] with `all_states`.
    """
    run = _run_branch if is_readable(projected) else torch.ops.shippo.step_branch
    run(projected, window, weight, bias, x, next_window, all_states)


def _run_branch(
    projected: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, next_window: Tensor, all_states: bool
) -> None:
    (tokens, row), batch = projected.shape, window.shape[0]
    length = tokens // max(1, batch)
    taps, channels = weight.shape
    addresses = map(_address, (projected, window, weight, bias, x, next_window))
    operands = Branch._make((*addresses, channels, row, length, batch * (taps - 1) * channels if all_states else 0))
    storage = NAMES[x.dtype]
    constants = {"storage": storage, "dtype": ARITHMETIC[storage], "taps": taps, "has_bias": bias is not None}
    launch(build_branch, batch, operands, _MIN_STATE // (channels * length) + 1, raw=True, **constants)


class CellStep(NamedTuple):
    """Operands of `cell`; all tensors are contiguous.

    Args:
        x: [B T, r D].
        projected: [B T, row]; its last D channels are the gate.
        raw: projections of the controller, write [B T, Q r N], read [B T, Q N], scalars [B T, 4 G] and, with `inline`,
            coordinates [B T, G K]; their rows may stand apart.
        right: R [B T, G, P, P], or `None`.
        inline: how the kernel computes R where it is not given; with neither there is no right action.
        parameters: scalar_bias [4, G], right_bias [G, K], drift_log [G, N], skip [G, P] and the norm's weight [D], or `None`.
        norm_eps: epsilon of the norm.
        before: memory, write and value of the state that is entered.
        after: the same after the last position, written; with a leading T axis with `all_states`.
        out: [B T, D], written.
        dt: [B T] times, factors of the steps.
        all_states: whether `after` holds the states after all positions.
    """

    x: Tensor
    projected: Tensor
    raw: Sequence[Tensor]
    right: Tensor | None
    inline: Inline | None
    parameters: Sequence[Tensor | None]
    norm_eps: float
    before: Sequence[Tensor]
    after: Sequence[Tensor]
    out: Tensor
    dt: Tensor
    all_states: bool


def cell(step: CellStep) -> None:
    """out = silu(gate) (norm(read_gate read^T H) + skip x) with H moved through every position."""
    if is_readable(step.x):
        _run_cell(step)
        return
    x, projected, raw, right, inline, parameters, norm_eps, before, after, out, dt, all_states = step
    kind, *sizes = ("",) if inline is None else inline
    torch.ops.shippo.step_cell(
        x, projected, raw, right, kind, sizes, *parameters, norm_eps, *before, *after, out, dt, all_states
    )


def _run_cell(step: CellStep) -> None:
    x, projected, raw, right, inline, parameters, norm_eps, before, after, out, dt, all_states = step
    memory = before[0]
    (batch, groups, order, width), sets = memory.shape, before[1].shape[1]
    length, channels = x.shape[0] // max(1, batch), groups * width
    rank = x.shape[1] // channels
    right_bias, norm = parameters[1], parameters[4]
    num_coordinates = 0 if inline is None or right_bias is None else right_bias.shape[1]
    absent = [0] * (4 - len(raw))
    places, rows = [tensor.data_ptr() for tensor in raw] + absent, [tensor.stride(0) for tensor in raw] + absent
    gate = _address(projected) + x.element_size() * (projected.shape[1] - channels)
    given = map(_address, (right, *parameters, *before, *after, out, dt))
    ends = (rank * channels, projected.shape[1], *rows, groups, sets, length, batch if all_states else 0)
    case = _case(
        x.dtype, memory.dtype, order, width, rank, num_coordinates, inline, right is not None,
        None if norm is None else norm_eps,
    )  # fmt: skip
    operands = Cell._make((_address(x), gate, *places, *given, *ends))
    launch(build_cell, batch, operands, _MIN_STATE // (channels * order * length) + 1, raw=True, case=case)


@functools.lru_cache
def _case(storage: torch.dtype, dtype: torch.dtype, *rest: Any) -> CellCase:
    order, width, rank, num_coordinates, inline, given, norm_eps = rest
    has_right = given or inline is not None
    return CellCase(NAMES[storage], NAMES[dtype], order, width, rank, num_coordinates, inline, has_right, norm_eps)


@functools.lru_cache
def _ones(count: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(count, dtype=dtype, device="cpu")


def _address(tensor: Tensor | None) -> int:
    """As `address_of`, written out, since a step has twenty of them; 0 for `None`."""
    if tensor is None:
        return 0
    return tensor.data_ptr() or address_of(tensor)


# Under fake tensors, `torch.compile` and `torch.export` the two are operators that write into their arguments.
_library = torch.library.Library("shippo", "FRAGMENT")
_library.define(
    "step_branch(Tensor projected, Tensor window, Tensor weight, Tensor? bias, Tensor(a!) x, Tensor(b!) next_window, "
    "bool all_states) -> ()"
)
_library.define(
    "step_cell(Tensor x, Tensor projected, Tensor[] raw, Tensor? right, str kind, int[] sizes, "
    "Tensor scalar_bias, Tensor? right_bias, Tensor drift_log, Tensor skip, Tensor? norm, float norm_eps, Tensor memory, "
    "Tensor write, Tensor value, Tensor(a!) next_memory, Tensor(b!) next_write, Tensor(c!) next_value, Tensor(d!) out, "
    "Tensor dt, bool all_states) -> ()"
)


def _checked(dtype: torch.dtype, *tensors: tuple[Tensor | None, int], written: bool = False) -> list[Any]:
    """Contiguous tensors with so many numbers of `dtype`: an exported program takes any strides, dtypes and devices."""
    for tensor, count in tensors:
        if tensor is None:
            continue
        if (tensor.dtype, tensor.device.type, tensor.numel()) != (dtype, "cpu", count):
            came = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise ValueError(f"Shippo: a tensor of the decode step is {came}; expected {count} numbers of {dtype} on the CPU")
        if written and not tensor.is_contiguous():
            raise ValueError(f"Shippo: a state with strides {tensor.stride()} cannot be written in place; make it contiguous")
    return [None if tensor is None else tensor.contiguous() for tensor, _ in tensors]


def _branch_op(projected, window, weight, bias, x, next_window, all_states) -> None:
    (tokens, row), (batch, before, channels), dtype = projected.shape, window.shape, x.dtype
    kept = batch * before * channels
    after = kept * (tokens // max(1, batch) if all_states else 1)
    given = (projected, tokens * row), (window, kept), (weight, (before + 1) * channels), (bias, channels)
    written = (x, tokens * channels), (next_window, after)
    projected, window, weight, bias = _checked(dtype, *given)
    x, next_window = _checked(dtype, *written, written=True)
    _run_branch(projected, window, weight, bias, x, next_window, all_states)


def _cell_op(x, projected, raw, right, kind, sizes, *rest) -> None:
    *parameters, norm_eps, m, w, v, next_m, next_w, next_v, out, dt, all_states = rest
    inline = Inline(kind, *sizes) if kind else None
    (batch, groups, order, width), tokens, channels = m.shape, x.shape[0], out.shape[1]
    rank, coordinates = x.shape[1] // max(1, channels), 0 if parameters[1] is None else parameters[1].shape[1]
    vectors, kept = w.shape[1] * order, (m.numel(), batch * w.shape[1] * rank * order, batch * rank * channels)
    columns = rank * vectors, vectors, 4 * groups, groups * coordinates
    projections = [(tensor, tokens * count) for tensor, count in zip(raw, columns)]
    x, projected, *raw = _checked(x.dtype, (x, tokens * rank * channels), (projected, projected.numel()), *projections)
    numbers = 4 * groups, groups * coordinates, groups * order, channels, channels
    right, dt, *given = _checked(
        m.dtype, (right, tokens * channels * width), (dt, tokens), *zip(parameters, numbers), *zip((m, w, v), kept)
    )
    times = tokens // max(1, batch) if all_states else 1
    after = _checked(m.dtype, *((t, times * count) for t, count in zip((next_m, next_w, next_v), kept)), written=True)
    (out,) = _checked(x.dtype, (out, tokens * channels), written=True)
    _run_cell(CellStep(x, projected, raw, right, inline, given[:5], norm_eps, given[5:], after, out, dt, all_states))


_library.impl("step_branch", _branch_op, "CPU")
_library.impl("step_cell", _cell_op, "CPU")
for _name in ("step_branch", "step_cell"):
    torch.library.register_fake(f"shippo::{_name}", lambda *given: check_one_device("Shippo", given), lib=_library)


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of `module` does more than its class says: hooks, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


class CachedPlan(NamedTuple):
    """A plan, and everything it depends on as it was when the plan was made."""

    plan: DecodePlan | None
    options: tuple[Any, ...]
    children: list[tuple[dict[str, Any], str, Any]]
    """Modules, parameters and parts of quantised weights: the holder, the name there, and what it was."""
    modules: list[nn.Module]
    forwards: list[Any]
    classes: list[type]
    """Of the layer and the modules."""
    hooks: list[dict[int, Any]]
    tensors: Sequence[Tensor]
    forms: list[tuple[Any, ...]]

    def is_valid(self, layer: Shippo) -> bool:
        """Whether no option, module, parameter, forward, hook or memory layout has changed since."""
        if any(self.hooks) or has_global_hooks():
            return False
        for holder, name, child in self.children:
            if holder.get(name) is not child:
                return False
        # Bound methods are equal where module and function are: this sees changed classes and patched ones.
        if [module.forward for module in self.modules] != self.forwards or self.options != _options(layer):
            return False
        if [module.__class__ for module in (layer, *self.modules)] != self.classes:
            return False
        return _forms(self.tensors) == self.forms


_plans: weakref.WeakKeyDictionary[nn.Module, CachedPlan] = weakref.WeakKeyDictionary()


def _options(layer: Shippo) -> tuple[Any, ...]:
    # Read from `_modules`: torch's own way to a child takes as long as one of the checks.
    children: dict[str, Any] = layer._modules
    norm, controller, right = children.get("read_norm"), children["controller"], children["right"]
    return layer.use_right, controller.zero_suffix, right.signature(), None if norm is None else norm.eps


def _forms(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_neg()) for t in tensors]


def cached_plan(layer: Shippo) -> DecodePlan | None:
    """`make_plan` of a layer, made again only where something that it depends on has changed."""
    cached = _plans.get(layer)
    if cached is not None and cached.is_valid(layer):
        return cached.plan
    plan, controller = make_plan(layer), layer.controller
    modules = [*layer.children(), *controller.children()]
    if any(map(is_hooked, modules)) or has_global_hooks():
        # Not cached: a hook may hold the layer, which would then never be freed.
        _plans.pop(layer, None)
        return plan
    children = [(m._modules, name, child) for m in (layer, controller) for name, child in m._modules.items()]
    children += [(m._parameters, name, child) for m in (layer, *modules) for name, child in m._parameters.items()]
    for quantised in [child for _, _, child in children if isinstance(child, Tensor) and not is_plain(child)]:
        children += [(vars(quantised), name, part) for name, part in vars(quantised).items()]
    tensors = [child for _, _, child in children if isinstance(child, Tensor) and is_plain(child)]
    _plans[layer] = CachedPlan(
        plan,
        _options(layer),
        children,
        modules,
        [module.forward for module in modules],
        [module.__class__ for module in (layer, *modules)],
        [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)],
        tensors,
        _forms(tensors),
    )
    return plan


def make_plan(layer: Shippo) -> DecodePlan | None:
    """The plan of a decode step of `layer`; `None` where only the forward pass serves it: other dtypes,
    devices, shapes or memory layouts, or hooks on modules that it would not call."""
    controller, conv, norm, spec = layer.controller, layer.conv, layer.read_norm, layer.spec
    silent = [module for module in (conv, controller, layer.right, norm) if module is not None]
    if controller.zero_suffix or any(map(is_hooked, silent)) or has_global_hooks():
        return None
    readable = is_readable(layer.drift_log)
    if readable and any(type(module).forward is not forward for module, forward in zip(silent, _FORWARDS)):
        return None
    dtype, state_dtype, eps = conv.weight.dtype, layer.drift_log.dtype, 0.0 if norm is None else norm.eps
    if dtype not in STEP_DTYPES or state_dtype != compute_dtype(dtype) or eps is None:
        return None
    # Read from `_parameters`: a parametrised one is another tensor at every access.
    groups, channels, order = layer.num_groups, spec.write_rank * layer.d_inner, spec.d_state
    operands = [
        (conv, "weight", dtype, (spec.d_conv, channels)),
        (conv, "bias", dtype, (channels,)),
        (controller, "scalar_bias", state_dtype, (4, groups)),
        (controller, "right_bias", state_dtype, (groups, layer.right.num_coordinates)),
        (layer, "drift_log", state_dtype, (groups, order)),
        (layer, "skip", state_dtype, (groups, spec.group_width)),
        (norm, "weight", state_dtype, (layer.d_inner,)),
    ]
    tensors = []
    for module, name, wanted, shape in operands:
        tensor = None if module is None else module._parameters.get(name)
        # The kernel has no norm without a weight.
        if tensor is None and module is not None and (module is norm or getattr(module, name) is not None):
            return None
        if tensor is not None and (tensor.device.type, tensor.dtype, tensor.shape) != ("cpu", wanted, shape):
            return None
        if tensor is not None and not (tensor.is_contiguous() and not (readable and tensor.is_neg())):
            return None
        tensors.append(tensor)
    projections, inline = controller.projections, None
    sets = controller.num_sets
    widths = [sets * spec.write_rank * order, sets * order, 4 * groups]
    if controller.right_proj is not None:
        projections, inline = (projections, layer.right.inline) if layer.use_right else (projections[:-1], None)
        widths += [groups * layer.right.num_coordinates] if layer.use_right else []
    narrow, narrow_widths, bottleneck = [], [], spec.controller_rank or 0
    if controller.down_proj is not None:
        low = slice(2, 4) if spec.low_rank_right else slice(2, 3)
        narrow, narrow_widths = projections[low], widths[low]
        del projections[low], widths[low]
        projections, widths = [*projections, controller.down_proj], [*widths, bottleneck]
    linears = ([layer.in_proj], projections, [layer.out_proj], narrow)
    sizes = ([channels + layer.d_inner], widths, [layer.d_model], narrow_widths)
    weights = []
    for linear, columns, rows in zip(linears, (layer.d_model, layer.d_inner, layer.d_inner, bottleneck), sizes):
        found = weights_of(linear) if linear and readable and not any(map(is_hooked, linear)) else None
        fits = found is not None and (found.dtype, found.columns) == (dtype, columns)
        rows_found = [matrix.rows for matrix in found.matrices if matrix.rows] if found is not None else None
        weights.append(found if fits and rows_found == rows else None)
    return DecodePlan(dtype, state_dtype, tuple(tensors[:2]), tuple(tensors[2:]), linears, sizes, tuple(weights), inline, eps)
