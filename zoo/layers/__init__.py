"""The layers that zoo can swap in, and their registry."""

from zoo.layers._fallback import note_fallback
from zoo.layers.adapters import register_adapter
from zoo.layers.linear import Linear
from zoo.layers.mlp import mlp as _mlp  # noqa: F401 - registers it
from zoo.layers.registry import get_layer, list_layers, register_layer

__all__ = ["Linear", "get_layer", "list_layers", "note_fallback", "register_adapter", "register_layer"]
