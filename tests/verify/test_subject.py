"""How cases are compared: what counts as wrong, refused and untested."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.verify.outcome import Broken, Refused, Untested
from zoo.verify.subject import ALL, Case, Subject, evaluate


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def refuses_one_row(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.shape[0] == 1:
        raise NotImplementedError("one row is not supported")
    return F.linear(input, weight, bias)


def refuses_one_row_and_is_wrong(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return refuses_one_row(input, weight, bias) * 1.001


def cases(subject: Subject) -> list[Case]:
    return [Case("one", subject.randn(1, 8), 4), Case("many", subject.randn(64, 8), 4)]


def test_a_refusal_counts_apart_and_hides_no_error() -> None:
    with pytest.raises(Refused, match=r"^one: NotImplementedError: one row is not supported$"):
        Subject(refuses_one_row).compare(cases(Subject(nn.Linear)))
    with pytest.raises(Broken, match=r"^many output: error 1.0e-03 is over the limit"):
        Subject(refuses_one_row_and_is_wrong).compare(cases(Subject(nn.Linear)))


def test_what_the_stock_layer_does_not_do_is_untested() -> None:
    @contextlib.contextmanager
    def nowhere() -> Iterator[None]:
        raise RuntimeError("not on this machine")
        yield

    with pytest.raises(Untested, match="one: the stock layer itself raised RuntimeError: not on this machine"):
        Subject(nn.Linear).compare(cases(Subject(nn.Linear)), around=nowhere)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_error_of_a_few_eps_is_found_in_each_dtype(dtype: torch.dtype) -> None:
    off = 1 + 16 * torch.finfo(dtype).eps

    def slightly_wrong(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias) * off

    subject = Subject(slightly_wrong, dtype=dtype)
    case = Case("case", subject.randn(64, 96), 48, gradients=ALL)
    Subject(nn.Linear, dtype=dtype).compare([case])
    with pytest.raises(Broken, match="case "):
        subject.compare([case])


def test_only_what_is_asked_for_requires_a_gradient() -> None:
    subject = Subject(nn.Linear)
    layer, _ = subject.pair(8, 4)
    case = Case("", subject.randn(3, 8), 4, gradients=("bias",), cotangent=subject.cotangent(3, 4))
    found = evaluate(layer, case)
    assert list(found) == ["output", "bias"]
    assert torch.equal(found["bias"], case.cotangent.sum(0))
    assert [p.requires_grad for p in layer.parameters()] == [False, True] and not case.input.requires_grad
    assert list(evaluate(layer, Case("", case.input, 4))) == ["output"]


def test_cotangents_are_exact_in_every_dtype() -> None:
    values = Subject(nn.Linear).cotangent(1000, 1000)
    assert torch.equal(values.bfloat16().float(), values)
    assert torch.equal(values.half().float(), values)


class Twice(nn.Linear):
    """A layer that is no Linear: twice one."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class AsTwice(Twice):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, 2 * self.weight, None if self.bias is None else 2 * self.bias)


def test_against_another_than_the_stock_layer() -> None:
    with pytest.raises(Broken, match=r"error 1\.0e"):
        Subject(AsTwice).compare(cases(Subject(nn.Linear)))
    subject = Subject(AsTwice, against=Twice)
    subject.compare(cases(subject))
    assert isinstance(subject.pair()[1], Twice) and subject.suite.parameters == ("weight", "bias")
    with pytest.raises(Broken, match=r"error 5\.0e-01"):
        Subject(nn.Linear, against=Twice).compare(cases(subject))


def test_what_cannot_be_built_is_told_by_its_case() -> None:
    class NoBias(nn.Linear):
        def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
            if not bias:
                raise NotImplementedError("always with a bias")
            super().__init__(in_features, out_features)

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    subject = Subject(NoBias)
    with pytest.raises(Refused, match=r"^bare, to be built: NotImplementedError: always with a bias$"):
        subject.compare([Case("bare", subject.randn(2, 8), 4, {"bias": False}), *cases(subject)])


def test_values_that_the_stock_layer_has_not_either_are_left_out() -> None:
    subject = Subject(nn.Linear)
    large = Case("large", 1e30 * subject.randn(8, 8), 4, weight_scale=1e30)
    with pytest.raises(Untested, match=r"^large: the stock layer's own values are not finite$"):
        subject.compare([large])
    subject.compare([large, *cases(subject)])
