"""Coverage: what really ran, why the rest did not, and the FLOPs, against counts by hand."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.coverage import CoverageReport, ModuleCoverage, coverage
from zoo.layers import note_fallback, registry
from zoo.swap import patch, unpatch


def entries(report: CoverageReport) -> dict[str, ModuleCoverage]:
    return {module.name: module for module in report.modules}


class Net(nn.Module):
    """A layer called twice, one called in training alone, one whose weight is read past its forward, one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.aux, self.read, self.never = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x))
        x = F.linear(x, self.read.weight, self.read.bias)
        return x + self.aux(x) if self.training else x


def test_calls_flops_and_share_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Conv2d(1, 2, 3))
    model.forward = lambda x, image: (model[2](model[0](x)), model[3](image))
    patch(model, only=["0"])
    report = coverage(model, torch.randn(2, 5, 4), torch.randn(1, 1, 6, 6))
    first, second, conv = 2 * 10 * 4 * 8, 2 * 10 * 8 * 3, 2 * 16 * 9 * 2
    assert [m.flops for m in report.modules] == [first, second] and report.flops == first + second + conv
    assert report.custom_flops == first and report.share == first / (first + second + conv)
    custom, skipped = report.modules
    assert (custom.status, custom.layer, custom.calls, custom.reason) == ("custom", "zoo", 1, "")
    assert (skipped.status, skipped.layer, skipped.calls) == ("skipped", None, 1)
    assert skipped.reason == "not selected by only" and report.ok


def test_each_status_with_its_reason() -> None:
    model = Net()
    patch(model)
    report = coverage(model.eval(), torch.ones(1, 4))
    got = {name: (m.status, m.calls, m.fault) for name, m in entries(report).items()}
    assert got == {
        "twice": ("custom", 2, False),
        "aux": ("never called", 0, False),
        "read": ("skipped", 0, False),
        "never": ("never called", 0, False),
    }
    assert entries(report)["read"].reason == "its weight went past its forward into aten.t.default"
    assert entries(report)["aux"].reason == "idle in this forward" and report.ok
    assert entries(coverage(model.train(), torch.ones(1, 4)))["aux"].status == "custom"
    assert "read: skipped: its weight went past its forward" in str(report)


def test_a_custom_layer_whose_weight_goes_past_it_is_a_fault() -> None:
    model = Net()
    patch(model)
    model.read.__class__ = type(model.twice)
    report = coverage(model, torch.ones(1, 4))
    assert entries(report)["read"].status == "never called" and entries(report)["read"].fault and not report.ok


class Tied(nn.Module):
    """The weight of an idle layer, used by those that share it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.used, self.idle = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.used.weight = self.idle.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.used(self.embed(ids))


def test_a_tied_weight_does_not_go_past_the_layers_that_share_it() -> None:
    model = Tied()
    patch(model)
    report = entries(coverage(model, torch.tensor([1, 2])))
    assert report["used"].status == "custom" and report["idle"].reason == "idle in this forward"
    assert patch(model, example=torch.tensor([1, 2])).skipped["idle"].startswith("not called in the probe")


def test_a_model_that_was_not_patched() -> None:
    report = coverage(Net(), torch.ones(1, 4))
    assert report.share == 0 and report.ok and entries(report)["twice"].reason == "the model was not patched"
    none = coverage(nn.Sequential(nn.ReLU()), torch.ones(1, 4))
    assert none.modules == () and none.share == 0 and none.ok and "no layer of a known kind" in str(none)


def test_a_layer_that_was_lost_after_the_patch_is_a_fault() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float32))
    patch(model, only=["0", "1"])
    model[1] = nn.Linear(4, 4)
    report = coverage(model, torch.ones(1, 4))
    assert not report.ok and "stock layer made after the patch" in entries(report)["1"].reason
    assert entries(report)["2"].reason == "not selected by only" and not entries(report)["2"].fault
    patch(model)
    assert coverage(model, torch.ones(1, 4)).ok


def test_the_policy_of_a_part_counts() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    patch(model[0])
    model[0][0] = nn.Linear(4, 4)
    report = coverage(model, torch.ones(1, 4))
    assert "patch again" in entries(report)["0.0"].reason and entries(report)["1"].reason == "not selected by only"


def test_reasons_of_what_cannot_be_swapped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].forward = lambda x: x
    patch(model)
    model[0].forward = lambda x: x
    report = coverage(model, torch.ones(1, 4))
    assert {m.reason for m in report.modules} == {"a forward of its own was set on this instance"}
    assert {m.status for m in report.modules} == {"skipped"}


class Quantised(Tensor):
    """A weight that answers torch functions itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_fallbacks_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    patch(model)
    model[1].weight = nn.Parameter(model[1].weight.detach().as_subclass(Quantised))
    report = coverage(model, torch.ones(1, 4))
    entry = entries(report)["1"]
    assert entry.status == "fell back" and entry.layer == "zoo" and entry.calls == 1 and entry.fault and not report.ok
    assert list(entry.fallbacks.values()) == [1] and "brings its own linear" in next(iter(entry.fallbacks))
    assert report.share == pytest.approx(0.5) and "(1 of 1 calls)" in str(report)


def test_a_users_layer_tells_of_its_fallbacks() -> None:
    @registry.register_layer("linear", "small")
    class Small(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if len(input) > 2:
                note_fallback(self, "more than 2 rows")
            return F.linear(input, self.weight, self.bias)

    model = nn.Sequential(nn.Linear(4, 4))
    patch(model, layer="small")
    assert coverage(model, torch.ones(2, 4)).ok
    assert coverage(model, torch.ones(3, 4)).modules[0].fallbacks == {"more than 2 rows": 1}
    unpatch(model)
    assert patch(model, layer="small", example=torch.ones(3, 4)).skipped == {"0": "it falls back: more than 2 rows"}


def test_layers_built_as_zoos_count_and_unpatch_is_seen() -> None:
    from zoo.layers import Linear

    model = nn.Sequential(Linear(4, 4), nn.Linear(4, 4))
    patch(model)
    assert coverage(model, torch.ones(1, 4)).share == 1
    unpatch(model)
    assert [m.status for m in coverage(model, torch.ones(1, 4)).modules] == ["custom", "skipped"]


@pytest.mark.parametrize("training", [True, False])
def test_the_encoders_fast_path_is_seen_and_not_disturbed(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    with torch.no_grad():
        report = coverage(
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training), torch.ones(2, 3, 8)
        )
    rows, width = 2 * 3, 8
    attention = 2 * rows * width * 3 * width + 2 * rows * width * width + 4 * rows * 3 * width
    assert report.flops == 2 * (attention + 2 * 2 * rows * 8 * 16)
    reasons = {m.reason for m in report.modules}
    if training:
        assert "its weight went past its forward into aten.t.default" in reasons
    else:
        assert reasons == {"its weight went past its forward into aten._transformer_encoder_layer_fwd.default"}
    assert report.share == 0


def test_a_kernel_without_a_flop_formula_counts_as_the_stock_layer() -> None:
    @registry.register_layer("linear", "opaque")
    def opaque(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from torch._C import _DisableTorchDispatch  # stands for a kernel that torch cannot look into

        with _DisableTorchDispatch():
            return F.linear(input, weight, bias)

    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.ones(3, 4)
    stock = coverage(model, x)
    patch(model, layer="opaque", only=["0"])
    report = coverage(model, x)
    assert report.flops == stock.flops and report.modules[0].flops == report.custom_flops == 2 * 3 * 4 * 8


class Takes(nn.Module):
    def __init__(self, take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.take, self.fc = take, nn.Linear(4, 2)

    def forward(self, given: Any) -> Tensor:
        return self.fc(input=self.take(given))


X = torch.ones(1, 4)


@pytest.mark.parametrize(
    ("take", "given"), [(lambda d: d["x"], {"x": X}), (lambda pair: pair[0], (X, X)), (lambda x: x, X)]
)
def test_inputs_of_any_form(take: Callable[[Any], Tensor], given: Any) -> None:
    model = Takes(take)
    patch(model)
    assert coverage(model, given).share == 1


def test_coverage_leaves_no_trace_also_when_the_forward_fails() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    patch(model)
    buffers, rng = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
    global_hooks = len(torch.nn.modules.module._global_forward_hooks)
    coverage(model, torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="zoo::linear"):
        coverage(model, torch.ones(3, 5))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers()) and model.training
    assert torch.equal(torch.get_rng_state(), rng)
    assert len(torch.nn.modules.module._global_forward_hooks) == global_hooks
    assert coverage(model, torch.ones(3, 4)).modules[0].calls == 1


def test_a_call_that_fails_inside_the_forward_does_not_confuse_the_counts() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.a(x[:, :3])
            except RuntimeError:
                x = self.b(x)
            return self.b(x)

    model = Tries()
    patch(model)
    report = entries(coverage(model, torch.ones(1, 4)))
    assert report["a"].calls == 0 and report["b"].calls == 2 and report["b"].flops == 2 * 2 * 4 * 4


def test_calls_that_fail_inside_a_watched_layer() -> None:
    class Outer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.inner = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(RuntimeError):
                self.inner(x)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Outer())
    report = entries(coverage(model, torch.ones(1, 4)))
    assert {name: m.flops for name, m in report.items()} == {"0": 32, "1": 32, "1.inner": 0}


def test_a_compiled_model_is_run_uncompiled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager"))
    patch(model)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 4))
    report = coverage(compiled, torch.ones(1, 4))
    assert report.share == 1 and [m.calls for m in report.modules] == [1, 1]
    assert [m.name for m in report.modules] == [n for n, m in compiled.named_modules() if isinstance(m, nn.Linear)]


def test_a_compiled_model_runs_compiled_again_after() -> None:
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        return lambda *args: ran.append(1) or graph.forward(*args)

    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)
    patch(model)
    model[0].compile(backend=backend)
    for runs in (1, 2):
        model(x)
        assert len(ran) == runs
        assert coverage(model, x).share == 1 and len(ran) == runs


def test_other_threads_do_not_count() -> None:
    mine, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    patch(mine)
    patch(other)
    stop, failures = threading.Event(), []

    def run() -> None:
        try:
            while not stop.is_set():
                other(torch.ones(1, 4))
                mine(torch.ones(1, 4))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    reports = [coverage(mine, torch.ones(1, 4)) for _ in range(30)]
    stop.set()
    thread.join()
    assert not failures and all(r.modules[0].calls == 1 and r.flops == 2 * 4 * 4 for r in reports)


def test_on_the_meta_device_and_under_inference_mode() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.empty(3, 4)
    patch(model)
    assert coverage(model, x).share == 1
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    patch(model)
    with torch.inference_mode():
        assert coverage(model, torch.ones(3, 4)).share == 1


def test_lazy_layers_that_the_forward_initialises() -> None:
    report = coverage(nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()), torch.ones(3, 4))
    assert report.modules[0].calls == 1 and report.flops == 2 * 3 * 4 * 2


def test_layers_put_around_a_patched_one() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(4, 1), nn.Linear(1, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    model = nn.Sequential(nn.Linear(4, 4))
    patch(model)
    model[0] = Lora(model[0])
    report = entries(coverage(model, torch.ones(1, 4)))
    assert report["0.base"].status == "custom" and report["0.a"].fault and report["0.b"].fault


def test_the_report_as_data() -> None:
    model = Net()
    patch(model)
    report = coverage(model, torch.ones(1, 4))
    data = json.loads(report.to_json())
    assert data["ok"] is True and data["share"] == report.share and data["flops"] == report.flops
    assert data["modules"][0]["name"] == "twice" and data["modules"][0]["fallbacks"] == {}


SHARES = [
    ("torchvision", "resnet50", 0.05),
    ("torchvision", "convnext_tiny", 93.4),
    ("torchvision", "vit_b_16", 95.3),
    ("torchvision", "swin_t", 96.6),
    ("torchvision", "swin_v2_t", 95.3),
    ("timm", "beit_base_patch16_224", 95.3),
    ("timm", "eva02_tiny_patch14_224", 80.4),
    ("timm", "swinv2_tiny_window8_256", 95.7),
    ("timm", "vit_base_patch16_224", 95.3),
    ("timm", "mixer_b16_224", 99.1),
]


@pytest.mark.parametrize(("source", "name", "percent"), SHARES)
def test_shares_of_real_models(source: str, name: str, percent: float) -> None:
    import timm
    import torchvision

    with torch.device("meta"):
        model = timm.create_model(name) if source == "timm" else torchvision.models.get_model(name)
        patch(model.eval())
        report = coverage(model, torch.empty(1, 3, *[256 if name.endswith("256") else 224] * 2))
    assert 100 * report.share == pytest.approx(percent, abs=0.05) and report.ok
