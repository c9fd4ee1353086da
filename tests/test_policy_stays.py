"""A model's policy goes where the model goes, or the next coverage report says what was lost."""

import copy
import pickle

import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from timm.utils.model import reparameterize_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

import zoo
from zoo.policy import policy_of

NAMES = ("blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "head")


def vit(**options):
    options = {"img_size": 32, "patch_size": 8, "depth": 1, "num_classes": 10, "custom_linear": True, **options}
    torch.manual_seed(0)
    return zoo.create("timm/vit_tiny_patch16_224", **options).eval()


@pytest.fixture
def image():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def by_status(model, image):
    found = {}
    for module in zoo.coverage(model, image).modules:
        found.setdefault(module.status, set()).add(module.name)
    return found


def all_run(model, image, prefix=""):
    found = zoo.coverage(model, image)
    assert {m.name.removeprefix(prefix) for m in found.modules if m.status == "custom"} == set(NAMES)
    assert all(unit.status == "as one" for unit in found.units), found
    return True


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_ema(model):
    ema = ModelEmaV3(model, decay=0.5)
    ema.update(model, step=1)
    return ema.module


def through_averaging(model):
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    return averaged.module


def through_a_new_head(model):
    model.reset_classifier(7)
    assert model.head.out_features == 7
    return model


@pytest.mark.parametrize(
    "go", [copy.deepcopy, through_pickle, through_ema, through_averaging, through_a_new_head], ids=lambda f: f.__name__
)
def test_it_goes_along(image, go):
    model = vit()
    policy = policy_of(model)
    gone = go(model)
    assert policy_of(gone) == policy != ()
    assert all_run(gone, image)


def test_it_goes_through_a_checkpoint_of_timm(image, tmp_path):
    model = vit()
    torch.save({"state_dict": vit(custom_linear=False).state_dict()}, tmp_path / "weights.pth")
    timm.models.load_checkpoint(model, str(tmp_path / "weights.pth"))
    assert all_run(model, image)


def test_a_linear_added_later_is_named(image):
    model = vit()
    model.norm = nn.Sequential(model.norm, nn.Linear(192, 192))
    found = zoo.coverage(model, image)
    (late,) = (m for m in found.modules if m.status == "skipped")
    assert late.name == "norm.1" and "made after the patch; patch again" in late.reason
    zoo.patch(model)
    assert "norm.1" in by_status(model, image)["custom"]


def test_linears_that_fuse_makes_are_named():
    image = torch.randn(2, 3, 224, 224)
    model = zoo.create("timm/levit_128s", custom_linear=True, num_classes=10).eval()
    with torch.no_grad():
        before = model(image)
        fused = reparameterize_model(model)
        torch.testing.assert_close(fused(image), before, atol=1e-3, rtol=1e-3)
    found = zoo.coverage(fused, image)
    made = [m for m in found.modules if type(fused.get_submodule(m.name)) is nn.Linear]
    assert made, "else this tests nothing"
    assert all(m.status == "skipped" and "patch again" in m.reason for m in made)
    zoo.patch(fused)
    assert all(m.status == "custom" for m in zoo.coverage(fused, image).modules)


def test_lora_on_top(image):
    peft = pytest.importorskip("peft")
    model = vit()
    before = model(image)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv", "fc1", "fc2"], r=4)).eval()
    torch.testing.assert_close(wrapped(image), before)  # its B begins at zero
    found = by_status(wrapped, image)
    custom = {name.replace(".base_layer", "").removeprefix("base_model.model.") for name in found.pop("custom")}
    assert custom == set(NAMES)
    # its own small Linears are stock ones, and are named
    assert set(found) == {"skipped"} and all(".lora_" in name for name in found["skipped"])
    wrapped(image).sum().backward()
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "lora_" in name)
    assert all(p.grad is None for name, p in wrapped.named_parameters() if ".base_layer." in name)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(image), before)
    assert all_run(merged, image)


def test_quantisation_on_top(image):
    quantization = pytest.importorskip("torchao.quantization")
    model = vit()
    want = vit(custom_linear=False)
    for one in (model, want):
        quantization.quantize_(one, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        assert torch.equal(model(image), want(image))  # torchao's own product, as without zoo
    found = zoo.coverage(model, image)
    assert {m.name for m in found.modules if m.status == "fell back"} == set(NAMES)
    assert str(found).count("brings its own linear") == len(NAMES) + 1  # and the unit
    assert found.share == 0
