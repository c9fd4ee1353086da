"""Which tests run where, and the real data that installed packages hold.

``slow`` tests run with ``--slow`` and where ``CI=true``. Tests on real data are skipped where there is none, with how
to get it; in CI that is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest

# Children that tests start with -c or -m import the installed zoo, not the sources in the folder they start in.
os.environ["PYTHONSAFEPATH"] = "1"

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", default=IN_CI, help="run the tests that take over a minute too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes over a minute; runs with --slow, and in CI"))


@pytest.fixture(autouse=True)
def _registries_as_before() -> Iterator[None]:
    """What a test registers, in a README block or an example that it runs too, is gone after it."""
    from zoo import registry as models
    from zoo.layers import registry as layers
    from zoo.layers.adapters import registry as adapters

    with patch.dict(models._builders), patch.dict(layers._layers), patch.dict(adapters._registered):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For a module whose problems are too small to share between threads, or whose sums are to have one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """torch's own float32 products in float32, so that they can serve as the reference on a GPU; and one seed."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    yield
    torch.set_float32_matmul_precision(before)


def absent(reason: str) -> NoReturn:
    """Skip, or in CI fail: there the data must be."""
    if IN_CI:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def fashion_mnist_root() -> Path:
    """A folder for ``zoo.data.fashion_mnist(root)``."""
    from zoo.data import fashion_mnist

    named = os.environ.get("ZOO_TEST_FASHION_MNIST") or os.environ.get("ZOO_DATA")
    try:
        return Path(fashion_mnist(named, train=False).root)
    except FileNotFoundError as error:
        absent(f"{error}; tests find it by ZOO_TEST_FASHION_MNIST, too")


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty photographs of ImageNet classes, each with the number of its class at the end of its name (foolbox's)."""
    folder = tmp_path_factory.mktemp("photos")
    from zoo.verify.trained import PHOTOS

    files = _package(*PHOTOS)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert len(files) == 20
    return folder


@pytest.fixture(scope="session")
def lite0_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet weights of EfficientNet-Lite0, a .pth in its author's layout."""
    from zoo.verify.trained import LITE0_WEIGHTS

    ((name, content),) = _package(*LITE0_WEIGHTS).items()
    path = tmp_path_factory.mktemp("weights") / name
    path.write_bytes(content)
    return path


def _package(package: str, requirement: str, pattern: str) -> dict[str, bytes]:
    from zoo.verify.outcome import Untested
    from zoo.verify.trained import package_files

    try:
        return package_files(package, requirement, pattern)
    except Untested as error:
        absent(str(error))
