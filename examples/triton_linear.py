"""A fused Linear in Triton, and what `zoo verify` says of it.

    python examples/triton_linear.py                      # on a GPU, where there is one
    TRITON_INTERPRET=1 python examples/triton_linear.py   # on a CPU, in Triton's interpreter: slow, but it runs

One kernel computes `x @ weight.T + bias` for operands of any strides, with the bias added before the result is rounded;
the backward uses the same kernel for both of its products. The verdict is made by

    cd examples
    TRITON_INTERPRET=1 zoo verify triton_linear:triton_linear --models none --json results/verify/triton_linear-cpu.json
    zoo verify triton_linear:triton_linear --device cuda --json results/verify/triton_linear-cuda.json

It was not written for zoo: this is what one has who follows Triton's tutorial on matrix products and makes an operator
of it by torch.library.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import zoo

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this machine
    triton = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 64
# the interpreter exchanges parts of triton.language while a kernel runs
_one_at_a_time = threading.Lock() if INTERPRETED else contextlib.nullcontext()

if triton is not None:

    @triton.jit
    def _kernel(
        a,
        b,
        bias,
        c,
        m,
        n,
        k,
        a_row,
        a_column,
        b_row,
        b_column,
        has_bias: tl.constexpr,
        block: tl.constexpr,
    ):
        """c = a @ b + bias, of (m, k) and (k, n); c is contiguous. Each program makes a block of c."""
        rows = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
        columns = (tl.program_id(1) * block + tl.arange(0, block)).to(tl.int64)
        total = tl.zeros((block, block), dtype=tl.float32)
        for start in range(0, k, block):
            inner = (start + tl.arange(0, block)).to(tl.int64)
            inside_a = (rows[:, None] < m) & (inner[None, :] < k)
            inside_b = (inner[:, None] < k) & (columns[None, :] < n)
            left = tl.load(a + rows[:, None] * a_row + inner[None, :] * a_column, mask=inside_a, other=0.0)
            right = tl.load(b + inner[:, None] * b_row + columns[None, :] * b_column, mask=inside_b, other=0.0)
            total += tl.dot(left, right, input_precision="ieee")
        if has_bias:
            total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        inside = (rows[:, None] < m) & (columns[None, :] < n)
        tl.store(c + rows[:, None] * n + columns[None, :], total.to(c.dtype.element_ty), mask=inside)


def unavailable(device: torch.device) -> str | None:
    """Why the kernel cannot run on a device, or None."""
    if triton is None:
        return "triton is not installed"
    if device.type == "cpu" and not INTERPRETED:
        return "a Triton kernel runs on a GPU; TRITON_INTERPRET=1 lets its values be checked on a CPU"
    return None


@torch.library.custom_op("examples::product", mutates_args=())
def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """(m, k) @ (k, n) + bias, by the kernel."""
    if why := unavailable(a.device):
        raise NotImplementedError(f"{why}; not supported here")
    if a.dtype not in DTYPES:
        raise NotImplementedError(f"{a.dtype} is not supported; expected float32, float16 or bfloat16")
    if INTERPRETED and a.dtype == torch.bfloat16:
        raise NotImplementedError("bfloat16 is not supported by Triton's interpreter: it multiplies the bit patterns")
    (m, k), n = a.shape, b.shape[1]
    output = a.new_empty(m, n)
    grid = (triton.cdiv(m, BLOCK), triton.cdiv(n, BLOCK))
    if m and n:
        with _one_at_a_time, torch.cuda.device_of(a):
            _kernel[grid](a, b, bias, output, m, n, k, *a.stride(), *b.stride(), has_bias=bias is not None, block=BLOCK)
    return output


@product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _ = inputs
    of_a, of_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if of_b else None, b if of_a else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    of_a, of_b, of_bias = ctx.needs_input_grad[:3]
    return (
        product(grad, b.T, None) if of_a else None,
        product(a.T, grad, None) if of_b else None,
        grad.sum(0) if of_bias else None,
    )


product.register_autograd(_backward, setup_context=_setup)


def triton_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``input @ weight.T + bias``: (*, in_features) -> (*, out_features)."""
    device = input.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return triton_linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(f"input has {input.shape[-1]} features, expected {weight.shape[1]}")
    if input.dtype != weight.dtype:
        raise TypeError(f"input is {input.dtype}, expected the weight's {weight.dtype}")
    output = product(input.reshape(-1, input.shape[-1]), weight.T, bias)
    return output.view(*input.shape[:-1], weight.shape[0])


def main(
    claim: Annotated[list[str] | None, typer.Option(help="Claims by name, as 'gradients*'. All, unless told.")] = None,
) -> None:
    """Judge the layer on a GPU, or in Triton's interpreter."""
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
    if why := unavailable(device):
        print(f"{why}.")
        return
    print(zoo.verify(triton_linear, device=device, claims=claim or "*", isolate=False))


if __name__ == "__main__":
    typer.run(main)
