"""The kernels of the operators' Autograd key: Python is asked where a derivative is, and only there."""

import pytest
import torch
from torch.autograd import forward_ad

from zoo.ops import _library

FRAGMENT = torch.library.Library("zoo", "FRAGMENT")
FRAGMENT.define("probe(Tensor a, Tensor? b, str c, bool d, int e=3) -> (Tensor, Tensor)")
FRAGMENT.define("probe_one(Tensor a) -> Tensor")
CALLS: list[tuple] = []


def below(a, b, c, d, e=3):
    return a + 1, a.new_full((1,), e) if b is None else b * 2


def derivative(*args):
    CALLS.append(args)
    if args[2] == "raise":
        raise ValueError("no such derivative")
    return args[0] * 10, args[0] * 20


FRAGMENT.impl("probe", below, "CPU")
FRAGMENT.impl("probe_one", lambda a: a + 1, "CPU")
_library.implement("probe", derivative)
_library.implement("probe_one", lambda a: (CALLS.append((a,)), a * 10)[1])

in_cpp = pytest.mark.skipif(_library.EAGER_MISSING is not None, reason=f"zoo._C_eager: {_library.EAGER_MISSING}")


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


@in_cpp
def test_python_is_not_asked_where_no_derivative_is():
    a, wants = torch.ones(2), torch.ones(2, requires_grad=True)
    first, second = torch.ops.zoo.probe(a, None, "x", True)
    assert first.tolist() == [2, 2] and second.tolist() == [3]
    with torch.no_grad():
        assert torch.ops.zoo.probe(wants, wants, "x", True, 5)[1].tolist() == [2, 2]
        assert torch.ops.zoo.probe_one(wants).tolist() == [2, 2]
    assert not CALLS


def test_a_gradient_or_a_tangent_asks_for_one():
    a, wants = torch.ones(2), torch.ones(2, requires_grad=True)
    for args in ((wants, None, "x", True), (a, wants, "y", False, 7)):
        assert [t.tolist() for t in torch.ops.zoo.probe(*args)] == [[10, 10], [20, 20]]
    assert [call[2:4] for call in CALLS] == [("x", True), ("y", False)] and CALLS[1][4] == 7
    assert CALLS[0][0] is wants and CALLS[0][1] is None and CALLS[1][1] is wants
    assert torch.ops.zoo.probe_one(wants).tolist() == [10, 10]
    torch.autograd.grad(torch.ops.zoo.probe_one(wants).sum(), wants)
    with forward_ad.dual_level(), torch.no_grad():
        torch.ops.zoo.probe_one(forward_ad.make_dual(a, a))
    assert len(CALLS) == 5


def test_an_error_of_python_comes_out():
    with pytest.raises(ValueError, match="no such derivative"):
        torch.ops.zoo.probe(torch.ones(2, requires_grad=True), None, "raise", True)
    assert len(CALLS) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_an_error_of_python_is_told_by_torchscript():
    graph = torch.jit.CompilationUnit("def call(a: Tensor):\n    return torch.ops.zoo.probe(a, None, 'raise', True)\n")
    with pytest.raises(RuntimeError, match="no such derivative"):
        graph.call(torch.ones(2, requires_grad=True))
    assert len(CALLS) == 1
