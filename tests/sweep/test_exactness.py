from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo.swap import patch, unpatch
from zoo.sweep.exactness import Snapshot, outputs_of


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


def test_nothing_differs_after_unpatch() -> None:
    net = model()
    before = Snapshot(net)
    patch(net)
    assert before.differences(net) == ["classes differ", "attributes differ"]
    unpatch(net)
    assert before.differences(net) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda net: net.__setattr__("0", nn.Linear(4, 3)), "modules"),
        (lambda net: setattr(net[0], "__class__", nn.Identity), "classes"),
        (lambda net: setattr(net[0], "extra", 1), "attributes"),
        (lambda net: setattr(net[0], "weight", nn.Parameter(net[0].weight.detach())), "parameters"),
        (lambda net: setattr(net[1], "running_mean", torch.zeros(3)), "buffers"),
        (lambda net: net[0].register_buffer("more", torch.zeros(1)), "keys"),
    ],
)
def test_what_differs_is_named(change, what: str) -> None:
    net = model()
    before = Snapshot(net)
    change(net)
    assert f"{what} differ" in before.differences(net)


def test_outputs_come_from_one_random_state() -> None:
    net, x = model().train(), torch.randn(5, 4)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, two = outputs_of(net, x), outputs_of(net, x)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one["output"], two["output"])
    assert net[1].num_batches_tracked == 0
