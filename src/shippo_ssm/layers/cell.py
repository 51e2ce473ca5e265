"""The two-point exponential-adjusted cell (paper section 3.4) on any scan, continued exactly across segments.

With beta_t = (1 - mix_t) step_t, gamma_t = mix_t step_t and U_t = write_t value_t^T, the cell is

    H_t = L_t (H_{t-1} + beta_t U_{t-1}) R_t + gamma_t U_t,    y_t = read_t^T H_t.

Data path: put Z_t = H_t + beta_{t+1} U_t. Then Z_t = L_t Z_{t-1} R_t + (gamma_t + beta_{t+1}) U_t is a transported scan
with one rank-r source, started at Z_0 = H_0 + beta_1 U_0; a position is shown only gamma_t U_t of its own source, since
y_t = read_t^T (Z_t - beta_{t+1} U_t), and beta_{t+1} belongs to a token that it must not know. At the end of a segment
beta_{T+1} is taken as zero, so that the scan ends in H_T; H_T and the last write and value make the `CellState` from which
a later segment, or a single step, continues.

A masked position is the identity map. It has step 0 (L = I, beta = gamma = 0), R = I, it reads nothing, and it holds the write
and value of the last real position before it, so that the next real position still finds U_{t-1} beside it. What it was given
is never used, NaN or not. Masks may stand anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shippo_ssm.dispatch import asks_gradients, compute_dtype, uses_gpu_step
from shippo_ssm.engine import launch_gpu
from shippo_ssm.layers.halo import halo
from shippo_ssm.layers.mixer import Segment
from shippo_ssm.layers.rows import scaled
from shippo_ssm.layers.states import CellState
from shippo_ssm.scan import Recurrence, scan
from shippo_ssm.scan.algebra import per_group
from shippo_ssm.scan.checks import check_recurrence, describe_recurrence, expect_shape
from shippo_ssm.scan.distributed import keep_in_graph, negotiate_shards
from shippo_ssm.scan.triton import SILENT, configs


def shippo_cell(
    value: Tensor, write: Tensor, read: Tensor, step: Tensor, mix: Tensor, drift: Tensor, right: Tensor | None = None, *,
    initial_state: CellState | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None, group: ProcessGroup | None = None, backend: str = "auto",
) -> tuple[Tensor, CellState | None]:  # fmt: skip
    """H_t = L_t (H_{t-1} + (1 - mix_t) step_t U_{t-1}) right_t + mix_t step_t U_t, y_t = read_t^T H_t, U_t = write_t value_t^T.

    Args:
        value: [B, T, G, P], or [B, T, G, r, P] for a rank-r write (the r sources are summed).
        write: [B, T, Q, N], or [B, T, Q, r, N]; Q divides G, and group g uses set g // (G / Q).
        read: [B, T, Q, N].
        step: [B, T, G], >= 0.
        mix: [B, T, G] in [0, 1]: 1 is exponential Euler, 1/2 the trapezoid.
        drift: [G, N] or [B, T, G, N]; L_t = exp(step_t drift_t).
        right: [B, T, G, P, P]; `None` (default) is the identity.
        initial_state: a `CellState` to continue from; zeros by default.
        output_final_state: whether to return the `CellState` after the last position.
        cu_seqlens: [num_sequences + 1] boundaries of sequences packed along T, with B = 1; sources do not cross them.
        mask: [B, T] bool, `False` where a position is padding and the cell must not move.
        group: as in `transport_scan`; `mask` is this rank's.
        backend: as in `transport_scan`.

    Returns:
        y [B, T, G, P] in the dtype of `value` (zeros at masked positions), and the `CellState` or `None`.

    Example:
        >>> import torch
        >>> ones = torch.ones(1, 2, 1, 1)
        >>> y, state = shippo_cell(
        ...     ones, ones, ones, ones[..., 0], 0.5 * ones[..., 0], torch.zeros(1, 1), output_final_state=True,
        ...     backend="reference",
        ... )
        >>> y.flatten().tolist(), state.memory.item()
        ([0.5, 1.5], 1.5)
    """
    op = "shippo_cell"
    named = {"value": value, "write": write, "read": read, "step": step, "mix": mix, "drift": drift, "right": right}
    for name, operand in named.items():
        # Floats of any precision are taken, and brought to one; anything else is looked at before it is cast.
        floats = isinstance(operand, Tensor) and operand.is_floating_point()
        if not floats and (name != "right" or operand is not None):
            raise ValueError(f"{op}: `{name}` {_came(operand)}; expected a floating tensor; convert it with .to()")
    kept, dtype = compute_dtype(value.dtype), value.dtype
    given = Recurrence(value, write, read, step, drift, right).map(lambda tensor: tensor.to(kept))

    def check() -> dict[str, Any]:
        if cu_seqlens is not None and mask is not None:
            raise ValueError(f"{op}: `mask` came with `cu_seqlens`; expected one of them; pack without padding")
        check_recurrence(op, given, None, cu_seqlens, cut=group is not None)
        sizes = {"B": value.shape[0], "T": value.shape[1], "G": value.shape[2]}
        expect_shape(op, "mix", mix, ("B", "T", "G"), sizes)
        if mask is not None:
            expect_shape(op, "mask", mask, ("B", "T"), sizes)
            if mask.dtype != torch.bool:
                raise ValueError(f"{op}: `mask` {_came(mask)}; expected torch.bool, True at real positions")
        if initial_state is not None and not isinstance(initial_state, CellState):
            raise ValueError(f"{op}: `initial_state` is a {type(initial_state).__name__}; expected a CellState")
        for name, tensor, expected in zip(CellState._fields, initial_state or (), zeros()):
            if not isinstance(tensor, Tensor) or tensor.shape != expected.shape:
                came = f"has shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else _came(tensor)
                raise ValueError(f"{op}: `initial_state.{name}` {came}; expected {tuple(expected.shape)}, as the operands have")
        return describe_recurrence(given, cu_seqlens) | {
            "`initial_state` is there": initial_state is not None,
            "a gradient of `value` or another operand is asked for": asks_gradients(*given, mix, *(initial_state or ())),
        }

    def zeros() -> CellState:
        sequences = value.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shapes = (value.shape[2], read.shape[-1], value.shape[-1]), write.shape[2:], value.shape[2:]
        return CellState(*(value.new_zeros(sequences, *shape) for shape in shapes))

    if group is None:
        check()
        segment = Segment(mask, cu_seqlens)
    else:
        part = negotiate_shards(op, group, check)
        segment = Segment(mask, None if cu_seqlens is None else part.bounds(op, cu_seqlens), part=part)
    before = CellState(*(tensor.to(kept) for tensor in (zeros() if initial_state is None else initial_state)))
    y, after = run_cell(given.normalised(), mix.to(kept), before, segment, backend, initial_state is None)
    return y.to(dtype), after if output_final_state else None


def run_cell(
    recurrence: Recurrence, mix: Tensor, before: CellState, segment: Segment, backend: str, fresh: bool
) -> tuple[Tensor, CellState]:
    """`shippo_cell` of a normalised record, from the state `before`; its write and value may lack the axis of rank one, and
    are zero where it is `fresh`."""
    last_source = bounds = None
    if segment.part is not None:
        # What goes to other ranks has one dtype, and a source may come from there.
        recurrence, fresh = recurrence.normalised(), False
        before, last_source = _enter_part(recurrence, before, segment)
    if segment.mask is not None:
        recurrence, mix = _hold(recurrence, before, segment.mask), torch.where(segment.mask.unsqueeze(-1), mix, 0)
    value, write, step = recurrence.value, recurrence.write, recurrence.step
    gamma, beta = mix * step, (1 - mix) * step
    # Padded first: a graph with a free T would have to know that T - 1 is not 1, and T may be 0.
    padded = F.pad(beta, (0, 0, 0, 1))
    first, beta_next = padded[:, 0], padded[:, 1:]
    if segment.cu_seqlens is not None:
        bounds = segment.cu_seqlens.to(torch.int64)
        # An empty sequence has no first position.
        first = torch.where((bounds.diff() > 0).unsqueeze(-1), padded[0, bounds[:-1]], 0)
        if value.shape[1]:
            # An empty first sequence has no last position; -1 wraps to the end of the row, which is zero already.
            beta_next = beta_next.index_fill(1, torch.remainder(bounds[1:] - 1, value.shape[1]), 0)
    # The weight of a source stands on its value, the shorter of its two factors.
    stored, seen = scaled(value, gamma + beta_next, gamma)
    y, memory = scan(
        recurrence._replace(value=stored, seen=seen),
        initial_state=before.memory if fresh else before.memory + first[..., None, None] * before.source,
        output_final_state=True,
        cu_seqlens=segment.cu_seqlens,
        part=segment.part,
        backend=backend,
    )
    assert memory is not None
    if last_source is None:
        last_source = before[1:]
        if bounds is not None and value.shape[1]:
            # An empty sequence keeps what stood before it.
            ends, filled = (bounds[1:] - 1).clamp_min(0), bounds.diff() > 0
            last_source = [
                torch.where(filled.view(-1, *[1] * (kept.ndim - 1)), tensor[0, ends].view_as(kept), kept)
                for tensor, kept in zip((write, value), before[1:])
            ]
        elif value.shape[1]:
            last_source = [tensor[:, -1].view_as(kept) for tensor, kept in zip((write, value), before[1:])]
    return y, CellState(memory, *(tensor.to(memory.dtype) for tensor in last_source))


def shippo_cell_step(recurrence: Recurrence, mix: Tensor, state: CellState) -> tuple[Tensor, CellState]:
    """`shippo_cell` of a record with a single position, T = 1, as one update instead of a scan.

    This is the reference of one position; the kernels of the decode step are tested against it.

    Args:
        recurrence: the operands of `shippo_cell`, with or without the axis of the rank.
        mix: [B, 1, G].
        state: the `CellState` to continue from.

    Returns:
        y [B, 1, G, P] and the next `CellState`.
    """
    dtype, kept = recurrence.value.dtype, state.memory.dtype
    here = recurrence.map_time(lambda tensor: tensor.squeeze(1)).map(lambda tensor: tensor.to(kept))
    value, write, read, step, drift, right, _ = here
    mix = mix.squeeze(1).to(kept)
    if uses_gpu_step(value, state.memory):
        y, memory = gpu_step(value, write, read, step, mix, drift, right, *state)
        return y.unsqueeze(1).to(dtype), CellState(memory, write.view_as(state.write), value.view_as(state.value))
    gamma, beta = (mix * step)[..., None, None], ((1 - mix) * step)[..., None, None]
    memory = state.memory + beta * state.source
    memory = memory if right is None else memory @ right
    after = state._replace(write=write.view_as(state.write), value=value.view_as(state.value))
    memory = torch.exp(step[..., None] * drift)[..., None] * memory + gamma * after.source
    y = (per_group(read, memory.shape[1], 1).unsqueeze(-2) @ memory).squeeze(-2)
    return y.unsqueeze(1).to(dtype), after._replace(memory=memory)


# Operands of the step on a GPU, in their order.
_STEP = ("value", "write", "read", "step", "mix", "drift", "right", "memory", "last_write", "last_value")
_STEP_SCHEMA = f"({', '.join(f'Tensor {name}' for name in _STEP)}) -> (Tensor, Tensor)".replace("Tensor right", "Tensor? right")


@torch.library.custom_op("shippo::gpu_step", mutates_args=(), schema=_STEP_SCHEMA)
def gpu_step(*operands: Tensor | None) -> tuple[Tensor, Tensor]:
    """`shippo_cell_step` as one GPU kernel without gradients: y [B, G, P] and the next memory [B, G, N, P].

    Shapes are static and the host waits for nothing, so a CUDA graph can hold it after a first call has tuned it.
    """
    import triton.language as tl

    from shippo_ssm.layers import _cell_triton as kernels

    arguments: dict[str, Any] = {
        name: None if given is None else given.contiguous().resolve_neg() for name, given in zip(_STEP, operands)
    }
    value, read, drift, memory = (arguments[name] for name in ("value", "read", "drift", "memory"))
    batch, groups, order, width = memory.shape
    y, after = value.new_empty(batch, groups, width), torch.empty_like(memory)
    arguments |= {
        "y": y,
        "after": after,
        "groups": groups,
        "SHARED": groups // read.shape[1],
        "crowd": 1 << (batch * groups - 1).bit_length(),
        "N": order,
        "P": width,
        "RANK": value.numel() // (batch * groups * width),
        "HAS_RIGHT": arguments["right"] is not None,
        "VARYING": drift.ndim == 3,
        "DTYPE": tl.float64 if memory.dtype == torch.float64 else tl.float32,
    }
    launch_gpu(kernels.cell_step, lambda sizes: (-(-groups // sizes["BG"]), batch), arguments, step_configs(order, width))
    return y, after


@gpu_step.register_fake
def _(value: Tensor, *others: Any) -> Any:
    memory = others[6]
    return value.new_empty(*memory.shape[:2], memory.shape[3]), torch.empty_like(memory, memory_format=torch.contiguous_format)


def step_configs(order: int, width: int) -> tuple[Any, ...]:
    """Configurations of the scan without its sizes along T."""
    choices, kept = configs(order, width, **SILENT), ("BG", "HALVES")
    return tuple(config._replace(sizes=tuple(size for size in config.sizes if size[0] in kept)) for config in choices)


def _enter_part(recurrence: Recurrence, before: CellState, segment: Segment) -> tuple[CellState, tuple[Tensor, Tensor]]:
    """What this rank's part continues from, and the last (write, value) of the whole sequence.

    The memory that enters is the scan's to know: it is what the first rank's part begins with, and nothing on the others.
    """
    assert segment.part is not None
    sources = [recurrence.write, recurrence.value]
    windows = [kept.view(-1, 1, *tensor.shape[2:]) for kept, tensor in zip(before[1:], sources)]
    (write, value), (last_write, last_value) = (
        [tensor.view_as(kept) for tensor, kept in zip(found, before[1:])] for found in halo(sources, windows, segment)
    )
    # A part without positions uses no source, and still answers for the one it received.
    return CellState(keep_in_graph(segment.part.first(before.memory), write, value), write, value), (last_write, last_value)


def _came(thing: Any) -> str:
    return f"has dtype {thing.dtype}" if type(thing) is Tensor else f"is a {type(thing).__name__}"


def _hold(recurrence: Recurrence, before: CellState, mask: Tensor) -> Recurrence:
    """Turn masked positions into identity maps that hold the write and value of the last real position before them."""
    batch, length = mask.shape
    # Place 0 is what stood before the segment, place t + 1 is position t. Real positions write their place under their
    # number, padding writes under a number that nobody asks for.
    number, places = mask.cumsum(1), torch.arange(1, length + 1, device=mask.device).expand(batch, length)
    table = number.new_zeros(batch, length + 2).scatter(1, torch.where(mask, number, length + 1), places)
    source = table.gather(1, number)
    rows = torch.arange(batch, device=mask.device).unsqueeze(1)
    held = [
        torch.cat([first.view(batch, 1, *tensor.shape[2:]), tensor], dim=1)[rows, source]
        for first, tensor in ((before.value, recurrence.value), (before.write, recurrence.write))
    ]
    right, drift = recurrence.right, recurrence.drift
    if right is not None:
        eye = torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
        right = torch.where(mask[..., None, None, None], right, eye)
    read = torch.where(mask[..., None, None], recurrence.read, 0)
    drift = drift if drift.ndim == 2 else torch.where(mask[..., None, None], drift, 0)
    step = torch.where(mask.unsqueeze(-1), recurrence.step, 0)
    return Recurrence(held[0], held[1], read, step, drift, right)
