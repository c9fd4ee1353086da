"""Claims about the output: at the shapes of models, at awkward ones, on awkward values, in every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.verify.outcome import Broken, Claim, outcome_of
from zoo.verify.subject import ALL, Case, Subject, evaluate, judged

__all__ = ["CLAIMS"]


def shapes(s: Subject) -> None:
    s.compare(
        [
            Case("(64, 784)->256", s.randn(64, 784), 256),
            Case("(100, 256)->10", s.randn(100, 256), 10),
            Case("(2, 50, 192)->768", s.randn(2, 50, 192), 768),
            Case("(8, 2048)->1000", s.randn(8, 2048), 1000),
            Case("(2, 7, 7, 96)->384", s.randn(2, 7, 7, 96), 384),
        ]
    )


def edges(s: Subject) -> None:
    sizes = [
        (1, 64, 48),
        (0, 64, 48),
        (3, 1, 5),
        (33, 63, 127),
        (65, 129, 1),
        (2, 7, 3),
        (129, 17, 65),
    ]
    cases = [Case(f"({m}, {k})->{n}", s.randn(m, k), n) for m, k, n in sizes]
    cases += [
        Case("(96,)->40, one vector", s.randn(96), 40),
        Case("(2, 0, 64)->48", s.randn(2, 0, 64), 48),
        Case("(1, 1, 1, 64)->48", s.randn(1, 1, 1, 64), 48),
    ]
    s.compare(cases)


def no_bias(s: Subject) -> None:
    s.compare(
        [
            Case("(64, 192)->96 without bias", s.randn(64, 192), 96, bias=False, gradients=("input", "weight")),
            Case("(1, 31)->17 without bias", s.randn(1, 31), 17, bias=False, gradients=("input", "weight")),
        ]
    )


def strides(s: Subject) -> None:
    s.compare(
        [
            Case("transposed", s.randn(96, 64).T, 96),
            Case("every second column", s.randn(64, 192)[:, ::2], 96),
            Case("every second row", s.randn(64, 96)[::2], 96),
            Case("a slice at an odd offset", s.randn(64, 99)[3:, 1:98], 96),
            Case("permuted (N, H, W, C)", s.randn(2, 96, 7, 5).permute(0, 2, 3, 1), 96),
            Case("expanded rows", s.randn(1, 96).expand(64, 96), 96),
            Case("expanded columns", s.randn(64, 1).expand(64, 96), 96),
            Case("middle dimension transposed", s.randn(8, 4, 96).transpose(0, 1), 96),
        ]
    )


def large(s: Subject) -> None:
    s.compare(
        [
            Case("values of 1e15, weights of 1e15", 1e15 * s.randn(64, 96), 96, weight_scale=1e16),
            Case("values of 1e25", 1e25 * s.randn(64, 96), 96),
            Case("values of 1e-25", 1e-25 * s.randn(64, 96), 96, bias=False),
        ]
    )


def denormal(s: Subject) -> None:
    s.compare([Case("values of 1e-39", 1e-39 * s.randn(64, 96), 96, bias=False, weight_scale=10.0)])


def mixed(s: Subject) -> None:
    # Each row by itself: beside a row of 1e4, a small one that is wrong would not be seen.
    custom, stock = s.pair(96, 96)
    for layer in (custom, stock):
        with torch.no_grad():
            layer.bias.zero_()  # type: ignore[operator]
    scales = torch.logspace(-6, 6, 64, device=s.device, dtype=torch.float64)[:, None]
    x = (s.randn(64, 96).double() * scales).to(s.dtype)
    exact = stock.double()(x.double()).detach() / scales
    stock = stock.to(s.dtype)
    with torch.no_grad():
        got, want = custom(x).double() / scales, stock(x).double() / scales
    judged(
        {"rows from 1e-6 to 1e6": got.to(s.dtype)},
        {"rows from 1e-6 to 1e6": want.to(s.dtype)},
        {"rows from 1e-6 to 1e6": exact},
    )


def infinite(s: Subject) -> None:
    _special(s, [float("inf"), float("-inf")])


def nan(s: Subject) -> None:
    _special(s, [float("nan")])


def _special(s: Subject, values: list[float]) -> None:
    """Values that are not finite come through in their own rows, and do not spread to others."""
    custom, stock = s.pair(96, 96)
    x = s.randn(64, 96)
    for number, value in enumerate(values):
        x[5 + 20 * number, 7] = value
    with torch.no_grad():
        got, want = custom(x), stock(x)
    if got.shape != want.shape:
        raise Broken(f"shape: got {tuple(got.shape)}, expected {tuple(want.shape)}")
    for what, test in (("nan", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(got) != test(want)
        if bool(wrong.any()):
            at = tuple(wrong.nonzero()[0].tolist())
            raise Broken(
                f"{int(wrong.sum())} of {got.numel()} outputs are {what} where the stock layer's are not, or the other "
                f"way round; the first at {at}: got {float(got[at])}, expected {float(want[at])}"
            )
    rows = torch.isfinite(want).all(dim=1)
    exact = torch.nn.functional.linear(x[rows].double(), stock.weight.double(), stock.bias.double())
    judged({"other rows": got[rows]}, {"other rows": want[rows]}, {"other rows": exact})


def float64(s: Subject) -> None:
    _dtype(s, torch.float64)


def float32(s: Subject) -> None:
    _dtype(s, torch.float32)


def bfloat16(s: Subject) -> None:
    _dtype(s, torch.bfloat16)


def float16(s: Subject) -> None:
    _dtype(s, torch.float16)


def _dtype(s: Subject, dtype: torch.dtype) -> None:
    t = s.of(dtype)
    t.compare(
        [
            Case("(64, 192)->96", t.randn(64, 192), 96, gradients=ALL),
            Case("(2, 33, 65)->48", t.randn(2, 33, 65), 48, gradients=ALL),
        ]
    )


def autocast(s: Subject) -> None:
    s.compare(
        [
            Case("(64, 192)->96 in bfloat16", s.randn(64, 192), 96, gradients=ALL),
            Case("(2, 33, 64)->48 in bfloat16", s.randn(2, 33, 64), 48),
        ],
        around=lambda: torch.autocast(s.device.type, dtype=torch.bfloat16),
    )


def plain(s: Subject) -> None:
    custom, stock = s.pair(96, 48)
    x = s.randn(64, 96)
    got, want = custom(x), stock(x)
    if type(got) is not Tensor:
        raise Broken(f"the output is a {type(got).__name__}, not a Tensor")
    for what in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
        if getattr(got, what) != getattr(want, what):
            raise Broken(f"{what} of the output: got {getattr(got, what)}, expected {getattr(want, what)}")
    storage = got.untyped_storage().data_ptr()
    for name, tensor in (("input", x), *custom.named_parameters()):
        if tensor.untyped_storage().data_ptr() == storage:
            raise Broken(f"the output lies in the memory of {name}")


def wrong_inputs(s: Subject) -> None:
    for what, x in (
        ("95 features instead of 96", s.randn(8, 95)),
        ("192 features instead of 96", s.randn(8, 192)),
        ("float64 instead of float32", s.randn(8, 96).double()),
        ("integers", torch.ones(8, 96, dtype=torch.int64, device=s.device)),
    ):
        custom, _ = s.pair(96, 48)
        try:
            got = custom(x)
        except Exception as error:
            if not str(error).strip():
                raise Broken(f"{what}: {outcome_of(error)[1]}") from None
        else:
            raise Broken(f"{what}: no error, but an output of shape {tuple(got.shape)}")


def repeated(s: Subject) -> None:
    """Many calls of one layer, each judged: what is right only at first, or only now and then, is not right."""
    custom, stock = s.pair(64, 48)
    got, want, exact = {}, {}, {}
    double = torch.nn.Linear(64, 48, device=s.device, dtype=torch.float64)
    double.load_state_dict(stock.state_dict())
    for call in range(12):
        case = Case("", s.randn(1 + 7 * call, 64), 48)
        got[f"call {call}"] = evaluate(custom, case)["output"]
        want[f"call {call}"] = evaluate(stock, case)["output"]
        exact[f"call {call}"] = evaluate(double, Case("", case.input.double(), 48))["output"]
    judged(got, want, exact)


CLAIMS = (
    Claim("values", "outputs are right at the shapes of real models", shapes),
    Claim("edge-shapes", "outputs are right for no row, one row, odd and tiny sizes, vectors", edges),
    Claim("no-bias", "a layer without bias is right, forward and backward", no_bias),
    Claim("strides", "inputs may have any strides and offsets, or be expanded", strides),
    Claim("large", "large and small magnitudes neither overflow nor vanish", large),
    Claim("denormals", "denormal values count as much as they do in the stock layer", denormal),
    Claim("mixed-magnitudes", "small rows are as exact beside large ones", mixed),
    Claim("inf", "infinities come out where the stock layer's do, and nowhere else", infinite),
    Claim("nan", "a NaN comes through in its own row, and nowhere else", nan),
    Claim("repeated", "outputs are right at every call, with rows in any number", repeated),
    Claim("output", "the output is a plain Tensor in memory of its own, as the stock layer's", plain),
    Claim("wrong-inputs", "a wrong number of features or dtype is an error with a text", wrong_inputs),
    Claim("float64", "right in float64, forward and backward", float64),
    Claim("float32", "right in float32, forward and backward", float32),
    Claim("bfloat16", "right in bfloat16, forward and backward", bfloat16),
    Claim("float16", "right in float16, forward and backward", float16),
    Claim("autocast", "follows autocast to bfloat16, forward and backward", autocast),
)
