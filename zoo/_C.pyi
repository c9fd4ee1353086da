"""zoo's core library, seen from Python; importing it registers the operators under torch.ops.zoo."""

_Layout = tuple[int, int, bool]

def choose(
    batch: int,
    M: int,
    N: int,
    K: int,
    dtype: str,
    a: _Layout,
    b: _Layout,
    activation: str,
    precision: str,
    capability: int,
    processors: int,
    hopper: bool,
    forced: str | None,
    /,
) -> tuple[str, str, str, float, tuple[tuple[str, str], ...]]:
    """The CUDA kernel for y (batch, M, N) = act(a (batch, M, K) b (batch, K, N) + bias), as csrc/choice.h has it.

    Args:
        dtype: "float64", "float32", "float16" or "bfloat16".
        a, b: (elements between rows of y, for b columns; elements between steps of K; whether 16-byte aligned).
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu".
        precision: as torch.get_float32_matmul_precision().
        capability: the chip's compute capability, 90 for 9.0.
        processors: its streaming multiprocessors.
        hopper: whether the build has code for sm_90a.
        forced: a kernel's name, or None.

    Returns:
        kernel, configuration in words, reason, the model's microseconds, and (kernel, reason) of each other one.

    Raises:
        RuntimeError: the forced kernel is unknown or cannot compute this.
        ValueError: an unknown name, or a negative size.
    """

def choose_apart(
    M: int,
    N: int,
    K: int,
    dtype: str,
    activation: str,
    bias: bool,
    precision: str,
    capability: int,
    processors: int,
    hopper: bool,
    forced: str | None,
    /,
) -> tuple[bool, bool, bool, str, str, float]:
    """How dX (M, K) and dW (N, K) of a dense gradient (M, N) are made apart, each by a product (csrc/choice.h).

    Arguments as those of ``choose``; ``bias`` is whether db is asked for.

    Returns:
        whether a pass makes bf16 planes of the gradient; whether dX reads the gradient itself all the same; whether dW
        is computed turned; the kernels of dX and of dW; the model's microseconds of all.

    Raises:
        RuntimeError: the forced kernel is unknown or cannot compute one of the two.
        ValueError: an unknown name, or a negative size.
    """

def choose_together(
    M: int,
    N: int,
    K: int,
    dtype: str,
    activation: str,
    bias: bool,
    precision: str,
    capability: int,
    processors: int,
    hopper: bool,
    forced: str | None,
    /,
) -> tuple[bool, bool, int, int, float]:
    """Whether dX (M, K) and dW (N, K) of a dense gradient (M, N) are one launch of ``small``, as csrc/choice.h has it.

    Of fewer than nine rows another kernel makes them where it can, before this is asked. Arguments as those of
    ``choose_apart``.

    Returns:
        whether it is better than each in a launch of its own; whether act'(z) takes a pass before; blocks that share
        the K of a tile of dW, and of dX; the model's microseconds.

    Raises:
        RuntimeError: the forced kernel is unknown or cannot compute one of the two.
        ValueError: an unknown name, or a negative size.
    """

def choose_through(
    M: int,
    N: int,
    K: int,
    dtype: str,
    activation: str,
    sums: bool,
    capability: int,
    processors: int,
    hopper: bool,
    forced: str | None,
    /,
) -> tuple[bool, int, float]:
    """Whether act'(saved) is multiplied in the epilogue of a dense product (M, K) (K, N), as csrc/choice.h has it.

    Arguments as those of ``choose``; ``sums`` is whether the result's columns are summed too.

    Returns:
        whether it is better than the product and a pass over it; the tile shape; the model's microseconds.

    Raises:
        RuntimeError: the forced kernel is unknown.
        ValueError: an unknown name, or a negative size.
    """
