"""Bring your own Linear: three of them go into a real model, and zoo tells which are right.

    python examples/bring_your_own_linear.py
    python examples/bring_your_own_linear.py --model torchvision/convnext_tiny

A layer is registered as a function of (input, weight, bias), or as a subclass of nn.Linear. `zoo.patch` then puts it
into every Linear of a model that was built without knowing of it. Three questions come before whether it is fast:

* does it run? A model may read a Linear's weight past its forward; `zoo.coverage` counts what really ran.
* is its forward right? `zoo.parity` compares outputs by their error against float64, beside the error that torch's own
  Linear makes.
* is its backward? The same, for the gradient of every parameter.

The third layer here has a right forward and a wrong backward, as a real bug had: no look at outputs finds it.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import zoo
from zoo.data import eval_transform, photos


# As a function: torch differentiates it.
@zoo.register_layer("linear", "addmm")
def by_addmm(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One matrix product over all leading dimensions."""
    rows = input.reshape(-1, weight.shape[1])
    output = rows @ weight.T if bias is None else torch.addmm(bias, rows, weight.T)
    return output.view(*input.shape[:-1], weight.shape[0])


# As a class, where a layer has settings of its own. The patched module stays the object that it was, with its
# parameters; `adopt` is called when it becomes this class, and may add attributes. `zoo.unpatch` removes them.
@zoo.register_layer("linear", "sliced")
class SlicedLinear(nn.Linear):
    """Computes the output in slices of its features, so that less of the weight is in use at a time."""

    slices: int

    def adopt(self) -> None:
        self.slices = min(4, self.out_features)

    def forward(self, input: Tensor) -> Tensor:
        weights = self.weight.tensor_split(self.slices)
        biases = [None] * self.slices if self.bias is None else self.bias.tensor_split(self.slices)
        parts = [F.linear(input, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return torch.cat(parts, dim=-1)


# With a backward of its own, and a bug in it: the bias gradient is that of the first image of the batch alone.
class ForgetfulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_weight = rows.T @ input.reshape(-1, input.shape[-1])
        return grad @ weight, grad_weight, grad[0].reshape(-1, grad.shape[-1]).sum(0)


@zoo.register_layer("linear", "forgetful")
def forgetful(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Right in all but the gradient of its bias."""
    return F.linear(input, weight) if bias is None else ForgetfulFunction.apply(input, weight, bias)


def examine(layer: str, stock: nn.Module, images: Tensor) -> bool:
    """Put a layer into a copy of the model, and print what zoo finds. Returns whether it runs and is right."""
    model = copy.deepcopy(stock)
    print(f"\n--- {layer}")
    swap = zoo.patch(model, "linear", layer=layer, example=images)
    print(f"swapped {len(swap.swapped)} Linears, left {len(swap.skipped)} alone")
    ran = zoo.coverage(model, images)
    print(f"{ran.share:.1%} of the FLOPs ran through it")
    found = zoo.parity(model, stock, images, gradients=True)
    for kind in ("output", "gradient"):
        wrong = [entry.name for entry in found.entries if entry.kind == kind and not entry.ok]
        print(f"{kind}s: {f'{len(wrong)} WRONG' if wrong else 'right'}")
    print(found)
    return ran.ok and found.ok


def main(
    model: Annotated[str, typer.Option(help="Any name of zoo.list_models() that takes photographs.")] = (
        "timm/vit_tiny_patch16_224"
    ),
) -> None:
    """Examine three layers in a real model on real photographs."""
    torch.manual_seed(0)
    stock = zoo.create(model).eval()
    transform = eval_transform(model)
    images = torch.stack([transform(photo) for photo in photos().values()])
    verdicts = {layer: examine(layer, stock, images) for layer in ("addmm", "sliced", "forgetful")}
    print()
    for layer, right in verdicts.items():
        print(f"{layer}: {'right' if right else 'WRONG'}")


if __name__ == "__main__":
    typer.run(main)
