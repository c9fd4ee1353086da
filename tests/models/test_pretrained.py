from __future__ import annotations

import dataclasses
import re
import urllib.error

import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import DenseNet121_Weights, ResNet18_Weights, ResNet50_Weights, get_model_weights

from zoo import weights_index
from zoo.factory import create
from zoo.models import pretrained
from zoo.registry import build, register_model, spec_of


def shuffled(model: nn.Module) -> nn.Module:
    """With values that no initialisation gives."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 0.2)
    return model


def same(model: nn.Module, tensors: dict[str, torch.Tensor], *, but: str = "\0") -> bool:
    state = model.state_dict()
    return all(torch.equal(state[key], tensor) for key, tensor in tensors.items() if not key.startswith(but))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A place for files as torch.hub would keep them; downloading is an error."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)

    def refuse(url, *args, **kwargs):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    return folder


@pytest.fixture
def offline_hub(tmp_path, monkeypatch):
    """An empty Hugging Face cache without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path / "hf"


def cache(folder, repository: str, tensors: dict[str, torch.Tensor]) -> None:
    """Put a file where the Hugging Face client keeps it."""
    root = folder / f"models--{repository.replace('/', '--')}"
    (root / "snapshots" / "abc").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, root / "snapshots/abc/model.safetensors")


# Names


@pytest.mark.parametrize(
    ("model", "listed", "foreign"),
    [
        ("resnet50", ["IMAGENET1K_V1", "IMAGENET1K_V2", "DEFAULT", "a1_in1k", "tv2_in1k", "ram_in1k"], "mlp.digits"),
        ("torchvision/resnet18", ["IMAGENET1K_V1", "DEFAULT"], "a1_in1k"),
        ("timm/resnet18", ["a1_in1k", "tv_in1k"], "IMAGENET1K_V1"),
        ("mlp", ["mlp.digits", "mlp.fashion_mnist"], "IMAGENET1K_V1"),
    ],
)
def test_a_wrong_name_lists_the_right_ones(model, listed, foreign):
    for wrong in ("IMAGENET1K_V9", "imagenet1k_v1", ResNet50_Weights if model != "resnet50" else True):
        with pytest.raises(ValueError, match="unknown weights") as caught:
            pretrained.find(model, wrong)
        text = str(caught.value)
        assert repr(wrong) in text
        assert model in text
        assert all(name in text for name in [*listed, ".safetensors", ".pth"])
        assert foreign not in text.replace(repr(wrong), "")


def test_members_of_torchvisions_enum_are_names_too():
    found = pretrained.find("resnet18", ResNet18_Weights.DEFAULT)
    assert (found.name, found.num_classes) == ("IMAGENET1K_V1", 1000)
    with pytest.raises(ValueError, match="IMAGENET1K_V1"):
        pretrained.find("resnet18", ResNet50_Weights.IMAGENET1K_V2)


def test_every_name_of_torchvision_is_known():
    for model in torchvision.models.list_models(module=torchvision.models):
        for name in get_model_weights(model).__members__:
            assert pretrained.find(f"torchvision/{model}", name).num_classes in (1000, None)


def test_every_tag_of_timm_is_known():
    for full in timm.list_pretrained("vit_base*") + timm.list_pretrained("resnet*"):
        model, _, tag = full.partition(".")
        assert pretrained.find(f"timm/{model}", tag).name == tag
    assert pretrained.find("timm/vit_base_patch16_224", "augreg_in21k").num_classes == 21843
    assert pretrained.find("resnet50", "bamboo").num_classes == 0


def test_a_users_own_model_has_paths_alone():
    register_model("of_a_user")(lambda: nn.Linear(1, 1))
    with pytest.raises(ValueError, match="expected the path of a") as caught:
        pretrained.find("of_a_user", "IMAGENET1K_V1")
    assert "torchvision" not in str(caught.value)


def test_classes_that_do_not_fit_are_refused_with_both_shapes_before_any_download(hub, offline_hub):
    for model, weights, shapes in [
        ("resnet18", "IMAGENET1K_V1", ["(1000, 512)", "(7, 512)"]),
        ("resnet18", "a1_in1k", ["(1000, 512)", "(7, 512)"]),
        ("torchvision/squeezenet1_0", "IMAGENET1K_V1", ["(1000, 512, 1, 1)", "(7, 512, 1, 1)"]),
        ("timm/test_vit", "r160_in1k", ["(1000, 64)", "(7, 64)"]),
        ("timm/vit_tiny_patch16_224", "augreg_in21k", ["(21843, 192)", "(7, 192)"]),
        ("resnet50", "bamboo", ["absent", "(7, 2048)"]),
        ("mlp", "mlp.digits", ["(10, 256)", "(7, 256)"]),
    ]:
        with pytest.raises(ValueError, match="num_classes=7 does not fit") as caught:
            create(model, weights=weights, num_classes=7)
        assert all(shape in str(caught.value) for shape in [*shapes, "reset_head=True", weights])
    with pytest.raises(ValueError, match="absent in the model"):
        create("resnet18", weights="IMAGENET1K_V1", num_classes=0)


def test_reset_head_without_weights_is_refused():
    with pytest.raises(ValueError, match="needs weights"):
        create("resnet18", reset_head=True)


def test_weights_on_the_meta_device_are_refused(hub):
    with pytest.raises(ValueError, match="meta device"):
        create("resnet18", weights="IMAGENET1K_V1", device="meta")


# torchvision's


@pytest.mark.parametrize("model", ["resnet18", "torchvision/resnet18"])
def test_torchvisions_file_loads_strictly(hub, model):
    theirs = shuffled(torchvision.models.resnet18()).state_dict()
    file = hub / "resnet18-f37072fd.pth"
    torch.save(theirs, file)
    assert same(create(model, weights="IMAGENET1K_V1"), theirs)
    assert same(create(model, weights="DEFAULT", dtype=torch.float64).float(), theirs)

    torch.manual_seed(8)
    fresh = build(model, {"num_classes": 7})
    torch.manual_seed(8)
    other = create(model, weights="IMAGENET1K_V1", num_classes=7, reset_head=True)
    assert same(other, theirs, but="fc.")
    assert torch.equal(other.fc.weight, fresh.fc.weight)

    del theirs["layer1.0.conv1.weight"]
    torch.save(theirs, file)
    for options in ({}, {"num_classes": 7, "reset_head": True}):
        with pytest.raises(ValueError, match=r"layer1\.0\.conv1\.weight"):
            create(model, weights="IMAGENET1K_V1", **options)


def test_a_headless_model_takes_all_but_the_head(hub):
    theirs = shuffled(torchvision.models.resnet18()).state_dict()
    torch.save(theirs, hub / "resnet18-f37072fd.pth")
    model = create("resnet18", weights="DEFAULT", num_classes=0, reset_head=True)
    assert same(model, {key: t for key, t in theirs.items() if not key.startswith("fc.")})
    assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 512)


@pytest.mark.parametrize("in_chans", [1, 4])
def test_other_input_channels_take_what_timm_makes_of_them(hub, in_chans):
    theirs = shuffled(torchvision.models.resnet18()).state_dict()
    torch.save(theirs, hub / "resnet18-f37072fd.pth")
    model = create("resnet18", weights="IMAGENET1K_V1", in_chans=in_chans)
    expected = timm.models.adapt_input_conv(in_chans, theirs["conv1.weight"])
    assert expected.shape[1] == in_chans
    assert torch.equal(model.conv1.weight, expected)
    assert same(model, theirs, but="conv1.")


def test_densenets_old_keys(hub):
    theirs = shuffled(torchvision.models.densenet121())
    old = {re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", key): t for key, t in theirs.state_dict().items()}
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, hub / DenseNet121_Weights.DEFAULT.url.rpartition("/")[2])
    assert same(create("torchvision/densenet121", weights="DEFAULT"), theirs.state_dict())


def test_googlenets_auxiliary_heads_come_only_if_asked_for(hub):
    theirs = shuffled(torchvision.models.googlenet(init_weights=False)).state_dict()
    torch.save(theirs, hub / "googlenet-1378be20.pth")
    model = create("torchvision/googlenet", weights="DEFAULT")
    assert model.aux1 is None
    assert model.transform_input
    assert same(model, {key: tensor for key, tensor in theirs.items() if not key.startswith("aux")})
    assert spec_of(model).options == {"aux_logits": False, "transform_input": True, "init_weights": False} | {
        "num_classes": 1000
    }
    both = create("torchvision/googlenet", weights="DEFAULT", aux_logits=True, transform_input=False)
    assert same(both, theirs)
    assert not both.transform_input
    few = create("torchvision/googlenet", weights="DEFAULT", aux_logits=True, num_classes=3, reset_head=True)
    assert few.aux1.fc2.out_features == 3
    assert torch.equal(few.aux1.fc1.weight, theirs["aux1.fc1.weight"])


def test_weights_set_the_image_size_that_they_need():
    found = pretrained.find("torchvision/vit_b_16", "IMAGENET1K_SWAG_E2E_V1")
    assert found.complete({}, reset_head=False)["image_size"] == 384
    assert found.complete({"image_size": 384}, reset_head=False)["image_size"] == 384
    with pytest.raises(ValueError, match=r"image_size=384.*got image_size=224"):
        found.complete({"image_size": 224}, reset_head=False)


def test_without_a_network_the_error_says_what_to_do(hub):
    with pytest.raises(OSError, match="no network here") as caught:
        create("resnet18", weights="IMAGENET1K_V1")
    url = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    for part in ("'IMAGENET1K_V1' of resnet18", url, str(hub / "resnet18-f37072fd.pth"), "weights='path"):
        assert part in str(caught.value)


def test_a_download_is_checked_by_its_hash(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    source = tmp_path / "resnet18-f37072fd.pth"
    torch.save({"not": torch.zeros(1)}, source)
    fake = dataclasses.replace(ResNet18_Weights.IMAGENET1K_V1.value, url=source.as_uri())
    monkeypatch.setattr(ResNet18_Weights.IMAGENET1K_V1, "_value_", fake)
    with pytest.raises(ValueError, match="invalid hash value"):
        create("resnet18", weights="IMAGENET1K_V1")


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>"])
def test_a_damaged_file_is_named(hub, content):
    file = hub / "resnet18-f37072fd.pth"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="delete it") as caught:
        create("resnet18", weights="IMAGENET1K_V1")
    assert str(file) in str(caught.value)


def test_nothing_but_weights_is_unpickled(hub, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    torch.save({"fc.weight": Evil()}, hub / "resnet18-f37072fd.pth")
    with pytest.raises(ValueError, match=r"resnet18-f37072fd\.pth"):
        create("resnet18", weights="IMAGENET1K_V1")
    assert not (tmp_path / "pwned").exists()


# timm's


def test_timms_file_loads_strictly(offline_hub):
    theirs = shuffled(timm.create_model("test_vit")).state_dict()
    cache(offline_hub, "timm/test_vit.r160_in1k", theirs)
    model = create("timm/test_vit", weights="r160_in1k")
    assert same(model, theirs)

    torch.manual_seed(8)
    fresh = build("timm/test_vit", {"num_classes": 7})
    torch.manual_seed(8)
    other = create("timm/test_vit", weights="r160_in1k", num_classes=7, reset_head=True)
    assert same(other, theirs, but="head.")
    assert torch.equal(other.head.weight, fresh.head.weight)
    assert spec_of(other).options == {"num_classes": 7}


def test_timms_tag_brings_its_preprocessing(offline_hub):
    theirs = timm.create_model("resnet18").state_dict()
    cache(offline_hub, "timm/resnet18.a2_in1k", theirs)
    assert create("timm/resnet18", weights="a2_in1k").pretrained_cfg["tag"] == "a2_in1k"
    assert create("timm/resnet18").pretrained_cfg["tag"] != "a2_in1k"


def test_timms_adaptations_stay(offline_hub):
    theirs = shuffled(timm.create_model("test_vit")).state_dict()
    cache(offline_hub, "timm/test_vit.r160_in1k", theirs)
    model = create("timm/test_vit", weights="r160_in1k", in_chans=1, img_size=96, num_classes=2, reset_head=True)
    assert model.eval()(torch.zeros(1, 1, 96, 96)).shape == (1, 2)
    summed = theirs["patch_embed.proj.weight"].sum(1, keepdim=True)
    torch.testing.assert_close(model.patch_embed.proj.weight, summed)


def test_a_file_that_lacks_something_is_refused_whatever_the_head(offline_hub):
    theirs = timm.create_model("test_resnet").state_dict()
    del theirs["layer1.0.conv1.weight"]
    cache(offline_hub, "timm/test_resnet.r160_in1k", theirs)
    with pytest.raises((ValueError, RuntimeError), match=r"layer1\.0\.conv1\.weight"):
        create("timm/test_resnet", weights="r160_in1k", num_classes=7, reset_head=True)


@pytest.mark.parametrize("in_chans", [3, 1])
def test_zoos_resnets_take_timms_tags(offline_hub, in_chans):
    theirs = shuffled(timm.create_model("resnet18")).state_dict()
    cache(offline_hub, "timm/resnet18.a1_in1k", theirs)
    model = create("resnet18", weights="a1_in1k", in_chans=in_chans, zero_init_residual=True)
    assert same(model, theirs, but="conv1.")
    assert model.conv1.weight.shape[1] == in_chans


def test_without_a_hub_the_error_says_what_to_do(offline_hub):
    for model in ("timm/resnet18", "resnet18"):
        with pytest.raises(OSError, match=r"Hugging Face repository timm/resnet18\.a1_in1k") as caught:
            create(model, weights="a1_in1k")
        for part in (f"'a1_in1k' of {model}", "model.safetensors", str(offline_hub), "hf download", "weights='path"):
            assert part in str(caught.value)


def test_timms_files_on_the_web(hub, offline_hub):
    url = timm.models.get_pretrained_cfg("legacy_seresnet18.in1k").url
    name = url.rpartition("/")[2]
    with pytest.raises(OSError, match="no network here") as caught:
        create("timm/legacy_seresnet18", weights="in1k")
    assert url in str(caught.value)
    assert str(hub / name) in str(caught.value)
    theirs = shuffled(timm.create_model("legacy_seresnet18")).state_dict()
    torch.save(theirs, hub / name)
    assert same(create("timm/legacy_seresnet18", weights="in1k"), theirs)


def test_timms_files_on_the_web_are_checked_by_their_hash(hub, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *args, **kwargs: asked.append(args))
    pretrained._download("it", "https://example.org/seresnet18-4bb0ce65.pth")
    assert asked == [("https://example.org/seresnet18-4bb0ce65.pth", str(hub / "seresnet18-4bb0ce65.pth"), "4bb0ce65")]


# zoo's own


def test_an_entry_of_the_index():
    entry = weights_index.find("mlp.digits")
    model = create("mlp", weights="mlp.digits")
    assert model.in_features == 64
    assert same(model, load_file(entry.path))
    assert spec_of(model).options == entry.options
    create("mlp", weights="mlp.digits", in_features=64, hidden=(256, 256))
    with pytest.raises(ValueError, match=r"in_features=64.*got in_features=32"):
        create("mlp", weights="mlp.digits", in_features=32)
    few = create("mlp", weights="mlp.digits", num_classes=3, reset_head=True)
    assert same(few, load_file(entry.path), but="6.")
    with pytest.raises(ValueError, match=r"'mlp.digits' are of model 'mlp', got model 'resnet18'"):
        create("resnet18", weights="mlp.digits")


def test_a_file_of_the_index_is_checked_by_its_hash(monkeypatch):
    entry = weights_index.find("mlp.digits")
    monkeypatch.setattr(weights_index, "find", lambda name: dataclasses.replace(entry, sha256="0" * 64))
    with pytest.raises(ValueError, match="sha256"):
        create("mlp", weights="mlp.digits")


# Paths


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_path(tmp_path, suffix):
    theirs = shuffled(torchvision.models.resnet18(num_classes=5)).state_dict()
    path = tmp_path / f"file.{suffix}"
    save_file(theirs, path) if suffix == "safetensors" else torch.save(theirs, path)
    for weights in (path, str(path)):
        assert same(create("resnet18", weights=weights, num_classes=5), theirs)
    with pytest.raises(ValueError, match=r"fc\.weight") as caught:
        create("resnet18", weights=path)
    assert "(5, 512)" in str(caught.value)
    assert "(1000, 512)" in str(caught.value)
    assert path.name in str(caught.value)
    assert same(create("resnet18", weights=path, reset_head=True), theirs, but="fc.")


@pytest.mark.parametrize("path", ["nope.pth", "nope.safetensors", "timm/a1_in1k"])
def test_a_path_without_a_file_is_named(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(repr(path))):
        create("resnet18", weights=path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        create("resnet18", weights=tmp_path / "nowhere")
