"""The pytest plugin: ``pytest --zoo-layer=my_package.my_module:MyLinear`` collects each claim as a test.

It is installed as ``zoo_pytest``, beside zoo and not inside: pytest imports it in every run, and ``import zoo`` would
import torch. Without the option, and in tests that do not ask for the fixture, nothing else is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["pytest_addoption", "pytest_configure", "zoo_verify"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("zoo", "zoo: verification of custom layers")
    group.addoption(
        "--zoo-layer",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="collect every claim about this layer as a test; or the name of a registered layer; repeatable",
    )
    group.addoption("--zoo-kind", default="linear", metavar="KIND", help="linear (default), layer_norm, conv2d or mlp")
    group.addoption(
        "--zoo-claim",
        action="append",
        default=[],
        metavar="GLOB",
        help="only claims of such a name, as 'gradients*'; repeatable",
    )
    group.addoption(
        "--zoo-models",
        default="",
        metavar="NAMES",
        help="also claims about these models (commas between) with the layer in them",
    )
    group.addoption("--zoo-device", default="cpu", metavar="DEVICE", help="cpu (default), cuda or cuda:N")
    group.addoption("--zoo-seed", type=int, default=0, metavar="N", help="of weights and inputs; 0 unless told")
    group.addoption(
        "--zoo-strict",
        action="store_true",
        help="a claim that the layer refuses with a clear error fails; it is an expected failure (xfail) otherwise",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("zoo_layer"):
        from zoo.verify.pytest_items import Plugin

        config.pluginmanager.register(Plugin(config), "zoo-layers")


@pytest.fixture
def zoo_verify() -> Callable[..., Any]:
    """``zoo_verify(layer, **options)`` is :func:`zoo.verify`; the test fails where a claim does.

    A layer given as a class or function is judged in this process, unless told ``isolate=True``. Returns the report.
    """
    import zoo

    def run(target: Any, **options: Any) -> zoo.VerifyReport:
        report = zoo.verify(target, **{"isolate": isinstance(target, str), **options})
        report.raise_for_failure()
        return report

    return run
