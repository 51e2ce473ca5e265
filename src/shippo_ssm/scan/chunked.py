"""The recurrence in a moving frame: diagonal gated linear attention inside a chunk, the composition law between chunks.

Data path: T is cut into chunks of C positions. Inside a chunk V_t = right_1 .. right_t is the frame, counted from the chunk's
start. Values go into the frame, value_t^T V_t^{-1}; there the memory follows a plain diagonal recurrence, so position t sees
an earlier position s with weight read_t . exp(decay from s to t) write_s; the answer is carried back with V_t. Each chunk is
also one `Affine` map of the memory, and those maps are scanned.

Weights between two positions never divide by a decay: a chunk is halved again and again, and for s in the first and t in the
second half of a piece the decay splits at the middle into two factors that are each a product of true left factors. The frame
is divided by, so its condition number bounds the error; `chunk_length` halves C until that bound is met. README.md beside
this file has the derivation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shippo_ssm.scan import associative
from shippo_ssm.scan.algebra import Recurrence, outer, read_source
from shippo_ssm.scan.packing import scan_packed

LONGEST_CHUNK = 64
# The largest condition number of V that a chunk may reach: rounding errors are multiplied by it.
LARGEST_CONDITION = {torch.float32: 30.0, torch.float64: 1e4}
# The largest norm of V and of its inverse: what is multiplied by both stays in range.
LARGEST_NORM = {torch.float32: 1e20, torch.float64: 1e150}


def run(recurrence: Recurrence, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y and the final state, by chunks in a moving frame."""
    if cu_seqlens is not None:
        return scan_packed(run, recurrence, initial_state, cu_seqlens)
    value, write, read, step, drift, right, seen = recurrence.per_group()
    length = chunk_length(read.shape[1], right)
    if length == 1:
        # A frame of one step is the step itself: nothing is left of the chunk but the scan of the maps.
        return associative.run(recurrence, initial_state)
    log_left = step.unsqueeze(-1) * drift
    num_positions = read.shape[1]

    # K chunks of C positions: [B, G, K, C, ...]. Identity maps pad the front, so that the last position of a sequence is the
    # last of its chunk.
    read_c, write_c, value_c, log_left_c = (_cut(tensor, length) for tensor in (read, write, value, log_left))
    frame_c, framed_c = None, value_c
    if right is not None:
        frame_c, inverse_c = frame(_cut(right, length, identity=True))
        framed_c = value_c @ inverse_c

    y_c = _attend(read_c, write_c, framed_c, log_left_c)

    # The chunk as one map of the memory: what was written meets the decay up to the chunk's end and the frame of its end.
    # The last position's own write meets neither, and must not: dividing by the frame and multiplying again leaves rounding
    # errors that would be all there is of a gradient where the decay is strong.
    decay_c = log_left_c.cumsum(-2)
    kept_c = write_c * _decay_to_end(log_left_c).exp().unsqueeze(-2)
    update = outer(kept_c[..., :-1, :, :].flatten(-3, -2), framed_c[..., :-1, :, :].flatten(-3, -2))
    last_frame = None if frame_c is None else frame_c[..., -1, :, :]
    update = update if last_frame is None else update @ last_frame
    update = update + outer(write_c[..., -1, :, :], value_c[..., -1, :, :])
    states = associative.block_affine_scan(decay_c[..., -1, :].exp(), last_frame, update, initial_state=initial_state)
    before = torch.zeros_like(states[:, :, 0]) if initial_state is None else initial_state
    entering = torch.cat([before.unsqueeze(2), states[:, :, :-1]], dim=2)
    y_c = y_c + (read_c * decay_c.exp()) @ entering
    if frame_c is not None:
        y_c = (y_c.unsqueeze(-2) @ frame_c).squeeze(-2)
    # A position's own write needs no frame: it is read as it was written.
    y_c = y_c + read_source(read_c, write_c, value_c if seen is None else _cut(seen, length))

    y = y_c.flatten(2, 3)[:, :, -num_positions:].movedim(2, 1)
    return y, states[:, :, -1]


def chunk_length(num_positions: int, right: Tensor | None) -> int:
    """The longest C = 64, 32, .. 1 for which the frames of all chunks are well conditioned.

    The condition of V_t is |V_t| |V_t^{-1}| / P in Frobenius norms, 1 for an orthogonal frame. It is measured, not bounded
    from the steps, so that rotations never shorten a chunk; a singular `right` leaves C = 1, which needs no frame.
    """
    length = LONGEST_CHUNK
    while length > 1 and length >= 2 * num_positions:
        length //= 2
    if right is None or right.numel() == 0 or right.is_meta:
        return length
    with torch.no_grad():
        while length > 1:
            frames, inverses = frame(_cut(right, length, identity=True))
            norms = torch.linalg.matrix_norm(torch.stack([frames, inverses]))
            conditions = norms[0] * norms[1] / right.shape[-1]
            # Written so that a NaN, from a singular or overflowing frame, counts as ill conditioned.
            if bool((conditions <= LARGEST_CONDITION[right.dtype]).all() & (norms <= LARGEST_NORM[right.dtype]).all()):
                break
            length //= 2
    return length


def frame(right: Tensor) -> tuple[Tensor, Tensor]:
    """V_t = right_1 .. right_t and V_t^{-1} along dimension -3, by doubling.

    The inverses are true inverses, multiplied in the opposite order: a transpose would be right on the orthogonal group only,
    and would give wrong gradients even there.
    """
    inverse, _ = torch.linalg.inv_ex(right)
    span = 1
    while span < right.shape[-3]:
        head, tail = right[..., :span, :, :], inverse[..., :span, :, :]
        right = torch.cat([head, right[..., :-span, :, :] @ right[..., span:, :, :]], dim=-3)
        inverse = torch.cat([tail, inverse[..., span:, :, :] @ inverse[..., :-span, :, :]], dim=-3)
        span *= 2
    return right, inverse


def _attend(read: Tensor, write: Tensor, framed: Tensor, log_left: Tensor) -> Tensor:
    """sum over s < t of (read_t . exp(decay from s to t) write_s) framed_s inside each chunk, [.., C, P].

    read and log_left are [.., C, N], write is [.., C, r, N], and framed [.., C, r, P] holds the values in the frame.
    """
    length = read.shape[-2]
    y = framed.new_zeros(*read.shape[:-1], framed.shape[-1])
    half = length // 2
    while half:
        pieces = (length // (2 * half), 2, half)
        first_log, second_log = log_left.unflatten(-2, pieces).unbind(-3)
        first_write = write.unflatten(-3, pieces).select(-4, 0)
        queries = read.unflatten(-2, pieces).select(-3, 1) * second_log.cumsum(-2).exp()
        keys = (first_write * _decay_to_end(first_log).exp().unsqueeze(-2)).flatten(-3, -2)
        seen = queries @ keys.mT @ framed.unflatten(-3, pieces).select(-4, 0).flatten(-3, -2)
        y = y + torch.stack([torch.zeros_like(seen), seen], dim=-3).flatten(-4, -2)
        half //= 2
    return y


def _decay_to_end(log_left: Tensor) -> Tensor:
    """The log decay that a write at s meets until the end of its piece: the sum of log_left over s + 1, .., end."""
    later = F.pad(log_left[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2)


def _cut(tensor: Tensor, length: int, identity: bool = False) -> Tensor:
    """[B, T, G, ...] -> [B, G, K, C, ...], padded with zeros, or with identity matrices, at the front."""
    moved = tensor.movedim(1, 2)
    if short := -moved.shape[2] % length:
        filler = torch.eye(moved.shape[-1]).to(moved) if identity else moved.new_zeros(())
        moved = torch.cat([filler.expand(*moved.shape[:2], short, *moved.shape[3:]), moved], dim=2)
    return moved.unflatten(2, (-1, length))
