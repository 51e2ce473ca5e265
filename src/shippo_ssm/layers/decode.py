"""The decode step: a few tokens of a `Shippo` layer without gradients, as its projections and two CPU kernels.

Data path: `find_plan` says whether a layer can take this path, and where its weights are in memory; `decode` runs it. The
in-projection [B T, (r + 1) D] goes through `branch` (convolution and SiLU) to x [B T, r D]; the controller's projections of x
go with x and the gate through `cell` (everything else up to the out-projection). Both write into given tensors: the next state
may be the old one, or hold the states after all positions. Plain projections are one compiled product (`linear.py`), others
are called as modules. `_decode_cpu.py` has the kernels; their reference is the layer's own forward pass with
`shippo_cell_step`, which also serves graphs that are traced.
"""

from __future__ import annotations

import functools
import weakref
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm._private import has_global_hooks
from shippo_ssm.actions.kernels import Inline
from shippo_ssm.dispatch import PLAIN, STEP_DTYPES, compute_dtype, is_plain, uses_cpu_step
from shippo_ssm.engine import launch
from shippo_ssm.layers._decode_cpu import Branch, Cell, CellCase, build_branch, build_cell
from shippo_ssm.layers.controller import Controller
from shippo_ssm.layers.linear import ARITHMETIC, MAX_TOKENS, NAMES, Weights, address_of, product, weights_of
from shippo_ssm.layers.mixer import Segment
from shippo_ssm.layers.rows import RMSNorm, ShortConv
from shippo_ssm.layers.states import CellState, ShippoState, check_state

if TYPE_CHECKING:
    from shippo_ssm.layers.shippo import Shippo

# Numbers of state that make a row of the batch worth a thread of its own.
_MIN_STATE = 1 << 15
_PLAIN = frozenset(PLAIN)
# The forward methods that the kernels replace; a module with another one is called instead.
_FORWARDS = (ShortConv.forward, Controller.forward, RMSNorm.forward)


class Projection(NamedTuple):
    """Linear layers that read the same x."""

    linears: list[nn.Linear]
    widths: list[int]
    """The number of outputs of each."""
    weights: Weights | None
    """Their weights in memory; `None` where they have to be called."""


class DecodePlan(NamedTuple):
    """What a decode step needs of a layer and is the same for every token."""

    dtype: torch.dtype
    """Of u, of the projections and of the convolution."""
    state_dtype: torch.dtype
    conv: tuple[Tensor, Tensor | None]
    parameters: tuple[Tensor | None, ...]
    """scalar_bias [4, G], right_bias [G, K], drift_log [G, N], skip [G, P] and the norm's weight [D]."""
    projections: list[Projection]
    """In-projection, the controller's projections of x, out-projection, and the controller's projections of its bottleneck,
    which is the last of those of x."""
    inline: Inline | None
    """How the cell kernel computes the right action, where it can."""
    norm_eps: float


def find_plan(layer: Shippo, u: Tensor, state: ShippoState | None, segment: Segment) -> DecodePlan | None:
    """The plan for a call of `layer` without gradients, or `None` where the ordinary forward pass has to serve it."""
    # First: a graph with a free length must not ask whether it is one.
    if not uses_cpu_step(u, layer.spec.backend):
        return None
    few = not layer.spec.controller_conv if segment.return_all_states else u.shape[1] == 1
    if not few or not segment.whole:
        return None
    plan = cached_plan(layer)
    if plan is None or plan.dtype != u.dtype:
        return None
    if state is None:
        return plan
    if not isinstance(state, ShippoState) or not isinstance(state.cell, CellState):
        return None
    # Their device is that of u, or `check_state` raises.
    if not _PLAIN.issuperset(map(type, (state.conv, *state.cell))):
        return None
    return plan if state.conv.dtype == u.dtype and state.cell.memory.dtype == plan.state_dtype else None


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
    before = [tensor.contiguous().resolve_neg() for tensor in (state.conv, *state.cell)]
    if (fresh or segment.in_place) and not all_states:
        after = before
    else:
        lead = (length,) if all_states else ()
        after = [tensor.new_empty(lead + tensor.shape) for tensor in before]
    tokens, channels, rank = batch * length, layer.d_inner, layer.spec.write_rank
    enter, emit, leave, emit_low = plan.projections
    projected = _project(enter, u.reshape(tokens, -1).contiguous().resolve_neg())
    x, out = u.new_empty(tokens, rank * channels), u.new_empty(tokens, channels)
    _run_branch(projected, before[0], *plan.conv, x, after[0], all_states)
    source, own_window = x if rank == 1 else x[:, :channels].contiguous(), None
    if state.controller is not None:
        conv = layer.controller.conv
        assert conv is not None
        source, own_window = conv(source.unsqueeze(1), state.controller)
        source = source.squeeze(1)
    wide, narrow = _project(emit, source), None
    if emit_low.linears:
        narrow = _project(emit_low, wide[:, -emit.widths[-1] :].contiguous())
    if segment.dt is None:
        dt = _ones(tokens, plan.state_dtype)
    else:
        dt = segment.dt.reshape(tokens).to(plan.state_dtype).contiguous().resolve_neg()
    right = None
    if plan.inline is None and layer.use_right and layer.right.num_coordinates:
        right = _right(layer, plan, wide, narrow, dt)
    _run_cell(x, projected, wide, narrow, right, plan, before[1:], after[1:], out, dt, all_states)
    return _project(leave, out).view(batch, length, -1), ShippoState(after[0], CellState(*after[1:]), own_window)


def _project(projection: Projection, x: Tensor) -> Tensor:
    """x [tokens, D] through linear layers, side by side: one product, or one call each."""
    linears, widths, weights = projection
    if weights is not None and x.shape[0] <= MAX_TOKENS:
        return product(weights, x)
    outputs = [linear(x) for linear in linears]
    for output, linear, width in zip(outputs, linears, widths):
        if output.shape != (wanted := (x.shape[0], width)):
            came = f"a {type(linear).__name__} in the layer returned {tuple(output.shape)}"
            raise ValueError(f"Shippo: {came}; expected {wanted}")
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)).to(x.dtype).contiguous().resolve_neg()


def _right(layer: Shippo, plan: DecodePlan, wide: Tensor, narrow: Tensor | None, dt: Tensor) -> Tensor:
    """R [tokens, G, P, P] of a family that the cell kernel cannot compute."""
    scalar_bias, right_bias = plan.parameters[:2]
    assert scalar_bias is not None
    assert right_bias is not None
    first = wide.split(plan.projections[1].widths, 1)[2:]
    scalars, coords = (first if narrow is None else [*narrow.split(plan.projections[3].widths, 1), *first])[:2]
    step = F.softplus(scalars[:, : layer.num_groups].to(plan.state_dtype) + scalar_bias[0]) * dt.unsqueeze(-1)
    coords = coords.unflatten(-1, (layer.num_groups, -1)).to(plan.state_dtype) + right_bias
    return layer.right(coords, step).contiguous()


def _run_branch(projected, window, weight, bias, x, next_window, all_states) -> None:
    """x = silu(bias + sum_k weight_k projected_{t-K+1+k}) per channel, behind `window`.

    Args:
        projected: [B T, row]; its first channels are convolved.
        window: [B, K - 1, channels].
        weight, bias: [K, channels] and [channels].
        x: [B T, channels], written.
        next_window: written; as `window`, or [T, B, K - 1, channels] with `all_states`.
        all_states: whether `next_window` holds the windows after all positions.
    """
    (tokens, row), batch = projected.shape, window.shape[0]
    length = tokens // max(1, batch)
    taps, channels = weight.shape
    addresses = _addresses(projected, window, weight, bias, x, next_window)
    operands = Branch._make((*addresses, channels, row, length, batch * (taps - 1) * channels if all_states else 0))
    storage = NAMES[x.dtype]
    constants = {"storage": storage, "dtype": ARITHMETIC[storage], "taps": taps, "has_bias": bias is not None}
    launch(build_branch, batch, operands, _MIN_STATE // (channels * length) + 1, raw=True, **constants)


def _run_cell(x, projected, wide, narrow, right, plan, before, after, out, dt, all_states) -> None:
    """out = silu(gate) (norm(read_gate read^T H) + skip x) with H moved through every position; all tensors are contiguous.

    Args:
        x: [B T, r D].
        projected: [B T, row]; its last D channels are the gate.
        wide: [B T, row], side by side write [Q r N], read [Q N], scalars [4 G] and the right coordinates [G K].
        narrow: [B T, row], scalars, or scalars and coordinates, where the controller has a bottleneck; `wide` has them not.
        right: R [B T, G, P, P] where the kernel cannot compute it.
        plan: the parameters, and the `Inline` by which the kernel computes R; with neither there is no right action.
        before: memory, write and value of the state that is entered.
        after: the same after the last position, written; with a leading T axis with `all_states`.
        out: [B T, D], written.
        dt: [B T] times, factors of the steps.
        all_states: whether `after` holds the states after all positions.
    """
    inline, right_bias, norm = plan.inline, plan.parameters[1], plan.parameters[4]
    (batch, groups, order, width), sets, (tokens, channels) = before[0].shape, before[1].shape[1], out.shape
    rank, length, size = x.shape[1] // channels, tokens // max(1, batch), x.itemsize
    addresses = _addresses(x, projected, wide, narrow, right, *plan.parameters, *before, *after, out, dt)
    x_at, gate, write_at, scalars, *others = addresses
    row, gate_row = wide.shape[1], projected.shape[1]
    read = write_at + size * sets * rank * order
    coords, scalar_row, coords_row = read + size * sets * order, row, row
    if narrow is None:
        scalars, coords = coords, coords + size * 4 * groups
    else:
        scalar_row = narrow.shape[1]
        if scalar_row > 4 * groups:
            coords, coords_row = scalars + size * 4 * groups, scalar_row
    operands = Cell._make((
        x_at, gate + size * (gate_row - channels), write_at, read, scalars, coords, *others, rank * channels, gate_row, row,
        row, scalar_row, coords_row, groups, sets, length, batch if all_states else 0,
    ))  # fmt: skip
    case = CellCase(
        NAMES[x.dtype], NAMES[dt.dtype], order, width, rank, 0 if inline is None else right_bias.shape[1], inline,
        right is not None or inline is not None, None if norm is None else plan.norm_eps,
    )  # fmt: skip
    launch(build_cell, batch, operands, _MIN_STATE // (channels * order * length) + 1, raw=True, case=case)


@functools.lru_cache
def _ones(count: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(count, dtype=dtype, device="cpu")


def _addresses(*tensors: Tensor | None) -> list[int]:
    """As `address_of`, which raises for freed memory; 0 for `None`."""
    return [0 if tensor is None else tensor.data_ptr() or address_of(tensor) for tensor in tensors]


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of `module` does more than its class says: hooks, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


class CachedPlan(NamedTuple):
    """A plan, and everything it depends on as it was when the plan was made."""

    plan: DecodePlan | None
    children: list[tuple[dict[str, Any], str, Any]]
    """Modules, parameters and parts of quantised weights: the holder, the name there, and what it was."""
    hooks: list[dict[int, Any]]
    modules: list[nn.Module]
    tensors: list[Any]
    facts: list[Any]

    def is_valid(self, layer: Shippo) -> bool:
        """Whether no option, module, parameter, forward, hook or memory layout has changed since."""
        if any(self.hooks) or has_global_hooks():
            return False
        for holder, name, child in self.children:
            if holder.get(name) is not child:
                return False
        return _facts(layer, self.modules, self.tensors) == self.facts


_plans: weakref.WeakKeyDictionary[nn.Module, CachedPlan] = weakref.WeakKeyDictionary()
_forward_of, _form_of = attrgetter("forward"), attrgetter("dtype", "shape")


def _facts(layer: Shippo, modules: list[nn.Module], tensors: list[Any]) -> list[Any]:
    # Read from `_modules`: torch's own way to a child takes as long as one of the checks.
    children: dict[str, Any] = layer._modules
    norm, controller, right = children.get("read_norm"), children["controller"], children["right"]
    # Bound methods are equal where module and function are: they tell patched forwards, types all other changes of a class.
    return [
        layer.use_right, controller.zero_suffix, right.signature(), None if norm is None else norm.eps,
        type(layer), *map(type, modules), *map(_forward_of, modules),
        *map(Tensor.data_ptr, tensors), *map(Tensor.is_contiguous, tensors), *map(Tensor.is_neg, tensors),
        *map(_form_of, tensors),
    ]  # fmt: skip


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
    hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    _plans[layer] = CachedPlan(plan, children, hooks, modules, tensors, _facts(layer, modules, tensors))
    return plan


def make_plan(layer: Shippo) -> DecodePlan | None:
    """The plan of a decode step of `layer`; `None` where only the forward pass serves it: other dtypes,
    devices, shapes or memory layouts, or hooks on modules that it would not call."""
    controller, conv, norm, spec = layer.controller, layer.conv, layer.read_norm, layer.spec
    silent = [module for module in (conv, controller, norm, layer.right) if module is not None]
    if controller.zero_suffix or any(map(is_hooked, silent)) or has_global_hooks():
        return None
    forwards = *_FORWARDS[: len(silent) - 1], type(layer.right).dense
    if any(type(module).forward is not forward for module, forward in zip(silent, forwards)):
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
        if tensor is not None:
            # Freed memory is left to `_addresses`, which raises: torch would read it.
            form = is_plain(tensor), tensor.dtype, tensor.shape, tensor.is_contiguous(), tensor.is_neg()
            if form != (True, wanted, shape, True, False):
                return None
        tensors.append(tensor)
    sets, bottleneck = controller.num_sets, spec.controller_rank or 0
    inline = layer.right.inline if layer.use_right else None
    vectors = [(controller.write_proj, sets * spec.write_rank * order), (controller.read_proj, sets * order)]
    numbers, narrow = [(controller.scalar_proj, 4 * groups)], []
    if controller.right_proj is not None and layer.use_right:
        numbers.append((controller.right_proj, groups * layer.right.num_coordinates))
    if controller.down_proj is not None:
        low = 2 if spec.low_rank_right else 1
        narrow, numbers = numbers[:low], [*numbers[low:], (controller.down_proj, bottleneck)]
    parts = [(layer.in_proj, channels + layer.d_inner)], vectors + numbers, [(layer.out_proj, layer.d_model)], narrow
    projections = []
    for part, columns in zip(parts, (layer.d_model, layer.d_inner, layer.d_inner, bottleneck)):
        linears, widths = [linear for linear, _ in part], [width for _, width in part]
        weights = weights_of(linears) if not any(map(is_hooked, linears)) else None
        rows = None if weights is None else [matrix.rows for matrix in weights.matrices if matrix.rows]
        fits = weights is not None and (weights.dtype, weights.columns, rows) == (dtype, columns, widths)
        projections.append(Projection(linears, widths, weights if fits else None))
    return DecodePlan(dtype, state_dtype, tuple(tensors[:2]), tuple(tensors[2:]), projections, inline, eps)
