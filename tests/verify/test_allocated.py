"""What is allocated on a GPU is read for a while: autograd's thread may hold the last gradients until it runs again."""

from collections.abc import Sequence

import pytest
import torch

from zoo.verify.claims import cuda
from zoo.verify.outcome import Broken
from zoo.verify.subject import Subject

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is told in turn; the last number is told again and again."""
    told = [0]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: told.pop(0) if len(told) > 1 else told[0])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return told


@pytest.mark.parametrize(
    ("told", "at_most", "found"),
    [
        ([1000, 1000, 700], -1, 700),  # the gradients were held when it was read first
        ([1000, 700, 900], 700, 700),
        ([1000] * 50 + [700], 700, 700),  # as long as it takes
        ([1000] * 50 + [701], 700, 701),  # a leak of one byte
        ([1000] * 50 + [700], -1, 1000),  # not for ever
        ([1000] * 5000 + [700], 700, 1000),
    ],
)
def test_the_least_is_told(says: list[int], told: Sequence[int], at_most: int, found: int) -> None:
    says[:] = told
    assert cuda.allocated(DEVICE, at_most) == found


@pytest.mark.parametrize("leaked", [0, 1])
def test_what_is_held_for_a_moment_is_no_leak(says: list[int], monkeypatch: pytest.MonkeyPatch, leaked: int) -> None:
    """The gradients are held when it is read first after the first calls, and for some readings after the others."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    held, free = 3000, 1000
    says[:] = [held] + [free] * cuda.READINGS + [held] * 5 + [free + leaked]
    subject = Subject(torch.nn.Linear, torch.device("cpu"))
    if leaked:
        with pytest.raises(Broken, match="left 1 bytes allocated"):
            cuda.memory_growth(subject)
    else:
        cuda.memory_growth(subject)
