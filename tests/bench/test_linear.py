from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo import ops
from zoo.bench import CASES, Case, LinearReport, bench_linear, linear
from zoo.bench import measuring as bench
from zoo.machine import examine
from zoo.ops._linear import activate

pytestmark = pytest.mark.usefixtures("small_cache")

PLAIN, GELU = Case("plain", 24, 40, 16), Case("fused", 24, 40, 16, "gelu")
KEYS = (
    "case M K N dtype precision activation pass peer zoo_us peer_us speedup zoo_err peer_err kernel ok clock sets "
    "repeats speedup_low speedup_high "
    "zoo_host_us peer_host_us zoo_flop_share zoo_byte_share zoo_err_positive peer_err_positive"
)


def run(*cases: Case | str, **given: Any) -> LinearReport:
    usual = {"dtypes": ["float32"], "peers": ["eager"], "repeats": 2}
    return bench_linear(cases=cases or None, **{**usual, **given})


def test_rows_of_the_document() -> None:
    report = run(PLAIN, GELU, dtypes=["f32", "bf16"], command="as told")
    assert report.ok and report.complete
    data = json.loads(report.to_json())
    assert (data["ok"], data["schema"], data["command"], data["precision"], data["seed"]) == (
        True,
        1,
        "as told",
        ["highest"],
        0,
    )
    assert {"device", "driver", "torch", "zoo", "date"} <= set(data)
    assert len(data["rows"]) == 2 * 2 * 2
    for row in data["rows"]:
        assert set(KEYS.split()) <= set(row)
        assert row["speedup"] == pytest.approx(row["peer_us"] / row["zoo_us"])
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        eps = torch.finfo(getattr(torch, row["dtype"])).eps
        for error in ("zoo_err", "peer_err", "zoo_err_positive", "peer_err_positive"):
            assert eps / 100 < row[error] < 3 * eps, row
        assert (row["clock"], row["repeats"], row["kernel"]) == ("wall", 2, "aten")
        assert row["sets"] >= 2
    assert [(r["case"], r["dtype"], r["activation"], r["pass"]) for r in data["rows"][::3]] == [
        ("plain", "float32", None, "forward"),
        ("plain", "bfloat16", None, "forward+backward"),
        ("fused", "bfloat16", "gelu", "forward"),
    ]


def test_text() -> None:
    text = str(run(PLAIN, GELU))
    assert text.splitlines()[-1] == "4 rows, every output right"
    assert "float32, forward+backward, with activation, over eager" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_tanh"])
def test_all_dtypes_and_activations_are_right(dtype: str, activation: str) -> None:
    report = run(Case("c", 24, 40, 16, activation), Case("unbiased", 5, 300, 1, bias=False), dtypes=[dtype])
    assert report.ok, str(report)


def test_precisions_are_crossed_with_float32_alone_and_come_back() -> None:
    seen = []
    before = torch.get_float32_matmul_precision()
    with pytest.MonkeyPatch.context() as patch:
        real = bench.race
        patch.setattr(bench, "race", lambda *a, **k: seen.append(torch.get_float32_matmul_precision()) or real(*a, **k))
        report = run(PLAIN, dtypes=["float32", "bfloat16"], precisions=["high", "highest"], passes=["forward"])
    assert [(row.dtype, row.precision) for row in report.rows] == [
        ("float32", "high"),
        ("float32", "highest"),
        ("bfloat16", "highest"),
    ]
    assert seen == ["high", "highest", "highest"]
    assert torch.get_float32_matmul_precision() == before
    assert torch.is_grad_enabled()


def test_seed_decides_the_data() -> None:
    def errors(seed: int) -> list[float | None]:
        return [row.zoo_err for row in run(PLAIN, passes=["forward"], seed=seed).rows]

    assert errors(1) == errors(1) != errors(2)


def test_progress_and_checkpoints() -> None:
    gone, kept = [], []

    def progress(measurements: Any) -> Iterator[Any]:
        for measurement in measurements:
            gone.append(str(measurement))
            yield measurement

    report = run(PLAIN, progress=progress, checkpoint=kept.append)
    assert gone == ["plain float32 forward", "plain float32 forward+backward"]
    assert [(len(r.rows), r.complete, r.ok) for r in kept] == [(1, False, False), (2, False, False)]
    assert "stopped before its end" in str(kept[0])
    assert report.complete


def test_defaults_are_the_table_or_its_quick_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "measured", lambda *a, **k: [])
    taken: list[Any] = []
    for quick in (False, True):
        bench_linear(quick=quick, progress=lambda ms: taken.append({m.case.name for m in ms}) or [])
    assert taken == [{case.name for case in CASES}, {case.name for case in CASES if case.quick}]
    bench_linear(cases=["mnist/*", PLAIN], progress=lambda ms: taken.append({m.case.name for m in ms}) or [])
    assert taken[-1] == {"mnist/fc1", "mnist/fc2", "mnist/fc3", "plain"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtypes": ["f8"]}, "dtype 'f8': expected one or more of float32"),
        ({"dtypes": []}, "dtype: none given"),
        ({"precisions": ["low"]}, "precision 'low'"),
        ({"passes": ["backward"]}, "pass 'backward'"),
        ({"peers": ["jax"]}, "peer 'jax'"),
        ({"cases": ["nothing*"]}, "case 'nothing"),
    ],
)
def test_unknown_names_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_linear(**{"cases": [PLAIN], **given})


# the compiled peer


def test_torch_compile_is_a_peer() -> None:
    report = run(GELU, peers=["compiled", "eager"], passes=["forward"])
    assert report.ok, str(report)
    compiled, eager = report.rows
    assert (compiled.peer, eager.peer) == ("compiled", "eager")
    assert compiled.zoo_us == eager.zoo_us  # one run
    assert compiled.peer_us != eager.peer_us
    counted = torch._dynamo.utils.counters["stats"]
    assert counted["unique_graphs"] >= 1


def test_compiled_for_each_case_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some recompilations torch would run the function eagerly without a word."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(tuple(inputs[0].shape))
        return graph.forward

    monkeypatch.setattr(
        bench, "compiled", lambda a: torch.compile(bench.eager(a), backend=backend, fullgraph=True, dynamic=False)
    )
    cases = [Case(f"c{m}", m, 40, 16) for m in (3, 4, 5)]
    with torch._dynamo.config.patch(recompile_limit=2):
        assert run(*cases, peers=["compiled"], passes=["forward"]).ok
    assert [shape[0] for shape in graphs] == [3, 4, 5]


def test_a_peer_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(activation: str | None) -> Any:
        def fail(*_: Any) -> Tensor:
            raise TypeError("no compiler\nand more")

        return fail

    monkeypatch.setattr(bench, "compiled", broken)
    report = run(PLAIN, peers=["eager", "compiled"], passes=["forward"])
    eager, compiled = report.rows
    assert eager.ok and eager.speedup is not None
    assert (compiled.ok, compiled.speedup, compiled.failure) == (False, None, "compiled failed: TypeError: no compiler")
    assert not report.ok
    assert "1 of 2 rows FAILED" in str(report)
    json.loads(report.to_json())


def test_a_measurement_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.race

    def race(clock: Any, **given: Any) -> Any:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(clock, **given)

    monkeypatch.setattr(bench, "race", race)
    forward, both = run(PLAIN).rows
    assert forward.ok
    assert both.failure == "OutOfMemoryError: CUDA out of memory"


# broken layers, each of which must be caught


def scaled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b)) * 1.00001


def half_inside(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x.half(), w.half(), b.half()).float())


def tanh_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def unwritten(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b)) + torch.full((x.shape[0], w.shape[0]), math.nan)


def no_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w) + 0 * b)


def one_wrong_element(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.gelu(F.linear(x, w, b))
    bump = torch.zeros_like(y)
    bump[-1, -1] = 2e-5
    return y + bump


def bias_gradient_doubled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, 2 * b - b.detach()))


def weight_gradient_dropped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w.detach() + 0 * w, b))


def wrong_where_nothing_cancels(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.gelu(F.linear(x, w, b))
    return y * 1.01 if bool((x > 0).all()) else y


def broadcast(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x[:1], w, b))


class Memo:
    """Computes for the first set it sees, and gives that result for all."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def __call__(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = F.gelu(F.linear(x, w, b))
        return self.kept.clone()


class WrongOnOneSet:
    """Right on all sets but one, which is not the first, nor the last, nor one that is compared."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if x.data_ptr() not in self.seen:
            self.seen.append(x.data_ptr())
        y = F.gelu(F.linear(x, w, b))
        return y * math.nan if self.seen.index(x.data_ptr()) == 1 else y


def caught(monkeypatch: pytest.MonkeyPatch, layer: Any, **given: Any) -> str:
    monkeypatch.setattr(bench, "custom", lambda activation: layer)
    report = run(GELU, **given)
    assert report.rows
    return "" if report.ok else report.rows[-1].failure


@pytest.mark.parametrize(
    "layer",
    [scaled, half_inside, tanh_gelu, unwritten, no_bias, one_wrong_element, wrong_where_nothing_cancels, broadcast],
)
def test_a_wrong_forward_is_caught(monkeypatch: pytest.MonkeyPatch, layer: Any) -> None:
    assert "zoo's y: " in caught(monkeypatch, layer, passes=["forward"])


def test_a_result_of_another_set_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "zoo's y: error" in caught(monkeypatch, Memo(), passes=["forward"])


def test_one_bad_set_among_those_not_compared_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cache_bytes", lambda device: 200_000)
    failure = caught(monkeypatch, WrongOnOneSet(), passes=["forward"])
    assert failure.startswith("zoo's y: not finite on 1 of ")
    assert failure.endswith("first on set 1")


@pytest.mark.parametrize(
    ("layer", "names"), [(bias_gradient_doubled, ["db"]), (weight_gradient_dropped, ["dw"]), (no_bias, ["y", "db"])]
)
def test_a_wrong_gradient_is_caught(monkeypatch: pytest.MonkeyPatch, layer: Any, names: list[str]) -> None:
    failure = caught(monkeypatch, layer, passes=["forward+backward"])
    for name in names:
        assert f"zoo's {name}: " in failure


def test_a_layer_that_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        raise ValueError("zoo: got this, expected that")

    assert caught(monkeypatch, refuses) == "zoo failed: ValueError: zoo: got this, expected that"


def test_a_right_layer_of_another_kind_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return activate(x[:, :13] @ w[:, :13].T + x[:, 13:] @ w[:, 13:].T + b, "gelu")

    assert caught(monkeypatch, split) == ""


def test_the_custom_side_is_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.custom(None) is ops.linear
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    for activation in ("relu", "gelu"):
        assert torch.equal(bench.custom(activation)(x, w, None), ops.linear(x, w, activation=activation))
        assert torch.equal(bench.eager(activation)(x, w, None), activate(F.linear(x, w), activation))


def test_relu_gradients_do_not_hang_on_rounding() -> None:
    """Where the product is nearer to zero than rounding the gradient that comes is zero."""
    m = bench.Measurement(Case("r", 64, 40, 64, "relu"), "float32", "highest", "forward+backward")
    race = bench._Race(m, ("eager",), torch.device("cpu"), 0)
    for operands in race.sets[: race.count]:
        assert operands.grad is not None
        near = F.linear(*operands.arguments()).abs() < 0.01
        assert near.any() and not operands.grad[near].any()
        assert operands.grad.count_nonzero() > 0.9 * operands.grad.numel()


def test_host_times_are_of_each_call_and_only_where_they_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "finish", lambda device: None)
    for pass_, backward in (("forward", False), ("forward+backward", True)):
        m = bench.Measurement(PLAIN, "float32", "highest", pass_)
        with torch.set_grad_enabled(backward):
            race = bench._Race(m, ("eager",), torch.device("cpu"), 0)
            race.functions["zoo"] = lambda x, w, b: time.sleep(0.001) or F.linear(x, w, b)  # type: ignore[func-returns-value]
            runs = {name: race._run_with(function) for name, function in race.functions.items()}
            short = bench.Timing("graph", 2, {"zoo": (5.0, 5.0), "eager": (5.0, 5.0)})
            assert race._host_times(runs, short) == {}  # the CPU
            race.device = torch.device("cuda")
            found = race._host_times(runs, short)
            assert 1000 < found["zoo"] < 100_000
            assert 0 < found["eager"] < found["zoo"]
            assert race._host_times(runs, bench.replace(short, samples={"zoo": (5.0,), "eager": (2000.0,)})) == {}


def test_shares_of_a_known_device() -> None:
    m = bench.Measurement(Case("c", 1000, 1000, 1000), "bfloat16", "highest", "forward")
    with pytest.MonkeyPatch.context() as patch:
        race = bench._Race(m, ("eager",), torch.device("cpu"), 0)
        patch.setattr(race, "device", torch.device("cuda"))
        facts = examine(torch.device("cpu"))
        shares = race._shares(10.0, bench.replace(facts, device="NVIDIA H200"))
        assert shares["zoo_flop_share"] == pytest.approx(2e9 / 1e-5 / 989e12)
        assert shares["zoo_byte_share"] == pytest.approx(2 * (3e6 + 1000) / 1e-5 / 4.8e12)
        assert set(race._shares(10.0, facts).values()) == {None}


def test_import_is_lazy_and_light() -> None:
    code = """
import sys, zoo
assert not any(name.startswith("zoo.bench") for name in sys.modules)
before = set(sys.modules)
import zoo.bench
assert not {"matplotlib", "torchvision", "timm", "torch._dynamo", "typer"} & (set(sys.modules) - before)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
