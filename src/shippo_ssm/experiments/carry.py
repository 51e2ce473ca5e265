"""Values carried to the end of a sequence: z_t = x_t^T exp(M_{t+1}) .. exp(M_T), with gradients.

With a fixed left operator the final state of H_t = L H_{t-1} R_t + sum_j b_j x_{t,j}^T is

    H_T = sum_t sum_j (L^{T-t} b_j) z_{t,j}^T,

so the only sequential part is the product of right actions, a chain of small matrices; everything else is a matrix
product over all positions. Generators of the projection task are small (spectral norm about 0.04), so exp is its
Taylor polynomial: degree three where data are made (the first omitted term is about 1e-7 of a step) and degree two
where a model trains (1e-5 of a step, 1e-9 in NMSE).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shippo_ssm._numba import jit, parallel_for

TRAIN_DEGREE, EXACT_DEGREE = 2, 3
_ARRAYS = ", ".join(["float32[::1]"] * 5)
_FORWARD = f"void({_ARRAYS}, int64, int64, int64)"
_BACKWARD = f"void({_ARRAYS}, float32[::1], float32[::1], int64, int64, int64)"


def _flat(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).numpy()


def _forward(value: Tensor, coef: Tensor, generators: Tensor, degree: int, keep: bool) -> tuple[Tensor, Tensor]:
    """Moved values, and the frames where `keep` (an empty tensor elsewhere)."""
    from shippo_ssm.experiments._carry_kernels import build_forward

    sequences, length, rank, width = value.shape
    kernel = jit(build_forward, _FORWARD, width=width, rank=rank, count=len(generators), degree=degree, keep=keep)
    moved = torch.empty_like(value)
    frame = torch.empty(sequences, length, width, width) if keep else torch.empty(0)
    arrays = [_flat(tensor) for tensor in (value, coef, generators, moved, frame)]
    parallel_for(sequences, lambda start, stop: kernel(*arrays, length, start, stop))
    return moved, frame


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, coef: Tensor, generators: Tensor) -> Tensor:
        moved, frame = _forward(value, coef, generators, TRAIN_DEGREE, keep=True)
        ctx.save_for_backward(value, coef, generators, frame)
        return moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        from shippo_ssm.experiments._carry_kernels import build_backward

        value, coef, generators, frame = ctx.saved_tensors
        sequences, length, rank, width = value.shape
        kernel = jit(build_backward, _BACKWARD, width=width, rank=rank, count=len(generators))
        dvalue, turned = torch.empty_like(value), torch.empty(sequences, *generators.shape)
        arrays = [_flat(tensor) for tensor in (value, coef, generators, frame, grads[0].contiguous(), dvalue, turned)]
        parallel_for(sequences, lambda start, stop: kernel(*arrays, length, start, stop))
        return dvalue, None, turned.sum(0).mT


def check(value: Tensor, coef: Tensor, generators: Tensor) -> None:
    """Raise where shapes or dtypes are not those of `carry`."""
    width = generators.shape[-1]
    fits = value.ndim == 4 and coef.shape == (*value.shape[:2], len(generators)) and value.shape[3] == width
    if not fits or generators.shape[1:] != (width, width):
        raise ValueError(
            f"carry got value {tuple(value.shape)}, coef {tuple(coef.shape)}, generators {tuple(generators.shape)}; "
            "expected [n, T, r, d], [n, T, K], [K, d, d]"
        )
    if any(tensor.dtype != torch.float32 for tensor in (value, coef, generators)):
        raise ValueError("carry computes in float32; convert its arguments with .float()")
    if width % 8 or (value.shape[2] % 4 and value.shape[2] != 1):
        raise ValueError(f"carry got r = {value.shape[2]}, d = {width}; expected r = 1 or divisible by 4, d divisible by 8")


def carry(value: Tensor, coef: Tensor, generators: Tensor) -> Tensor:
    """z_t = x_t exp(M_{t+1}) .. exp(M_T), M_t = sum_k coef_{t,k} G_k, exp to second order; gradients in x and G.

    Args:
        value: x [n, T, r, d], r rows per position; r divisible by 4, d by 8; float32.
        coef: [n, T, K]; the first position acts on nothing. Data: it gets no gradient.
        generators: G [K, d, d].

    Returns:
        z [n, T, r, d].

    Example:
        >>> value, coef = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 3)
        >>> torch.equal(carry(value, coef, torch.zeros(3, 8, 8)), value)
        True
    """
    check(value, coef, generators)
    if value.shape[2] % 4:
        raise ValueError(f"carry got r = {value.shape[2]} rows per position; expected a multiple of 4; pad with zeros")
    return _Carry.apply(value.contiguous(), coef.contiguous(), generators.contiguous())  # pyright: ignore[reportReturnType]


def carry_exactly(value: Tensor, coef: Tensor, generators: Tensor, *, keep: bool = False) -> tuple[Tensor, Tensor]:
    """The same to third order, without gradients, for data and evaluation.

    Returns:
        z [n, T, r, d] and, where `keep`, the frames S_t = exp(M_{t+1}) .. exp(M_T) [n, T, d, d] (else an empty tensor).
    """
    check(value, coef, generators)
    with torch.no_grad():
        return _forward(value.contiguous(), coef.contiguous(), generators.contiguous(), EXACT_DEGREE, keep)
