"""The compiled paths of right actions, on a CPU and on a card: when a call takes them, and the ops that are built on a kernel.

Data path. Tensors [.., P, P] (or coordinates [.., K] and steps [..]) are taken as flat contiguous arrays of M items;
`engine.launch` compiles the kernel for their dtype and width on first use and shares the blocks of LANES items between
threads. Every block is computed the same way whatever thread takes it, so results do not
depend on their number. On a card `launch_items` runs the kernels of `_triton_kernels.py`, up to P = 4 one item per lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shippo_ssm.engine import LANES, Config, allocate, card_obstacle, launch_card, needs_torch

BACKENDS = ("auto", "torch", "fused", "triton")
# From this many items on, "auto" takes the compiled kernel: for a handful of matrices compilation does not pay.
FEWEST_ITEMS = 32
# Widths with a compiled kernel: code grows with P^2, and from here on batched matrix products are as good. The exponential of
# a generator is loops over its rows, and goes further.
LARGEST_WIDTH, LARGEST_GENERATOR_WIDTH, LARGEST_CARD_WIDTH = 8, 16, 16
# The widest matrix that a lane of a card holds.
LARGEST_LANE_WIDTH = 4
DTYPES = (torch.float32, torch.float64)


def choose_kernel(op: str, tensors: tuple[Tensor, ...], width: int, axes: int, backend: str = "auto") -> str:
    """The kernel that a call takes: "torch", "fused" (CPU) or "triton" (card).

    "auto" is "fused" for at least 32 float32 or float64 items on the CPU with width <= 8 (16 for generators), "triton" for such
    items on a card with width <= 16 where Triton is installed, else "torch"; differentiation by `torch.func` or in forward mode
    needs the torch formulas.

    Args:
        op: who asks, for messages.
        tensors: generators [.., P, P] (`axes` 2) or coordinates [.., K] (`axes` 1) first, then what else goes in.
        width: P.
        axes: how many axes at the end belong to one item.
        backend: "torch", "fused", "triton" or "auto".
    """
    if backend not in BACKENDS:
        raise ValueError(f"{op}: `backend` is {backend!r}; expected one of {', '.join(map(repr, BACKENDS))}")
    if backend == "torch":
        return backend
    first, obstacle = tensors[0], needs_torch(*tensors)
    named = ("fused" if first.device.type == "cpu" else "triton") if backend == "auto" else backend
    here = first.device.type == "cpu" if named == "fused" else card_obstacle(first) is None
    widest = LARGEST_GENERATOR_WIDTH if axes == 2 else LARGEST_WIDTH
    widest = widest if named == "fused" else LARGEST_CARD_WIDTH
    if not here or first.dtype not in DTYPES or width > widest:
        obstacle = f"{first.dtype} on {first.device.type} with width {width}"
    if backend == "auto":
        count = math.prod(first.shape[:-axes])
        # A graph with free sizes takes the kernel for all of them.
        many = isinstance(count, torch.SymInt) or count >= FEWEST_ITEMS
        return named if many and not obstacle else "torch"
    if obstacle:
        place = "the CPU" if named == "fused" else "a card, with Triton,"
        raise ValueError(
            f'{op}: `backend` is "{named}" for {obstacle}; expected float32 or float64 on {place} with width <= {widest}, '
            'outside torch.func and forward-mode differentiation; pass backend="torch" or "auto"'
        )
    return backend


def item_configs(name: str, width: int) -> tuple[str, tuple[Config, ...]]:
    """The kernel of `_triton_kernels.py` that serves a width, and its configurations: items of one program, and its warps."""
    if width <= LARGEST_LANE_WIDTH:
        return name, (Config((("BM", 32),), 1), Config((("BM", 64),), 2))
    lanes = 1 << (width - 1).bit_length()
    if name == "split":
        # A row of a matrix in a lane.
        return "wide_split", (Config((("BM", 32 // lanes),), 1),)
    # All products of a row and a column at once: 32 or fewer numbers in a lane.
    return "wide_expm", ((Config((("BM", 1),), 1), Config((("BM", 2),), 1)) if lanes <= 8 else (Config((("BM", 1),), 4),))


def launch_items(name: str, count: int, operands: dict[str, Tensor | None], **constants: Any) -> None:
    """Run a kernel of `_triton_kernels.py` on `count` items of width P."""
    import triton.language as tl

    from shippo_ssm.actions import _triton_kernels

    arguments = {key: None if tensor is None else tensor.contiguous() for key, tensor in operands.items()}
    (dtype,) = {tensor.dtype for tensor in operands.values() if tensor is not None}
    constants |= {"DTYPE": tl.float64 if dtype == torch.float64 else tl.float32}
    name, configs = item_configs(name, constants["P"])
    kernel = getattr(_triton_kernels, name)
    launch_card(kernel, lambda sizes: (-(-count // sizes["BM"]),), arguments | {"count": count} | constants, configs)


class Operands(NamedTuple):
    """What the kernel of a `coordinate_op` takes, for `count` items; forward it has no cotangent and no gradients."""

    coords: Any
    step: Any
    right: Any
    cotangent: Any
    d_coords: Any
    d_step: Any
    count: int


def coordinate_op(
    name: str,
    run: Callable[..., None],
    formula: Callable[..., Tensor],
    card: tuple[str, Callable[..., dict[str, Any]]] | None,
) -> Callable[..., Tensor]:
    """right = op(coords, step, width, sizes, backend): a map from coordinates to matrices with a compiled value and gradient.

    Where a second derivative is asked for (create_graph=True) the gradient is taken through the torch formula instead,
    which has one.

    Args:
        name: of the torch op, below `shippo::`.
        run: `launch` for a builder, on a CPU: called with the number of blocks of LANES items, `Operands`, and dtype, width,
            sizes and backward by name. Forward it fills `right`; backward it fills the gradients.
        formula: the same map in torch, differentiable to any order.
        card: the name of the same map in `_triton_kernels.py`, and its constants from dtype and sizes; `None` where there is
            none.

    Returns:
        The op for coords [.., K] and step [..] with one leading shape; `sizes` are integers that mean something to all, and
        `backend` is resolved already.
    """

    def run_card(coords: Tensor, step: Tensor, right: Tensor, sizes: Sequence[int], **more: Tensor | None) -> None:
        assert card is not None
        kernel, constants = card
        operands = {"coords": coords, "step": step, "right": right, "cotangent": None, "d_coords": None, "d_step": None} | more
        chosen = constants(coords.dtype, sizes) | {"P": right.shape[-1], "BACKWARD": bool(more)}
        launch_items(kernel, step.numel(), operands, **chosen)

    @torch.library.custom_op(f"shippo::{name}", mutates_args=())
    def forward_op(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int], backend: str) -> Tensor:
        right = allocate(coords, (*step.shape, width, width))
        if backend == "triton":
            run_card(coords, step, right, sizes)
            return right
        count, dtype = step.numel(), str(coords.dtype).removeprefix("torch.")
        operands = Operands(coords, step, right, None, None, None, count)
        run(-(-count // LANES), operands, dtype=dtype, width=width, sizes=tuple(sizes), backward=False)
        return right

    @torch.library.custom_op(f"shippo::{name}_backward", mutates_args=())
    def backward_op(
        coords: Tensor, step: Tensor, right: Tensor, cotangent: Tensor, sizes: Sequence[int], backend: str
    ) -> tuple[Tensor, Tensor]:
        d_coords, d_step = (allocate(coords, tensor.shape) for tensor in (coords, step))
        if backend == "triton":
            run_card(coords, step, right, sizes, cotangent=cotangent, d_coords=d_coords, d_step=d_step)
            return d_coords, d_step
        count, dtype = step.numel(), str(coords.dtype).removeprefix("torch.")
        operands = Operands(coords, step, right, cotangent, d_coords, d_step, count)
        run(-(-count // LANES), operands, dtype=dtype, width=right.shape[-1], sizes=tuple(sizes), backward=True)
        return d_coords, d_step

    @forward_op.register_fake
    def _(coords: Tensor, step: Tensor, width: int, sizes: Sequence[int], backend: str) -> Tensor:
        return coords.new_empty(*step.shape, width, width)

    @backward_op.register_fake
    def _(
        coords: Tensor, step: Tensor, right: Tensor, cotangent: Tensor, sizes: Sequence[int], backend: str
    ) -> tuple[Tensor, Tensor]:
        return coords.new_empty(coords.shape), coords.new_empty(step.shape)

    def save(ctx, inputs, output) -> None:
        coords, step, ctx.width, ctx.sizes, ctx.backend = inputs
        ctx.save_for_backward(coords, step, output)

    def pull_back(ctx, cotangent: Tensor):
        coords, step, right = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *backward_op(coords, step, right, cotangent, ctx.sizes, ctx.backend), None, None, None
        wanted = [tensor for tensor in (coords, step) if tensor.requires_grad]
        right = formula(coords, step, ctx.width, ctx.sizes)
        gradients = iter(torch.autograd.grad(right, wanted, cotangent, create_graph=True))
        return *(next(gradients) if tensor.requires_grad else None for tensor in (coords, step)), None, None, None

    forward_op.register_autograd(pull_back, setup_context=save)

    @forward_op.register_vmap
    def _(info, in_dims, coords: Tensor, step: Tensor, width: int, sizes: Sequence[int], backend: str):
        return forward_op(*batch_first(info, in_dims, coords, step), width, sizes, backend), 0

    return forward_op


def batch_first(info: Any, in_dims: Sequence[int | None], *tensors: Tensor) -> list[Tensor]:
    """Operands of an op under `vmap` with the mapped axis first."""
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims)
    ]
