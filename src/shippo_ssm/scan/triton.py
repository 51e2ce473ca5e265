"""The scan on a card: forward and backward as Triton kernels, under operators like those of `fused.py`.

Data path: the tensors of a `Recurrence` go to one custom operator that returns y [B, T, G, P], the final states and the
states at chunk boundaries; its gradient is a second operator that recomputes the states inside each chunk. A program is one
sequence and one block of groups, and keeps its state in registers over time. Operands may be float32, bfloat16 or float16 (or
float64): a program computes in float32 (float64), and each gradient comes in the dtype of its operand. `_triton_kernels.py`
holds the kernels, compiled on first use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shippo_ssm._dtypes import compute_dtype
from shippo_ssm.engine import Config, card_obstacle, launch_card
from shippo_ssm.scan.algebra import Recurrence
from shippo_ssm.scan.fused import WIDEST, Outputs, scan_operators

# Chains, B G, from which a card is busy enough; few long ones are cut into segments.
FEWEST_CHAINS = 512
# Positions between two kept states; the states between them lie in a scratch that should stay in the card's cache.
KEEP = 16


def obstacle(value: Tensor) -> str | None:
    """Why the kernels cannot run on `value` [.., P]; `None` where they can."""
    if not 1 <= value.shape[-1] <= WIDEST:
        return f"width P = {value.shape[-1]}, and the Triton kernels take 1 to {WIDEST}"
    return card_obstacle(value)


class Case(NamedTuple):
    """What the operators of `fused.py` ask of a backend."""

    chunk: int
    row: int


def configs(order: int, width: int, backward: bool) -> tuple[Config, ...]:
    """The configurations to choose from: groups of a program, and positions that its loads run ahead."""
    # Up to eight numbers of one group's state in a lane.
    warps = max(1, min(8, (1 << (order - 1).bit_length()) * width // 256))
    stages = 8 if backward else 12
    return tuple(Config((("BG", groups), ("STAGES", stages)), warps) for groups in (2, 1, 4))


def _case(recurrence: Recurrence) -> Case:
    return Case(KEEP, int(recurrence.read.shape[-1]))


def _forward(
    case: Case, recurrence: Recurrence, initial_state: Tensor | None, cu_seqlens: Tensor | None, outputs: Outputs
) -> None:
    from shippo_ssm.scan import _triton_kernels as kernels

    arguments = _arguments(recurrence, initial_state, cu_seqlens)
    arguments |= outputs._asdict() | {"initial": _contiguous(initial_state), "KEEP": case.chunk if outputs.kept.numel() else 0}
    choices = configs(arguments["N"], arguments["P"], backward=False)
    launch_card(kernels.forward, _grid(*outputs.final.shape[:2]), arguments, choices)


def _backward(
    case: Case,
    recurrence: Recurrence,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
    gradient: Recurrence,
    dinitial: Tensor,
) -> None:
    from shippo_ssm.scan import _triton_kernels as kernels

    arguments = _arguments(recurrence, initial_state, cu_seqlens)
    order, width, varying = arguments["N"], arguments["P"], arguments["VARYING"]
    chains = len(recurrence.read) if cu_seqlens is None else len(cu_seqlens) - 1, recurrence.read.shape[2]
    # A constant drift collects one partial per sequence, added in order below: nothing depends on who comes first.
    partials = gradient.drift if varying else kept.new_empty(*chains, order)
    arguments |= {f"d{name}": tensor for name, tensor in gradient._replace(drift=partials)._asdict().items()}
    arguments |= {"dinitial": dinitial, "dy": dy.contiguous(), "dfinal": _contiguous(dfinal), "HAS_FINAL": dfinal is not None}
    arguments |= {"kept": kept, "states": kept.new_empty(*chains, case.chunk, width, order), "KEEP": case.chunk}
    launch_card(kernels.backward, _grid(*chains), arguments, configs(order, width, backward=True))
    if not varying:
        gradient.drift.copy_(partials.sum(0))


def _arguments(recurrence: Recurrence, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> dict[str, Any]:
    """What both kernels take."""
    import triton.language as tl

    value, read = recurrence.value, recurrence.read
    _, length, groups, rank, width = value.shape
    chains = groups * (len(value) if cu_seqlens is None else len(cu_seqlens) - 1)
    # Offsets of the largest operands still fit into 32 bits, which are cheaper.
    small = max(tensor.numel() for tensor in recurrence if tensor is not None) < 2**31
    return recurrence.map(Tensor.contiguous)._asdict() | {
        "bounds": _contiguous(cu_seqlens),
        "length": length,
        "groups": groups,
        "crowd": 1 << (chains - 1).bit_length() if chains else 0,
        "N": read.shape[-1],
        "P": width,
        "RANK": rank,
        "HAS_RIGHT": recurrence.right is not None,
        "HAS_SEEN": recurrence.seen is not None,
        "VARYING": recurrence.drift.ndim == 4,
        "HAS_INITIAL": initial_state is not None,
        "HAS_BOUNDS": cu_seqlens is not None,
        "DTYPE": tl.float64 if compute_dtype(value.dtype) == torch.float64 else tl.float32,
        "INDEX": tl.int32 if small else tl.int64,
    }


def _grid(sequences: int, groups: int) -> Any:
    return lambda sizes: (-(-groups // sizes["BG"]), sequences)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


# For tensors on a card with P <= 16.
run, _scan, _scan_backward = scan_operators("card_scan", _case, _forward, _backward)
