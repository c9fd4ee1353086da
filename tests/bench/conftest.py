"""A small cache, so that few buffer sets are rotated."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.bench.measuring.cache_bytes", lambda device: 20_000)
