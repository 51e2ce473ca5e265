"""Triton's kernels of right actions, run by Triton's interpreter, against torch in float64: values and gradients."""

import pytest
import torch

from shippo_ssm.actions import Orthogonal, expm
from shippo_ssm.actions.kernels import choose_kernel

TOLERANCE = {"float32": 1e-6, "float64": 1e-13}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "scale"), [(1, 1.0), (2, 1e-3), (3, 0.3), (2, 5.0), (5, 1.0), (8, 3.0), (16, 0.1)])
def test_exponentials(interpreter, width, scale, dtype):
    # A wide matrix has a program of its own.
    errors = interpreter.ask("action", family="expm", width=width, scale=scale, dtype=dtype, items=33 if width <= 4 else 3)
    assert len(errors) == 2
    assert max(errors.values()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("family", "width"), [("split", 2), ("split", 3), ("split", 5), ("orthogonal", 2), ("orthogonal", 3), ("orthogonal", 4)]
)
def test_closed_forms(interpreter, family, width, dtype):
    errors = interpreter.ask("action", family=family, width=width, dtype=dtype)
    assert len(errors) == 3
    assert max(errors.values()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_angles_at_zero_and_far_from_it(interpreter, scale):
    errors = interpreter.ask("action", family="orthogonal", width=4, scale=scale, dtype="float64")
    assert max(errors.values()) <= 1e-12


@pytest.mark.parametrize(("family", "width"), [("orthogonal", 6), ("dissipative", 5), ("structured", 7), ("split", 16)])
def test_wide_families(interpreter, family, width):
    """Beyond a lane's width all families have kernels: products of factors, or exponentials."""
    errors = interpreter.ask("action", family=family, width=width, dtype="float64", items=3)
    assert len(errors) == 3
    assert max(errors.values()) <= 1e-13


def test_a_generator_over_widths_beyond_the_kernel_takes_torch():
    """Width 17 has no kernel on a card: "auto" says so, by name it is refused."""
    wide = torch.zeros(64, 17, 17)
    with pytest.raises(ValueError, match=r'`backend` is "triton".*expected float32 or float64 on a card.*<= 16'):
        expm(wide, backend="triton")
    assert choose_kernel("expm", (torch.zeros(64, 17, 17, device="meta"),), 17, 2) == "torch"
    with pytest.raises(ValueError, match="triton"):
        Orthogonal(3).dense(torch.zeros(64, 3), 1.0, backend="triton")
