"""The bench's clocks on a GPU, each on one small case, and what a run reports there."""

import pytest
import torch

from zoo.bench import Case, bench_linear, bench_model, bench_serving
from zoo.bench import measuring as bench
from zoo.bench.cuda_clocks import CaptureFailed, EventClock, GraphClock, cuda_clock
from zoo.bench.timing import race

pytestmark = pytest.mark.quiet

CUDA = torch.device("cuda")
CASE = Case("small", 256, 512, 384, "gelu")


def product(n):
    tensors = [torch.randn(n, n, device=CUDA) for _ in range(3)]
    return lambda i: (tensors[i] @ tensors[i],)


def waits(i):
    y = torch.ones(64, device=CUDA) * i
    y.sum().item()
    return (y,)


@pytest.mark.parametrize("make", [GraphClock, EventClock])
def test_a_clock_measures_and_keeps_the_results(make):
    runs = {"small": product(1024), "large": product(4096)}
    clock = make(runs, sets=3, device=CUDA)
    timing = race(clock, repeats=5)
    assert timing.clock == {"GraphClock": "graph", "EventClock": "events"}[make.__name__]
    # 64 times the work; a product of 4096 takes over 0.1 ms on any GPU there is
    assert timing.median("large") > 100
    assert timing.speedup("small", over="large").value > 8
    for name, run in runs.items():
        outputs = clock.outputs(name)
        assert len(outputs) == 3
        for i, (y,) in enumerate(outputs):
            torch.testing.assert_close(y, run(i)[0])


def test_a_graph_that_leaves_results_unwritten_shows_nan():
    kept = torch.ones(4, device=CUDA)
    clock = GraphClock({"memo": lambda i: (kept,), "works": product(64)}, sets=2, device=CUDA)
    clock.block("memo")
    assert all(y.isnan().all() for (y,) in clock.outputs("memo"))


def test_what_cannot_be_captured_is_timed_by_events():
    with pytest.raises(CaptureFailed, match="waits cannot be captured"):
        GraphClock({"waits": waits}, sets=2, device=CUDA)
    clock, note = cuda_clock({"good": product(64), "waits": waits}, sets=2, device=CUDA)
    assert (clock.name, note.startswith("waits cannot be captured in a CUDA graph: ")) == ("events", True)
    assert race(clock, repeats=2).median("waits") > 0
    # the failed capture has left nothing behind
    torch.cuda.empty_cache()
    assert torch.randn(4, device=CUDA).isfinite().all()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    clock, note = cuda_clock({"good": product(64)}, sets=2, device=CUDA)
    assert (clock.name, note) == ("graph", "")


def test_bench_linear_by_graphs():
    report = bench_linear(cases=[CASE], dtypes=["f32", "bf16"], device=CUDA, repeats=5)
    assert report.ok, str(report)
    assert len(report.rows) == 8
    for row in report.rows:
        assert (row.clock, row.clock_note) == ("graph", "")
        touched = CASE.elements(backward=row.pass_ != "forward") * (4 if row.dtype == "float32" else 2)
        assert row.sets * touched >= 2 * torch.cuda.get_device_properties(CUDA).L2_cache_size
        assert 0 < row.zoo_us < 1e4 and row.zoo_host_us > 0 and row.peer_host_us > 0


def test_bench_linear_by_events(monkeypatch):
    def layer(activation):
        right = bench.eager(activation)

        def linear(x, w, b):
            b.sum().item()
            return right(x, w, b)

        return linear

    monkeypatch.setattr(bench, "custom", layer)
    report = bench_linear(cases=[CASE], dtypes=["f32"], peers=["eager"], device=CUDA, repeats=3)
    assert report.ok, str(report)
    assert {row.clock for row in report.rows} == {"events"}
    assert all(row.clock_note.startswith("zoo cannot be captured") for row in report.rows)


def test_a_wrong_result_of_a_graph_is_caught(monkeypatch):
    right = bench.eager("gelu")
    monkeypatch.setattr(bench, "custom", lambda activation: lambda *args: right(*args) * 1.0001)
    report = bench_linear(cases=[CASE], dtypes=["f32"], peers=["eager"], device=CUDA, repeats=3)
    assert all("zoo's y: error" in row.failure for row in report.rows)


def test_bench_model():
    report = bench_model(
        ["resnet18"], modes=["bf16"], peers=["eager"], batch=8, image=64, device=CUDA, blocks=3, block_seconds=0.02
    )
    assert report.ok, str(report)
    for row in report.rows:
        assert row.zoo_img_s > 0 and row.zoo_peak_bytes > 2**20 and row.peer_peak_bytes > 2**20


def test_bench_serving_with_and_without_cuda_graphs():
    model = "timm/vit_tiny_patch16_224"
    report = bench_serving([model], modes=["bf16"], batches=[1], device=CUDA, calls=100)
    assert report.ok, str(report)
    assert [(row.peer, row.cuda_graphs) for row in report.rows] == [("eager", None), ("compiled", True)]
    assert all(row.zoo_error < 2 * row.peer_error for row in report.rows), report
    eager, graph = report.rows  # launches are what a small request costs, and a graph has one
    assert graph.zoo_p50_us < eager.zoo_p50_us and graph.peer_p50_us < eager.peer_p50_us
