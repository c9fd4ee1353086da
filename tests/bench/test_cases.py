from __future__ import annotations

import pytest

from zoo.bench import CASES, Case, cases_named
from zoo.ops import ACTIVATIONS


def test_the_table_holds_the_shapes_of_the_models() -> None:
    shapes = {case.name: (case.M, case.K, case.N, case.activation) for case in CASES}
    assert len(shapes) == len(CASES) == 24
    assert shapes["vit_b/fc1"] == (64 * 197, 768, 4 * 768, "gelu")
    assert shapes["convnext_t/stage1_fc2"] == (64 * 56 * 56, 384, 96, None)
    assert shapes["mixer_b/tokens_fc1"] == (64 * 768, 14 * 14, 384, "gelu")
    assert shapes["resnet50/fc_b256"] == (256, 2048, 1000, None)
    assert shapes["mnist/fc1"] == (64, 784, 256, "relu")
    assert {case.activation for case in CASES} - {None} <= set(ACTIVATIONS)
    assert all(case.flops(backward=False) < 1e9 for case in CASES if case.quick)


def test_work_of_a_case() -> None:
    case = Case("c", 2, 3, 5)
    assert (case.flops(backward=False), case.flops(backward=True)) == (60, 180)
    assert case.elements(backward=False) == 2 * 3 + 5 * 3 + 5 + 2 * 5
    assert case.elements(backward=True) == 2 * case.elements(backward=False)  # dy, dx, dw, db beside them
    assert Case("c", 2, 3, 5, bias=False).elements(backward=False) == 2 * 3 + 5 * 3 + 2 * 5


def test_cases_by_name() -> None:
    assert [case.name for case in cases_named(["mnist/*", "vit_b/head"])] == [
        "vit_b/head",
        "mnist/fc1",
        "mnist/fc2",
        "mnist/fc3",
    ]
    assert cases_named([]) == ()
    with pytest.raises(ValueError, match=r"case 'vit/\*': matches none.*vit_b/qkv"):
        cases_named(["mnist/*", "vit/*"])
