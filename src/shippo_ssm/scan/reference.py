"""The recurrence as the paper writes it: a loop over time, torch only, any dtype. The only oracle of this project.

Data path: `value` and `write` make the source U_t = write_t value_t^T; `step` and `drift` make the diagonal left factor
L_t = exp(step_t drift_t); the state moves as H_t = L_t H_{t-1} R_t + U_t; `read` takes y_t = read_t^T H_t out of it,
of whose last source it sees write_t shown_t^T where `shown` is given.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from shippo_ssm.scan.algebra import Affine, apply, outer


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


def transport_scan(
    value: Tensor,
    write: Tensor,
    read: Tensor,
    step: Tensor,
    drift: Tensor,
    right: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    shown: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """H_t = exp(step_t drift_t) H_{t-1} right_t + write_t value_t^T, y_t = read_t^T H_t, one step after another."""
    if value.ndim == 4:
        value, write = value.unsqueeze(-2), write.unsqueeze(-2)
        shown = None if shown is None else shown.unsqueeze(-2)
    if drift.ndim == 2:
        drift = drift.expand(*read.shape)
    if cu_seqlens is None:
        sequences = [(slice(None), slice(0, read.shape[1]))]
    else:
        bounds = cu_seqlens.tolist()
        sequences = [(slice(s, s + 1), slice(low, high)) for s, (low, high) in enumerate(pairwise(bounds))]

    outputs, finals = [], []
    for rows, times in sequences:
        if initial_state is None:
            state = value.new_zeros(value.shape[0], value.shape[2], read.shape[-1], value.shape[-1])
        else:
            state = initial_state[rows]
        for t in range(times.start, times.stop):
            left = torch.exp(step[:, t, :, None] * drift[:, t])
            right_t = None if right is None else right[:, t]
            state = apply(Affine(left, right_t, outer(write[:, t], value[:, t])), state)
            seen = state if shown is None else state + outer(write[:, t], shown[:, t] - value[:, t])
            outputs.append((read[:, t].unsqueeze(-2) @ seen).squeeze(-2))
        finals.append(state)
    y = torch.stack(outputs, dim=1) if outputs else value.new_zeros(*read.shape[:3], value.shape[-1])
    return y, torch.cat(finals) if output_final_state else None
