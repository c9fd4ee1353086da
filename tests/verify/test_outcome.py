"""What counts as a clear refusal, and what as a failure."""

from __future__ import annotations

import pytest
import torch

from zoo.verify.outcome import FAIL, REFUSED, UNTESTED, Broken, Refused, Untested, outcome_of


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Broken("wrong"), FAIL),
        (Refused("no"), REFUSED),
        (Untested("no GPU"), UNTESTED),
        (NotImplementedError("only float32"), REFUSED),
        (ValueError("expected 3 features, got 4"), REFUSED),
        (RuntimeError("expected a contiguous input, got strides (1, 4)"), REFUSED),
        (RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable"), REFUSED),
        (NotImplementedError(), FAIL),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"), FAIL),
        (IndexError("list index out of range"), FAIL),
        (AssertionError(), FAIL),
        (ValueError("too many values to unpack (expected 3)"), FAIL),
        (TypeError("f() takes 2 positional arguments but 3 were given"), FAIL),
        (TypeError("'NoneType' object is not callable"), FAIL),
        (TypeError("f() got an unexpected keyword argument 'bias'"), REFUSED),
        (RuntimeError("torch.compile with aot_autograd does not currently support double backward"), REFUSED),
        (torch._dynamo.exc.Unsupported("call_function is not supported"), FAIL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_outcomes(error: Exception, status: str) -> None:
    got, reason = outcome_of(error)
    assert got == status and reason


def test_a_long_text_is_cut() -> None:
    assert len(outcome_of(Broken("x" * 1000))[1]) == 300
