"""The recurrence as the paper writes it: a loop over time, torch only, any dtype. The only oracle of this project.

Data path: `value` and `write` make the source U_t = write_t value_t^T; `step` and `drift` make the diagonal left factor
L_t = exp(step_t drift_t); the state moves as H_t = L_t H_{t-1} R_t + U_t; `read` takes y_t = read_t^T H_t out of it,
of whose last source it sees write_t seen_t^T where `seen` is given.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from shippo_ssm._private import loop
from shippo_ssm.scan.algebra import Affine, Recurrence, apply, outer


def block_affine_scan(left: Tensor, right: Tensor | None, update: Tensor, *, initial_state: Tensor | None = None) -> Tensor:
    """All states of H_t = left_t H_{t-1} right_t + update_t, shapes as in `shippo_ssm.scan.block_affine_scan`."""
    time = update.ndim - 3
    shape = update.shape[:time] + update.shape[time + 1 :]
    state = update.new_zeros(shape) if initial_state is None else initial_state
    states = []
    for t in range(update.shape[time]):
        right_t = None if right is None else right.select(time, t)
        state = apply(Affine(left.select(time, t), right_t, update.select(time, t)), state)
        states.append(state)
    return torch.stack(states, dim=time) if states else update


def advance(state: Tensor, now: Recurrence) -> tuple[Tensor, Tensor]:
    """H_t and y_t from H_{t-1} [B, G, N, P] and the operands of one position, without a time axis."""
    value, write, read, step, drift, right, seen = now
    state = apply(Affine(torch.exp(step.unsqueeze(-1) * drift), right, outer(write, value)), state)
    shown = state if seen is None else state + outer(write, seen - value)
    return state, (read.unsqueeze(-2) @ shown).squeeze(-2)


def run(recurrence: Recurrence, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y and the final state, one step after another."""
    recurrence = recurrence.per_group()
    value, write, read = recurrence[:3]
    if recurrence.drift.ndim == 2:
        recurrence = recurrence._replace(drift=recurrence.drift.expand(*read.shape))
    if cu_seqlens is not None:
        sequences = [
            run(recurrence.between(low, high), None if initial_state is None else initial_state[s : s + 1])
            for s, (low, high) in enumerate(pairwise(cu_seqlens.tolist()))
        ]
        ys, finals = zip(*sequences)
        return torch.cat(ys, dim=1), torch.cat(finals)
    state = recurrence.zero_state() if initial_state is None else initial_state
    if isinstance(read.shape[1], torch.SymInt):
        # A graph with a free length holds the loop itself rather than its turns.
        state, y = loop(advance, state, recurrence.map(lambda tensor: tensor.movedim(1, 0)))
        return y.movedim(0, 1), state
    outputs = []
    for t in range(read.shape[1]):
        state, y = advance(state, recurrence.map(lambda tensor, t=t: tensor[:, t]))
        outputs.append(y)
    # No position at all still has a gradient, of no entries.
    return torch.stack(outputs, dim=1) if outputs else (read.unsqueeze(-2) @ outer(write, value)).squeeze(-2), state
