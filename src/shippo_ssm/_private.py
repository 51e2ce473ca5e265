"""Private names of other libraries, one function each: what a new version of them can break stands here."""

from __future__ import annotations

import torch
from torch import Tensor


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is seen from inside `torch.func.vmap`, `grad` or another transform.

    Torch has no public question for it; compiled kernels need plain tensors, so they must know.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return not torch.compiler.is_compiling() and wrapped(tensor)
