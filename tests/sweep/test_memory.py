"""What models are said to take."""

from __future__ import annotations

import pytest
import torch

from zoo.sweep.memory import fitted, need, room
from zoo.sweep.rows import Task


def test_large_models_need_more() -> None:
    small, large = need(Task("timm/resnet18")), need(Task("timm/vit_large_patch16_224"))
    assert 10**9 < small < 3 * 10**9 < 10**10 < large < 2 * 10**10


def test_a_model_without_values_needs_nothing() -> None:
    assert need(Task("timm/vit_large_patch16_224", on="meta")) == 0
    assert need(Task("timm/vit_large_patch16_224", max_parameters=10**6)) == 0


def test_of_an_unknown_model_the_least_is_said() -> None:
    assert 0 < need(Task("never heard of")) < need(Task("timm/resnet18"))


def test_what_would_take_too_much_is_made_lean() -> None:
    task = Task("timm/vit_large_patch16_384")
    assert fitted(task, 10**12) is task
    lean = fitted(task, 4 * 10**10)
    assert (lean.name, lean.lean, lean.asked()) == (task.name, True, task.asked())
    assert need(lean) < need(task)


def test_room_on_the_cpu() -> None:
    assert room("cpu") > 10**8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_room_on_a_gpu() -> None:
    assert 0 < room("cuda") < torch.cuda.get_device_properties(0).total_memory
