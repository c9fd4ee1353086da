"""How a target is found, built and hashed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support import honest
from zoo.layers import Linear, register_layer
from zoo.verify.kinds.linear import Functional
from zoo.verify.target import build, name_of, resolve, source_of

WHERE = {"bias": True, "device": "cpu", "dtype": torch.float64}


def test_by_name() -> None:
    assert resolve("support.honest:addmm") is honest.addmm
    assert resolve("zoo") is Linear
    assert resolve(nn.Linear) is nn.Linear
    register_layer("linear", "mine")(honest.addmm)
    assert issubclass(resolve("mine"), nn.Linear)
    assert name_of(honest.addmm) == "support.honest:addmm"


@pytest.mark.parametrize(
    ("target", "kind", "text"),
    [
        ("support.nowhere:Linear", "linear", "No module named 'support.nowhere'"),
        ("support.honest:Nobody", "linear", "there is no 'Nobody'; there are .*Sliced"),
        ("zo", "linear", "unknown linear layer 'zo'.*zoo"),
        ("zoo", "lineal", "linear"),
        (nn.Linear, "mlp", r"a layer of kind 'mlp' is a function of \(input, weight1, .*got class Linear"),
        (honest.addmm, "layer_norm", r"must take \(input, normalized_shape, weight, bias, eps\)"),
        (nn.Linear(2, 2), "linear", "expected a class"),
        (dict, "linear", "expected a subclass of nn.Module"),
        (lambda x: x, "linear", r"must take \(input, weight, bias\)"),
    ],
)
def test_what_is_no_target(target: object, kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve(target, kind)


@pytest.mark.parametrize("layer", [nn.Linear, honest.addmm, honest.Sliced, honest.FromScratch])
def test_built_like_the_stock_layer(layer: object) -> None:
    built = build(layer, 6, 4, **WHERE)
    stock = nn.Linear(6, 4, dtype=torch.float64)
    built.load_state_dict(stock.state_dict())
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(built(x), stock(x))
    assert build(layer, 6, 4, **{**WHERE, "bias": False}).bias is None


def test_adopt_is_called_and_a_function_gets_parameters() -> None:
    assert build(honest.Sliced, 6, 3, **WHERE).slices == 3
    assert type(build(honest.addmm, 6, 3, **WHERE)) is Functional


def test_source() -> None:
    file = Path(honest.__file__)
    for layer in (honest.addmm, honest.Sliced):
        source = source_of(layer)
        assert source.source_file == "honest.py"
        assert source.source_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert source_of(Tensor.add).source_sha256 is None
