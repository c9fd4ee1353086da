from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import zoo
from zoo.bench import ServeReport, bench_serving
from zoo.bench import serving as bench
from zoo.cli import app
from zoo.judging import Measure
from zoo.policy import policy_of


def run(*models: str, **given: Any) -> ServeReport:
    usual = {"modes": ["fp32"], "peers": ["eager"], "batches": [2], "calls": 12}
    return bench_serving(models or ("mlp",), **{**usual, **given})


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "compiled", lambda model: torch.compile(model, backend="eager", dynamic=False))


@pytest.mark.usefixtures("uncompiled")
def test_rows_of_the_document() -> None:
    report = run(modes=["fp32", "bf16"], peers=["eager", "compiled"], batches=[1, 8], command="as told")
    assert report.ok, str(report)
    data = json.loads(report.to_json())
    assert (data["ok"], data["schema"], data["command"]) == (True, 2, "as told")
    assert [(r["mode"], r["peer"], r["batch"]) for r in data["rows"]] == [
        (mode, peer, batch) for mode in ("fp32", "bf16") for peer in ("eager", "compiled") for batch in (1, 8)
    ]
    for row in data["rows"]:
        for side in ("zoo", "peer"):
            assert 0 < row[f"{side}_p50_us"] <= row[f"{side}_p90_us"] <= row[f"{side}_p99_us"]
        assert row["speedup"] == pytest.approx(row["peer_p50_us"] / row["zoo_p50_us"])
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert (row["calls"], row["custom_share"], row["cuda_graphs"], row["failure"]) == (12, 1.0, None, "")
    text = str(report)
    assert text.splitlines()[-1] == "8 rows, all outputs agree"
    assert max(map(len, text.splitlines())) <= 120


def test_percentiles_are_those_of_the_counted_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """zoo's call takes 1 ms, but each tenth takes 5; torch's takes 2 ms; the first of a run takes a second."""
    clock, calls = [0.0], {"zoo": 0, "peer": 0}
    before = bench.WARM_UP + 2  # of each side: the warm-up, and the comparison of two requests
    real = bench._answering

    def answering(model: nn.Module, *args: Any) -> Any:
        side, answer = "zoo" if policy_of(model) else "peer", real(model, *args)

        def timed(images: Tensor) -> Tensor:
            counted = calls[side] - before
            calls[side] += 1
            if counted % bench.RUN == 0:
                clock[0] += 1.0
            else:
                clock[0] += 0.002 if side == "peer" else 0.005 if counted % 10 == 3 else 0.001
            return answer(images)

        return timed

    monkeypatch.setattr(bench, "_answering", answering)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    (row,) = run(calls=300).rows
    assert row.ok, row.failure
    assert (row.zoo_p50_us, row.peer_p50_us, row.peer_p99_us) == pytest.approx((1000, 2000, 2000))
    assert row.zoo_p99_us == pytest.approx(5000)
    assert row.speedup == pytest.approx(2.0)


def test_time_limits_the_calls_but_not_below_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(bench, "FEWEST", 7)
    (row,) = run(calls=400).rows
    assert row.calls == 10  # the runs of five that count, until there are seven


@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_a_wrong_layer_fails(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    monkeypatch.setattr(zoo.layers.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias) * factor)
    report = run()
    assert report.rows[0].failure.startswith("the logits of zoo: ")
    assert not report.ok
    json.loads(report.to_json())


def test_an_answer_to_another_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is replayed without its new input."""

    def stale(model: nn.Module) -> Any:
        kept: list[Tensor] = []

        def forward(images: Tensor) -> Tensor:
            kept.append(model(images))
            return kept[0]

        return forward

    monkeypatch.setattr(bench, "compiled", stale)
    (row,) = run(peers=["compiled"]).rows
    assert "the logits of zoo: error" in row.failure and "the logits of peer: error" in row.failure


def test_logits_are_judged_by_the_error_of_the_peer() -> None:
    """In bf16 both are far from float64; twice the peer's error is not too far, and four times is."""
    (row,) = run("timm/test_vit", modes=["bf16"], image=160).rows
    assert row.ok and row.peer_error == row.eager_error and row.zoo_error is not None
    assert 1e-3 < row.peer_error < 1e-1 and row.zoo_error < 2 * row.peer_error
    right = Measure((2, 10), torch.bfloat16, 0.02, 0.01, 1.0, 0.5, 2000)
    m = bench.ServeMeasurement("mlp", "bf16", "compiled", 2)
    assert not bench._wrong(right, right, right, m)
    assert not bench._wrong(right.scaled(1.9, right.dtype), right, right, m)
    (told,) = bench._wrong(right.scaled(4, right.dtype), right, right, m)
    assert told.startswith("the logits of zoo: error 8.0e-02 is over") and told.endswith("compiled 2.0e-02)")
    # where torch.compile's own are wrong, zoo's are not excused by them
    lost = right.scaled(25, right.dtype)
    assert len(bench._wrong(lost, lost, right, m)) == 2 and len(bench._wrong(right, lost, right, m)) == 1


def test_a_side_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: nn.Module) -> Any:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(bench, "compiled", fail)
    kept: list[ServeReport] = []
    report = run(peers=["compiled", "eager"], checkpoint=kept.append)
    compiled, eager = report.rows
    assert (compiled.failure, compiled.speedup, eager.ok) == ("RuntimeError: no compiler", None, True)
    assert [(len(r.rows), r.complete) for r in kept] == [(1, False), (2, False)]


def test_the_models_are_in_eval_mode_and_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    real = bench._answering

    def answering(model: nn.Module, *args: Any) -> Any:
        model.register_forward_hook(lambda m, i, o: seen.append((m.training, o.requires_grad)))
        return real(model, *args)

    monkeypatch.setattr(bench, "_answering", answering)
    before = torch.get_rng_state()
    run()
    assert set(seen) == {(False, False)}
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()


def test_the_command(tmp_path: Any) -> None:
    file = tmp_path / "serve.json"
    words = ["--mode", "fp32", "--peer", "eager", "--batch", "1,2", "--calls", "5", "--device", "cpu"]
    done = CliRunner().invoke(app, ["bench", "serve", "mlp", *words, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "2 rows, all outputs agree" in done.stdout
    data = json.loads(file.read_text())
    assert data["command"].startswith("zoo bench serve mlp --mode fp32 --peer eager --batch 1,2 --image 224")
    assert [row["batch"] for row in data["rows"]] == [1, 2]
    refused = CliRunner().invoke(app, ["bench", "serve", "mlp", "--batch", "one", "--device", "cpu"])
    assert refused.exit_code == 1 and "batch 'one': expected numbers separated by commas" in refused.stderr


def test_what_cannot_be_is_refused() -> None:
    for given, message in (
        ({"modes": ["fp16"]}, "mode 'fp16': expected one or more of fp32, tf32, bf16"),
        ({"peers": ["jax"]}, "peer 'jax'"),
        ({"batches": [1, 0]}, "batch=0: expected at least 1"),
        ({"batches": []}, "batches: none given"),
        ({"calls": 1}, "calls=1: expected at least 2"),
        ({"image": 0}, "image=0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**given)
    with pytest.raises(ValueError, match="unknown model 'resnet19'"):
        run("mlp", "resnet19")


def test_a_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowed(real: Any) -> Any:
        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(0.002)
            return real(*args, **options)

        return slow

    monkeypatch.setattr(zoo.layers.Linear, "forward", slowed(zoo.layers.Linear.forward))
    monkeypatch.setattr(zoo.ops, "mlp", slowed(zoo.ops.mlp))
    (row,) = run(calls=20).rows
    assert row.zoo_p50_us is not None and row.zoo_p50_us > 2 * 2000  # two Linears that run as a unit, and the last
    assert row.speedup is not None and row.speedup < 1
