"""Private parts of other libraries that we cannot do without: one function each, so that a new version breaks one place."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules


def private(owner: Any, name: str, library: str = "") -> Any:
    """`owner.name` of a module's name or an object of `library`, or an error that says which version does not have it."""
    try:
        return getattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name)
    except (ImportError, AttributeError) as error:
        place = owner if isinstance(owner, str) else type(owner).__name__
        library = library or place.partition(".")[0]
        raise ImportError(
            f"shippo_ssm uses `{place}.{name}`, a private part of {library}, and {library} {metadata.version(library)} "
            "does not have it; expected a version that is tested: docs/platforms.md lists them"
        ) from error


# How many transforms of `torch.func` are active; torch has no public question for it.
transform_depth: Callable[[], int] = private("torch._C._functorch", "get_dynamic_layer_stack_depth")
# Looked up here, since a traced function cannot.
_without_fake_tensors = private("torch._subclasses.fake_tensor", "unset_fake_temporarily")
_scan = private("torch._higher_order_ops.scan", "scan")
# The leaves of nested tuples, lists and mappings, as modules take and give them.
tree_leaves: Callable[[Any], list[Any]] = private("torch.utils._pytree", "tree_leaves")


def openmp_parallel() -> int:
    """The address of GOMP_parallel, which runs a function on the threads that torch's own operations run on.

    0 where torch was built with other threads than those of GNU's OpenMP or of one that answers to its names.
    """
    # A symbol is looked for in a library and in those that it needs: this is the OpenMP that torch itself calls.
    library = ctypes.CDLL(torch._C.__file__)
    function = getattr(library, "GOMP_parallel", None)
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """The int8 numbers [rows, columns] and float32 scales [rows, 1] of a weight that torchao has quantised row by row, weights
    only; `None` for any other."""
    parts: Any = weight
    if type(weight).__name__ != "Int8Tensor" or not type(weight).__module__.startswith("torchao."):
        return None
    numbers, scale, zero_point = parts.qdata, parts.scale, parts.zero_point
    others = [getattr(parts, name, None) for name in ("act_quant_kwargs", "act_quant_scale", "act_pre_scale")]
    whole = list(parts.block_size) == [1, weight.shape[-1]] and scale.dtype == torch.float32 and numbers.dtype == torch.int8
    fits = numbers.shape == weight.shape and scale.shape == (len(weight), 1) and scale.is_contiguous()
    if not (whole and fits and numbers.is_cpu and scale.is_cpu and others == [None] * 3):
        return None
    # Looked at once, for this tensor: `zero_point.any()` takes longer than a small product.
    known, symmetric = getattr(parts, "_symmetric", (None, zero_point is None))
    if known is not zero_point:
        symmetric = zero_point is None or not bool(zero_point.any())
        parts._symmetric = zero_point, symmetric
    return (numbers, scale) if symmetric else None


def loop(body: Callable[..., tuple[Any, Any]], state: Any, operands: Any) -> tuple[Any, Any]:
    """state, y_t = body(state, operand_t) along the first axis as one operation of a graph, which torch calls a prototype."""
    if torch.onnx.is_in_onnx_export() and torch.is_grad_enabled():
        raise ValueError(
            "transport_scan: `backend` is 'reference' in an ONNX export with gradients on; expected none, torch cannot write a "
            "loop with gradients; call torch.onnx.export under torch.no_grad()"
        )
    return _scan(body, state, operands)


@contextlib.contextmanager
def real_numbers() -> Iterator[None]:
    """Tensors made inside are on the CPU and have values, whatever device or fake mode is set around: for constants."""
    with _without_fake_tensors(), torch.device("cpu"):
        yield


def has_global_hooks() -> bool:
    """Whether forward hooks of all modules are registered, which a module that is not called would miss."""
    return bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)


def target_machine() -> tuple[str, str, str]:
    """Triple, processor and features that Numba compiles for: this machine, or what NUMBA_CPU_NAME and its like say."""
    return private(_cpu_context().codegen(), "magic_tuple", "numba")()


def object_code(result: Any) -> tuple[str, str, list[str], list[str], bytes] | None:
    """The object code of a Numba compile result, as the fields of `engine.cache.MachineCode`.

    `None` for code that only this process can run: it holds addresses, or objects of Python.
    """
    lookup = private("numba.core.environment", "lookup_environment")
    library, names = result.library, result.fndesc
    module = private(library, "_final_module", "numba")
    values = [*module.functions, *module.global_variables]
    environments = [value.name for value in values if value.name.startswith("_ZN08NumbaEnv")]
    has_objects = any(found.consts for found in map(lookup, environments) if found)
    if has_objects or result.reload_init or library.has_dynamic_globals:
        return None
    externals = [value.name for value in values if value.is_declaration and not value.name.startswith("llvm.")]
    code = private(library, "_get_compiled_object", "numba")()
    return names.llvm_func_name, names.llvm_cpython_wrapper_name, environments, externals, code


def python_function(name: str, address: int, environments: list[int]) -> Callable[..., Any]:
    """The Python function whose C function (self, arguments, keywords) is at `address`, as Numba wraps it; `environments` are
    the addresses of its variables for Numba's environment, which is made empty."""
    environment = private("numba._dynfunc", "Environment")({})
    for place in environments:
        ctypes.c_void_p.from_address(place).value = id(environment)
    make = private("numba._dynfunc", "make_function")
    return make(sys.modules[__name__], name, f"compiled kernel {name}", address, environment, (environment,))


def _cpu_context() -> Any:
    """Numba's compiler for this machine."""
    return private("numba.core.registry", "cpu_target").target_context


def start_runtime() -> None:
    """Give the process the functions that Numba's machine code calls, those for memory among them."""
    private("numba.core.runtime.nrt", "rtsys").initialize(_cpu_context())


def link_module(module: Any, name: str) -> tuple[int, Any]:
    """The address of a function of an llvmlite module as machine code, and what owns its memory; Numba's own linker does it."""
    with private("numba.core.compiler_lock", "global_compiler_lock"):
        library = _cpu_context().codegen().create_library(module.name)
        library.add_ir_module(module)
        library.finalize()
        return library.get_pointer_to_function(name), library
