"""Convolutions and mlp units: right ones, and ones that are broken in one realistic way each.

By kind: ``HONEST`` maps a layer to the claims that it refuses, ``CAUGHT_BY`` to the one that must find it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers.mlp import mlp as zoos_mlp

MaybeTensor = Tensor | None
HONEST: dict[str, dict[Any, set[str]]] = {"conv2d": {}, "mlp": {}}
CAUGHT_BY: dict[str, dict[Any, str]] = {"conv2d": {}, "mlp": {}}


def honest(kind: str, *refuses: str) -> Any:
    def note(layer: Any) -> Any:
        HONEST[kind][layer] = set(refuses)
        return layer

    return note


def caught_by(kind: str, claim: str) -> Any:
    def note(layer: Any) -> Any:
        CAUGHT_BY[kind][layer] = claim
        return layer

    return note


honest("conv2d")(nn.Conv2d)
honest("mlp")(zoos_mlp)


@honest("conv2d")
def unfolded(
    input: Tensor, weight: Tensor, bias: MaybeTensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """im2col and a product for each group."""
    if input.dtype != weight.dtype and not torch.is_autocast_enabled(input.device.type):
        raise TypeError(f"input is {input.dtype}, expected {weight.dtype}")
    if input.dtype in (torch.float16, torch.bfloat16):  # its slices overlap, and so do their gradients
        wide = (None if t is None else t.float() for t in (input, weight, bias))
        return unfolded(*wide, stride, padding, dilation, groups).to(input.dtype)  # type: ignore[arg-type]
    x = input if input.dim() == 4 else input[None]
    kernel = weight.shape[2:]
    if isinstance(padding, str):
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)] if padding == "same" else [0, 0]
        x = F.pad(x, (total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2))
        padding = (0, 0)
    high, wide = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(x.shape[2:], padding, dilation, kernel, stride, strict=True)
    )
    if high < 1 or wide < 1 or x.shape[1] != weight.shape[1] * groups:
        raise ValueError(
            f"input of shape {tuple(input.shape)}: too small, or not of {weight.shape[1] * groups} channels"
        )
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    rows = [
        x[:, :, i * dilation[0] :: stride[0], j * dilation[1] :: stride[1]][:, :, :high, :wide]
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]
    columns = torch.stack(rows, 2).unflatten(1, (groups, -1)).flatten(2, 3).flatten(3)
    output = torch.einsum("gok,ngkp->ngop", weight.flatten(1).unflatten(0, (groups, -1)), columns)
    output = output.flatten(1, 2).unflatten(2, (high, wide))
    output = output if bias is None else output + bias.to(output.dtype)[:, None, None]
    return output if input.dim() == 4 else output[0]


@honest("mlp")
def by_steps(
    input: Tensor, weight1: Tensor, bias1: MaybeTensor, weight2: Tensor, bias2: MaybeTensor, activation: str
) -> Tensor:
    """The activations written out."""
    z = F.linear(input, weight1, bias1)
    if activation == "relu":
        h = z.clamp_min(0)
    elif activation == "silu":
        h = F.silu(z)
    else:
        h = F.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.linear(h, weight2, bias2)


@caught_by("conv2d", "values")
def ignores_dilation(
    input: Tensor, weight: Tensor, bias: MaybeTensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    if tuple(dilation) != (1, 1):
        size, padding = weight.shape[2] * 2 - 1, tuple(p + 1 for p in padding)
        weight = F.pad(weight, (1, 1, 1, 1))[:, :, :size, :size]  # the taps are in the wrong place
        return F.conv2d(input, weight, bias, stride, tuple(p - 1 for p in padding), 1, groups)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


@caught_by("conv2d", "values")
def pads_same_on_the_left(
    input: Tensor, weight: Tensor, bias: MaybeTensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    if padding == "same" and weight.shape[-1] % 2 == 0:
        total = weight.shape[-1] - 1
        input, padding = F.pad(input, (total - total // 2, total // 2)), (weight.shape[-2] // 2, 0)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


@caught_by("conv2d", "edge-shapes")
def needs_a_batch(
    input: Tensor, weight: Tensor, bias: MaybeTensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    return F.conv2d(input.unsqueeze(0) if input.dim() == 3 else input, weight, bias, stride, padding, dilation, groups)


@caught_by("conv2d", "strides")
def reads_channels_last_dense(
    input: Tensor, weight: Tensor, bias: MaybeTensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    if input.dim() == 4 and not input.is_contiguous() and input.is_contiguous(memory_format=torch.channels_last):
        input = input.permute(0, 2, 3, 1).reshape(input.shape)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


@caught_by("conv2d", "gradients")
def bias_gradient_of_one_image(
    input: Tensor, weight: Tensor, bias: MaybeTensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    output = F.conv2d(input, weight, None, stride, padding, dilation, groups)
    if bias is None or output.dim() == 3:
        return output if bias is None else output + bias[:, None, None]
    rest = (output[1:] + bias.detach()[:, None, None],)
    return torch.cat((output[:1] + bias[:, None, None], *rest))


@caught_by("conv2d", "hooks")
class DropsHooks(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight, self.bias)

    def __call__(self, input: Tensor) -> Tensor:
        return self.forward(input)


@caught_by("mlp", "values")
def always_the_tanh_gelu(
    input: Tensor, weight1: Tensor, bias1: MaybeTensor, weight2: Tensor, bias2: MaybeTensor, activation: str
) -> Tensor:
    return by_steps(input, weight1, bias1, weight2, bias2, "gelu_tanh" if activation == "gelu" else activation)


@caught_by("mlp", "no-bias")
def biases_of_one(
    input: Tensor, weight1: Tensor, bias1: MaybeTensor, weight2: Tensor, bias2: MaybeTensor, activation: str
) -> Tensor:
    bias2 = weight2[:, 0] if bias2 is None else bias2
    return by_steps(input, weight1, bias1, weight2, bias2, activation)


@caught_by("mlp", "bfloat16")
def hidden_in_fewer_bits(
    input: Tensor, weight1: Tensor, bias1: MaybeTensor, weight2: Tensor, bias2: MaybeTensor, activation: str
) -> Tensor:
    if input.dtype != torch.bfloat16:
        return by_steps(input, weight1, bias1, weight2, bias2, activation)
    z = F.linear(input, weight1, bias1)
    h = F.relu(z) if activation == "relu" else F.gelu(z)
    return F.linear(h.to(torch.float8_e4m3fn).to(h.dtype), weight2, bias2)


@caught_by("mlp", "gradients")
def relu_s_gradient_for_silu(
    input: Tensor, weight1: Tensor, bias1: MaybeTensor, weight2: Tensor, bias2: MaybeTensor, activation: str
) -> Tensor:
    if activation != "silu":
        return by_steps(input, weight1, bias1, weight2, bias2, activation)
    z = F.linear(input, weight1, bias1)
    h = F.relu(z) + (F.silu(z) - F.relu(z)).detach()
    return F.linear(h, weight2, bias2)


@caught_by("mlp", "gradients-singly")
def needs_both_weights(
    input: Tensor, weight1: Tensor, bias1: MaybeTensor, weight2: Tensor, bias2: MaybeTensor, activation: str
) -> Tensor:
    alone = weight2.requires_grad and not weight1.requires_grad and torch.is_grad_enabled()
    return by_steps(input, weight1, bias1, weight2.detach() + 0 * weight2 if alone else weight2, bias2, activation)


@caught_by("mlp", "double-backward")
def first_order_only(
    input: Tensor, weight1: Tensor, bias1: MaybeTensor, weight2: Tensor, bias2: MaybeTensor, activation: str
) -> Tensor:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Tensor:
            ctx.save_for_backward(*tensors)
            return by_steps(*tensors, activation)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[MaybeTensor, ...]:
            leaves = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
            with torch.enable_grad():
                output = by_steps(*leaves, activation)  # type: ignore[arg-type]
            found = iter(torch.autograd.grad(output, [t for t in leaves if t is not None], grad.detach()))
            return tuple(None if t is None else next(found) for t in leaves)

    return Function.apply(input, weight1, bias1, weight2, bias2)
