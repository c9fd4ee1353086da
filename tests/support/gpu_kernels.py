"""What the tests of CUDA kernels share: operands, their float64 results, and how far from these a type may be.

Errors are relative in the Frobenius norm; the elements are held to a multiple of it, so that one wrong tile shows.
"""

import math

import torch
import torch.nn.functional as F

CUDA = torch.device("cuda")
ACTIVATIONS = {
    "none": lambda t: t,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "silu": F.silu,
}
LIMITS = {torch.float64: 1e-14, torch.float32: 2.5e-7, torch.float16: 6e-4, torch.bfloat16: 4e-3}
NEEDS_HOPPER = ("wgmma", "small", "split3", "split6")


def normal(*sizes, dtype=torch.float32, scale=1.0):
    return (torch.randn(*sizes, device=CUDA) * scale).to(dtype)


def check(got, want, limit, what):
    """`got` beside `want`, its float64 value."""
    assert got.shape == want.shape, what
    difference = (got.double() - want).abs()
    norm = want.norm()
    error = float(difference.norm() / norm)
    assert error <= limit, f"{what}: error {error:.2g} over {limit:.2g}"
    typical = norm / math.sqrt(want.numel())
    worst = float((difference / torch.maximum(want.abs(), typical)).max())
    assert worst <= 40 * limit, f"{what}: one element is off by {worst:.2g}"


def exact_gradient(g, saved, activation):
    """dY' in float64, rounded to the type that both products read it in, and as it is."""
    exact = g.double()
    if activation == "relu":
        exact = exact * (saved > 0)
    elif activation != "none":
        leaf = saved.double().detach().clone().requires_grad_()
        (exact,) = torch.autograd.grad(ACTIVATIONS[activation](leaf), leaf, exact)
    return exact.to(g.dtype).double(), exact


def kernels_of(run):
    """The names of the CUDA kernels that `run` launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages()]
