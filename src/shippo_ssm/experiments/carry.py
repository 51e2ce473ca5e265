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
_FORWARD = "void(float32[::1], float32[::1], float32[::1], float32[::1], int64, int64, int64)"
_BACKWARD = "void(float32[::1], float32[::1], float32[::1], float32[::1], float32[::1], float32[::1], int64, int64, int64)"


def _flat(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).numpy()


def _run_forward(value: Tensor, generator: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    from shippo_ssm.experiments._carry_kernels import build_forward

    sequences, length, rank, width = value.shape
    kernel = jit(build_forward, _FORWARD, width=width, rank=rank, degree=degree)
    moved, frame = torch.empty_like(value), torch.empty_like(generator)
    arrays = [_flat(tensor) for tensor in (value, generator, moved, frame)]
    parallel_for(sequences, lambda start, stop: kernel(*arrays, length, start, stop))
    return moved, frame


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, generator: Tensor) -> Tensor:
        moved, frame = _run_forward(value, generator, TRAIN_DEGREE)
        ctx.save_for_backward(value, generator, frame)
        return moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from shippo_ssm.experiments._carry_kernels import build_backward

        value, generator, frame = ctx.saved_tensors
        sequences, length, rank, width = value.shape
        kernel = jit(build_backward, _BACKWARD, width=width, rank=rank)
        dvalue, turned = torch.empty_like(value), torch.empty_like(generator)
        arrays = [_flat(tensor) for tensor in (value, generator, frame, grads[0].contiguous(), dvalue, turned)]
        parallel_for(sequences, lambda start, stop: kernel(*arrays, length, start, stop))
        return dvalue, turned.mT


def check(value: Tensor, generator: Tensor) -> None:
    """Raise where shapes or dtypes are not those of `carry`."""
    width = generator.shape[-1]
    if value.ndim != 4 or generator.shape != (*value.shape[:2], width, width) or value.shape[3] != width:
        raise ValueError(
            f"carry got value {tuple(value.shape)} and generator {tuple(generator.shape)}; "
            "expected [n, T, r, d] and [n, T, d, d] of the same n, T, d"
        )
    if width % 8 or value.shape[2] % 4 or value.dtype != torch.float32 or generator.dtype != torch.float32:
        raise ValueError("carry needs float32, a width divisible by 8 and a rank divisible by 4; pad with zeros")


def carry(value: Tensor, generator: Tensor) -> Tensor:
    """z_t = x_t exp(M_{t+1}) .. exp(M_T) with exp to second order; differentiable in both arguments.

    Args:
        value: x [n, T, r, d], r rows per position; r divisible by 4, d by 8; float32.
        generator: M [n, T, d, d]; M_1 acts on nothing.

    Returns:
        z [n, T, r, d].

    Example:
        >>> value, still = torch.randn(2, 5, 4, 8), torch.zeros(2, 5, 8, 8)
        >>> torch.equal(carry(value, still), value)
        True
    """
    check(value, generator)
    return _Carry.apply(value.contiguous(), generator.contiguous())  # pyright: ignore[reportReturnType]


def frames(generator: Tensor) -> Tensor:
    """S_t = exp(M_{t+1}) .. exp(M_T) to third order, [n, T, d, d] -> [n, T, d, d]; no gradient."""
    value = torch.zeros(*generator.shape[:2], 4, generator.shape[-1])
    check(value, generator)
    return _run_forward(value, generator.contiguous(), EXACT_DEGREE)[1]
