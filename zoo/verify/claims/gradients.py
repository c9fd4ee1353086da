"""Claims about the backward: each gradient, singly and together, for every kind of incoming gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.verify.outcome import Broken, Claim
from zoo.verify.subject import ALL, Case, Subject, Tensors, evaluate, judged

__all__ = ["CLAIMS"]


def together(s: Subject) -> None:
    sizes = [(1, 64, 48), (5, 63, 31), (64, 192, 96), (65, 192, 96), (200, 96, 10), (0, 16, 8)]
    cases = [Case(f"({m}, {k})->{n}", s.randn(m, k), n, gradients=ALL) for m, k, n in sizes]
    s.compare([*cases, Case("(2, 50, 96)->48", s.randn(2, 50, 96), 48, gradients=ALL)])


def singly(s: Subject) -> None:
    subsets = [("input",), ("weight",), ("bias",), ("input", "weight"), ("input", "bias"), ("weight", "bias")]
    s.compare(
        Case(f"only {' and '.join(names)} of ({m}, 96)->48", s.randn(m, 96), gradients=names, out_features=48)
        for names in subsets
        for m in (40, 100)
    )


def expanded(s: Subject) -> None:
    shape = (70, 48)
    s.compare(
        [
            Case("of .sum()", s.randn(70, 96), 48, gradients=ALL, cotangent=s.cotangent(1, 1).expand(shape)),
            Case("equal rows", s.randn(70, 96), 48, gradients=ALL, cotangent=s.cotangent(48).expand(shape)),
            Case("equal columns", s.randn(70, 96), 48, gradients=ALL, cotangent=s.cotangent(70, 1).expand(shape)),
            Case(
                "of .mean(1)",
                s.randn(4, 20, 96),
                48,
                gradients=ALL,
                cotangent=s.cotangent(4, 1, 48).expand(4, 20, 48),
            ),
        ]
    )


def strided(s: Subject) -> None:
    s.compare(
        [
            Case("transposed", s.randn(70, 96), 48, gradients=ALL, cotangent=s.cotangent(48, 70).T),
            Case("every second column", s.randn(70, 96), 48, gradients=ALL, cotangent=s.cotangent(70, 96)[:, ::2]),
            Case("at an odd offset", s.randn(70, 96), 48, gradients=ALL, cotangent=s.cotangent(71, 51)[1:, 3:]),
            Case(
                "transposed, of a transposed input",
                s.randn(96, 70).T,
                48,
                gradients=ALL,
                cotangent=s.cotangent(48, 70).T,
            ),
        ]
    )


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

    s.compare([Case("two backwards", s.randn(64, 96), 96, gradients=ALL)], evaluate=twice)


def double_backward(s: Subject) -> None:
    def second(layer: nn.Module, case: Case) -> Tensors:
        assert case.cotangent is not None
        x = case.input.detach().requires_grad_()
        cotangent = case.cotangent.detach().requires_grad_()
        weight = dict(layer.named_parameters())["weight"].requires_grad_()
        first = torch.autograd.grad(layer(x), [x, weight], cotangent, create_graph=True)
        # Functions of both gradients, so that all three second derivatives are there and differ.
        total = (first[0] * case.input.roll(1, 0)).sum() + (first[1] * weight.detach()).sum()
        weight.grad = None
        total.backward()  # and not torch.autograd.grad, which steps over the error that once_differentiable raises
        return {"d input": x.grad, "d weight": weight.grad, "d gradient": cotangent.grad}

    s.compare([Case("second derivatives", s.randn(64, 96), 96, gradients=ALL)], evaluate=second)


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

    s.compare([Case("weights frozen", s.randn(64, 96), 96, gradients=("input",))], evaluate=trained)
    custom, _ = s.pair(96, 48)
    for parameter in custom.parameters():
        parameter.requires_grad_(False)
    if custom(s.randn(8, 96)).requires_grad:
        raise Broken("nothing requires a gradient, but the output does")


def saved(s: Subject) -> None:
    wanted: list[tuple[str, tuple[str, ...]]] = [
        ("all gradients", ALL),
        ("weights frozen", ("input",)),
        ("input without gradient", ("weight", "bias")),
        ("only the bias trained", ("bias",)),
    ]
    for what, names in wanted:
        custom, stock = s.pair(96, 48)
        x = s.randn(512, 96)
        got, want = (_saved_bytes(layer, x, names) for layer in (custom, stock))
        if got > want + 1024:
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
    custom, stock = s.pair(96, 48)
    x = s.randn(64, 96)
    cotangent = s.cotangent(64, 48)
    runs: list[dict[str, Tensor | None]] = []
    for layer in (custom, stock):
        y = layer(x)
        leaves = list(layer.parameters())
        torch.autograd.grad(y, leaves, cotangent, retain_graph=True)
        runs.append(dict(zip(("weight", "bias"), torch.autograd.grad(y, leaves, cotangent), strict=True)))
    case = Case("", x.double(), 48, gradients=("weight", "bias"), cotangent=cotangent.double())
    exact = evaluate(stock.double(), case)
    judged(runs[0], runs[1], {name: exact[name] for name in ("weight", "bias")})


def changed(s: Subject) -> None:
    """A tensor that the backward needs is changed in place: torch's error, or gradients of the old values."""
    for what in ("input", "weight"):
        custom, _ = s.pair(96, 48)
        x = s.randn(64, 96)
        leaf = x.clone().requires_grad_()
        held = leaf * 1.0  # no leaf, so that it may be changed
        weight = dict(custom.named_parameters())["weight"]
        cotangent = s.cotangent(64, 48)
        right = {"input": cotangent.double() @ weight.detach().double(), "weight": cotangent.double().T @ x.double()}
        output = custom(held)
        with torch.no_grad():
            (held if what == "input" else weight).mul_(3.0)
        try:
            got = torch.autograd.grad(output, [held, weight], cotangent)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            continue
        for name, value in zip(right, got, strict=True):
            off = float((value.double() - right[name]).norm() / right[name].norm())
            if not off < 0.01:
                raise Broken(f"{what} was changed between forward and backward: no error, and a wrong {name} gradient")


CLAIMS = (
    Claim("gradients", "all three gradients are right, for few rows and many", together),
    Claim("gradients-singly", "any subset of the gradients is right when asked for alone", singly),
    Claim("gradients-expanded", "incoming gradients may be expanded (stride 0), as those of .sum()", expanded),
    Claim("gradients-strided", "incoming gradients may have any strides", strided),
    Claim("gradients-accumulate", "two graphs at once, whose backwards add up in .grad", accumulated),
    Claim("retain-graph", "a graph that is kept gives the same gradients again", kept_graph),
    Claim("double-backward", "gradients of gradients are right", double_backward),
    Claim("frozen", "frozen weights get no gradient, and the input's is right", frozen),
    Claim("saved", "nothing is kept for the backward that the stock layer does not keep", saved),
    Claim("in-place", "a saved tensor that changes before the backward is noticed", changed),
)
