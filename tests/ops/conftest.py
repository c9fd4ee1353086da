"""The operator tests run on the CPU, and on CUDA as well where a GPU and zoo's CUDA library are."""

import pytest
import torch

from zoo.ops import _library

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and _library.CUDA_LOADED else [])


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def exact_float32():
    """torch's own float32 products in float32, so that they can serve as the reference on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    yield
    torch.set_float32_matmul_precision(before)
