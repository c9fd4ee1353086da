"""Published folders: what timm and zoo load from them, what the card says, and what is never overwritten."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from typer.testing import CliRunner

import zoo
from zoo import publishing, weights_index
from zoo.cli import app
from zoo.publishing import publish
from zoo.train import TrainConfig, read_config, train


def saved(path: Path, name: str, *, dtype: torch.dtype | None = None, **options: Any) -> Path:
    """A checkpoint whose BatchNorms and zeroed branches have values of their own."""
    torch.manual_seed(0)
    model = zoo.create(name, dtype=dtype, **options)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_(torch.rand_like(tensor), alpha=0.3)
    return zoo.save_checkpoint(model, path / "model.safetensors")


def header(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---\n")[1])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {"num_classes": 7, "in_chans": 1}),
        ("torchvision/resnet18", {}),
        ("torchvision/densenet121", {"num_classes": 5}),
        ("timm/test_resnet", {"num_classes": 10, "dtype": torch.bfloat16}),
        ("timm/vit_tiny_patch16_224", {"depth": 1, "img_size": 32, "patch_size": 4, "custom_linear": True}),
    ],
)
def test_timm_gives_the_same_logits_to_the_bit(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    file, target = saved(tmp_path, name, **options), tmp_path / "out"
    report = publish(file, target, license="MIT")
    assert report.timm == name.rpartition("/")[2] and not report.timm_missing
    theirs = timm.create_model(f"local-dir:{target}", pretrained=True).eval()  # what the card says
    ours = zoo.load(target / "model.safetensors").eval()
    zoo.unpatch(ours)
    side = 32 if options.get("img_size") else 64
    images = torch.randn(3, options.get("in_chans", 3), side, side)
    with torch.no_grad():
        assert torch.equal(theirs(images), ours.float()(images))
    assert theirs.num_classes == options.get("num_classes", 1000)
    assert (header(target)["library_name"], header(target)["license"]) == ("timm", "mit")
    assert "timm.create_model" in (target / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mlp", "timm has no architecture mlp"),
        ("torchvision/alexnet", "timm has no architecture alexnet"),
        ("torchvision/convnext_tiny", "timm's convnext_tiny is another: KeyError: 'classifier.2.weight'"),
    ],
)
def test_where_timm_cannot_load_it_the_report_says_why(tmp_path: Path, name: str, reason: str) -> None:
    report = publish(saved(tmp_path, name, num_classes=3), tmp_path / "out", license="mit")
    assert (report.timm, report.timm_missing, report.accuracy) == (None, reason, None)
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ("prepared as `zoo.data.eval_transform(" in text) == (name != "mlp")
    assert "timm" not in text and "| top-1 | not stated by its checkpoint |" in text
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["zoo_model"] == {"name": name, "options": {"num_classes": 3}}
    assert isinstance(zoo.load(tmp_path / "out" / "model.safetensors"), torch.nn.Module)


def test_other_logits_of_timm_are_not_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = timm.create_model

    def off(name: str, **given: Any) -> Any:
        model = real(name, **given)
        if given.get("pretrained"):
            model.fc.bias.data[0] += 1e-6
        return model

    monkeypatch.setattr(timm, "create_model", off)
    report = publish(saved(tmp_path, "resnet18"), tmp_path / "out", license="mit")
    assert report.timm_missing == "the logits of timm's resnet18 are not the same to the bit"


def test_a_run_with_its_recipe_and_without_this_machines_folders(tmp_path: Path) -> None:
    place = tmp_path / "private" / "digits_as_photos"
    from PIL import Image

    for part in ("train", "val"):
        for label in ("a", "b"):
            (place / part / label).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (32, 32), (60 * number, 9, 9)).save(place / part / label / f"{number}.png")
    start = saved(tmp_path / "private", "resnet18", num_classes=2)
    config = TrainConfig(
        model="resnet18", data=str(place), weights=str(start), epochs=1, batch_size=4, size=32, device="cpu"
    )
    train(config, tmp_path / "run")
    report = publish(tmp_path / "run", tmp_path / "out", license="cc-by-4.0")
    assert report.files == ("README.md", "config.json", "config.toml", "model.safetensors")
    for file in (tmp_path / "out").iterdir():
        assert b"private" not in file.read_bytes(), file
    fields = read_config(tmp_path / "out" / "config.toml")
    assert (fields["data"], fields["weights"], fields["epochs"]) == ("digits_as_photos", "model.safetensors", 1)
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "zoo train --config config.toml" in text and "The weights are those after step 2." in text
    assert f"{report.accuracy:.2%}, on the validation part of digits_as_photos" in text
    ((result,),) = (entry["results"] for entry in header(tmp_path / "out")["model-index"])
    assert result["dataset"] == {"name": "digits_as_photos", "type": "digits_as_photos", "split": "val"}
    assert result["metrics"][0]["value"] == report.accuracy
    prepared = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["pretrained_cfg"]
    assert (prepared["input_size"], prepared["crop_pct"], prepared["interpolation"]) == ([3, 32, 32], 0.875, "bilinear")
    assert prepared["mean"] == [0.485, 0.456, 0.406]


@pytest.mark.parametrize(
    ("name", "header", "told"),
    [
        ("resnet50", {}, (3, 224, 224 / 232, "bilinear", 0.485)),
        ("timm/resnet50", {}, (3, 224, 0.95, "bicubic", 0.485)),
        ("resnet18", {"data": "fashion_mnist"}, (3, 28, 1.0, "bilinear", 0.0)),
    ],
)
def test_images_are_prepared_as_when_the_accuracy_was_measured(
    tmp_path: Path, name: str, header: dict[str, str], told: tuple[Any, ...]
) -> None:
    torch.manual_seed(0)
    file = zoo.save_checkpoint(zoo.create(name), tmp_path / "model.safetensors", metadata=header)
    publish(file, tmp_path / "out", license="mit")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    got = config["pretrained_cfg"]
    assert (*got["input_size"][:2], got["crop_pct"], got["interpolation"], got["mean"][0]) == pytest.approx(told)
    assert ("label_names" in config) == bool(header)
    from timm.data import create_transform, resolve_data_config

    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    transform = create_transform(**resolve_data_config({}, model=model))
    assert f"CenterCrop(size=({told[1]}, {told[1]}))" in str(transform).replace("torch.Size", "")


def test_zoos_own_weights(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["publish", "mlp.fashion_mnist", "-o", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["ok"], report["accuracy"], report["license"]) == (True, 0.9075, "mit")
    entry = weights_index.find("mlp.fashion_mnist")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert entry.recipe["command"] in text and "images (N, 1, 28, 28), float32 in [0, 1]" in text
    assert header(tmp_path / "out")["datasets"] == ["zalando-datasets/fashion_mnist"]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    here = Path.cwd()
    os.chdir(tmp_path / "out")
    try:
        namespace: dict[str, Any] = {}
        exec(code, namespace)
    finally:
        os.chdir(here)
    reference = zoo.create("mlp", weights="mlp.fashion_mnist").eval()
    images = torch.rand(4, 1, 28, 28)
    assert torch.equal(namespace["model"](images), reference(images))


def test_nothing_is_overwritten_and_nothing_half_done_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path, "mlp")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for name in ("full", "file"):
        with pytest.raises(FileExistsError, match=f"{name}: it is there already and stays as it is"):
            publish(file, tmp_path / name, license="mit")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        publish(file, tmp_path / "no" / "where", license="mit")
    (tmp_path / "empty").mkdir()
    publish(file, tmp_path / "empty", license="mit")
    assert (tmp_path / "empty" / "model.safetensors").is_file()

    def taken(about: Any) -> str:
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "kept").write_text("kept")
        return ""

    def broken(about: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(publishing, "card", taken)
    with pytest.raises(FileExistsError, match="late: it appeared meanwhile"):
        publish(file, tmp_path / "late", license="mit")
    monkeypatch.setattr(publishing, "card", broken)
    with pytest.raises(KeyboardInterrupt):
        publish(file, tmp_path / "broken", license="mit")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "file", "full", "late", "model.safetensors"}
    assert [path.name for path in (tmp_path / "late").iterdir()] == ["kept"]


def test_what_cannot_be_published_is_refused(tmp_path: Path) -> None:
    file, out = saved(tmp_path, "mlp"), tmp_path / "out"
    with pytest.raises(ValueError, match="license: got none; say under which one"):
        publish(file, out)
    with pytest.raises(FileNotFoundError, match=r"nowhere: there is no such file or folder; .* mlp\.digits"):
        publish("nowhere", out, license="mit")
    with pytest.raises(ValueError, match=r"there is no config\.toml in this folder"):
        publish(tmp_path, out, license="mit")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('model = "mlp"\ndata = "digits"\n')
    with pytest.raises(FileNotFoundError, match="the run has not come to its end; go on with zoo train --resume"):
        publish(tmp_path / "run", out, license="mit")
    model = zoo.create("mlp")
    with torch.no_grad():
        model[3].bias[7] = float("nan")
    with pytest.raises(ValueError, match=r"3\.bias is not finite"):
        publish(zoo.save_checkpoint(model, tmp_path / "nan.safetensors"), out, license="mit")
    with pytest.raises(ValueError, match="a torch file does not say which model it holds"):
        publish(zoo.save_checkpoint(model, tmp_path / "plain.pth"), out, license="mit")
    (tmp_path / "text.safetensors").write_text("no")
    with pytest.raises(ValueError, match=r"text\.safetensors"):
        publish(tmp_path / "text.safetensors", out, license="mit")
    assert not out.exists()
