"""Runs custom layers in parents that do the arithmetic of their Linears themselves."""

from zoo.layers.adapters._given import given_listeners, made_from, run_given, unfit
from zoo.layers.adapters.registry import Adapter, adapter_of, computing, register_adapter, rewritten, routes

__all__ = [
    "Adapter",
    "adapter_of",
    "computing",
    "given_listeners",
    "made_from",
    "register_adapter",
    "rewritten",
    "routes",
    "run_given",
    "unfit",
]
