"""Which of zoo's operators really run."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Calls"]


class Calls(TorchDispatchMode):
    """Inside, ``names`` gets the operators of zoo as they run, without the namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "zoo":
            self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
