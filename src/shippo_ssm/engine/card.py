"""Kernels for cards: whether Triton can take a tensor, and how one of its kernels is launched.

Triton compiles a kernel when it is first called and keeps the machine code on disk, so nothing is compiled at import. Which of
a few configurations is the fastest it measures at the first call with operands of a kind; the choice is kept on disk as well.
With TRITON_INTERPRET=1 in the environment before Triton is imported, kernels run on a CPU as NumPy: slow, and good for proofs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shippo_ssm._dtypes import compute_dtype

# Triton is not imported for the question. A constant, since `torch.compile` traces through those who ask.
HAS_TRITON = importlib.util.find_spec("triton") is not None


class Config(NamedTuple):
    """One way to run a kernel: compile-time sizes by name, and warps of one program."""

    sizes: tuple[tuple[str, int], ...]
    num_warps: int = 1


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def card_obstacle(tensor: Tensor) -> str | None:
    """Why Triton's kernels cannot take a tensor, or `None` where they can; a ROCm card is a "cuda" device to torch."""
    if not HAS_TRITON:
        return "no Triton installed (the extra `gpu` brings it)"
    if tensor.device.type != "cuda" and not interpreted():
        return f"tensors on {tensor.device.type}, and the Triton kernels run on a card"
    return None


def packs(tensor: Tensor) -> bool:
    """Whether kernels should take two float32 numbers of a lane in one instruction, as NVIDIA's cards can from Blackwell on."""
    if tensor.device.type != "cuda" or interpreted() or torch.version.cuda is None:
        return False
    return compute_dtype(tensor.dtype) == torch.float32 and torch.cuda.get_device_capability(tensor.device) >= (10, 0)


def launch_card(
    kernel: Any, grid: Callable[[dict[str, Any]], tuple[int, ...]], arguments: dict[str, Any], configs: Sequence[Config]
) -> None:
    """Run a Triton kernel with the configuration that is the fastest for operands like these.

    Args:
        kernel: a function under `triton.jit` that may be run more than once on the same arguments.
        grid: programs to run, from all compile-time sizes by name.
        arguments: everything but the sizes of a configuration, by name; those in capitals are compile-time, and decide
            together with `crowd`, if there is one, which configuration is the fastest.
        configs: the configurations to choose from.
    """
    if 0 in grid(arguments | dict(configs[0].sizes)):
        return
    if interpreted():
        kernel[grid](**arguments, **dict(configs[0].sizes))
        return
    key = tuple(name for name in arguments if name.isupper() or name == "crowd")
    # Fusing a product and a sum is what the kernels are written for.
    _tuned(kernel, tuple(configs), key)[grid](**arguments, enable_fp_fusion=True)


@functools.cache
def _tuned(kernel: Any, configs: tuple[Config, ...], key: tuple[str, ...]) -> Any:
    import triton

    choices = [triton.Config(dict(config.sizes), num_warps=config.num_warps) for config in configs]
    return triton.autotune(choices, key=list(key), cache_results=True)(kernel)
