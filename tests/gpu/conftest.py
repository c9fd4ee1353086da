"""These tests need a GPU and zoo's CUDA library; elsewhere they are skipped, with the reason."""

import pytest
import torch

from zoo.ops import _library


def reason_to_skip():
    if not torch.cuda.is_available():
        return "no CUDA GPU here"
    return _library.CUDA_MISSING


def pytest_collection_modifyitems(items):
    reason = reason_to_skip()
    if reason:
        for item in items:
            if "tests/gpu" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _exact(exact_float32):
    yield
    torch.cuda.synchronize()  # an illegal access is reported here, and not by the next test
