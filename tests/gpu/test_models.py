"""Whole models on the GPU: swapped, run in every mode, trained, compared with the stock model."""

import copy

import pytest
import torch
from torch import nn

import zoo


def test_resnet50_parity_with_gradients():
    model = zoo.create("resnet50", custom_linear=True, device="cuda")
    stock = copy.deepcopy(model)
    zoo.unpatch(stock)
    report = zoo.parity(model, stock, torch.randn(4, 3, 96, 96, device="cuda"), gradients=True)
    report.raise_for_failure()
    seen = zoo.coverage(model, torch.randn(2, 3, 64, 64, device="cuda"))
    assert seen.ok and [m.name for m in seen.modules if m.status == "custom"] == ["fc"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mlp_trains_as_the_stock_one_under_autocast(dtype):
    def losses(custom):
        torch.manual_seed(0)
        model = zoo.create("mlp", custom_linear=custom, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = torch.Generator("cuda").manual_seed(1)
        x = torch.randn(512, 784, device="cuda", generator=data)
        labels = x[:, :10].argmax(1)
        out = []
        for _ in range(60):
            with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
                loss = nn.functional.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    stock, custom = losses(False), losses(True)
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    assert custom[-1] < 0.5 * custom[0]
    for a, b in zip(stock[:10], custom[:10], strict=True):
        assert abs(a - b) <= tolerance * abs(a)


def test_channels_last_model_keeps_its_layout():
    model = zoo.create("resnet18", num_classes=10, device="cuda").to(memory_format=torch.channels_last)
    strides = [p.stride() for p in model.parameters()]
    zoo.patch(model)
    assert strides == [p.stride() for p in model.parameters()]
    assert all(p.is_cuda for p in model.parameters())


def test_half_model():
    model = zoo.create("resnet18", custom_linear=True, device="cuda", dtype=torch.float16)
    assert model(torch.randn(2, 3, 64, 64, device="cuda", dtype=torch.float16)).dtype == torch.float16
