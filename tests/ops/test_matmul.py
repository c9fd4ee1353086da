"""matmul: torch.matmul's shapes, values and gradients."""

import pytest
import torch

from support.reference import DTYPES, gradients
from zoo import ops

SHAPES = [
    ((3, 4), (4, 5)),
    ((4,), (4,)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (4,)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (6, 4, 5)),
    ((3, 4), (2, 4, 5)),
    ((0, 4), (4, 5)),
    ((3, 0), (0, 5)),
    ((2, 3, 4), (2, 4, 0)),
    ((0, 3, 4), (0, 4, 5)),
    ((70, 33), (33, 65)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_is_torch_matmul(device, dtype, shapes):
    a, b = (torch.randn(*s, device=device).to(dtype) for s in shapes)
    want, want_grads = gradients(
        torch.matmul,
        (a.double(), b.double()),
        torch.ones((), device=device).double().expand(torch.matmul(a.double(), b.double()).shape),
    )
    got, grads = gradients(ops.matmul, (a, b), torch.ones((), device=device).expand(want.shape))
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    for g, w in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance)


def test_strided_batches(device):
    a = torch.randn(4, 2, 3, device=device).permute(1, 2, 0)
    b = torch.randn(1, 4, 5, device=device).expand(2, 4, 5)
    torch.testing.assert_close(ops.matmul(a, b), torch.matmul(a, b))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((3, 4), (5, 6)), r"got a \(3, 4\) and b \(5, 6\)"),
        (((2, 3, 4), (3, 4, 5)), "must broadcast"),
        (((), (3,)), "at least 1 dimension"),
    ],
)
def test_what_does_not_fit_is_refused(device, shapes, words):
    for where in (device, "meta"):
        with pytest.raises(RuntimeError, match=words):
            ops.matmul(*(torch.randn(s, device=where) for s in shapes))


def test_wrong_dtypes_are_refused(device):
    a = torch.ones(2, 2, device=device)
    with pytest.raises(RuntimeError, match="dtype"):
        ops.matmul(a, a.double())
    with pytest.raises(RuntimeError, match="float64, float32, float16 or bfloat16"):
        ops.matmul(a.long(), a.long())


def test_autocast(device):
    a = torch.ones(2, 2, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert ops.matmul(a, a).dtype == torch.bfloat16
        assert ops.matmul(a.double(), a.double()).dtype == torch.float64
