"""Shared by the tests of right actions: an exponential of high precision."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def exact_expm():
    """exp of one matrix with 40 digits, as a function returning the relative error of an approximation in the inf-norm."""
    import mpmath

    def error(matrix: torch.Tensor, approximation: torch.Tensor) -> float:
        with mpmath.workdps(40):
            exact = mpmath.expm(mpmath.matrix(matrix.double().tolist()))
            rows = approximation.double().tolist()
            size = len(rows)
            off = max(sum(abs(mpmath.mpf(rows[i][j]) - exact[i, j]) for j in range(size)) for i in range(size))
            return float(off / mpmath.norm(exact, mpmath.inf))

    return error
