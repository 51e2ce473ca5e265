"""The one rule on precision that several modules share."""

from __future__ import annotations

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which states are kept and closed forms evaluated: float32 for the half types, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
