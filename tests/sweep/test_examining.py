"""What is done with one model. Each step has a saboteur, which it must catch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import registry
from zoo.coverage import CoverageReport, coverage
from zoo.layers import note_fallback, register_layer
from zoo.registry import build, register_model
from zoo.swap import patch, unpatch
from zoo.sweep import examining
from zoo.sweep.examining import examine
from zoo.sweep.rows import SweepRow, Task


class Net(nn.Module):
    """A convolution, a Linear, and one that is idle."""

    def __init__(self, *, num_classes: int = 4) -> None:
        super().__init__()
        self.conv, self.fc, self.spare = nn.Conv2d(3, 5, 3), nn.Linear(5, num_classes), nn.Linear(5, 5)

    def pooled(self, x: Tensor) -> Tensor:
        return self.conv(x).relu().mean((-1, -2))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pooled(x))


def look(net: type[nn.Module] = Net, **options: object) -> SweepRow:
    registry._builders.pop("net", None)
    register_model("net")(net)
    steps: list[str] = []
    row = examine(Task("net", **{"small": True, **options}), note=steps.append)  # type: ignore[arg-type]
    assert list(row.seconds) == list(dict.fromkeys(steps))
    assert all(seconds >= 0 for seconds in row.seconds.values())
    if row.failure is not None:
        assert row.failure.step == steps[-1]
    return row


def failure(net: type[nn.Module] = Net, **options: object) -> tuple[str, str]:
    row = look(net, **options)
    assert row.failure is not None and not row.ok
    return row.failure.step, row.failure.message


def test_all_is_well_on_data() -> None:
    row = look()
    assert row.ok, row
    assert list(row.seconds) == ["build", "stock", "patch", "run", "state_dict", "backward", "parity", "unpatch"]
    assert (row.source, row.reference, row.on, row.input) == ("zoo", None, "data", (3, 32, 32))
    assert (row.linears, row.swapped, row.skipped, row.idle) == (2, 2, {}, ("spare",))
    assert row.parameters == 5 * 27 + 5 + 5 * 4 + 4 + 30
    assert row.reached_flops == row.linear_flops == row.custom_flops == 2 * 5 * 4
    assert row.flops == 2 * 5 * 4 + 2 * 30 * 30 * 27 * 5
    assert row.parity is not None
    assert (row.parity.ok, row.parity.outputs, row.parity.gradients) == (True, 1, 5)
    assert row.parity.error <= row.parity.limit
    assert row.untested == {"state_dict": "no model of the same name in torchvision"}
    assert row.peak_bytes is None


def test_units_run_as_custom_linear_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Units(nn.Module):
        def __init__(self, *, num_classes: int = 4) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3)
            self.mlp = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, num_classes))

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.conv(x).relu().mean((-1, -2)))

    found = []

    def seen(model: nn.Module, example: Tensor) -> CoverageReport:
        found.append(coverage(model, example))
        return found[-1]

    monkeypatch.setattr(examining, "coverage", seen)
    assert look(Units).ok
    _, *patched = found  # the first is of the stock model
    assert patched and all([unit.status for unit in report.units] == ["as one"] for report in patched)


class Normed(Net):
    def __init__(self, *, num_classes: int = 4) -> None:
        super().__init__(num_classes=num_classes)
        self.norm = nn.BatchNorm1d(5)

    def pooled(self, x: Tensor) -> Tensor:
        assert self.training or x.is_meta or self.norm.running_var[0] != 1 or self.norm._forward_pre_hooks
        return self.norm(super().pooled(x))


def test_batch_norms_give_values_of_about_one() -> None:
    row = look(Normed, small=False)
    assert row.ok and row.batch_norms == 1, row
    assert look().batch_norms == 0 and look(Normed, on="meta").batch_norms is None
    assert SweepRow.from_line(row.to_line()).batch_norms == 1


def test_on_the_meta_device() -> None:
    row = look(on="meta")
    assert row.ok, row
    assert list(row.seconds) == ["build", "stock", "patch", "run", "state_dict", "unpatch"]
    assert (row.input, row.parity, row.swapped) == ((3, 224, 224), None, 2)
    assert row.custom_flops == row.linear_flops == 2 * 5 * 4


def test_a_model_over_the_limit_has_no_values() -> None:
    row = look(max_parameters=100)
    assert (row.ok, row.on) == (True, "meta")
    assert row.untested["data"] == "over the limit of 100 parameters"  # of any size alike, for one line in a report
    assert "parity" not in row.seconds


def test_without_gradients() -> None:
    row = look(gradients=False)
    assert row.ok and row.parity is not None
    assert (row.parity.gradients, "backward" in row.seconds) == (0, False)


def test_a_library_model_both_ways() -> None:
    row = examine(Task("timm/test_vit", gradients=False))
    assert row.ok, row
    assert (row.reference, row.untested, row.swapped) == ("timm/test_vit", {}, 25)


def test_lean_computes_activations_again() -> None:
    plain, lean = (examine(Task("timm/test_vit", lean=lean)) for lean in (False, True))
    assert plain.ok and lean.ok, lean
    assert (plain.lean, lean.lean) == (False, True)
    assert (lean.flops, lean.custom_flops, lean.swapped) == (plain.flops, plain.custom_flops, plain.swapped)
    assert lean.parity is not None and plain.parity is not None
    assert (lean.parity.outputs, lean.parity.gradients) == (plain.parity.outputs, plain.parity.gradients)
    assert not examine(Task("torchvision/squeezenet1_1", small=True, gradients=False, lean=True)).lean  # it cannot


def test_the_steps_leave_what_is_outside_alone() -> None:
    torch.manual_seed(5)
    examine(Task("mlp", on="meta"))
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("fails", [False, True])
def test_convolutions_run_in_float32_proper(fails: bool) -> None:
    seen = set()

    class Looks(Net):
        def __init__(self) -> None:
            super().__init__()
            seen.add(torch.backends.cudnn.allow_tf32)

        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.backends.cudnn.allow_tf32)
            if fails:
                raise KeyError("gone")
            return super().forward(x)

    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    assert cudnn.allow_tf32, "this case should be one"
    assert look(Looks).ok is not fails
    assert seen == {False}
    assert (cudnn.allow_tf32, cudnn.enabled, cudnn.benchmark, cudnn.deterministic) == before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize(("conv", "whole"), [("ieee", "none"), ("tf32", "none"), ("ieee", "tf32"), (None, "tf32")])
def test_torchs_newer_switches_may_be_set(conv: str | None, whole: str, older: bool, fails: bool) -> None:
    """They make the older one raise when it is read, or rule what it does."""
    seen = []

    class Looks(Net):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(cudnn.conv.fp32_precision)
            if fails:
                raise KeyError("gone")
            return super().forward(x)

    def settings() -> list[object]:
        try:
            allowed: object = cudnn.allow_tf32
        except RuntimeError:
            allowed = "unreadable"
        return [allowed, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, torch.backends.fp32_precision]

    cudnn, backends = torch.backends.cudnn, torch.backends
    first = settings()
    try:
        cudnn.allow_tf32, backends.fp32_precision = older, whole
        if conv is not None:
            cudnn.conv.fp32_precision = conv
        before = settings()
        assert look(Looks).ok is not fails
        assert look(on="meta").ok
        assert seen and "tf32" not in seen
        assert settings() == before
    finally:
        backends.fp32_precision, cudnn.allow_tf32 = "none", True
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
    assert settings() == first


# Saboteurs


def test_build() -> None:
    class Broken(Net):
        def __init__(self) -> None:
            raise RuntimeError("no such thing\nand more")

    assert failure(Broken) == ("build", "RuntimeError: no such thing")


class Picky(Net):
    """Needs values."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            raise AssertionError
        return super().forward(x)


def test_what_the_meta_device_cannot_run_is_no_failure() -> None:
    row = look(Picky, on="meta")
    assert row.ok
    assert row.untested["run"].startswith("the stock model does not run on the meta device: ")
    assert (row.swapped, row.flops, row.custom_flops) == (2, None, None)


def test_stock() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("gone")

    assert failure(Broken) == ("stock", "KeyError: 'gone'")


def test_a_weight_that_goes_past_the_layer() -> None:
    class Past(Net):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.pooled(x), getattr(self.fc, "wei" + "ght"))

    step, message = failure(Past)
    assert step == "run"
    assert message.startswith("in eval mode 1 layers do not run as custom, first fc: its weight went past")
    assert failure(Past, on="meta")[0] == "run"


def test_a_weight_that_goes_past_the_layer_in_training_alone() -> None:
    class Past(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.pooled(x)
            return F.linear(x, getattr(self.fc, "wei" + "ght")) if self.training else self.fc(x)

    step, message = failure(Past)
    assert step == "run"
    assert message.startswith("in training mode 1 layers")


def use(monkeypatch: pytest.MonkeyPatch, layer: object) -> None:
    register_layer("linear", "sabotage")(layer)  # type: ignore[type-var]
    monkeypatch.setattr(examining, "patch", lambda model: patch(model, layer="sabotage"))


def test_a_layer_that_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            note_fallback(self, "too tired")
            return F.linear(input, self.weight, self.bias)

    use(monkeypatch, Lazy)
    assert failure() == ("run", "in eval mode 1 layers do not run as custom, first fc: too tired")


def test_gradients_that_are_not_finite() -> None:
    class Steep(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (self.fc.bias - self.fc.bias).sqrt()

    assert failure(Steep) == ("backward", "1 gradients are not finite, first fc.bias")


def test_no_gradients() -> None:
    class Cut(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach().requires_grad_()

    assert failure(Cut) == ("backward", "no parameter has a gradient")


def test_keys_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "build", lambda name, options: build("timm/test_vit2", options))
    row = examine(Task("timm/test_vit", on="meta"))
    assert row.failure is not None
    assert (row.failure.step, row.failure.message[:38]) == ("state_dict", "CheckFailed: state dict differs from V")


def test_a_layer_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda input, weight, bias: F.linear(input, weight, bias) * 1.001)
    row = look()
    assert row.failure is not None and row.failure.step == "parity"
    assert "error 1.0e-03 is over the limit" in row.failure.message
    assert row.failure.message.endswith("; first at layer fc")
    assert row.parity is not None and not row.parity.ok
    assert row.parity.error > row.parity.limit


def test_a_gradient_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda input, weight, bias: F.linear(input, weight, bias.detach() + 0.5 * (bias - bias.detach())))
    assert failure()[0] == "parity"
    assert examine(Task("net", small=True, gradients=False)).ok  # the outputs alone do not show it


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda model: None, "classes differ; attributes differ"),
        (lambda model: (unpatch(model), setattr(model, "conv", copy.deepcopy(model.conv))), "modules differ; param"),
        (lambda model: (unpatch(model), model.fc.bias.data.add_(1)), "outputs differ"),
    ],
)
def test_an_unpatch_that_is_not_exact(monkeypatch: pytest.MonkeyPatch, wrong, what: str) -> None:
    monkeypatch.setattr(examining, "unpatch", wrong)
    step, message = failure()
    assert step == "unpatch"
    assert message.startswith(what)


def test_a_model_that_is_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.calls += 1
            return super().forward(x) * Counting.calls

    row = look(Counting)
    assert row.untested["outputs after unpatch"] == "the stock model's own differ from run to run"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_memory_that_runs_out_is_told_apart(error: Exception) -> None:
    class Hungry(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:  # parity raises an error of its own from this one
                raise error
            return super().forward(x)

    row = look(Hungry)
    assert row.failure is not None
    assert (row.failure.step, row.failure.starved) == ("parity", True)


def test_other_failures_are_not_of_memory() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    row = look(Broken)
    assert row.failure is not None and not row.failure.starved
