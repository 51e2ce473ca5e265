"""Matrix exponentials of many small matrices: R = exp(A) for A [.., P, P].

Every matrix is scaled by its own power of two until its 1-norm is at most `theta`. A Taylor polynomial (Paterson and
Stockmeyer's scheme in A, A^2, A^3, A^4) gives exp(2^-s A), and s squarings undo the scaling. float32 is computed in float64 and
rounded once, float16 and bfloat16 in float32, complex64 in complex128. The kernels "fused" (`_expm_cpu.py`) and "triton"
(`_expm_triton.py`) take float32 and float64 up to width 16.

Derivatives. With L(A, E) the Frechet derivative of exp at A in direction E, the gradient of <G, exp(A)> is L(A^H, G).
L is exp itself in the algebra of pairs (X, E) (X', E') = (X X', X E' + E X'), that of the block matrices [[X, E], [0, X]]. L
is an op whose gradient is again an L, of those blocks, so derivatives of every order exist.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shippo_ssm.actions._expm_cpu import NARROW, BlockOperands, LaneScheme, Operands, build_expm
from shippo_ssm.actions.base import register_vmap
from shippo_ssm.dispatch import choose_action, transform_reason
from shippo_ssm.engine import LANES, Config, allocate, custom_op, launch, launch_gpu


class Scheme(NamedTuple):
    """Degree m of the Taylor polynomial and the largest 1-norm theta at which it is used."""

    degree: int
    theta: float


def largest_norm(degree: int, tolerance: float) -> float:
    """theta with theta^m / m! = tolerance, the truncation error of the Frechet derivative; that of exp is smaller."""
    return (tolerance * math.factorial(degree)) ** (1.0 / degree)


# What a result rounded to float32 or less cannot see (1e-9) is a looser target than the unit roundoff of float64.
SINGLE = Scheme(12, largest_norm(12, 1e-9))
DOUBLE = Scheme(16, largest_norm(16, 2.0**-53))
# Norms up to 1e7: the angle of a larger rotation has no digits behind the point in float32.
MOST_SQUARINGS = 24
# The compiled kernel computes small float32 exponentials in float32.
ROUNDED = Scheme(12, largest_norm(12, 2.0**-26))
# Up to width 4 a higher degree costs four multiplications; what ends the range then is the rounding of the larger terms.
NARROW_SINGLE, NARROW_DOUBLE = Scheme(16, 2.0), Scheme(20, largest_norm(20, 2.0**-53))
# The GPU kernel computes in the dtype of its operands, by Horner's rule: fewer products, more squarings.
GPU_SCHEMES = {torch.float32: Scheme(8, largest_norm(8, 2.0**-26)), torch.float64: DOUBLE}
_COMPUTE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}


# A matrix [X], or an element X + eps E of the dual numbers over matrices (eps^2 = 0), [X, E].
Dual = list[Tensor]


def times(x: Dual, y: Dual) -> Dual:
    product = [x[0] @ y[0]]
    return product if len(x) == 1 else [*product, x[0] @ y[1] + x[1] @ y[0]]


def combine(weights: list[float], powers: list[Dual]) -> Dual:
    """weights[0] I + sum_k weights[k] powers[k - 1]."""
    value, *tangent = (functools.reduce(torch.add, map(torch.mul, parts, weights[1:])) for parts in zip(*powers))
    # Not in place: the ONNX exporter refuses a write into a diagonal.
    return [value + weights[0] * torch.eye(value.shape[-1], dtype=value.dtype, device=value.device), *tangent]


def taylor(base: Dual, degree: int) -> Dual:
    """sum_{k <= degree} base^k / k! for a degree divisible by four: 3 products for the powers, degree / 4 - 1 for the rest."""
    second = times(base, base)
    powers = [base, second, times(base, second), times(second, second)]
    weights = [1.0 / math.factorial(k) for k in range(degree + 1)]
    total = combine(weights[degree - 4 :], powers)
    for start in range(degree - 8, -1, -4):
        total = list(map(torch.add, times(powers[3], total), combine(weights[start : start + 4], powers[:3])))
    return total


def scale_and_square(generator: Tensor, direction: Tensor | None = None, squarings: int | None = None) -> Tensor:
    """exp(generator), or the Frechet derivative L(generator, direction), for tensors [.., P, P].

    Every matrix is squared as often as the largest needs it, and keeps the result after its own count. A fixed number of
    `squarings` reads no values; a matrix that needs more, or is not finite, gives NaN.
    """
    dtype, scheme = _COMPUTE[generator.dtype], DOUBLE if generator.dtype in (torch.float64, torch.complex128) else SINGLE
    if generator.device.type == "mps" and dtype == torch.float64:
        dtype = torch.float32
    matrix = generator.to(dtype)
    norm = matrix.detach().abs().sum(-2).amax(-1)[..., None, None]
    count = torch.log2(torch.where(norm.isfinite(), norm, 0).clamp_min(1e-30) / scheme.theta).ceil().clamp_min(0)
    rounds = squarings if squarings is not None else int(count.amax().item()) if generator.numel() else 0
    scale = torch.where(norm.isfinite() & (count <= rounds), torch.exp2(-count), math.nan)
    tangent = [] if direction is None else [direction.to(dtype) * scale]
    result = taylor([matrix * scale, *tangent], scheme.degree)
    for done in range(rounds):
        result = [torch.where(count > done, square, x) for x, square in zip(result, times(result, result))]
    return result[-1].to(generator.dtype)


def expm_formula(generator: Tensor) -> Tensor:
    """exp(generator) in torch's own operations without reading values, for `torch.func`, forward mode and ONNX."""
    return scale_and_square(generator, squarings=MOST_SQUARINGS)


def check_square(op: str, name: str, matrix: Tensor) -> None:
    """Raise where a tensor is not [.., P, P] of a floating or complex dtype."""
    if not isinstance(matrix, Tensor):
        raise ValueError(f"{op}: `{name}` is a {type(matrix).__name__}; expected a tensor [.., P, P]; use torch.as_tensor")
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(f"{op}: `{name}` has shape {tuple(matrix.shape)}; expected square matrices [.., P, P]; reshape it")
    if matrix.dtype not in _COMPUTE:
        raise ValueError(f"{op}: `{name}` has dtype {matrix.dtype}; expected a floating or complex one; convert it with .to()")


def lane_schemes(dtype: str, width: int, backward: bool) -> list[LaneScheme]:
    """How a kernel takes numbers of `dtype`: float32 matrices of moderate norm in their own precision, the rest in float64."""
    if dtype == "float64":
        return [LaneScheme("float64", *(NARROW_DOUBLE if width <= NARROW else DOUBLE))]
    own, wider = (NARROW_SINGLE, NARROW_SINGLE) if width <= NARROW else (ROUNDED, SINGLE)
    # The errors of many values add up along a product of them; those of gradients do not.
    return [LaneScheme("float32", *own, 8.0 if backward else 2.5), LaneScheme("float64", *wider)]


def launch_schemes(build: Callable, operands: Any, schemes: Sequence[LaneScheme], **constants: Any) -> None:
    """Run a kernel on all of `operands.count` matrices, with one scheme after another on what is left to do."""
    num_blocks = -(-operands.count // LANES)
    todo = np.ones(num_blocks, np.int8)
    for scheme in schemes:
        if todo.any():
            launch(build, num_blocks, BlockOperands(operands, todo), scheme=scheme, **constants)


def run_cpu(generator: Tensor, direction: Tensor | None = None) -> Tensor:
    """exp(generator), or L(generator, direction), by the CPU kernel; it reads the transpose of A for L(A, E), which is what a
    gradient has in memory."""
    generator = generator if direction is None else generator.mT
    width, dtype, backward = generator.shape[-1], str(generator.dtype).removeprefix("torch."), direction is not None
    out = allocate(generator, generator.shape)
    operands = Operands(generator, direction, out, generator.numel() // (width * width))
    schemes = lane_schemes(dtype, width, backward)
    launch_schemes(build_expm, operands, schemes, dtype=dtype, width=width, backward=backward)
    return out


def gpu_configs(width: int) -> tuple[Config, ...]:
    """Matrices and warps of one program: all products of a row and a column at once, 32 or fewer numbers in a lane."""
    products = (1 << (width - 1).bit_length()) ** 3
    items, warps = max(1, 1024 // products), max(1, products // 1024)
    return tuple(Config((("BM", size),), warps) for size in sorted({items, max(1, items // 2)}))


def run_gpu(generator: Tensor, direction: Tensor | None = None) -> Tensor:
    """The same as `run_cpu` by the GPU kernel; what is not finite stays so."""
    import triton.language as tl

    from shippo_ssm.actions._expm_triton import expm as kernel

    generator = generator if direction is None else generator.mT
    out, width, scheme = generator.new_empty(generator.shape), generator.shape[-1], GPU_SCHEMES[generator.dtype]
    count = generator.numel() // width**2
    arguments = {
        "generator": generator.contiguous(), "direction": None if direction is None else direction.contiguous(), "out": out,
        "count": count, "P": width, "FRECHET": direction is not None, "DEGREE": scheme.degree, "THETA": scheme.theta,
        "DTYPE": tl.float64 if generator.dtype == torch.float64 else tl.float32,
    }  # fmt: skip
    launch_gpu(kernel, lambda sizes: (-(-count // sizes["BM"]),), arguments, gpu_configs(width))
    return out


RUN = {"torch": scale_and_square, "fused": run_cpu, "triton": run_gpu}


@custom_op("shippo::expm")
def expm_op(generator: Tensor, backend: str) -> Tensor:
    """exp(generator) as one op; `backend` is resolved already."""
    return RUN[backend](generator)


@custom_op("shippo::expm_frechet")
def frechet_op(generator: Tensor, direction: Tensor, backend: str) -> Tensor:
    """L(generator, direction), the derivative of exp at `generator` along `direction`."""
    return RUN[backend](generator, direction)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _expm_backward(ctx, grad: Tensor):
    (generator,) = ctx.saved_tensors
    return frechet_op(generator.mH, grad, ctx.backend), None


def _frechet_backward(ctx, grad: Tensor):
    generator, direction = ctx.saved_tensors
    width = generator.shape[-1]
    zero = torch.zeros_like(generator)
    block = torch.cat([torch.cat([generator, direction], -1), torch.cat([zero, generator], -1)], -2)
    corner = torch.nn.functional.pad(grad, (width, 0, 0, width))
    pulled = frechet_op(block.mH, corner, choose_action("expm", (block,), 2 * width, 2))
    diagonal = pulled[..., :width, :width] + pulled[..., width:, width:]
    return diagonal, pulled[..., :width, width:], None


for _op, _backward, _num_tensors in ((expm_op, _expm_backward, 1), (frechet_op, _frechet_backward, 2)):
    _op.register_fake(lambda generator, *_: torch.empty_like(generator, memory_format=torch.contiguous_format))
    _op.register_autograd(_backward, setup_context=_save)
    register_vmap(_op, _num_tensors)


def expm(generator: Tensor, *, backend: str = "auto") -> Tensor:
    """R = exp(A) for every matrix of a batch, differentiable to any order.

    Args:
        generator: A [.., P, P], floating or complex, on any device.
        backend: "torch" (batched products), "fused" (the CPU kernel), "triton" (the GPU kernel) or "auto" (`choose_action`).

    Returns:
        R [.., P, P] of the same dtype, accurate to a few units in the last place times the condition number of exp at A
        (float32 to the last place or two); NaN where A is not finite.

    Example:
        >>> quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]]) * (torch.pi / 2)
        >>> expm(quarter).round().tolist()
        [[-0.0, -1.0], [1.0, -0.0]]
    """
    check_square("expm", "generator", generator)
    kernel = choose_action("expm", (generator,), generator.shape[-1], 2, backend)
    return expm_formula(generator) if kernel == "torch" and transform_reason(generator) else expm_op(generator, kernel)
