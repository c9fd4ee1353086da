"""The naive twin of the operators, in float64, and the rule by which a result is judged."""

import torch
import torch.nn.functional as F

ACTIVATE = {
    None: lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def naive_linear(x, w, b=None, activation=None):
    """Written as the sum it is, in float64."""
    x, w = x.double(), w.double()
    z = (x.unsqueeze(-2) * w).sum(-1)
    return ACTIVATE[activation](z if b is None else z + b.double())


def gradients(f, tensors, cotangent):
    """y and the gradients of the tensors that require one."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    y = f(*leaves)
    wanted = [t for t in leaves if t is not None]
    return y.detach(), torch.autograd.grad(y, wanted, cotangent.to(y.dtype))


def assert_accurate(got, want, *, terms, sizes):
    """Each element within the rounding of `terms` products summed in float32 or better, then rounded to the dtype.

    `sizes` is the sum of the absolute products, elementwise: what the rounding errors are relative to.
    """
    assert got.shape == want.shape
    assert not got.isnan().any()
    unit = torch.finfo(got.dtype).eps
    sum_unit = min(unit, torch.finfo(torch.float32).eps)
    bound = unit * want.abs() + sum_unit * (terms**0.5 + 4) * sizes.double() + torch.finfo(got.dtype).tiny
    error = (got.double() - want).abs()
    worst = (error / bound).max().item() if got.numel() else 0.0
    assert worst <= 1, f"off by {worst:.2f} times the bound"
