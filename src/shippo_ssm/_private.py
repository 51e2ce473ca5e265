"""Private parts of other libraries that we cannot do without: one function each, so that a new version breaks one place."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# How many transforms of `torch.func` are under way; torch has no public question for it.
transform_depth: Callable[[], int] = torch._C._functorch.get_dynamic_layer_stack_depth  # pyright: ignore


def under_transform() -> bool:
    """Whether a transform of `torch.func` or a level of `forward_ad` is under way."""
    return transform_depth() > 0 or forward_ad._current_level >= 0


def values_visible(tensor: Tensor) -> bool:
    """Whether a tensor holds plain CPU numbers that Python may look at: not compiled, not traced, not transformed.

    On a card a look would stall it.
    """
    # `under_transform` written out: this question stands in front of everything that decodes.
    plain = is_plain(tensor) and not torch.compiler.is_compiling()
    return plain and transform_depth() == 0 and forward_ad._current_level < 0


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is in the memory of the CPU, and of no class of its own."""
    return type(tensor) in PLAIN and tensor.is_cpu


PLAIN = (Tensor, torch.nn.Parameter)


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
    if not hasattr(weight, "_is_by_rows"):
        others = [getattr(parts, name, None) for name in ("act_quant_kwargs", "act_quant_scale", "act_pre_scale")]
        symmetric = parts.zero_point is None or not bool(parts.zero_point.any())
        whole = list(parts.block_size) == [1, weight.shape[-1]] and parts.scale.dtype == torch.float32
        # Looked at once: a quantised weight is a constant.
        parts._is_by_rows = symmetric and whole and others == [None] * 3 and weight.device.type == "cpu"
    return (parts.qdata, parts.scale) if parts._is_by_rows else None


def loop(body: Callable[..., tuple[Any, Any]], state: Any, operands: Any) -> tuple[Any, Any]:
    """state, y_t = body(state, operand_t) along the first axis as one operation of a graph, which torch calls a prototype."""
    from torch._higher_order_ops.scan import scan

    if torch.onnx.is_in_onnx_export() and torch.is_grad_enabled():
        raise ValueError(
            "transport_scan: `backend` is 'reference' in an ONNX export with gradients on; expected none, torch cannot write a "
            "loop with gradients; call torch.onnx.export under torch.no_grad()"
        )
    return scan(body, state, operands)


@contextlib.contextmanager
def real_numbers() -> Iterator[None]:
    """Tensors made inside are on the CPU and have values, whatever device or fake mode is set around: for constants."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.device("cpu"):
        yield


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists and mappings, as modules take and give them; torch keeps its own walk to itself."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(tree)


def name_configuration(mapping: Any, config: str, name: str) -> None:
    """Let a mapping of transformers' Auto classes know that the configuration class `config` belongs to the model type `name`.

    It reads its list of names once, when it is made; there is no way to add a name to it but with the class itself.
    """
    mapping._reverse_config_mapping.setdefault(config, name)


@contextlib.contextmanager
def slp_vectorizer() -> Iterator[None]:
    """Numba with LLVM's SLP vectoriser, for as long as we hold Numba's global compiler lock.

    Numba has this as a setting of the whole process only; under the lock no other user of Numba sees it.
    """
    from numba.core import config
    from numba.core.compiler_lock import global_compiler_lock

    # Numba writes its settings to the module at import; they are not declared.
    settings: Any = config
    with global_compiler_lock:
        before = settings.SLP_VECTORIZE
        settings.SLP_VECTORIZE = 1
        try:
            yield
        finally:
            settings.SLP_VECTORIZE = before


def pack_compiled(result: Any) -> bytes:
    """A Numba compile result as bytes: Numba's own cache does the same, but is bound to one source file per function."""
    from numba.core.serialize import dumps

    return dumps(result._reduce())


def unpack_compiled(target: Any, payload: bytes) -> Any:
    """The compile result that `pack_compiled` made bytes of, in the target context `target`."""
    from numba.core.compiler import CompileResult

    target.refresh()
    return CompileResult._rebuild(target, *pickle.loads(payload))


def link_module(module: Any, name: str) -> tuple[int, Any]:
    """The address of a function of an llvmlite module as machine code, and what owns its memory; Numba's own linker does it."""
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    with global_compiler_lock:
        target: Any = cpu_target.target_context
        library = target.codegen().create_library(module.name)
        library.add_ir_module(module)
        library.finalize()
        return library.get_pointer_to_function(name), library
