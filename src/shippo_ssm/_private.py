"""Private parts of other libraries that we cannot do without: one function each, so that a new version breaks one place."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is seen from inside `torch.func.vmap`, `grad` or another transform.

    Torch has no public question for it; compiled kernels need plain tensors, so they must know.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return not torch.compiler.is_compiling() and wrapped(tensor)


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
