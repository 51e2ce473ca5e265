"""The helpers and the runnable examples of this package."""

from __future__ import annotations

import doctest
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from scipy.linalg import expm as scipy_expm

from shippo_ssm.projection._numerics import expm, expm_ages, integrate


@pytest.mark.parametrize("size", [0.0, 0.01, 1.0, 30.0])
def test_expm(size):
    stack = size * np.random.default_rng(0).normal(size=(3, 2, 4, 4))
    reference = scipy_expm(stack)
    assert np.abs(expm(stack) - reference).max() < 1e-10 * np.abs(reference).max()
    ages = np.array([0.0, 0.5, 0.5, 2.0])
    assert np.allclose(expm_ages(stack[0, 0], ages)[1], scipy_expm(0.5 * stack[0, 0]))


def test_integrate_meets_kinks():
    value = integrate(lambda x, w: np.sum(w * np.abs(x - 0.3)), 0.0, 1.0, breaks=np.array([0.3]), panels=2, rtol=1e-13)
    assert value == pytest.approx((0.3**2 + 0.7**2) / 2, abs=1e-14)


@pytest.mark.parametrize("name", ["memory", "streaming"])
def test_examples(name):
    module = importlib.import_module(f"shippo_ssm.projection.{name}")
    result = doctest.testmod(module, extraglobs={"np": np})
    assert result.attempted > 0
    assert result.failed == 0


def test_import_is_light():
    """Importing the package brings in neither matplotlib nor numba nor torch."""
    code = (
        "import sys, shippo_ssm.projection;"
        "print([m for m in ('matplotlib', 'numba', 'torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_benchmark_entry(monkeypatch):
    path = importlib.util.spec_from_file_location("bench", "benchmarks/projection.py")
    assert path is not None
    assert path.loader is not None
    module = importlib.util.module_from_spec(path)
    path.loader.exec_module(module)
    figures = module.compression(num_samples=300, width=4, order=8)
    assert set(figures) == {
        "hippo_exact_s", "constant_exact_s", "varying_exact_s", "constant_zoh_s", "constant_bilinear_s", "peak_mb"
    }  # fmt: skip
    assert all(value > 0 for value in figures.values())
