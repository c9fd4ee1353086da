"""Claims about whole models: each has a saboteur that it finds, and flags no honest layer."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from support import honest
from support.model_saboteurs import IN_MODELS, FallsBack, two_of_four, untransposed_if_square
from zoo.layers import Linear, list_layers
from zoo.layers.registry import registered
from zoo.parity import RESAMPLES
from zoo.verify.claims import learning
from zoo.verify.claims.captured import calls_of
from zoo.verify.claims.models import claims_of, named
from zoo.verify.models import small_model, stock_model, swapped
from zoo.verify.outcome import FAIL, PASS, UNTESTED, Untested
from zoo.verify.running import claim_named, judge_claim
from zoo.verify.subject import Subject

CPU = torch.device("cpu")
AUTOCAST = ("model-autocast@mlp", "model-captured@mlp", "model-sgd-autocast@mlp")


@pytest.mark.parametrize(("layer", "name"), [pytest.param(*i, id=f"{i[0].__name__}-{i[1]}") for i in IN_MODELS.items()])
def test_a_saboteur_is_caught(layer: object, name: str) -> None:
    claim = named(f"{name}@mlp")
    assert claim is not None
    verdict = judge_claim(claim, Subject(layer))
    assert verdict.status == FAIL and verdict.reason, verdict
    assert judge_claim(claim, Subject(Linear)).status == PASS


def test_every_claim_has_a_saboteur() -> None:
    assert {claim.name for claim in claims_of("mlp")} == {f"{name}@mlp" for name in IN_MODELS.values()}


@pytest.mark.parametrize("layer", [*honest.LAYERS, Linear], ids=lambda layer: layer.__qualname__)
def test_an_honest_layer_is_not_flagged(layer: object) -> None:
    built = layer in (nn.Linear, honest.FromScratch)
    for claim in claims_of("mlp"):
        verdict = judge_claim(claim, Subject(layer), seed=1)
        if layer is honest.Refuses and claim.name in AUTOCAST:
            assert verdict.status == "refused" and "autocast are not supported" in verdict.reason, verdict
        elif built and claim.name == "model-unpatch@mlp":
            assert verdict.status == UNTESTED and "built" in verdict.reason, verdict
        else:
            assert verdict.status == PASS, verdict


def test_what_is_wrong_is_named() -> None:
    def reason(name: str, layer: object) -> str:
        claim = named(f"{name}@mlp")
        assert claim is not None
        return judge_claim(claim, Subject(layer)).reason

    assert "first 0: more than 192 features" in reason("model-runs", FallsBack)
    assert "3 (8, 256)->256 output: error" in reason("model-captured", two_of_four)
    assert "the first gradient to part is 0." in reason("model-gradients", untransposed_if_square)


def wrong_behind_gelu(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, bias) * (1.001 if input.shape[-1] == 192 else 1.0)


def test_the_first_module_that_parts_is_named_in_a_transformer() -> None:
    claim = claim_named("model-outputs@timm/test_vit")
    assert "the first layer to part is blocks.0.mlp.fc2: error" in judge_claim(claim, Subject(wrong_behind_gelu)).reason


# the parts


def test_captured_calls_are_what_the_layers_had() -> None:
    model, images = stock_model("mlp", CPU)
    calls = calls_of(model, images, ("0", "3", "6"))
    assert [str(call) for call in calls] == [
        "0 (8, 784)->256",
        "3 (8, 256)->256",
        "6 (8, 256)->10",
    ]
    for call in calls:
        assert call.cotangent is not None
        weight = dict(call.module.named_parameters())["weight"]
        torch.testing.assert_close(call.cotangent.T @ call.input, weight.grad)
    assert not any(module._forward_hooks for module in model.modules())


def test_small_models() -> None:
    _, images = small_model("mlp", CPU)
    assert images.shape == (8, 1, 28, 28)
    for name in ("resnet18", "timm/vit_tiny_patch16_224"):
        model, images = small_model(name, CPU)
        assert images.shape == (4, 3, 64, 64) and model.training
        assert model(images).shape == (4, 1000)


def test_patched_or_built() -> None:
    before = list_layers()
    for layer, how in ((honest.addmm, False), (honest.Sliced, False), (Linear, False), (honest.FromScratch, True)):
        model, images = stock_model("mlp", CPU)
        custom = copy.deepcopy(model)
        with swapped(custom, Subject(layer)) as swap:
            assert bool(swap.built) == how
            assert swap.names == ("0", "3", "6")
            torch.testing.assert_close(custom(images), model(images))
            assert not any(type(m) is nn.Linear for m in custom.modules())
    assert list_layers() == before
    with registered("linear", Linear) as name:
        assert name == "zoo"
    assert list_layers() == before


def test_a_model_without_linears_is_untested() -> None:
    with pytest.raises(Untested, match="no linear layer"), swapped(nn.Sequential(nn.Conv2d(3, 3, 1)), Subject(Linear)):
        pass


def test_models_of_a_run() -> None:
    report = zoo.verify(Linear, models="mlp", claims=("model-runs*", "model-outputs@mlp"), isolate=False)
    assert report.ok and [v.claim for v in report.verdicts] == ["build", "model-runs@mlp", "model-outputs@mlp"]
    with pytest.raises(ValueError, match=r"unknown model 'mlpp'.*mlp"):
        zoo.verify(Linear, models="mlpp", isolate=False)
    with pytest.raises(ValueError, match="no claim matches 'model-runs@resnet18'"):
        zoo.verify(Linear, models="mlp", claims="model-runs@resnet18", isolate=False)


def test_a_model_that_is_too_slow_to_train_is_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "BUDGET", 0.0)
    found = judge_claim(claim_named("model-sgd@mlp"), Subject(Linear))
    assert found.status == UNTESTED and "20 would take too long" in found.reason


def off_by_a_rounding(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, bias) * (1 + 1e-5)


def test_training_excuses_rounding_and_no_more() -> None:
    found = judge_claim(claim_named("model-sgd@mlp"), Subject(off_by_a_rounding))
    assert found.status == FAIL and "after 20 steps, losses: error" in found.reason
    exact, images = small_model("mlp", CPU)
    moved = list(learning._moved(exact, images, 0.0))
    assert len(moved) == RESAMPLES
    for model, other in moved:
        for a, b in ((images, other), (exact[0].weight, model[0].weight)):  # type: ignore[index]
            assert not torch.equal(a, b)
            torch.testing.assert_close(a, b, rtol=1.3e-7, atol=0)


def test_models_differ_by_the_seed_alone() -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        first, again = (stock_model("mlp", CPU)[0].state_dict() for _ in range(2))
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(first[name], again[name]) for name in first)
        return first["0.weight"]

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))


def test_top1_says_where_trained_weights_are() -> None:
    found = judge_claim(claim_named("model-top-1@resnet18"), Subject(Linear))
    assert found.status == UNTESTED and "there are of mlp, and of timm/tf_efficientnet_lite0" in found.reason
