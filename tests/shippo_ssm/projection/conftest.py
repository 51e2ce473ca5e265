"""Signals and transports shared by the projection tests: three channels, smooth, nothing commuting."""

from __future__ import annotations

import numpy as np
import pytest

from shippo_ssm.projection import Transport

GENERATOR = np.array([[0.0, -1.0, 0.3], [1.0, 0.0, 0.2], [0.0, 0.5, -0.1]])


def wave(t: float) -> np.ndarray:
    return np.array([np.sin(2 * t), np.cos(t) * t, np.exp(-t)])


def varying(t: float) -> np.ndarray:
    return np.cos(t) * GENERATOR + 0.4 * np.sin(2 * t) * GENERATOR.T @ GENERATOR


@pytest.fixture
def signal():
    return wave


@pytest.fixture(params=["none", "constant", "varying"])
def transport(request):
    if request.param == "none":
        return None
    return Transport(GENERATOR if request.param == "constant" else varying, 3)


@pytest.fixture
def moving():
    return Transport(varying, 3)
