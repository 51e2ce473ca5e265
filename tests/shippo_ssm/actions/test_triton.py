"""Triton's kernels of right actions, run by Triton's interpreter, against torch in float64: values and gradients."""

import pytest
import torch

from shippo_ssm.actions import Orthogonal, SplitFlow, expm
from shippo_ssm.dispatch import choose_action

TOLERANCE = {"float32": 1e-6, "float64": 1e-13}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "scale"), [(1, 1.0), (2, 1e-3), (3, 0.3), (2, 5.0), (5, 1.0), (8, 3.0), (16, 0.1)])
def test_exponentials(interpreter, width, scale, dtype):
    errors = interpreter.ask("action", family="expm", width=width, scale=scale, dtype=dtype, items=33 if width <= 4 else 3)
    assert len(errors) == 2
    assert max(errors.values()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_rotations_are_exponentials(interpreter, width, dtype):
    """The closed form has no GPU kernel: rotations of every width take that of the exponential."""
    errors = interpreter.ask("action", family="orthogonal", width=width, dtype=dtype)
    assert len(errors) == 3
    assert max(errors.values()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_angles_at_zero_and_far_from_it(interpreter, scale):
    errors = interpreter.ask("action", family="orthogonal", width=4, scale=scale, dtype="float64")
    assert max(errors.values()) <= 1e-12


@pytest.mark.parametrize(("family", "width"), [("orthogonal", 6), ("dissipative", 5), ("structured", 7)])
def test_wide_families(interpreter, family, width):
    errors = interpreter.ask("action", family=family, width=width, dtype="float64", items=3)
    assert len(errors) == 3
    assert max(errors.values()) <= 1e-13


def test_a_generator_over_widths_beyond_the_kernel_takes_torch():
    """Width 17 has no kernel on a GPU: "auto" says so, by name it is refused."""
    wide = torch.zeros(64, 17, 17)
    with pytest.raises(ValueError, match=r'`backend` is "triton".*expected float32 or float64 on a GPU.*<= 16'):
        expm(wide, backend="triton")
    assert choose_action("expm", (torch.zeros(64, 17, 17, device="meta"),), 17, 2) == "torch"
    with pytest.raises(ValueError, match="triton"):
        Orthogonal(3).dense(torch.zeros(64, 3), 1.0, backend="triton")


def test_split_products_take_torch_on_a_gpu():
    coords = torch.zeros(64, 16, device="meta")
    assert choose_action("SplitFlow", (coords,), 4, 1, gpu=False) == "torch"
    with pytest.raises(ValueError, match=r'`backend` is "triton".*expected float32 or float64 on the CPU'):
        SplitFlow(4).dense(coords, 1.0, backend="triton")
