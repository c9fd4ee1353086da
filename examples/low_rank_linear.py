"""A low-rank Linear, and the two questions that must be kept apart.

    python examples/low_rank_linear.py

It holds a weight of (out_features, in_features) as two factors of a smaller rank, found by a singular value
decomposition when a checkpoint is loaded, and keeps nothing for the backward but its input.

* *Is it a Linear?* No. Beside nn.Linear it is an approximation, and the verdict says by how much it is off: values and
  gradients fail, and its state dict is another one. A pass would be a lie.
* *Does it compute what a low-rank layer should?* Beside its twin, two plain products with the same factors, every claim
  must hold, the gradients of the factors too. That is `--against`.

The verdicts are made by

    cd examples
    zoo verify low_rank_linear:LowRankLinear --json results/verify/low_rank_linear-cpu.json
    zoo verify low_rank_linear:LowRankLinear --against low_rank_linear:Factored \\
        --json results/verify/low_rank_linear-against-its-twin-cpu.json

and the same with `--device cuda`.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import zoo


class Factored(nn.Module):
    """``y = (x downᵀ) upᵀ + bias``, by two of torch's products. A Linear's state dict is loaded as its best factors."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rank = max(1, min(in_features, out_features) // 4)
        whole = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.down = nn.Parameter(whole.weight.new_empty(self.rank, in_features))
        self.up = nn.Parameter(whole.weight.new_empty(out_features, self.rank))
        self.bias = whole.bias
        self.register_load_state_dict_pre_hook(_factor)
        self.load_state_dict(whole.state_dict())

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.linear(input, self.down), self.up, self.bias)


def _factor(module: Factored, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put the factors in the place of a whole weight."""
    weight = state_dict.pop(f"{prefix}weight", None)
    if weight is not None:
        u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
        root = s[: module.rank].sqrt()
        state_dict[f"{prefix}down"] = (root[:, None] * v[: module.rank]).to(weight.dtype)
        state_dict[f"{prefix}up"] = (u[:, : module.rank] * root).to(weight.dtype)


class _Recomputed(torch.autograd.Function):
    """Keeps the input and the factors; what lies between the products is computed again in the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, down: Tensor, up: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(F.linear(input, down), up, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, down, up, _ = inputs
        of_input, of_down, of_up, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            input if of_down or of_up else None,
            down if of_input or of_up else None,
            up if of_input or of_down else None,
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, down, up = ctx.saved_tensors
        of_input, of_down, of_up, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        hidden = grad @ up if of_input or of_down else None
        columns = None if input is None else input.reshape(-1, input.shape[-1])
        return (
            hidden @ down if of_input else None,
            hidden.reshape(-1, up.shape[1]).T @ columns if of_down else None,
            rows.T @ (columns @ down.T) if of_up else None,
            rows.sum(0) if of_bias else None,
        )


class LowRankLinear(Factored):
    """:class:`Factored` with a backward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        down, up, bias, device = self.down, self.up, self.bias, input.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return _Recomputed.apply(input, down, up, bias)
        dtype = torch.get_autocast_dtype(device)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return _Recomputed.apply(input.to(dtype), down.to(dtype), up.to(dtype), bias)


def main(
    claim: Annotated[list[str] | None, typer.Option(help="Claims by name, as 'gradients*'. All, unless told.")] = None,
    device: str = "cpu",
) -> None:
    """Judge the layer beside nn.Linear, and beside its twin."""
    for twin in (None, Factored):
        print(zoo.verify(LowRankLinear, against=twin, device=device, claims=claim or "*", isolate=False))


if __name__ == "__main__":
    typer.run(main)
