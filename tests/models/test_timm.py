from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from zoo.models import timm as door
from zoo.registry import build


def test_names_are_timms():
    assert door.names() == timm.list_models()
    assert len(door.names()) > 1000


def test_options_reach_the_model():
    torch.manual_seed(0)
    ours = build("timm/test_resnet", {"num_classes": 4, "in_chans": 1})
    torch.manual_seed(0)
    theirs = timm.create_model("test_resnet", num_classes=4, in_chans=1)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert ours.eval()(torch.zeros(1, 1, 64, 64)).shape == (1, 4)


@pytest.mark.parametrize(
    ("name", "known"),
    [("test_resnet", "drop_rate"), ("test_vit", "patch_size"), ("test_byobnet", "stem_type"), ("test_convnext", "")],
)
def test_an_unknown_option_is_refused_with_those_there_are(name, known):
    with pytest.raises(TypeError, match="'nonsense'") as caught:
        build(f"timm/{name}", {"nonsense": 1})
    assert f"timm/{name}" in str(caught.value)
    assert known in str(caught.value)
    assert "num_classes" in str(caught.value) or name == "test_byobnet"


@pytest.mark.parametrize("option", ["pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path"])
def test_what_is_about_weights_is_refused_with_the_remedy(option):
    with pytest.raises(TypeError, match=rf"'{option}'.*weights="):
        build("timm/test_resnet", {option: "a1_in1k"})


def test_an_option_that_timm_would_drop_is_refused():
    with pytest.raises(TypeError, match=r"'nonsense'.*None"):
        build("timm/test_resnet", {"nonsense": None})


def test_a_type_error_about_something_else_stays_what_it_is():
    with pytest.raises(TypeError) as caught:
        build("timm/test_resnet", {"num_classes": "many"})
    assert "does not take the option" not in str(caught.value)


def test_a_tag_sets_classes_and_preprocessing_without_weights():
    with torch.device("meta"):
        model = door.build("vit_base_patch16_224", "augreg_in21k")
        usual = build("timm/vit_base_patch16_224", {})
    assert model.num_classes == 21843
    assert model.pretrained_cfg["tag"] == "augreg_in21k"
    assert usual.num_classes == 1000


@pytest.fixture
def file_of(monkeypatch):
    """What timm gets instead of a download."""

    def give(tensors: dict[str, torch.Tensor]) -> None:
        monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *a, **k: dict(tensors))

    return give


def test_pretrained_loads_all(file_of):
    source = timm.create_model("test_resnet")
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    file_of(source.state_dict())
    model = door.build_pretrained("test_resnet", "r160_in1k", {})
    for key, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor)


@pytest.mark.parametrize("lost", ["layer1.0.conv1.weight", "bn1.running_mean"])
def test_what_timm_would_leave_at_random_is_refused(file_of, lost):
    tensors = timm.create_model("test_resnet", num_classes=7).state_dict()
    del tensors[lost]
    file_of(tensors)
    # Other classes make timm's load lenient about everything.
    with pytest.raises(ValueError, match=rf"'r160_in1k'.*{lost}"):
        door.build_pretrained("test_resnet", "r160_in1k", {"num_classes": 7})


def test_absent_counters_are_allowed(file_of):
    tensors = timm.create_model("test_resnet").state_dict()
    file_of({key: t for key, t in tensors.items() if not key.endswith("num_batches_tracked")})
    door.build_pretrained("test_resnet", "r160_in1k", {})
