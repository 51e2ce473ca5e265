"""The public scans: check once, choose a backend (`shippo_ssm.dispatch`), compute in the state's dtype, return in the input's.

Nothing falls back silently: `resolve_backend` says what "auto" takes, and a backend named explicitly runs or raises.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shippo_ssm.dispatch import asks_gradients, choose_scan, compute_dtype, scan_kernels
from shippo_ssm.scan import associative, chunked, fused, reference, segments, triton
from shippo_ssm.scan.algebra import Recurrence
from shippo_ssm.scan.checks import check_affine_arguments, check_recurrence, describe_recurrence
from shippo_ssm.scan.distributed import SequenceShard, negotiate_shards
from shippo_ssm.scan.packing import keep_empty


def _segmented(
    recurrence: Recurrence, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y and the final state, by segments of each sequence side by side."""
    run = BACKENDS[scan_kernels(recurrence.value) or "chunked"]
    return keep_empty(partial(segments.scan_in_place, run, recurrence, cu_seqlens), initial_state, cu_seqlens)


# A backend is one function: (recurrence, initial_state, cu_seqlens) -> (y, final_state).
BACKENDS = {
    "reference": reference.run,
    "associative": associative.run,
    "chunked": chunked.run,
    "fused": fused.run,
    "triton": triton.run,
    "segmented": _segmented,
}


class Resolution(str):
    """The name of a backend, with the reason for taking it in `.reason`."""

    reason: str

    def __repr__(self) -> str:
        return f"{str(self)!r} ({self.reason})"


def resolve_backend(value: Tensor, right: Tensor | None = None, *, backend: str = "auto") -> Resolution:
    """The backend that `transport_scan(value, ..., backend=backend)` runs, and why.

    Args:
        value: [B, T, G, P] or [B, T, G, r, P]; its device, dtype and sizes decide.
        right: [B, T, G, P, P] or `None`; taken so that the call looks like the scan's.
        backend: "auto" or one of "reference", "associative", "chunked", "fused", "triton", "segmented".

    Returns:
        A string with a `.reason`.

    Example:
        >>> import torch
        >>> resolve_backend(torch.zeros(1, 8, 2, 4))
        'fused' (auto: CPU tensors of width 4 <= 16)
    """
    name, reason = choose_scan(backend, value, right)
    resolution = Resolution(name)
    resolution.reason = reason
    return resolution


def transport_scan(
    value: Tensor,
    write: Tensor,
    read: Tensor,
    step: Tensor,
    drift: Tensor,
    right: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    group: ProcessGroup | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """H_t = exp(step_t drift_t) H_{t-1} right_t + write_t value_t^T and y_t = read_t^T H_t.

    Args:
        value: [B, T, G, P], or [B, T, G, r, P] for a rank-r write (the r sources are summed).
        write: [B, T, Q, N], or [B, T, Q, r, N]. Q is any divisor of G: group g uses set g // (G / Q), so that Q = 1 is one
            write for all groups and Q = G one for each.
        read: [B, T, Q, N].
        step: [B, T, G].
        drift: [G, N] (constant) or [B, T, G, N] (time-varying); negative entries forget.
        right: [B, T, G, P, P]; `None` (default) is the identity.
        initial_state: [B, G, N, P], or [num_sequences, G, N, P] with `cu_seqlens`; zeros by default.
        output_final_state: whether to return the state after the last position.
        cu_seqlens: [num_sequences + 1] boundaries of sequences packed along T, with B = 1; a sequence may be empty.
        group: a `torch.distributed` process group whose ranks hold contiguous parts of T, in their order, of any lengths; the
            other arguments describe the whole sequence, alike on all ranks. Gradients of shared tensors add up over the ranks.
        backend: "auto", "reference", "associative", "chunked", "fused", "triton" or "segmented"; see `resolve_backend`.

    The kernels read contiguous memory: operands with other strides are copied, an expanded one in full.

    Returns:
        y [B, T, G, P] in the dtype of `value`, and the final state ([B, G, N, P] or [num_sequences, G, N, P]) or `None`.
        The state is float32 for half-precision inputs.

    Example:
        >>> import torch
        >>> ones = torch.ones(1, 3, 1, 1)
        >>> y, state = transport_scan(
        ...     ones, ones, ones, ones[..., 0], torch.zeros(1, 1), output_final_state=True, backend="reference"
        ... )
        >>> y.flatten().tolist(), state.item()
        ([1.0, 2.0, 3.0], 3.0)
    """
    given, part = Recurrence(value, write, read, step, drift, right), None
    if group is None:
        check_recurrence("transport_scan", given, initial_state, cu_seqlens)
    else:
        part = _negotiate_shards(given, initial_state, output_final_state, cu_seqlens, group)
        cu_seqlens = None if cu_seqlens is None else part.bounds("transport_scan", cu_seqlens)
        initial_state = None if initial_state is None else part.first(initial_state)
    # The kernels of a CPU know no float16.
    halves = backend in ("auto", "fused") and any(tensor is not None and tensor.dtype == torch.float16 for tensor in given)
    y, final_state = scan(
        given.normalised(cast=halves and value.device.type == "cpu"),
        initial_state=None if initial_state is None else initial_state.to(compute_dtype(value.dtype)),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        part=part,
        backend=backend,
    )
    return y.to(value.dtype), final_state


def scan(
    recurrence: Recurrence,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    part: SequenceShard | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`transport_scan` of a record that is checked and has a rank axis already; y in the dtype of its value.

    With a `part` of a sequence over several ranks, `initial_state` is added to the state that enters this part, and
    `cu_seqlens` are boundaries inside it.
    """
    chosen = choose_scan(backend, *recurrence, initial_state)[0]
    run = BACKENDS[chosen]
    # Kernels load half precision as it is: half the bytes. The summaries of a part take one dtype.
    halves = torch.float16 in (recurrence.write.dtype, recurrence.read.dtype)
    as_it_is = chosen == "triton" or (chosen == "fused" and not halves)
    if part is not None or not as_it_is:
        recurrence = recurrence.normalised()
    if part is None or len(part.lengths) == 1:
        y, final_state = run(recurrence, initial_state, cu_seqlens)
    else:
        y, final_state = segments.scan_segments(run, recurrence, initial_state, cu_seqlens, part)
    return y, final_state if output_final_state else None


def _negotiate_shards(
    given: Recurrence, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None, group: ProcessGroup
) -> SequenceShard:
    """The checks of `transport_scan` on all ranks of `group` at once."""

    def check() -> dict[str, Any]:
        check_recurrence("transport_scan", given, initial_state, cu_seqlens, cut=True)
        return describe_recurrence(given, cu_seqlens) | {
            "`initial_state` is there": initial_state is not None,
            "`output_final_state`": output_final_state,
            "a gradient of `value` or another operand is asked for": asks_gradients(*given, initial_state),
        }

    return negotiate_shards("transport_scan", group, check)


def block_affine_scan(
    left: Tensor, right: Tensor | None, update: Tensor, *, initial_state: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """All states of H_t = left_t H_{t-1} right_t + update_t.

    Args:
        left: [.., T, N] (diagonal) or [.., T, N, N] (dense).
        right: [.., T, P, P], or `None` for the identity.
        update: [.., T, N, P]; real or complex.
        initial_state: [.., N, P]; zeros by default.
        backend: "reference" (a loop), "associative" (parallel prefix), or "auto" (default), which is "associative".

    Returns:
        The states after each position, [.., T, N, P].

    Example:
        >>> import torch
        >>> block_affine_scan(torch.full((3, 1), 0.5), None, torch.ones(3, 1, 1)).flatten().tolist()
        [1.0, 1.5, 1.75]
    """
    if backend not in ("auto", "reference", "associative"):
        raise ValueError(
            f"block_affine_scan: `backend` is {backend!r}; expected 'auto', 'reference' or 'associative'; the chunked, "
            "fused and triton backends serve transport_scan"
        )
    check_affine_arguments(left, right, update, initial_state)
    kept = compute_dtype(update.dtype)
    right = None if right is None else right.to(kept)
    initial_state = None if initial_state is None else initial_state.to(kept)
    module = reference if backend == "reference" else associative
    return module.block_affine_scan(left.to(kept), right, update.to(kept), initial_state=initial_state).to(update.dtype)
