"""How a layer tells that it handed its work to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["alters_torch_functions", "fallback_listeners", "note_fallback"]

fallback_listeners: list[Callable[[nn.Module, str], None]] = []
"""Called with (module, reason) at each fallback. Coverage adds one while it watches a forward."""


def note_fallback(module: nn.Module, reason: str) -> None:
    """A layer calls this when a forward did not run its own kernel."""
    if not torch.compiler.is_compiling():
        for listener in fallback_listeners:
            listener(module, reason)


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)


_PLAIN = {nn.Parameter, Tensor}
_TORCHS, _NONE = _function(Tensor.__torch_function__), torch._C._disabled_torch_function_impl


def alters_torch_functions(t: Tensor) -> bool:
    """Whether ``t`` is a subclass that answers torch functions itself, as quantised weights do."""
    if type(t) in _PLAIN:
        return False
    function = _function(type(t).__torch_function__)
    return function is not _TORCHS and function is not _NONE  # not by a set: torch.compile cannot hash functions
