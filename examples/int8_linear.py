"""A Linear with int8 weights by torchao (weight only), and the two questions that must be kept apart.

    python examples/int8_linear.py        # needs torchao

torchao rounds each row of the weight to 255 steps and keeps int8; activations stay as they are. The weight takes no
gradient: such a layer is for inference, and for training what lies before it.

* *Is it a Linear?* No: outputs are off by the rounding of the weights, and the verdict says so. A pass would be a lie.
* *Does it compute what its int8 weights say?* Beside its twin, a Linear with those weights written out in full, values
  and the gradients of input and bias must be right. That is `--against`.

The verdicts are made by

    cd examples
    zoo verify int8_linear:Int8Linear --json results/verify/int8_linear-cpu.json
    zoo verify int8_linear:Int8Linear --against int8_linear:WrittenOut \\
        --json results/verify/int8_linear-against-its-twin-cpu.json

and the same with `--device cuda`.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import zoo

try:
    from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_
except ImportError:
    quantize_ = None


class Int8Linear(nn.Linear):
    """An nn.Linear whose weight torchao quantises when it is built, and again when a state dict is loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if quantize_ is None:
            raise NotImplementedError("torchao is not installed: pip install torchao")
        super().__init__(*args, **kwargs)
        quantize_(self, Int8WeightOnlyConfig())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight, steps = state_dict.get(f"{prefix}weight"), state_dict.pop(f"{prefix}steps", None)
        if steps is not None:  # its twin's
            scale = state_dict.pop(f"{prefix}scale")
            weight = Int8Tensor(steps.clone(), scale.clone(), [1, self.in_features], scale.dtype)
            self.weight = nn.Parameter(weight, requires_grad=False)
            state_dict[f"{prefix}weight"] = weight
        elif type(weight) in (Tensor, nn.Parameter):
            self.weight = nn.Parameter(weight.clone(), requires_grad=False)
            quantize_(self, Int8WeightOnlyConfig())
            state_dict[f"{prefix}weight"] = self.weight
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.requires_grad:
            raise NotImplementedError("the gradient of an int8 weight is not supported; freeze the weight")
        return F.linear(input, self.weight, self.bias)


class WrittenOut(nn.Module):
    """A Linear whose weight is a number of steps, int8, times the scale of its row; but for its bias, not trained."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        whole = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        weight = whole.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("steps", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = whole.bias

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.steps.to(self.scale.dtype) * self.scale, self.bias)


def main(
    claim: Annotated[list[str] | None, typer.Option(help="Claims by name, as 'gradients*'. All, unless told.")] = None,
    device: str = "cpu",
) -> None:
    """Judge the layer beside nn.Linear, and beside its twin."""
    if quantize_ is None:
        print("torchao is not installed: pip install torchao.")
        return
    for twin in (None, WrittenOut):
        print(zoo.verify(Int8Linear, against=twin, device=device, claims=claim or "*", isolate=False))


if __name__ == "__main__":
    typer.run(main)
