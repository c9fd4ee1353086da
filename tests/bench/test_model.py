from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from zoo.bench import MODELS, ModelReport, bench_model
from zoo.bench import model as bench
from zoo.policy import policy_of

KEYS = (
    "model mode phase peer zoo_img_s peer_img_s speedup custom_share zoo_peak_bytes peer_peak_bytes zoo_loss peer_loss"
)


def run(*models: str, **given: Any) -> ModelReport:
    usual = {"modes": ["fp32"], "peers": ["eager"], "batch": 4, "blocks": 2, "block_seconds": 0.01}
    return bench_model(models or ("mlp",), **{**usual, **given})


def test_rows_of_the_document() -> None:
    report = run(modes=["fp32", "tf32", "bf16"], command="as told")
    assert report.ok, str(report)
    data = json.loads(report.to_json())
    assert (data["ok"], data["schema"], data["command"], data["seed"]) == (True, 1, "as told", 0)
    assert {"device", "driver", "torch", "zoo", "date", "convolutions_tf32"} <= set(data)
    assert [(r["mode"], r["phase"]) for r in data["rows"]] == [
        (mode, phase) for mode in ("fp32", "tf32", "bf16") for phase in ("train", "infer")
    ]
    for row in data["rows"]:
        assert set(KEYS.split()) <= set(row)
        assert row["speedup"] == pytest.approx(row["zoo_img_s"] / row["peer_img_s"])
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert (row["custom_share"], row["zoo_peak_bytes"]) == (1.0, None)
        assert row["loss_difference"] == pytest.approx(abs(row["zoo_loss"] / row["peer_loss"] - 1), abs=1e-9)
        assert 0 <= row["output_difference"] < 1e-2
        assert (row["batch"], row["blocks"]) == (4, 2)
    text = str(report)
    assert text.splitlines()[-1] == "6 rows, all outputs and losses agree"
    assert max(map(len, text.splitlines())) <= 120


def test_a_convolutional_model() -> None:
    (row,) = run("resnet18", image=32, batch=2, phases=["train"]).rows
    assert row.ok, row.failure
    assert row.custom_share is not None and 0 < row.custom_share < 0.05


def test_compiled_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    monkeypatch.setattr(bench, "compiled", lambda model: torch.compile(model, backend=backend, dynamic=False))
    (row,) = run(peers=["compiled"], phases=["infer"]).rows
    assert row.ok and row.peer == "compiled"
    custom, stock = graphs
    assert any("zoo" in target for target in custom)
    assert not any("zoo" in target for target in stock)


def test_training_really_trains_and_inference_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[nn.Module] = []
    real = bench.create

    def create(*args: Any, **given: Any) -> nn.Module:
        models.append(real(*args, **given))
        return models[-1]

    monkeypatch.setattr(bench, "create", create)
    torch.manual_seed(0)
    fresh = zoo.create("mlp")
    train, infer = run().rows
    trained, trained_custom, as_it_was, custom_as_it_was = models
    for model in (as_it_was, custom_as_it_was):
        assert torch.equal(model[0].weight, fresh[0].weight) and not model.training
    for model in (trained, trained_custom):
        assert not torch.equal(model[0].weight, fresh[0].weight) and model.training
    assert train.zoo_loss != infer.zoo_loss
    for stock, custom in ((trained, trained_custom), (as_it_was, custom_as_it_was)):
        assert policy_of(custom) and not policy_of(stock), "zoo.create(..., custom_linear=True) made the one"
    assert all(p.grad is None for model in models for p in model.parameters())


def test_one_side_is_stock_and_the_other_custom(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[nn.Module] = []
    real = bench._Side

    def side(model: nn.Module, *args: Any) -> Any:
        sides.append(model)
        return real(model, *args)

    monkeypatch.setattr(bench, "_Side", side)
    run(phases=["infer"])
    custom, stock = sides
    assert isinstance(custom[0], zoo.layers.Linear) and type(stock[0]) is nn.Linear
    assert torch.equal(custom[0].weight, stock[0].weight)


@pytest.mark.parametrize("factor", [1.002, math.nan])
@pytest.mark.parametrize("phase", ["train", "infer"])
def test_a_wrong_layer_fails(monkeypatch: pytest.MonkeyPatch, factor: float, phase: str) -> None:
    monkeypatch.setattr(zoo.layers.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias) * factor)
    report = run(phases=[phase])
    assert not report.ok
    assert report.rows[0].failure.startswith("the logits of the first step differ by ")
    assert "1 of 1 rows FAILED" in str(report)
    json.loads(report.to_json())


def test_a_wrong_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo.layers.Linear, "forward", lambda self, x: F.linear(x, self.weight.detach(), self.bias))
    monkeypatch.setattr(bench, "LEARNING_RATE", 0.1)
    (row,) = run(phases=["train"], block_seconds=0.1).rows
    assert row.failure.startswith("the losses of the last step differ by ")


def test_a_side_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: nn.Module) -> Any:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(bench, "compiled", fail)
    kept: list[ModelReport] = []
    report = run(peers=["compiled", "eager"], phases=["infer"], checkpoint=kept.append)
    compiled, eager = report.rows
    assert (compiled.failure, compiled.speedup, eager.ok) == ("RuntimeError: no compiler", None, True)
    assert [(len(r.rows), r.complete) for r in kept] == [(1, False), (2, False)]
    assert not report.ok and report.complete


def test_settings_and_random_numbers_come_back() -> None:
    before, state = torch.get_float32_matmul_precision(), torch.get_rng_state()
    run(modes=["tf32"])
    assert torch.get_float32_matmul_precision() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_what_cannot_be_is_refused() -> None:
    for given, message in (
        ({"modes": ["fp16"]}, "mode 'fp16': expected one or more of fp32, tf32, bf16"),
        ({"phases": ["test"]}, "phase 'test'"),
        ({"peers": ["jax"]}, "peer 'jax'"),
        ({"batch": 0}, "batch=0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**given)
    with pytest.raises(ValueError, match="unknown model 'resnet19'"):
        run("mlp", "resnet19")
    with pytest.raises(ValueError, match=r"timm/vit_tiny_patch16_224 does not take images of shape \(2, 3, 32, 32\)"):
        run("timm/vit_tiny_patch16_224", image=32, batch=2)


def test_difference() -> None:
    a, zero = torch.tensor([3.0, 4.0]), torch.zeros(2)
    assert bench.difference(a * 1.01, a) == pytest.approx(0.01)
    assert bench.difference(zero, zero) == 0.0  # a head that begins as zeros
    assert math.isnan(bench.difference(a * math.nan, a))
    assert bench.difference(a, zero) == math.inf


def test_default_models_exist() -> None:
    known = set(zoo.list_models())
    assert len(MODELS) == 5 and set(MODELS) <= known
