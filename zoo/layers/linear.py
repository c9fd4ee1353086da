"""zoo's own Linear."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers._fallback import alters_torch_functions, note_fallback
from zoo.layers.registry import register_layer
from zoo.ops import linear

__all__ = ["Linear"]


@register_layer("linear", "zoo")
class Linear(nn.Linear):
    """``y = x Wᵀ + b`` on zoo's operator: :class:`torch.nn.Linear` in everything but the kernel.

    Shapes: input (*, in_features) -> (*, out_features). float64, float32, float16 and bfloat16; autocast as usual.
    A weight that answers torch functions itself (a quantised one) is given to ``F.linear``; coverage says so.
    """

    def forward(self, input: Tensor) -> Tensor:
        parameters: dict[str, Any] = (
            self._parameters
        )  # nn.Module's own lookup costs as much as the checks of the operator
        if "weight" in parameters and "bias" in parameters:
            weight, bias = parameters["weight"], parameters["bias"]
        else:  # parametrised, or put there as a plain tensor
            weight, bias = self.weight, self.bias
        if type(weight) is not nn.Parameter and alters_torch_functions(weight):
            note_fallback(self, f"its weight is a {type(weight).__name__}, which brings its own linear")
            return F.linear(input, weight, bias)
        return linear(input, weight, bias)
