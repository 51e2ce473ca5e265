"""Which implementation runs, why, and in what precision: the one module that decides.

| operator | runs | when |
|---|---|---|
| scan | `fused` (CPU kernels) | CPU tensors, 1 <= P <= 16 |
| scan | `triton` (GPU kernels) | GPU tensors with Triton installed, 1 <= P <= 16 |
| scan | `segmented` | as above, with fewer chains B G than threads (or than fill a GPU) and T >= 2 segments |
| scan | `chunked` (torch) | other widths and devices |
| scan | `associative` (torch) | under `torch.func` differentiation or forward-mode AD |
| scan | `reference` (torch loop) | ONNX export |
| expm and right actions | `fused` / `triton` | 32 or more float32 or float64 items, P <= 8 (generators and GPU: 16) |
| expm and right actions | `torch` | everything else |
| norm, scaling, short convolution | CPU kernel | plain CPU tensors of one dtype, no compiler, no transform, no export |
| decode step | CPU kernels | no gradients, plain CPU tensors, no autocast, no hooks on modules that it does not call |
| decode step | GPU kernel | no gradients, GPU tensors with Triton installed, 1 <= P <= 16 |

Everything that is not listed runs in torch. Functions that end in `_reason` return why a kernel cannot run, or "". `vmap`,
`torch.compile` and `torch.export` see the kernels as operators of torch (`torch.library`), which decide nothing themselves.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from shippo_ssm._private import transform_depth

SCAN_BACKENDS = ("reference", "associative", "chunked", "fused", "triton", "segmented")
ACTION_BACKENDS = ("auto", "torch", "fused", "triton")
# The largest P whose sums fit into registers.
MAX_SCAN_WIDTH = 16
# Positions of a segment, where a sequence is split between threads.
SEGMENT_LENGTH = 1024
# Chains (sequences times groups) that fill a GPU.
MIN_GPU_CHAINS = 512
# From this many matrices on, "auto" takes a compiled kernel: for a handful compilation does not pay.
MIN_ACTION_ITEMS = 32
# Widths with a compiled kernel: code grows with P^2. The exponential of a generator is loops over its rows, and goes further.
MAX_ACTION_WIDTH, MAX_GENERATOR_WIDTH, MAX_GPU_ACTION_WIDTH = 8, 16, 16
# The dtypes of tokens that the CPU kernels of a decode step take.
STEP_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
PLAIN = (Tensor, torch.nn.Parameter)
ONNX_EXPORT = "ONNX export, which has no kernels of ours"
# A constant, since `torch.compile` traces through the functions below. Triton is not imported for the question.
HAS_TRITON = importlib.util.find_spec("triton") is not None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which states are kept and closed forms evaluated: float32 for the half types, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def asks_gradients(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors will have a backward pass."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_interpreted() -> bool:
    """Whether GPU kernels run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is in the memory of the CPU, and of no subclass."""
    return type(tensor) in PLAIN and tensor.is_cpu


def is_readable(*tensors: Tensor) -> bool:
    """Whether Python and kernels may read the numbers where they are. A GPU would have to wait.

    Plain CPU tensors of one dtype, not empty and without negative views; not compiled, traced or transformed.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or transform_depth() or forward_ad._current_level >= 0:
        return False
    dtype = tensors[0].dtype
    for tensor in tensors:
        if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.dtype != dtype or not tensor.numel() or tensor.is_neg():
            return False
    return True


def transform_reason(*tensors: Tensor | None) -> str:
    """Why these tensors need torch's own operations, or "".

    `torch.func.grad`, `jvp` and `forward_ad` differentiate torch's operations only: a kernel would fail there, or give a
    tangent of zero. `vmap` alone is supported: operators have a rule for it.
    """
    compiling = torch.compiler.is_compiling()
    # torch's own question takes as long as a small kernel, so it comes last.
    if (compiling or torch.jit.is_tracing()) and torch.onnx.is_in_onnx_export():
        return ONNX_EXPORT
    if not transform_depth() and forward_ad._current_level < 0:
        return ""
    if compiling:
        # A graph shows that there is a transform, but not which tensors it concerns.
        return "a transform of torch.func"
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    for tensor in tensors:
        while tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_gradtrackingtensor(tensor):
                return "a transform of torch.func"
            tensor = functorch.get_unwrapped(tensor)
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            return "forward-mode differentiation"
    return ""


def gpu_reason(tensor: Tensor) -> str:
    """Why Triton's kernels cannot take a tensor, or ""; a ROCm GPU is a "cuda" device to torch."""
    if not HAS_TRITON:
        return "no Triton installed (the extra `gpu` brings it)"
    if tensor.device.type != "cuda" and not is_interpreted():
        return f"tensors on {tensor.device.type}, and the Triton kernels run on a GPU"
    return ""


def gpu_scan_reason(value: Tensor) -> str:
    """Why the GPU kernels of the scan cannot take `value` [.., P], or ""."""
    if not 1 <= value.shape[-1] <= MAX_SCAN_WIDTH:
        return f"width P = {value.shape[-1]}, and the Triton kernels take 1 to {MAX_SCAN_WIDTH}"
    return gpu_reason(value)


def scan_kernels(value: Tensor) -> str:
    """The kernels that can take `value` [.., P]: "fused", "triton" or "" for none."""
    if value.device.type == "cpu" and 1 <= value.shape[-1] <= MAX_SCAN_WIDTH:
        return "fused"
    return "" if gpu_scan_reason(value) else "triton"


def unknown_backend(op: str, backend: Any) -> ValueError:
    """Error for an unknown backend name of the scan."""
    choices = ", ".join(repr(name) for name in ("auto", *SCAN_BACKENDS))
    return ValueError(f"{op}: `backend` is {backend!r}; expected one of {choices}; 'auto' suits most calls")


def choose_scan(backend: str, value: Tensor, *others: Tensor | None) -> tuple[str, str]:
    """(backend, reason) of a scan, as plain strings: a traced graph takes no other."""
    if backend not in ("auto", *SCAN_BACKENDS):
        raise unknown_backend("transport_scan", backend)
    kind, width, reason = value.device.type, value.shape[-1], transform_reason(value, *others)
    # A loop is the only one of these that a graph with a free length can hold.
    fallback = "reference" if reason == ONNX_EXPORT else "associative" if reason else "chunked"
    named = ("fused" if kind == "cpu" else "triton") if backend == "auto" else backend
    if named not in ("fused", "triton", "segmented"):
        return backend, "asked for by name"
    if not reason and named == "triton":
        reason = gpu_scan_reason(value)
    elif not reason and named == "fused":
        if kind != "cpu":
            reason = f"tensors on {kind}, and the fused kernels run on a CPU"
        elif not 1 <= width <= MAX_SCAN_WIDTH:
            reason = f"width P = {width}, and the fused kernels take 1 to {MAX_SCAN_WIDTH}"
    if backend != "auto":
        if reason:
            raise ValueError(f"transport_scan: `backend` is {backend!r} with {reason}; use backend={fallback!r} or 'auto'")
        return backend, "asked for by name"
    if reason:
        return fallback, f"auto: {reason}"
    chains, workers = value.shape[0] * value.shape[2], f"{MIN_GPU_CHAINS} that fill a GPU"
    few = chains < MIN_GPU_CHAINS
    if kind == "cpu":
        # The number of threads is not available while tracing.
        threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()
        few, workers = chains < threads, f"{threads} threads"
    # Summaries are no operators of torch, which `vmap` would have a rule for.
    if few and value.shape[1] >= 2 * SEGMENT_LENGTH and not transform_depth():
        return "segmented", f"auto: {chains} long chains for {workers}"
    return named, f"auto: {'CPU' if kind == 'cpu' else kind} tensors of width {width} <= {MAX_SCAN_WIDTH}"


def choose_action(
    op: str, tensors: tuple[Tensor, ...], width: int, axes: int, backend: str = "auto", *, gpu: bool = True
) -> str:
    """The implementation of a right action: "torch", "fused" (CPU kernel) or "triton" (GPU kernel).

    Args:
        op: the caller, for messages.
        tensors: generators [.., P, P] (`axes` 2) or coordinates [.., K] (`axes` 1) first, then the other operands.
        width: P.
        axes: how many trailing axes belong to one item.
        backend: "torch", "fused", "triton" or "auto".
        gpu: whether the operator has a GPU kernel.
    """
    if backend not in ACTION_BACKENDS:
        raise ValueError(f"{op}: `backend` is {backend!r}; expected one of {', '.join(map(repr, ACTION_BACKENDS))}")
    if backend == "torch":
        return backend
    first, reason = tensors[0], transform_reason(*tensors)
    named = ("fused" if first.device.type == "cpu" else "triton") if backend == "auto" else backend
    here = first.device.type == "cpu" if named == "fused" else gpu and not gpu_reason(first)
    widest = MAX_GENERATOR_WIDTH if axes == 2 else MAX_ACTION_WIDTH
    widest = widest if named == "fused" else MAX_GPU_ACTION_WIDTH
    if not here or first.dtype not in (torch.float32, torch.float64) or width > widest:
        reason = f"{first.dtype} on {first.device.type} with width {width}"
    if backend == "auto":
        count = math.prod(first.shape[:-axes])
        # A graph with free sizes takes the kernel for all of them.
        many = isinstance(count, torch.SymInt) or count >= MIN_ACTION_ITEMS
        return named if many and not reason else "torch"
    if reason:
        place = "a GPU, with Triton," if named == "triton" and gpu else "the CPU"
        raise ValueError(
            f'{op}: `backend` is "{named}" for {reason}; expected float32 or float64 on {place} with width <= {widest}, '
            'outside torch.func and forward-mode differentiation; pass backend="torch" or "auto"'
        )
    return backend


def uses_gpu_step(value: Tensor, memory: Tensor) -> bool:
    """Whether the GPU kernel of one cell position serves `value` [.., P]: nobody needs gradients."""
    if value.device.type == "cpu" or torch.is_grad_enabled() or not value.numel():
        return False
    return not gpu_scan_reason(value) and not transform_reason(value, memory)


def uses_cpu_step(u: Tensor, backend: str) -> bool:
    """Whether the CPU kernels of a decode step can take tokens `u` [B, T, d_model], where nobody needs gradients."""
    return backend in ("auto", "fused") and u.dtype in STEP_DTYPES and is_readable(u) and not torch.is_autocast_enabled("cpu")
