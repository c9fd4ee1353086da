"""Claims about the backward: each gradient, singly and together, for every kind of incoming gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.verify.claims.values import by_cases, with_cases
from zoo.verify.kinds import EVERY
from zoo.verify.outcome import Broken, Claim
from zoo.verify.subject import ALL, Case, Subject, Tensors, evaluate, judged, parameter_of

__all__ = ["CLAIMS"]


def singly(s: Subject) -> None:
    names = s.suite.all
    subsets = [(name,) for name in names] + list(itertools.combinations(names, 2))
    s.compare(
        s.case(f"only {' and '.join(wanted)} of {m} rows", s.input(m), gradients=wanted)
        for wanted in subsets
        for m in (40, 100)
    )


def expanded(s: Subject) -> None:
    rows, out = 70, s.suite.out
    ones = tuple(1 for _ in out)
    cotangents = {
        "of .sum()": s.cotangent(1, *ones).expand(rows, *out),
        "equal rows": s.cotangent(*out).expand(rows, *out),
        "equal columns": s.cotangent(rows, *ones).expand(rows, *out),
    }
    cases = [_all(s, what, s.input(rows), cotangent) for what, cotangent in cotangents.items()]
    if s.suite.leading:
        cases.append(_all(s, "of .mean(1)", s.input(4, 20), s.cotangent(4, 1, *out).expand(4, 20, *out)))
    s.compare(cases)


def strided(s: Subject) -> None:
    rows, out = 70, s.suite.out
    wide = s.cotangent(rows, *out[:-1], 2 * out[-1])
    offset = s.cotangent(rows + 1, *out[:-1], out[-1] + 3)
    s.compare(
        [
            _all(s, "transposed", s.input(rows), _turned(s.cotangent, (rows, *out))),
            _all(s, "every second column", s.input(rows), wide[..., ::2]),
            _all(s, "at an odd offset", s.input(rows), offset[1:, ..., 3:]),
            _all(
                s,
                "transposed, of a transposed input",
                _turned(s.randn, (rows, *s.suite.sample)),
                _turned(s.cotangent, (rows, *out)),
            ),
        ]
    )


def _all(s: Subject, name: str, x: Tensor, cotangent: Tensor) -> Case:
    return s.case(name, x, gradients=s.suite.all, cotangent=cotangent)


def _turned(make: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
    """A tensor of that shape whose dimensions lie in memory in the opposite order."""
    return make(*reversed(shape)).permute(*reversed(range(len(shape))))


def accumulated(s: Subject) -> None:
    def twice(layer: nn.Module, case: Case) -> Tensors:
        for parameter in layer.parameters():
            parameter.requires_grad_(True).grad = None
        x = case.input.detach().requires_grad_()
        assert case.cotangent is not None
        first = layer(x)
        second = layer(x * 0.5)  # both graphs alive at once
        second.backward(case.cotangent)
        first.backward(case.cotangent)
        return {"input": x.grad, **{name.rpartition(".")[2]: p.grad for name, p in layer.named_parameters()}}

    s.compare([s.case("two backwards", s.input(64), gradients=s.suite.all)], evaluate=twice)


def double_backward(s: Subject) -> None:
    def second(layer: nn.Module, case: Case) -> Tensors:
        assert case.cotangent is not None
        x = case.input.detach().requires_grad_()
        cotangent = case.cotangent.detach().requires_grad_()
        weights = {name: parameter_of(layer, name).requires_grad_() for name in s.suite.weights}
        first = torch.autograd.grad(layer(x), [x, *weights.values()], cotangent, create_graph=True)
        # Functions of all gradients, so that all second derivatives are there and differ.
        total = (first[0] * case.input.roll(1, 0)).sum()
        for grad, weight in zip(first[1:], weights.values(), strict=True):
            total = total + (grad * weight.detach()).sum()
            weight.grad = None
        total.backward()  # and not torch.autograd.grad, which steps over the error that once_differentiable raises
        found = {f"d {name}": weight.grad for name, weight in weights.items()}
        return {"d input": x.grad, **found, "d gradient": cotangent.grad}

    s.compare([s.case("second derivatives", s.input(64), gradients=s.suite.all)], evaluate=second)


def frozen(s: Subject) -> None:
    def trained(layer: nn.Module, case: Case) -> Tensors:
        for parameter in layer.parameters():
            parameter.requires_grad_(False).grad = None
        x = case.input.detach().requires_grad_()
        layer(x).backward(case.cotangent)
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None:
                raise Broken(f"{name} is frozen, and got a gradient")
        return {"input": x.grad}

    s.compare([s.case("weights frozen", s.input(64), gradients=("input",))], evaluate=trained)
    custom, _ = s.pair()
    for parameter in custom.parameters():
        parameter.requires_grad_(False)
    if custom(s.input(8)).requires_grad:
        raise Broken("nothing requires a gradient, but the output does")


def saved(s: Subject) -> None:
    wanted: list[tuple[str, tuple[str, ...]]] = [
        ("all gradients", ALL),
        ("weights frozen", ("input",)),
        ("input without gradient", ("weight", "bias")),
        ("only the bias trained", ("bias",)),
    ]
    for what, names in wanted:
        custom, stock = s.pair()
        x = s.input(512)
        got, want = (_saved_bytes(layer, x, names) for layer in (custom, stock))
        if got > want + 1024 + s.suite.spare * x.nbytes:
            raise Broken(f"{what}: {got} bytes are kept for the backward; the stock layer keeps {want}")


def _saved_bytes(layer: nn.Module, x: Tensor, names: tuple[str, ...]) -> int:
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in names)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x.detach().requires_grad_("input" in names))
    del output
    return sum(kept.values())


def kept_graph(s: Subject) -> None:
    custom, stock = s.pair()
    x, cotangent = s.input(64), s.gradient(64)
    runs: list[dict[str, Tensor | None]] = []
    for layer in (custom, stock):
        y = layer(x)
        leaves = {name.rpartition(".")[2]: p for name, p in layer.named_parameters() if p.requires_grad}
        torch.autograd.grad(y, list(leaves.values()), cotangent, retain_graph=True)
        runs.append(dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), cotangent), strict=True)))
    case = s.case("", x.double(), gradients=s.suite.parameters, cotangent=cotangent.double())
    exact = evaluate(stock.double(), case)
    judged(runs[0], runs[1], {name: exact[name] for name in s.suite.parameters})


def changed(s: Subject) -> None:
    """A tensor that the backward needs is changed in place: torch's error, or gradients of the old values."""
    names = ("input", *s.suite.weights)
    for what in names:
        custom, stock = s.pair()
        x, cotangent = s.input(64), s.gradient(64)
        right = evaluate(stock.double(), s.case("", x.double(), gradients=names, cotangent=cotangent.double()))
        leaf = x.clone().requires_grad_()
        held = leaf * 1.0  # no leaf, so that it may be changed
        tensors = {"input": held, **{name: parameter_of(custom, name) for name in s.suite.weights}}
        output = custom(held)
        with torch.no_grad():
            tensors[what].mul_(3.0)
        try:
            got = torch.autograd.grad(output, list(tensors.values()), cotangent)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            continue
        for name, value in zip(tensors, got, strict=True):
            exact = right[name]
            assert exact is not None
            off = float((value.double() - exact).norm() / exact.norm())
            if not off < 0.01:
                raise Broken(f"{what} was changed between forward and backward: no error, and a wrong {name} gradient")


CLAIMS = (
    Claim(
        "gradients",
        "all gradients are right at once, for few rows and many",
        by_cases("gradients"),
        with_cases("gradients"),
    ),
    Claim("gradients-singly", "any subset of the gradients is right when asked for alone", singly, EVERY),
    Claim("gradients-expanded", "incoming gradients may be expanded (stride 0), as those of .sum()", expanded, EVERY),
    Claim("gradients-strided", "incoming gradients may have any strides", strided, EVERY),
    Claim("gradients-accumulate", "two graphs at once, whose backwards add up in .grad", accumulated, EVERY),
    Claim("retain-graph", "a graph that is kept gives the same gradients again", kept_graph, EVERY),
    Claim("double-backward", "gradients of gradients are right", double_backward, EVERY),
    Claim("frozen", "frozen weights get no gradient, and the input's is right", frozen, EVERY),
    Claim(
        "saved",
        "no more is kept for the backward than the stock layer keeps (one tensor more of a LayerNorm)",
        saved,
        ("linear", "layer_norm"),
    ),
    Claim("in-place", "a saved tensor that changes before the backward is noticed", changed, EVERY),
)
