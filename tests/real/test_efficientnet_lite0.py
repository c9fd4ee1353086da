"""Real ImageNet weights, from another project's file, through timm's model with its Linear swapped,
on real photographs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import zoo
from zoo.data import image_folder, top1
from zoo.layers import Linear
from zoo.verify.running import claim_named, judge_claim
from zoo.verify.subject import Subject

NAME = "timm/tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def weights(lite0_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The author's file under timm's names: the tensors are the same ones in the same order."""
    theirs = torch.load(lite0_weights, weights_only=True)
    names = zoo.create(NAME, device="meta").state_dict()
    assert len(theirs) == len(names) == 296
    path = tmp_path_factory.mktemp("lite0") / "lite0.pth"
    torch.save(dict(zip(names, theirs.values(), strict=True)), path)
    return path


@pytest.fixture(scope="module")
def models(weights: Path) -> dict[str, nn.Module]:
    return {
        n: zoo.create(NAME, weights=str(weights), custom_linear=c).eval()
        for n, c in (("stock", False), ("custom", True))
    }


@pytest.fixture(scope="module")
def photographs(photo_folder: Path) -> DataLoader[object]:
    # as the weights were trained, not as timm's own of the same name: (x - 127) / 128
    prepare = v2.Compose(
        [
            v2.Resize(256, interpolation=v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(224),
            v2.PILToTensor(),
            v2.Lambda(lambda pixels: (pixels.float() - 127) / 128),
        ]
    )
    return DataLoader(image_folder(photo_folder, transform=prepare), batch_size=20)


def test_eighteen_of_twenty_are_named_rightly(models: dict[str, nn.Module], photographs: DataLoader[object]) -> None:
    assert top1(models, photographs) == {"stock": 18 / 20, "custom": 18 / 20}


def test_logits_are_within_the_rule(models: dict[str, nn.Module], photographs: DataLoader[object]) -> None:
    ((images, _),) = photographs
    assert images.shape == (20, 3, 224, 224)
    report = zoo.coverage(models["custom"], images[:1])
    assert [(m.name, m.status) for m in report.modules] == [("classifier", "custom")]
    report = zoo.parity(models["custom"], models["stock"], images)
    assert report.ok and not report.weights_differ, report
    assert report.worst.shape == (20, 1000)


@pytest.mark.usefixtures("lite0_weights", "photo_folder")
def test_verify_judges_by_them() -> None:
    claim = claim_named(f"model-top-1@{NAME}")
    verdict = judge_claim(claim, Subject(Linear))
    assert verdict.status == "pass", verdict
    verdict = judge_claim(claim, Subject(_one_class_less))
    assert verdict.status == "fail" and "18 of the stock model's" in verdict.reason


def _one_class_less(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The third image's class is never named."""
    output = nn.functional.linear(input, weight, bias)
    return output.index_fill(-1, output[2].argmax(), float(output.min()))
