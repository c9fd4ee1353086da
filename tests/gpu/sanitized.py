"""Every operator on ragged shapes and strides, for compute-sanitizer: short, and without torch's own kernels where
they are not needed."""

import os

import torch

from zoo import ops

HOPPER = {
    torch.float32: ["split6:0:0", "split6:1:1", "split6:3:1", "split6:6:0", "small", "gemv"],
    torch.float16: ["wgmma:0:1", "wgmma:1:0", "small", "mma"],
    torch.bfloat16: ["wgmma:0:0", "wgmma:1:1", "wgmma:2:0", "wgmma:4:1", "wgmma:5:0", "small", "mma", "gemv"],
}


def hopper():
    """Each of the wgmma kernels on tiles that are cut off, more tiles than one, and the fused backward."""
    for dtype, kernels in HOPPER.items():
        for kernel in kernels:
            os.environ["ZOO_LINEAR_KERNEL"] = kernel
            m, k, n = (8, 192, 40) if kernel == "gemv" else (200, 200, 328)
            x, w, b = (torch.randn(*s).to("cuda", dtype) for s in ((m, k), (n, k), (n,)))
            y, z = torch.ops.zoo.linear_activation(x, w, b, "gelu", True)
            torch.ops.zoo.linear_backward(y, z, x, w, "gelu", True, True, True)
            if kernel != "gemv":
                ops.linear(x[:, 1:130], w[:, 1:130], b)  # rows that TMA cannot read
                ops.linear(x[:, ::2], w[:, ::2], b)
    del os.environ["ZOO_LINEAR_KERNEL"]


def through():
    """act' in a product's epilogue: pieces that wait for a buffer, tiles that are cut off, more tiles than blocks."""
    for dtype in (torch.float16, torch.bfloat16):
        for kernel in ("wgmma:0:0", "wgmma:1:0"):
            os.environ["ZOO_LINEAR_KERNEL"] = kernel
            for m, n, h in ((1, 8, 8), (200, 72, 328), (1300, 40, 1928)):
                g, z, w1, w2 = (torch.randn(*s).to("cuda", dtype) for s in ((m, n), (m, h), (h, 40), (n, h)))
                x = torch.randn(m, 40).to("cuda", dtype)
                torch.ops.zoo.mlp_backward(g, z, z, x, w1, w2, "gelu", True, True, True, True, True, m > 1)
    del os.environ["ZOO_LINEAR_KERNEL"]


def raw():
    """A split in registers: each product on tiles that are cut off, dW turned, an infinity that is computed again."""
    for kernel in ("split6:8:0", "split6:9:1", "split6:10:1", "split6:11:0"):
        os.environ["ZOO_LINEAR_KERNEL"] = kernel
        for m, k, n in ((200, 200, 328), (300, 36, 100)):
            x, w, b = (torch.randn(*s, device="cuda") for s in ((m, k), (n, k), (n,)))
            y, _ = torch.ops.zoo.linear_activation(x, w, b, "gelu", True)
            ops.linear_input_grad(y, w)
            ops.linear_weight_grad(y, x)
            x[m // 2, k // 2] = torch.inf
            ops.linear(x, w)
    os.environ["ZOO_LINEAR_KERNEL"] = "split6"
    x, z, g = torch.randn(400, 9000, device="cuda"), *torch.randn(2, 400, 72, device="cuda")
    torch.ops.zoo.linear_backward(g, z, x, None, "gelu", False, True, True)
    del os.environ["ZOO_LINEAR_KERNEL"]


def passes():
    """The pass over dY, with and without planes: rows of 4, 8 and 32 threads, one block's and many blocks'."""
    kernels = {torch.float32: ("small", "split6:0:0"), torch.float16: ("small",), torch.bfloat16: ("small",)}
    for dtype, kernel in ((dtype, kernel) for dtype, names in kernels.items() for kernel in names):
        os.environ["ZOO_LINEAR_KERNEL"] = kernel  # cuBLAS's products are not what is checked here
        for m, n in ((40, 72), (600, 96), (1100, 64), (17000, 1024), (20000, 40)):
            g, z, w = (torch.randn(*s).to("cuda", dtype) for s in ((m, n), (m, n), (n, 16)))
            torch.ops.zoo.linear_backward(g, z, None, w, "gelu", True, False, True)
            torch.ops.zoo.linear_backward(g, None, None, None, "none", False, False, True)
    del os.environ["ZOO_LINEAR_KERNEL"]


def few_rows():
    """Rows and columns that fill no block, and gradients whose N blocks share."""
    os.environ["ZOO_LINEAR_KERNEL"] = "gemv"
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for m, k, n in ((1, 8, 1), (2, 1032, 37), (3, 24, 1500), (8, 264, 1030)):
            x, w, b = (torch.randn(*s).to("cuda", dtype) for s in ((m, k), (n, k), (n,)))
            y, z = torch.ops.zoo.linear_activation(x, w, b, "gelu", True)
            torch.ops.zoo.linear_backward(y, z, x, w, "gelu", True, True, True)
    del os.environ["ZOO_LINEAR_KERNEL"]


def main():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for m, k, n in ((1, 1, 1), (65, 17, 10), (64, 64, 64), (130, 33, 129), (3000, 5, 40), (0, 3, 4), (3, 0, 4)):
            x, w, b = (torch.randn(*s).to("cuda", dtype) for s in ((m, k), (n, k), (n,)))
            for activation in (None, "relu", "gelu"):
                y = ops.linear(x, w, b, activation=activation)
            wide = torch.randn(2 * n, max(m, 1)).to("cuda", dtype)[::2].T[:m]  # strided and transposed
            ops.linear_input_grad(wide, w)
            ops.linear_weight_grad(wide, x)
            ops.linear_bias_grad(wide)
            ops.linear_bias_grad(wide[:1].expand(m, n))
            ops.activation_grad(y, y, "gelu")
            ops.matmul(x, w.T)
    few_rows()
    if torch.cuda.get_device_capability() == (9, 0):
        hopper()
        passes()
        through()
        raw()
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
