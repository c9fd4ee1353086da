"""Each claim about a layer as a test of pytest: what the plugin registers where ``--zoo-layer`` is given.

A claim that holds passes; one that does not fails, with the reason and the command that shows it. One that the layer
refuses with a clear error is an expected failure (xfail), or fails with ``--zoo-strict``; but for "values", which
always fails then. An untested one is skipped, with the reason. Claims are judged in a worker process with limits, one
for each layer and process of pytest, so that a crash costs one test.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zoo.verify.outcome import FAIL, PASS, REFUSED, UNTESTED, Claim, Verdict
from zoo.verify.report import ESSENTIAL
from zoo.verify.running import BUILD, chosen_claims, judging

__all__ = ["ClaimItem", "Layer", "Plugin"]


class Plugin:
    """Adds the items, and ends the workers."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        self.targets: list[str] = list(dict.fromkeys(option("zoo_layer")))
        self.options = {"kind": option("zoo_kind"), "device": option("zoo_device"), "seed": option("zoo_seed")}
        self.strict: bool = option("zoo_strict")
        self._stack = contextlib.ExitStack()
        config.addinivalue_line("markers", "zoo: a claim about a layer (--zoo-layer)")
        try:
            self.claims = chosen_claims(option("zoo_claim") or "*", option("zoo_kind"))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None

    @pytest.hookimpl
    def pytest_report_header(self) -> str:
        kind, device, seed = self.options.values()
        return f"zoo: {len(self.claims)} claims about {', '.join(self.targets)} ({kind}, on {device}, seed {seed})"

    @pytest.hookimpl(tryfirst=True)  # so that -k and --last-failed choose among them
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        for target in self.targets:
            layer = Layer.from_parent(session, name=target, nodeid=f"zoo/{target}", plugin=self)
            made: list[Any] = [ClaimItem.from_parent(layer, name=claim.name, claim=claim) for claim in self.claims]
            items += made
            session.ihook.pytest_collectreport(report=pytest.CollectReport(layer.nodeid, "passed", None, made))

    @functools.cache  # noqa: B019 - as long as the session
    def judge(self, target: str) -> Callable[[str], Verdict]:
        """What gives the verdict on a claim about a target."""
        judge = self._stack.enter_context(judging(target, **self.options))
        return functools.cache(judge)

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        self._stack.close()


class Layer(pytest.Collector):
    """A layer under test."""

    def __init__(self, *, plugin: Plugin, **more: Any) -> None:
        super().__init__(**more)
        self.plugin = plugin

    def collect(self) -> list[pytest.Item]:
        return []  # its items are made where the session's are put together


class ClaimItem(pytest.Item):
    """A claim about a layer."""

    def __init__(self, *, claim: Claim, **more: Any) -> None:
        super().__init__(**more)
        self.claim = claim
        self.add_marker(pytest.mark.zoo)

    @property
    def layer(self) -> Layer:
        """Whose claim it is."""
        assert isinstance(self.parent, Layer)
        return self.parent

    def runtest(self) -> None:
        plugin, target = self.layer.plugin, self.layer.name
        try:
            judge = plugin.judge(target)
        except ValueError as error:
            pytest.fail(str(error), pytrace=False)
        if self.claim.name != BUILD and judge(BUILD).status != PASS:
            pytest.skip("the layer could not be built")
        verdict = judge(self.claim.name)
        if verdict.status == UNTESTED:
            pytest.skip(verdict.reason)
        if verdict.status == REFUSED and not plugin.strict and self.claim.name != ESSENTIAL:
            pytest.xfail(f"refused: {verdict.reason}")
        if verdict.status in (FAIL, REFUSED):
            pytest.fail(self._telling(verdict), pytrace=False)

    def _telling(self, verdict: Verdict) -> str:
        kind, device, seed = self.layer.plugin.options.values()
        command = f"zoo verify {shlex.quote(self.layer.name)} --kind {kind} --claim {verdict.claim}"
        return (
            f"claimed: {self.claim.says}\n{verdict.status}: {verdict.reason}\n"
            f"again: {command} --device {device} --seed {seed}"
        )

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.layer.name}: {self.claim.name}"
