"""The recurrence as a parallel prefix of the composition law, log2(T) levels deep.

Data path: every position becomes an `Affine`; neighbours are composed in pairs, the prefix of the pairs is taken recursively,
and the positions in between are filled in by one more composition each. The initial state enters as a first element whose
update it is, so that the update of each cumulative map is the state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shippo_ssm.scan.algebra import Affine, Recurrence, balance, compose, identity_affine, map_tensors, outer, read_source
from shippo_ssm.scan.packing import scan_packed

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def widened(tensor: Tensor) -> Tensor:
    """`tensor` in double precision, where its device has one."""
    return tensor.to(WIDER.get(tensor.dtype, tensor.dtype)) if tensor.device.type in ("cpu", "cuda") else tensor


def cumulative_affine(elements: Affine, dim: int, *, balanced: bool = False) -> Affine:
    """The maps from before the first position to after each one: element 0, then 1 after 0, then 2 after 1 after 0, ...

    Args:
        elements: one map per position, with time at (positive) dimension `dim` of every tensor.
        dim: the time dimension.
        balanced: keep the factors of long products in range, equal to their products up to powers of two between them.

    Returns:
        The cumulative maps, same shapes. Two runs of them join exactly by `compose(last of the first, each of the second)`.
    """
    length = elements.update.shape[dim]
    if length < 2:
        return elements
    even, odd = _take(elements, dim, slice(0, None, 2)), _take(elements, dim, slice(1, None, 2))
    pairs = compose(_take(even, dim, slice(0, length // 2)), odd)
    at_odd = cumulative_affine(balance(pairs) if balanced else pairs, dim, balanced=balanced)
    at_even = compose(_take(at_odd, dim, slice(0, (length - 1) // 2)), _take(even, dim, slice(1, None)))
    starts = map_tensors(lambda first, rest: torch.cat([first.narrow(dim, 0, 1), rest], dim), even, at_even)
    return map_tensors(lambda evens, odds: _interleave(evens, odds, dim), starts, at_odd)


def block_affine_scan(left: Tensor, right: Tensor | None, update: Tensor, *, initial_state: Tensor | None = None) -> Tensor:
    """All states of H_t = left_t H_{t-1} right_t + update_t, shapes as in `shippo_ssm.scan.block_affine_scan`."""
    time = update.ndim - 3
    # A tree hands the rounding of every long product to all the positions behind it: over 4096 float32 steps near the unit
    # circle that is 1e-5 of the state, ten times the loop's. Composed in double precision it is 1e-7.
    elements = map_tensors(widened, Affine(left, right, update))
    if initial_state is None:
        return cumulative_affine(elements, time, balanced=True).update.to(update.dtype)
    start = identity_affine(
        *update.shape[-2:],
        batch_shape=update.shape[:-3],
        dense=not elements.diagonal,
        dtype=elements.update.dtype,
        device=update.device,
    )._replace(update=widened(initial_state))
    joined = map_tensors(lambda rest, first: torch.cat([first.unsqueeze(time), rest], time), elements, start)
    return cumulative_affine(joined, time, balanced=True).update.narrow(time, 1, update.shape[time]).to(update.dtype)


def run(recurrence: Recurrence, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y and the final state, by a parallel prefix."""
    if cu_seqlens is not None:
        return scan_packed(run, recurrence, initial_state, cu_seqlens)
    value, write, read, step, drift, right, seen = recurrence.per_group()
    # Time goes behind the groups, as `block_affine_scan` has it: [B, G, T, ...].
    left_BGTN = (step.unsqueeze(-1) * drift).exp().movedim(1, 2)
    right_BGTPP = None if right is None else right.movedim(1, 2)
    update_BGTNP = outer(write, value).movedim(1, 2)
    states_BGTNP = block_affine_scan(left_BGTN, right_BGTPP, update_BGTNP, initial_state=initial_state)
    y = (read.unsqueeze(-2) @ states_BGTNP.movedim(2, 1)).squeeze(-2)
    if seen is not None:
        y = y + read_source(read, write, seen - value)
    if states_BGTNP.shape[2]:
        return y, states_BGTNP[:, :, -1]
    return y, recurrence.zero_state() if initial_state is None else initial_state


def _take(elements: Affine, dim: int, span: slice) -> Affine:
    index = (slice(None),) * dim + (span,)
    return map_tensors(lambda tensor: tensor[index], elements)


def _interleave(evens: Tensor, odds: Tensor, dim: int) -> Tensor:
    """[e0, o0, e1, o1, ...] along `dim`; `evens` may be one longer."""
    pairs = odds.shape[dim]
    mixed = torch.stack([evens.narrow(dim, 0, pairs), odds], dim + 1).flatten(dim, dim + 1)
    return mixed if evens.shape[dim] == pairs else torch.cat([mixed, evens.narrow(dim, pairs, 1)], dim)
