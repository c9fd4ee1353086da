from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.bench import exact
from zoo.bench.exact import Operands, combined, names_of, verdicts, worst_error, wrongness
from zoo.judging import measure
from zoo.ops import ACTIVATIONS
from zoo.ops._linear import activate


def operands(dtype: torch.dtype = torch.float32, *, bias: bool = True, backward: bool = True) -> Operands:
    make = torch.Generator().manual_seed(0)
    x, w, b, g = (
        torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in ((50, 12), (7, 12), (7,), (50, 7))
    )
    for tensor in (x, w, b):
        tensor.requires_grad_(backward)
    return Operands(x, w, b if bias else None, g if backward else None)


def results(o: Operands, activation: str | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The naive twin: all at once, through autograd."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in o.leaves()]
    y = activate(F.linear(*leaves), activation or "none")
    if o.grad is None:
        return (y.detach(),)
    return (y.detach(), *torch.autograd.grad(y, leaves, o.grad.to(dtype)))


@pytest.mark.parametrize("activation", [None, *(name for name in ACTIVATIONS if name != "none")])
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_slices_give_what_the_whole_gives(activation: str | None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "SLICE", rows * 12)
    for o in (operands(), operands(bias=False), operands(backward=False)):
        right = results(o, activation, torch.float64)
        found = wrongness({"right": right, "off": [t * 1.001 for t in right]}, o, activation)
        assert tuple(found["right"]) == names_of(o)
        assert worst_error(found["right"]) < 1e-14
        for m, value in zip(found["off"].values(), right, strict=True):
            assert m.error == pytest.approx(1e-3, rel=1e-6)
            assert m.peak == pytest.approx(float(value.abs().max()) * 1e-3, rel=1e-6)
            assert m.shape[1:] == tuple(value.shape)[1:]


def test_each_result_is_looked_at() -> None:
    o = operands()
    right = results(o, "gelu", torch.float64)
    for index, name in enumerate(names_of(o)):
        wrong = [t.clone() for t in right]
        wrong[index].view(-1)[-1] += 1
        found = wrongness({"one": wrong}, o, "gelu")["one"]
        assert [n for n, m in found.items() if m.error > 1e-10] == [name]


def test_other_shapes_and_numbers_of_results_are_refused() -> None:
    o = operands()
    y, dx, dw, db = results(o, None, torch.float32)
    found = wrongness({"bad": (y[:1], dx, dw, db), "stock": (y, dx, dw, db)}, o, None)
    entries = verdicts(found["bad"], found["stock"], precision="highest", depth=50)
    assert [(e.name, e.reason) for e in entries if not e.ok] == [("y", "shape: got (1, 7), expected (50, 7)")]
    assert math.isnan(worst_error(found["bad"]))
    with pytest.raises(ValueError, match=r"bad: got 3 results, expected 4 \(y, dx, dw, db\)"):
        wrongness({"bad": (y, dx, dw)}, o, None)


def test_combined_is_the_measure_of_all() -> None:
    make = torch.Generator().manual_seed(1)
    value, true = torch.randn(40, 5, generator=make), torch.randn(40, 5, generator=make)
    whole, parts = (
        measure(value, true),
        combined([measure(v, t) for v, t in zip(value.split(9), true.split(9), strict=True)]),
    )
    for name in ("norm", "peak", "exact_norm", "exact_peak"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name))
    value[30] = math.nan
    bad = combined([measure(v, t) for v, t in zip(value.split(9), true.split(9), strict=True)])
    assert math.isnan(bad.error) and "not finite" in bad.fault


def judged(factor: float, dtype: torch.dtype, precision: str) -> bool:
    """Whether results that are off by so much pass beside stock ones of that dtype."""
    o = operands(dtype)
    stock = results(o, None, dtype)
    found = wrongness({"stock": stock, "off": [t * factor for t in results(o, None, torch.float64)]}, o, None)
    cast = {name: m.scaled(1.0, dtype) for name, m in found["off"].items()}
    return all(entry.ok for entry in verdicts(cast, found["stock"], precision=precision, depth=50))


def test_limits_follow_dtype_and_precision() -> None:
    assert judged(1 + 1e-7, torch.float32, "highest") and not judged(1 + 3e-5, torch.float32, "highest")
    assert judged(1 + 2e-4, torch.float32, "high") and not judged(1 + 3e-3, torch.float32, "high")
    assert judged(1 + 2e-3, torch.float32, "medium") and not judged(1 + 3e-2, torch.float32, "medium")
    assert judged(1 + 2e-3, torch.bfloat16, "highest") and not judged(1 + 3e-2, torch.bfloat16, "highest")
    assert judged(1 + 1e-15, torch.float64, "highest") and not judged(1 + 1e-13, torch.float64, "highest")
