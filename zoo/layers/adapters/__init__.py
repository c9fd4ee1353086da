"""Runs custom layers in parents that do the arithmetic of their Linears themselves."""

from zoo.layers.adapters._given import given_listeners, run_given, unfit
from zoo.layers.adapters.registry import Adapter, adapter_of, register_adapter, rewritten, routes

__all__ = ["Adapter", "adapter_of", "given_listeners", "register_adapter", "rewritten", "routes", "run_given", "unfit"]
