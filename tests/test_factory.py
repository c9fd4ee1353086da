from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import zoo
from zoo.factory import create
from zoo.registry import _builders, register_model
from zoo.swap import policy_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def mine() -> type[nn.Linear]:
    @zoo.register_layer("linear", "mine")
    class Mine(nn.Linear):
        def forward(self, input):
            return super().forward(input)

    return Mine


def swapped(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, zoo.layers.Linear)]


SMALL = {"in_features": 4, "hidden": [3, 3], "num_classes": 2}


@pytest.mark.parametrize(
    ("custom_linear", "names"),
    [
        (False, []),
        (True, ["0", "3", "6"]),
        ("head", ["6"]),
        (["0", "[3]"], ["0", "3"]),
        (("?",), ["0", "3", "6"]),
        (lambda name, module: module.in_features == 4, ["0"]),
    ],
)
def test_custom_linear(custom_linear, names):
    torch.manual_seed(0)
    model = create("mlp", custom_linear=custom_linear, **SMALL)
    assert swapped(model) == names
    torch.manual_seed(0)
    stock = create("mlp", **SMALL)
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), stock(x))
    assert list(model.state_dict()) == list(stock.state_dict())


@pytest.mark.parametrize(
    "custom_linear", ["fc", "*", [], (), [1], ["fc", None], None, 1, 0, 1.0, {"fc": True}, nn.Linear, {"fc"}], ids=str
)
def test_other_custom_linear_is_refused(custom_linear):
    with pytest.raises(ValueError, match=r"custom_linear=.*expected False, True, 'head', a list of globs") as caught:
        create("mlp", custom_linear=custom_linear)
    assert repr(custom_linear) in str(caught.value)
    assert (f"[{custom_linear!r}]" in str(caught.value)) == isinstance(custom_linear, str)


def test_custom_linear_in_each_library():
    for name, names in (
        ("resnet18", ["fc"]),
        ("torchvision/mobilenet_v3_small", ["classifier.0", "classifier.3"]),
        ("timm/test_resnet", ["fc"]),
    ):
        model = create(name, num_classes=3, custom_linear=True)
        assert swapped(model) == names
        assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    assert swapped(create("torchvision/mobilenet_v3_small", custom_linear="head", device="meta")) == ["classifier.3"]
    assert swapped(create("torchvision/squeezenet1_0", custom_linear=True, device="meta")) == []


def test_a_glob_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="'fc'"):
        create("mlp", custom_linear=["fc"])


def test_layers_names_the_layer(mine):
    assert isinstance(create("mlp", custom_linear="head", layers={"linear": "mine"}, **SMALL)[6], mine)
    model = create("mlp", layers={"linear": "mine"}, **SMALL)
    assert all(isinstance(model[i], mine) for i in (0, 3, 6))
    assert [(rule.layer, rule.only) for rule in policy_of(model)] == [("mine", None)]
    assert swapped(create("mlp", custom_linear=True, layers={}, **SMALL)) == ["0", "3", "6"]
    assert swapped(create("mlp", layers={}, **SMALL)) == []


@pytest.mark.parametrize(
    ("layers", "word"),
    [
        ({"linear": "min"}, "'min'"),
        ({"liner": "zoo"}, "'liner'"),
        ({"linear": None}, "layers="),
        ("zoo", "layers='zoo'"),
        (["zoo"], "layers="),
    ],
)
def test_wrong_layers_are_refused_before_anything_is_built(layers, word, monkeypatch):
    monkeypatch.setitem(_builders, "never", lambda: pytest.fail("built"))
    with pytest.raises(ValueError, match=word):
        create("never", layers=layers)


def test_the_policy_outlives_a_new_head():
    model = create("mlp", custom_linear=True, **SMALL)
    model.reset_classifier(9)
    assert isinstance(model[6], zoo.layers.Linear)
    assert model(torch.zeros(1, 4)).shape == (1, 9)


@pytest.mark.parametrize("name", ["resnet18", "torchvision/mobilenet_v3_small", "timm/test_resnet"])
def test_num_classes(name):
    assert create(name, num_classes=7).eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 7)


@pytest.mark.parametrize("name", ["resnet18", "timm/test_resnet"])
def test_in_chans(name):
    assert create(name, num_classes=2, in_chans=1).eval()(torch.zeros(1, 1, 64, 64)).shape == (1, 2)


def test_what_a_model_does_not_take_is_refused(monkeypatch):
    for name in ("resnet18", "mlp", "torchvision/mobilenet_v3_small", "timm/test_resnet"):
        with pytest.raises(TypeError, match=r"'nonsense'.*num_classes"):
            create(name, nonsense=1)
    with pytest.raises(TypeError, match="'in_chans'"):
        create("torchvision/resnet18", in_chans=1)
    monkeypatch.setattr("zoo.registry._builders", dict(_builders))
    register_model("classless")(type("Classless", (nn.Module,), {}))
    with pytest.raises(TypeError, match="'num_classes'"):
        create("classless", num_classes=3)


@pytest.mark.parametrize("name", ["resnet18", "torchvision/resnet18", "timm/resnet18"])
def test_pretrained_is_refused_with_the_remedy(name):
    for value in (True, False):
        with pytest.raises(ValueError, match=f"pretrained={value}.*weights="):
            create(name, pretrained=value)


def test_everything_is_keyword_only():
    with pytest.raises(TypeError):
        create("resnet18", "IMAGENET1K_V1")  # type: ignore[misc]


@pytest.mark.parametrize("name", ["wide_resnet101_2", "mlp", "torchvision/regnet_y_128gf", "timm/test_vit"])
def test_the_meta_device_needs_no_memory(name):
    model = create(name, device="meta", dtype=torch.bfloat16)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}


def test_a_device_is_for_this_model_alone():
    assert create("mlp", device=torch.device("meta"))[0].weight.is_meta
    assert create("mlp", device="cpu")[0].weight.device == torch.zeros(()).device == torch.device("cpu")
    with torch.device("meta"):
        assert create("mlp")[0].weight.is_meta


@pytest.mark.parametrize("device", ["foo", "cuda:x", 1.5, []])
def test_a_wrong_device_is_refused(device):
    with pytest.raises(ValueError, match="device="):
        create("mlp", device=device)


@pytest.mark.parametrize("dtype", ["float32", torch.int64, float, torch.complex64])
def test_a_wrong_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=r"dtype=.*torch\.bfloat16"):
        create("mlp", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_seed_gives_the_same_model_in_each_dtype(dtype):
    torch.manual_seed(0)
    plain = create("resnet18", num_classes=2)
    torch.manual_seed(0)
    typed = create("resnet18", num_classes=2, dtype=dtype)
    for one, other in zip(plain.state_dict().values(), typed.state_dict().values(), strict=True):
        assert torch.equal(one.to(other.dtype), other)
    assert typed.fc.weight.dtype == typed.bn1.running_var.dtype == dtype
    assert typed.bn1.num_batches_tracked.dtype == torch.int64
    assert torch.get_default_dtype() == torch.float32


def test_weights_of_a_wider_type_keep_every_bit(tmp_path):
    model = create("mlp", dtype=torch.float64, **SMALL)
    with torch.no_grad():
        model[0].weight.add_(1e-12)
    torch.save(model.state_dict(), tmp_path / "wide.pth")
    back = create("mlp", dtype=torch.float64, weights=tmp_path / "wide.pth", **SMALL)
    assert torch.equal(back[0].weight, model[0].weight)


def test_weights_come_before_the_swap(tmp_path):
    model = create("mlp", **SMALL)
    torch.save(model.state_dict(), tmp_path / "mlp.pth")
    custom = create("mlp", weights=tmp_path / "mlp.pth", custom_linear=True, **SMALL)
    assert swapped(custom) == ["0", "3", "6"]
    assert all(torch.equal(t, model.state_dict()[key]) for key, t in custom.state_dict().items())


def test_a_refused_head_and_a_reset_one(tmp_path):
    big = create("resnet18", num_classes=12)
    zoo.save_checkpoint(big, tmp_path / "r.pth")
    with pytest.raises(ValueError, match=r"fc\.weight") as caught:
        create("resnet18", weights=tmp_path / "r.pth", num_classes=10)
    assert "(12, 512)" in str(caught.value)
    assert "(10, 512)" in str(caught.value)
    model = create("resnet18", weights=tmp_path / "r.pth", num_classes=10, reset_head=True, custom_linear="head")
    assert torch.equal(model.conv1.weight, big.conv1.weight)
    assert swapped(model) == ["fc"]

    state = big.state_dict()
    del state["layer4.1.bn2.weight"]
    torch.save(state, tmp_path / "part.pth")
    with pytest.raises(ValueError, match=r"layer4\.1\.bn2\.weight"):
        create("resnet18", weights=tmp_path / "part.pth", num_classes=10, reset_head=True)


def test_models_come_in_training_mode():
    assert all(module.training for module in create("mlp", custom_linear=True).modules())


def test_building_on_two_devices_at_once():
    wrong: list[torch.device] = []

    def work(device: str) -> None:
        for _ in range(20):
            made = create("mlp", device=device, **SMALL)[0].weight.device
            if made.type != device:
                wrong.append(made)

    threads = [threading.Thread(target=work, args=(device,)) for device in ("cpu", "meta") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
