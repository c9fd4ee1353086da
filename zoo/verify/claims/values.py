"""Claims about the output: at the shapes of models, at awkward ones, on awkward values, in every dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zoo.verify.kinds import EVERY, SUITES
from zoo.verify.outcome import Broken, Claim, outcome_of
from zoo.verify.subject import Subject, double_of, evaluate, judged

__all__ = ["CLAIMS", "by_cases", "with_cases"]


def by_cases(name: str) -> Callable[[Subject], None]:
    """A check that compares the layer with the stock layer on the cases that its kind has for a claim."""

    def check(s: Subject) -> None:
        s.compare(s.suite.cases[name](s))

    return check


def with_cases(name: str) -> tuple[str, ...]:
    """The kinds that have cases for a claim."""
    return tuple(kind for kind, suite in SUITES.items() if name in suite.cases)


def mixed(s: Subject) -> None:
    # Each row by itself: beside a row of 1e4, a small one that is wrong would not be seen.
    custom, stock = s.pair()
    for layer in (custom, stock):
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if "bias" in name:
                    parameter.zero_()
    each = (64, *(1 for _ in s.suite.sample))
    scales = torch.logspace(-6, 6, 64, device=s.device, dtype=torch.float64).view(each)
    x = (s.input(64).double() * scales).to(s.dtype)
    exact = double_of(stock, x)
    sizes = exact.flatten(1).square().mean(1).sqrt().view(64, *(1 for _ in exact.shape[1:]))
    with torch.no_grad():
        got, want = custom(x).double() / sizes, stock(x).double() / sizes
    name = "rows from 1e-6 to 1e6"
    judged({name: got.to(s.dtype)}, {name: want.to(s.dtype)}, {name: exact / sizes})


def infinite(s: Subject) -> None:
    _special(s, [float("inf"), float("-inf")])


def nan(s: Subject) -> None:
    _special(s, [float("nan")])


def _special(s: Subject, values: list[float]) -> None:
    """Values that are not finite come through in their own rows, and do not spread to others."""
    custom, stock = s.pair()
    x = s.input(64)
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
    judged({"other rows": got[rows]}, {"other rows": want[rows]}, {"other rows": double_of(stock, x[rows])})


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
    t.compare(s.suite.cases["dtype"](t))


def autocast(s: Subject) -> None:
    s.compare(s.suite.cases["autocast"](s), around=lambda: torch.autocast(s.device.type, dtype=torch.bfloat16))


def plain(s: Subject) -> None:
    custom, stock = s.pair()
    x = s.input(64)
    got, want = custom(x), stock(x)
    if type(got) is not Tensor:
        raise Broken(f"the output is a {type(got).__name__}, not a Tensor")
    for what in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
        if getattr(got, what) != getattr(want, what):
            raise Broken(f"{what} of the output: got {getattr(got, what)}, expected {getattr(want, what)}")
    storage = _address(got)
    for name, tensor in (("input", x), *custom.named_parameters()):
        if _address(tensor) == storage is not None:
            raise Broken(f"the output lies in the memory of {name}")


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a subclass that wraps other tensors has no memory of its own
        return None


def wrong_inputs(s: Subject) -> None:
    for what, x in s.suite.wrong(s):
        custom, stock = s.pair()
        try:
            stock(x)
        except Exception:
            pass
        else:
            continue  # on this device it is none
        try:
            got = custom(x)
        except Exception as error:
            if not str(error).strip():
                raise Broken(f"{what}: {outcome_of(error)[1]}") from None
        else:
            raise Broken(f"{what}: no error, but an output of shape {tuple(got.shape)}")


def repeated(s: Subject) -> None:
    """Many calls of one layer, each judged: what is right only at first, or only now and then, is not right."""
    custom, stock = s.pair()
    got, want, exact = {}, {}, {}
    for call in range(12):
        x = s.input(1 + 7 * call)
        case = s.case("", x)
        got[f"call {call}"] = evaluate(custom, case)["output"]
        want[f"call {call}"] = evaluate(stock, case)["output"]
        exact[f"call {call}"] = double_of(stock, x)
    judged(got, want, exact)


def _of_cases(name: str, says: str) -> Claim:
    return Claim(name, says, by_cases(name), with_cases(name))


CLAIMS = (
    _of_cases("values", "outputs are right at the shapes of real models"),
    _of_cases("edge-shapes", "outputs are right for no row, one row, odd and tiny sizes, no batch"),
    _of_cases("no-bias", "a layer without bias is right, forward and backward"),
    _of_cases("no-affine", "a layer without parameters is right, forward and backward"),
    _of_cases("normalized-shape", "normalized_shape may have several dimensions, forward and backward"),
    _of_cases("eps", "eps is the one that the layer was given, under the root"),
    _of_cases("strides", "inputs may have any strides and offsets, or be expanded"),
    _of_cases("large", "large and small magnitudes neither overflow nor vanish"),
    _of_cases("denormals", "denormal values count as much as they do in the stock layer"),
    _of_cases("constant-rows", "rows without variance are right, forward and backward"),
    _of_cases("large-mean", "a mean far larger than the deviation costs no more digits than it must"),
    Claim("mixed-magnitudes", "small rows are as exact beside large ones", mixed, EVERY),
    Claim(
        "inf", "infinities come out where the stock layer's do, and nowhere else", infinite, ("linear", "layer_norm")
    ),
    Claim("nan", "a NaN comes through in its own row, and nowhere else", nan, ("linear", "layer_norm", "mlp")),
    Claim("repeated", "outputs are right at every call, with rows in any number", repeated, EVERY),
    Claim("output", "the output is a plain Tensor in memory of its own, as the stock layer's", plain, EVERY),
    Claim("wrong-inputs", "a wrong number of features or dtype is an error with a text", wrong_inputs, EVERY),
    Claim("float64", "right in float64, forward and backward", float64, EVERY),
    Claim("float32", "right in float32, forward and backward", float32, EVERY),
    Claim("bfloat16", "right in bfloat16, forward and backward", bfloat16, EVERY),
    Claim("float16", "right in float16, forward and backward", float16, EVERY),
    Claim(
        "autocast",
        "computes under autocast to bfloat16 in the stock layer's dtype, forward and backward",
        autocast,
        EVERY,
    ),
)
