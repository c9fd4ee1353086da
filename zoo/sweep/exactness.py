"""Whether a model is exactly what it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.isolation import undisturbed
from zoo.passes import named_tensors

__all__ = ["Snapshot", "outputs_of"]


class Snapshot:
    """A model's modules, classes, attributes, parameters, buffers and keys, by identity."""

    def __init__(self, model: nn.Module) -> None:
        self._held = list(model.modules())  # so that no id is used twice
        self._facts = _facts(model)

    def differences(self, model: nn.Module) -> list[str]:
        """What is another than it was, in words."""
        now = _facts(model)
        return [f"{what} differ" for what, fact in self._facts.items() if now[what] != fact]


def _facts(model: nn.Module) -> dict[str, Any]:
    modules = list(model.named_modules(remove_duplicate=False))
    return {
        "modules": [(name, id(module)) for name, module in modules],
        "classes": [type(module) for _, module in modules],
        "attributes": [list(vars(module)) for _, module in modules],
        "parameters": [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        "buffers": [(name, id(b)) for name, b in model.named_buffers(remove_duplicate=False)],
        "keys": list(model.state_dict(keep_vars=True)),
    }


def outputs_of(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Every tensor that the model returns, in the mode it is in, from one random state and without gradients."""
    with undisturbed(model), torch.no_grad():
        torch.manual_seed(0)
        output = model(inputs)
    return {name: tensor.clone() for name, tensor in named_tensors(output, "output")}
