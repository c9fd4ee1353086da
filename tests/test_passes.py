"""What the passes of a comparison are made of; the whole of them is tested with :func:`zoo.parity`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.passes import Pass, jittered, snapshot, twin_of, with_values


class Telling(nn.Module):
    """Tells others what it is given; what it kept itself would be gone after the pass."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.tell = tell

    def forward(self, x: Tensor) -> Tensor:
        self.tell(x)
        return x


def seen_in(x: Tensor, *how: Any) -> Tensor:
    """What a model is given for ``x`` in such a pass."""
    found: list[Tensor] = []
    Pass("it", Telling(found.append), *how).run((x,))
    (seen,) = found
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_jitter_moves_by_up_to_half_an_eps(dtype: torch.dtype) -> None:
    x = torch.randn(2000, dtype=dtype)
    x[x == 0] = 1
    eps = torch.finfo(dtype).eps
    for rounding in (0.0, 2.0**-6):
        moved = jittered(x, torch.Generator().manual_seed(0), rounding)
        off = ((moved - x) / x).abs().double()
        assert moved.dtype == dtype and off.gt(0).double().mean() > 0.1
        assert off.max() <= max(eps, rounding) / 2 + eps  # half an eps, rounded
        assert rounding < 2 * eps or off.max() > 0.4 * rounding
    assert not torch.equal(jittered(x, torch.Generator().manual_seed(1), 2.0**-6), moved)


def test_inputs_are_jittered_after_they_are_cast() -> None:
    x = torch.rand(500).double() + 1
    seen = seen_in(x, torch.float32, (torch.Generator().manual_seed(0), 2.0**-10))
    off = (seen.double() / x - 1).abs()
    assert seen.dtype == torch.float32 and 2.0**-12 < off.max() <= 2.0**-11 + 1e-6


def test_integers_are_neither_cast_nor_jittered() -> None:
    x = torch.arange(6)
    seen = seen_in(x, torch.float64, (torch.Generator(), 0.5))
    assert seen.dtype == torch.int64 and torch.equal(seen, x) and seen is not x


def test_twins_share_nothing_and_keep_ties() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    twin = twin_of(model, torch.float64)
    assert twin[2].weight is twin[0].weight and twin[0].weight is not model[0].weight
    assert {t.dtype for t in twin.state_dict().values()} == {torch.float64, torch.int64}
    assert model[0].weight.dtype == torch.float32 and twin[0].weight.requires_grad


def test_twins_cast_what_modules_keep() -> None:
    model = nn.Linear(3, 3)
    model.kept, model.several = torch.ones(2), {"a": [torch.ones(2), torch.arange(2)]}
    twin = twin_of(model, torch.float64)
    assert twin.kept.dtype == twin.several["a"][0].dtype == torch.float64
    assert twin.several["a"][1].dtype == torch.int64 and model.kept.dtype == torch.float32


def test_float32_is_widened_where_it_is_asked_for() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            some = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), x.type(torch.float32), x.half()]
            return [*some, torch.zeros(2, dtype=torch.float32), x.softmax(0, dtype=torch.float32)]

    x = torch.randn(4)
    for widened, dtype in ((True, torch.float64), (False, torch.float32)):
        found = list(Pass("it", Asks(), torch.float64, widened=widened).run((x,)).outputs.values())
        assert found.pop(4).dtype == torch.float16
        assert {tensor.dtype for tensor in found} == {dtype}


def test_values_are_set_only_where_the_forms_agree() -> None:
    x = torch.randn(3, requires_grad=True)
    output, values = x * 2, torch.tensor([7.0, 8.0, 9.0])
    (put,) = with_values((output,), (values,))
    assert torch.equal(put, values) and torch.equal(torch.autograd.grad(put.sum(), x)[0], torch.full((3,), 2.0))
    for other in (values, [values], (values, values), (values[:2],), (None,)):
        assert with_values((output,), other)[0] is output


def test_snapshots_do_not_change() -> None:
    x = torch.zeros(2)
    kept = snapshot({"x": [x], "n": 3})
    x += 1
    assert torch.equal(kept["x"][0], torch.zeros(2)) and kept["n"] == 3


@pytest.mark.parametrize("x", [torch.zeros(4, 0), torch.zeros(0, 4), torch.eye(3).to_sparse(), torch.tensor(2.0)])
def test_inputs_of_any_kind_are_copied(x: Tensor) -> None:
    seen = seen_in(x)
    assert seen is not x and seen.layout == x.layout and torch.equal(seen.to_dense(), x.to_dense())
