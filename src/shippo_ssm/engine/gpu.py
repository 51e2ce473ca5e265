"""How a Triton kernel is launched.

Triton compiles a kernel when it is first called, measures which of a few configurations is the fastest for operands of a kind,
and keeps both on disk. With TRITON_INTERPRET=1 in the environment before Triton is imported, kernels run on a CPU as NumPy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shippo_ssm.dispatch import is_interpreted


class Config(NamedTuple):
    """One way to run a kernel: compile-time sizes by name, and warps of one program."""

    sizes: tuple[tuple[str, int], ...]
    num_warps: int = 1


def launch_gpu(
    kernel: Any, grid: Callable[[dict[str, Any]], tuple[int, ...]], arguments: dict[str, Any], configs: Sequence[Config]
) -> None:
    """Run a Triton kernel with the configuration that is the fastest for operands like these.

    Args:
        kernel: a function under `triton.jit` that may be run more than once on the same arguments.
        grid: programs to run, from all compile-time sizes by name.
        arguments: everything but the sizes of a configuration, by name; those in capitals, and `crowd`, decide which is fast.
        configs: the configurations to choose from.
    """
    if 0 in grid(arguments | dict(configs[0].sizes)):
        return
    if is_interpreted():
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
