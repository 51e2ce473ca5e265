"""Words on the console are not under test: transformers stays quiet. Its common tests bring marks of their own."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

MARKS = "accelerate_tests flash_attn_test flash_attn_3_test flash_attn_4_test torch_compile_test order is_training_test"
MARKS += " is_fsdp_test is_tensor_parallel_test"


def pytest_configure(config):
    for mark in MARKS.split():
        config.addinivalue_line("markers", f"{mark}: a mark of Transformers' common tests")


def pytest_collection_modifyitems(config, items):
    """Its distributed tests start two processes each, which takes minutes in all: they run for the page "Works with" alone."""
    skip = pytest.mark.skip(reason="starts processes of its own; `make works-with` runs it")
    for item in items:
        apart = item.get_closest_marker("is_fsdp_test") or item.get_closest_marker("is_tensor_parallel_test")
        if apart and not config.getoption("--works-with"):
            item.add_marker(skip)
