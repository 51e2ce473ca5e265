"""Settings that every test shares: one thread per worker, a fixed seed, a quiet hypothesis profile."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("shippo", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("shippo")


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
