"""These tests need a GPU and zoo's CUDA library; elsewhere they are skipped, with the reason.

``quiet`` tests measure times: they need the GPU for themselves, and are skipped where pytest-xdist runs several at
once. ``bash tests/gpu/run.sh`` runs the others in parallel, and then those. The others may share the GPU.
"""

import os

import pytest
import torch

from support.gpu_kernels import NEEDS_HOPPER
from support.gpu_memory import memory_in_turn
from zoo.machine import free_bytes
from zoo.ops import _library

LONG = (
    "a_package_runs",
    "triton_example",
    "accuracy_parity",
    "split_models",
    "in_models",
    "in_a_worker",
    "torchrun",
    "mlp-",
    "conv2d-",
    "OneNumberOnly",
)
"""Parts of the names of the tests that take longest: where several processes share the work they come first."""


QUIET = (
    "planted",
    "saboteur_is_suspect",
    "equals",
    "clock",
    "tricks",
    "cupti",
    "other_kinds",
    "persisting",
    "bench_linear",
)
"""Where the tests are run one after the other, the claims about timing come first."""


def reason_to_skip():
    if not torch.cuda.is_available():
        return "no CUDA GPU here"
    return _library.CUDA_MISSING


def pytest_collection_modifyitems(items):
    reason, shared = reason_to_skip(), "PYTEST_XDIST_WORKER" in os.environ
    for item in items:
        if "tests/gpu" not in item.nodeid:
            continue
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif shared and item.get_closest_marker("quiet"):
            item.add_marker(pytest.mark.skip(reason="it needs the GPU for itself; run it without -n"))
    order = LONG if shared else QUIET
    items.sort(key=lambda item: place(item, order) if "tests/gpu" in item.nodeid else len(order))


def place(item, order):
    return next((rank for rank, part in enumerate(order) if part in item.name), len(order))


@pytest.fixture(autouse=True)
def _exact(exact_float32):
    yield
    torch.cuda.synchronize()  # an illegal access is reported here, and not by the next test


@pytest.fixture
def force(monkeypatch):
    def force(kernel):
        if kernel.startswith(NEEDS_HOPPER) and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs compute capability 9.0")
        monkeypatch.setenv("ZOO_LINEAR_KERNEL", kernel)

    return force


@pytest.fixture
def large_memory():
    """40 GiB, for this test alone of all processes that run tests; skips where other programs have them."""
    with memory_in_turn():
        free = free_bytes(torch.device("cuda"))
        if free < 40 * 2**30:
            pytest.skip(f"it needs 40 GiB of memory, and {free / 2**30:.1f} are free")
        yield
