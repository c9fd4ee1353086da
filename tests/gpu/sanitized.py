"""Every operator on ragged shapes and strides, for compute-sanitizer: short, and without torch's own kernels where
they are not needed."""

import torch

from zoo import ops


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
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
