"""The compiled CPU path of right actions: `expm`, its Frechet derivative, and the split product with its gradient.

Data path. Tensors [.., P, P] (or coordinates [.., K] and steps [..]) are taken as flat contiguous arrays of M items;
`engine.launch` compiles the kernel for their dtype and width on first use and shares the blocks of eight items between
threads. Every block is computed the same way whatever thread takes it, so results do not
depend on their number.

This module holds no autograd: the ops of `expm.py` and `split.py` call it when their backend is "fused".
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shippo_ssm.engine import LANES, launch

# Widths with a compiled kernel: code grows with P^2, and from here on batched matrix products are as good.
LARGEST_WIDTH = 8
DTYPES = (torch.float32, torch.float64)


def supports(tensor: Tensor, width: int) -> bool:
    """Whether a compiled kernel takes tensors like this one with matrices of this width."""
    return tensor.device.type == "cpu" and tensor.dtype in DTYPES and 1 <= width <= LARGEST_WIDTH


def require(tensor: Tensor, width: int) -> None:
    """Raise where a compiled kernel was asked for and there is none."""
    if not supports(tensor, width):
        raise ValueError(
            f'backend="fused" takes float32 or float64 on the CPU with width <= {LARGEST_WIDTH}, got {tensor.dtype} on '
            f'{tensor.device.type} with width {width}; pass backend="torch" or "auto"'
        )


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run_expm(generator: Tensor, direction: Tensor | None, schemes: list[tuple[str, int, float, int]]) -> Tensor:
    """exp(A) for `generator` A [.., P, P], or L(A^T, G) for the cotangent `direction` G.

    Args:
        schemes: (arithmetic, degree, theta, squarings) to try in this order; what needs more squarings goes to the
        next.
    """
    from shippo_ssm.actions._expm_kernels import Operands, build_expm

    out = torch.empty(generator.shape, dtype=generator.dtype)
    width = generator.shape[-1]
    count = generator.numel() // (width * width)
    kind = name(generator.dtype)
    todo, faults = np.ones(-(-count // LANES), np.int8), np.zeros(1, np.int64)
    operands = Operands(generator, generator if direction is None else direction, out, todo, faults, count)
    for arithmetic, degree, theta, squarings in schemes:
        launch(
            build_expm,
            len(todo),
            operands,
            dtype=kind,
            arithmetic=arithmetic,
            width=width,
            degree=degree,
            theta=theta,
            squarings=squarings,
            frechet=direction is not None,
        )
        if not todo.any():
            break
    if faults[0]:
        raise ValueError("generator has an entry that is not finite; look for a NaN or an overflow where it is made")
    return out


def run_split(
    coords: Tensor, step: Tensor, right: Tensor, cotangent: Tensor | None, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Fill `right` [.., P, P] with the split product, or return the gradients of coords and step for its cotangent.

    Args:
        coords: [.., K] with K = sum(sizes); `step` [..] has the same leading shape.
        sizes: numbers of diagonal, rotation and shear coordinates.
    """
    from shippo_ssm.actions._split_kernels import Operands, build_split

    kind, width = name(coords.dtype), right.shape[-1]
    backward = cotangent is not None
    d_coords = torch.empty(coords.shape if backward else (0,), dtype=coords.dtype)
    d_step = torch.empty(step.shape if backward else (0,), dtype=coords.dtype)
    faults = np.zeros(2, np.int64)
    count = step.numel()
    cotangent = right if cotangent is None else cotangent
    launch(
        build_split,
        -(-count // LANES),
        Operands(coords, step, right, cotangent, d_coords, d_step, faults, count),
        dtype=kind,
        width=width,
        num_diagonal=sizes[0],
        num_rotations=sizes[1],
        num_shears=sizes[2],
        backward=backward,
    )
    if faults[0]:
        raise ValueError(f"step must be >= 0 everywhere, got a minimum of {step.min().item()}; pass softplus(raw)")
    if faults[1]:
        raise ValueError("coords has an entry that is not finite; look for a NaN or an overflow where it is made")
    return d_coords, d_step
