"""The scan on a GPU: forward and backward as Triton kernels, under operators like those of `fused.py`.

Data path: the tensors of a `Recurrence` go to one custom operator that returns y [B, T, G, P], the final states and the
states at chunk boundaries. Its gradient is a second operator of two kernels: the adjoint goes back through time alone, as a
forward pass does, and leaves its states at the ends of long chunks; then all chunks are computed beside each other. Operands
may be float32, bfloat16 or float16 (or float64): a program computes in float32 (float64), and each gradient comes in the dtype
of its operand. `_triton_kernels.py` holds the kernels, compiled on first use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shippo_ssm.dispatch import compute_dtype
from shippo_ssm.engine import Config, launch_gpu
from shippo_ssm.scan.algebra import Recurrence
from shippo_ssm.scan.fused import Outputs, Pullback, scan_operators

# Programs of the backward pass that fill a GPU, and the fewest positions of one.
MANY, SHORTEST = 2048, 64
# Most positions of a round, a power of two.
LONGEST_ROUND = 8
# What passes ask of `configs`: one that sums over N at every position, one that does not, and the gradients, which need many
# registers.
FORWARD: dict[str, Any] = {"groups": (2, 4), "numbers": 16, "ahead": 5}
SILENT: dict[str, Any] = {"groups": (2,), "numbers": 32, "ahead": 4}
GRADIENTS: dict[str, Any] = {"groups": (2,), "numbers": 16, "ahead": 2}


class Case(NamedTuple):
    """What the operators of `fused.py` ask of a backend."""

    chunk: int
    row: int


def keep_every(width: int) -> int:
    """Positions between two kept states: as many as a program holds in registers, for wide groups some more."""
    return 4 if width <= 4 else 8


def span_of(chains: int, length: int) -> int:
    """Positions of a program of the backward pass, between two kept adjoints: a power of two.

    A sequence has about two, of which the adjoint alone must go through one; fewer if it is short, more if few chains are.
    """
    return 1 << (max(SHORTEST, length // max(2, MANY // max(1, chains))) - 1).bit_length()


def configs(order: int, width: int, *, groups: tuple[int, ...], numbers: int, ahead: int) -> tuple[Config, ...]:
    """The configurations to choose from: `groups` of a program, `numbers` of a round's values, rounds of loads `ahead`."""
    lanes, columns = 1 << (order - 1).bit_length(), 1 << (width - 1).bit_length()
    # Up to eight numbers of one group's state in a lane.
    warps, positions = max(1, min(8, lanes * width // 256)), max(1, min(LONGEST_ROUND, numbers // columns))
    choices = []
    for count in groups:
        # How often neighbours of N lie in one lane.
        halves = min(2, max(0, (count * lanes // (32 * warps)).bit_length() - 1), lanes.bit_length() - 1)
        sizes = (("BG", count), ("BT", positions), ("HALVES", halves), ("STAGES", ahead))
        choices.append(Config(sizes, warps))
    return tuple(choices)


def _case(recurrence: Recurrence) -> Case:
    return Case(keep_every(int(recurrence.value.shape[-1])), int(recurrence.read.shape[-1]))


def adjoint_update(recurrence: Recurrence, cu_seqlens: Tensor | None = None) -> Tensor:
    """The same as `fused.adjoint_update` on a GPU."""
    sequences, groups = _chains(recurrence, cu_seqlens)
    update = recurrence.value.new_empty(sequences, groups, recurrence.write.shape[-1], recurrence.value.shape[-1])
    _scan_kernel(recurrence, None, cu_seqlens, {"final": update}, MIRROR=True)
    return update


def _forward(
    case: Case, recurrence: Recurrence, initial_state: Tensor | None, cu_seqlens: Tensor | None, outputs: Outputs
) -> None:
    keep = case.chunk if outputs.kept.numel() else 0
    _scan_kernel(recurrence, initial_state, cu_seqlens, outputs._asdict(), READS=True, KEEP=keep)


def _backward(case: Case, call: Pullback) -> None:
    from shippo_ssm.scan import _triton_kernels as kernels

    recurrence, initial_state, cu_seqlens, kept, dy, dfinal, gradient, dinitial = call
    read, dy = recurrence.read, dy.contiguous()
    (batch, length, groups), order = recurrence.value.shape[:3], read.shape[-1]
    sequences, _ = _chains(recurrence, cu_seqlens)
    size = span_of(sequences * groups, length)
    arguments = _arguments(recurrence, cu_seqlens)
    slots, whose = batch * max(1, -(-length // size)), None
    if cu_seqlens is not None:
        # The sequence of every span of positions: each sequence begins a span.
        slots = length // size + sequences
        places = torch.arange(slots, device=read.device)
        starts = arguments["bounds"][:sequences] // size + places[:sequences]
        whose = torch.searchsorted(starts, places, right=True) - 1
    adjoints = kept.new_empty(slots, *kept.shape[1:])
    mirrored = recurrence._replace(value=dy.unsqueeze(-2), write=read.unsqueeze(-2), seen=None)
    _scan_kernel(mirrored, dfinal, cu_seqlens, {"kept": adjoints}, MIRROR=True, KEEP=size)
    # A constant drift collects one partial per span, a shared vector one per block of groups, added in order below: nothing
    # depends on who comes first.
    results, choices = gradient, configs(order, arguments["P"], **GRADIENTS)
    if not arguments["VARYING"]:
        results = results._replace(drift=kept.new_empty(slots, groups, order))
    shared, (block,) = arguments["SHARED"], {dict(config.sizes)["BG"] for config in choices}
    if shared > 1:
        parts = shared // block if shared % block == 0 else shared
        dwrite, dread = (kept.new_empty(parts, *vector.shape) for vector in recurrence[1:3])
        results = results._replace(write=dwrite, read=dread)
    arguments |= {f"d{name}": tensor for name, tensor in results._asdict().items()} | {"positions": batch * length}
    arguments |= {"dy": dy, "kept": kept, "adjoints": adjoints, "whose": whose, "KEEP": case.chunk, "SPAN": size}
    arguments |= {"dinitial": dinitial, "HAS_INITIAL": initial_state is not None}
    launch_gpu(kernels.gradients, _grid(slots, groups), arguments, choices)
    for total, partials in zip(gradient, results):
        if total is not None and partials is not None and partials is not total:
            total.copy_(partials.sum(0))


def _scan_kernel(
    recurrence: Recurrence, initial_state: Tensor | None, cu_seqlens: Tensor | None, outputs: dict[str, Any], **kind: Any
) -> None:
    """Run the kernel `scan` into `outputs`."""
    from shippo_ssm.scan import _triton_kernels as kernels

    arguments: dict[str, Any] = dict.fromkeys(("y", "final", "kept"))
    arguments |= {"MIRROR": False, "READS": False, "KEEP": 0}
    arguments |= _arguments(recurrence, cu_seqlens) | outputs | kind
    initial = None if initial_state is None else initial_state.contiguous()
    arguments |= {"initial": initial, "HAS_INITIAL": initial is not None}
    choices = configs(arguments["N"], arguments["P"], **(FORWARD if arguments["READS"] else SILENT))
    launch_gpu(kernels.scan, _grid(*_chains(recurrence, cu_seqlens)), arguments, choices)


def _chains(recurrence: Recurrence, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Sequences and groups."""
    value = recurrence.value
    return value.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1, value.shape[2]


def _arguments(recurrence: Recurrence, cu_seqlens: Tensor | None) -> dict[str, Any]:
    """What all kernels take."""
    import triton.language as tl

    value, write = recurrence.value, recurrence.write
    _, length, groups, rank, width = value.shape
    sequences, _ = _chains(recurrence, cu_seqlens)
    return recurrence.map(Tensor.contiguous)._asdict() | {
        "bounds": None if cu_seqlens is None else _safe_bounds(cu_seqlens, length),
        "length": length,
        "crowd": 1 << (sequences * groups - 1).bit_length() if sequences * groups else 0,
        "G": groups,
        "SHARED": groups // max(1, write.shape[2]),
        "N": write.shape[-1],
        "P": width,
        "RANK": rank,
        "HAS_RIGHT": recurrence.right is not None,
        "HAS_SEEN": recurrence.seen is not None,
        "VARYING": recurrence.drift.ndim == 4,
        "HAS_BOUNDS": cu_seqlens is not None,
        "EVEN": cu_seqlens is None and length % LONGEST_ROUND == 0,
        "DTYPE": tl.float64 if compute_dtype(value.dtype) == torch.float64 else tl.float32,
    }


def _safe_bounds(cu_seqlens: Tensor, length: int) -> Tensor:
    """[sequences + 2] boundaries that are in range and do not decrease, and whether they are those of `cu_seqlens`.

    Reading the values would stall a GPU: kernels stay inside the operands for any `cu_seqlens`, and give NaN for invalid ones.
    """
    bounds = cu_seqlens.clamp(0, length).cummax(0).values
    bounds[0] = 0
    valid = (bounds == cu_seqlens).all() & (bounds[-1] == length)
    return torch.cat([bounds, valid.to(bounds.dtype).unsqueeze(0)])


def _grid(rows: int, groups: int) -> Any:
    return lambda sizes: (-(-groups // sizes["BG"]), rows)


# For tensors on a GPU with P <= 16.
run, _scan, _scan_backward = scan_operators("gpu_scan", _case, _forward, _backward)
