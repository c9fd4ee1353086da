"""The operator tests run on the CPU, and on CUDA as well where a GPU and zoo's CUDA library are."""

import pytest
import torch

from zoo.ops import _library

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and _library.CUDA_LOADED else [])


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def _exact(exact_float32):
    """For each test here."""
