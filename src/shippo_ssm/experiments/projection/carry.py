"""Final states of a memory with a fixed left operator, without a state per token, with gradients.

With a fixed left operator and sources write_{t,j} x_{t,j}^T, x_{t,j} = E_j^T f_t, the final state of
H_t = L H_{t-1} R_t + sum_j b_j x_{t,j}^T is

    H_T = sum_t sum_j write_{t,j} z_{t,j}^T,     write_{t,j} = L^{T-t} b_j,     z_t = x_t^T R_{t+1} .. R_T,

so the only sequential part is the product of right actions R_t = exp(M_t), a chain of small matrices; everything else is
a matrix product over all positions. Generators of the projection task are small (spectral norm about 0.04), so exp is its
Taylor polynomial: degree three where data are made (the first omitted term is about 1e-7 of a step) and degree two
where a model trains (1e-5 of a step, 1e-9 in NMSE). Far from the end, where little of a source is left, one degree less
loses no more: that is what `near`, the number of last positions with the full degree, is for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shippo_ssm.engine import launch
from shippo_ssm.experiments.projection._carry_kernels import ROWS, Backward, Forward, build_backward, build_forward

TRAIN_DEGREE, EXACT_DEGREE = 2, 3


def _spans(signal: Tensor, near: int | None) -> tuple[int, int, int]:
    """The integers of a kernel's operands: length, near, apart."""
    n, length, width = signal.shape
    return length, length if near is None else near, n * width


class Motion(NamedTuple):
    """Right actions R_t = exp(sum_k coef_{t,k} G_k), and where they are taken to their full degree."""

    coef: Tensor  # [n, T, K]; the first position acts on nothing
    generators: Tensor  # G [K, d, d]
    near: int | None = None
    """Last positions with the full degree; one degree less before them. All positions by default."""


def num_dense(generators: Tensor) -> int:
    """Generators before the last ones that have a single entry at most; at least one.

    Half of the task's generators are elementary: adding their entries costs nothing beside adding matrices.
    """
    entries = generators.count_nonzero((1, 2)).tolist()
    while len(entries) > 1 and entries[-1] <= 1:
        entries.pop()
    return len(entries)


def _forward(signal: Tensor, front: Tensor | None, motion: Motion | None, degree: int, frame: Tensor | None) -> Tensor:
    """z [T, r, n, d]: positions first, so that the sum over them is one product."""
    n, length, width = signal.shape
    rank = 1 if front is None else front.shape[1] // width
    moved = torch.empty(length, rank, n, width)
    coef, generators, near = motion or (None, None, None)
    count = 0 if generators is None else len(generators)
    # Learned generators are dense.
    dense = num_dense(generators) if generators is not None and degree == EXACT_DEGREE else count
    constants = {"width": width, "rank": rank, "front": front is not None, "count": count, "dense": dense}
    operands = Forward(signal, front, coef, generators, moved, frame, *_spans(signal, near))
    launch(build_forward, n, operands, **constants, degree=degree, keep=frame is not None)
    return moved


def sum_sources(write: Tensor, moved: Tensor) -> Tensor:
    """sum_t sum_j write_{t,j} z_{t,j}^T: [N, T, r] and [T, r, n, d] -> [n, N, d]."""
    product = write.flatten(1) @ moved.flatten(0, 1).flatten(1)
    return product.unflatten(1, moved.shape[2:]).transpose(0, 1)


class _FinalState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, signal: Tensor, front: Tensor, write: Tensor, frame: Tensor, *motion: Any) -> Tensor:
        moved = _forward(signal, front, Motion(*motion) if motion else None, TRAIN_DEGREE if motion else 0, frame)
        coef, generators, ctx.near = motion or (None, None, None)
        ctx.save_for_backward(signal, front, write, frame, coef, generators, moved)
        return sum_sources(write, moved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        signal, front, write, frame, coef, generators, moved = ctx.saved_tensors
        n, _, width = signal.shape
        order, length, rank = write.shape
        learned, count = generators is not None, 0 if generators is None else len(generators)
        dfront = torch.empty(n, *front.shape)
        turned = torch.empty(n, -(-count // ROWS) * ROWS, width, width)
        tensors = (signal, front, write.permute(1, 2, 0), coef, generators, frame, grads[0], dfront, turned)
        operands = Backward(*tensors, *_spans(signal, ctx.near))
        launch(build_backward, n, operands, width=width, rank=rank, order=order, count=count, learned=learned)
        dwrite = grads[0].transpose(0, 1).flatten(1) @ moved.flatten(0, 1).flatten(1).mT
        dgenerators = turned.sum(0)[:count].mT if learned else None
        found = None, dfront.sum(0), dwrite.view(order, length, rank), None
        return (*found, None, dgenerators, None) if learned else found


def check(signal: Tensor, write: Tensor, front: Tensor | None = None, motion: Motion | None = None) -> None:
    """Raise where shapes or dtypes are not those of this module."""
    named = {"signal": signal, "write": write} | ({} if front is None else {"front": front})
    if motion is not None:
        named |= {"coef": motion.coef, "generators": motion.generators}
    width = signal.shape[-1]
    rank = 1 if front is None else front.shape[-1] // width
    fits = signal.ndim == 3 and write.ndim == 3 and write.shape[1:] == (signal.shape[1], rank)
    if front is not None:
        fits = fits and front.shape == (width, rank * width)
    if motion is not None:
        count = len(motion.generators)
        fits = fits and motion.coef.shape == (*signal.shape[:2], count) and motion.generators.shape == (count, width, width)
    if not fits:
        shapes = ", ".join(f"`{name}` {tuple(tensor.shape)}" for name, tensor in named.items())
        raise ValueError(
            f"carry: shapes are {shapes}; expected signal [n, T, d], write [N, T, r], front [d, r d], coef [n, T, K], "
            "generators [K, d, d]"
        )
    for name, tensor in named.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"carry: `{name}` is {tensor.dtype}; expected torch.float32; convert it with .float()")
    if width % 8 or (front is not None and rank % ROWS):
        raise ValueError(f"carry: d is {width}, r is {rank}; expected multiples of 8 and {ROWS}; pad with zeros")


def check_frame(signal: Tensor, frame: Tensor) -> None:
    """Raise where `frame` does not fit."""
    n, length, width = signal.shape
    if frame.shape != (n, length, width, width) or frame.dtype != torch.float32 or not frame.is_contiguous():
        raise ValueError(
            f"carry: `frame` is {tuple(frame.shape)}, {frame.dtype}; expected {(n, length, width, width)}, torch.float32, "
            "contiguous; make it with new_frame(signal)"
        )


def new_frame(signal: Tensor) -> Tensor:
    """Memory for the frames of a signal [n, T, d]: [n, T, d, d]."""
    return torch.empty(*signal.shape, signal.shape[-1])


def carry(signal: Tensor, front: Tensor, write: Tensor, motion: Motion, *, frame: Tensor | None = None) -> Tensor:
    """H_T with R_t = exp(M_t), M_t = sum_k coef_{t,k} G_k, exp to second order; gradients in E, write and G.

    Args:
        signal: f [n, T, d], d divisible by 8; float32. Data, as is the motion's coef: no gradient.
        front: E [d, r d], r divisible by 4.
        write: [N, T, r].
        motion: the right actions.
        frame: memory for the frames, from `new_frame`; it must not change before the gradient is taken. New memory by
            default, which the system has to find at every call.

    Returns:
        H_T [n, N, d].

    Example:
        >>> signal, coef, write = torch.randn(2, 5, 8), torch.randn(2, 5, 3), torch.randn(6, 5, 4)
        >>> carry(signal, torch.randn(8, 32), write, Motion(coef, torch.zeros(3, 8, 8))).shape
        torch.Size([2, 6, 8])
    """
    check(signal, write, front, motion)
    frame = new_frame(signal) if frame is None else frame
    check_frame(signal, frame)
    return _FinalState.apply(signal, front, write, frame, *motion)  # pyright: ignore[reportReturnType]


def turn(signal: Tensor, front: Tensor, write: Tensor, frame: Tensor) -> Tensor:
    """H_T by frames that `carry_exactly` left; gradients in E and write. Arguments as in `carry`."""
    check(signal, write, front)
    check_frame(signal, frame)
    return _FinalState.apply(signal, front, write, frame)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def carry_exactly(
    signal: Tensor, write: Tensor, motion: Motion, *, front: Tensor | None = None, frame: Tensor | None = None
) -> Tensor:
    """H_T to third order (second before the last `near` positions), without gradients, for data and evaluation.

    Arguments as in `carry`. Without `front` the signal itself is carried, and r is one. Frames S_t = R_{t+1} .. R_T are left in
    `frame` [n, T, d, d] where that is given.
    """
    check(signal, write, front, motion)
    if frame is not None:
        check_frame(signal, frame)
    return sum_sources(write, _forward(signal, front, motion, EXACT_DEGREE, frame))
