"""The ladder without a GPU: it compiles, table and text agree, and its judge and its processes do their work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

LADDER = Path(__file__).parent.parent / "examples" / "ladder"
MODULES = ("steps", "building", "device", "report", "float32_planes")


@pytest.fixture(scope="module")
def ladder() -> Iterator[dict[str, ModuleType]]:
    """The example's modules; afterwards no other test can meet their names."""
    sys.path.insert(0, str(LADDER))
    try:
        yield {name: import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(LADDER))
        for name in MODULES:
            sys.modules.pop(name, None)


def run(*arguments: str, script: str = "ladder.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LADDER / script), *arguments]
    # the scripts import the files beside them
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)


def made_up(steps: ModuleType) -> dict[str, Any]:
    """Results of steps 1 and 9 at both shapes; step 3 failed."""
    rows = [
        {
            "step": number,
            "shape": str(shape),
            "tflops": 100.0 * number + which,
            "cublas_tflops": 800.0 + number,
            "share": number / 10,
        }
        for number in (1, 9)
        for which, shape in enumerate(steps.SHAPES)
    ]
    return {"device": "Chip X", "date": "2020-02-02", "rows": rows, "failed": {"3": "it hung"}}


def test_each_step_has_a_file_a_limit_and_predictions(ladder: dict[str, ModuleType]) -> None:
    steps = ladder["steps"]
    assert [step.number for step in steps.STEPS] == list(range(1, 11))
    assert [step.file for step in steps.STEPS] == [*sorted(path.name for path in LADDER.glob("step_*.cu")), None]
    peak = steps.CHIP.tflops(steps.CHIP.tensor)
    assert peak == pytest.approx(989, rel=1e-3)  # the data sheet's
    for step in steps.STEPS:
        assert step.limit
        assert len(step.predicted) == len(steps.SHAPES)
        assert all(0 < predicted < peak for predicted in step.predicted)
    assert steps.step_of(7).number == 7
    with pytest.raises(ValueError, match="step 11: expected one of 1, 2,"):
        steps.step_of(11)


def test_readme_tells_of_each_step_and_shows_the_results(ladder: dict[str, ModuleType]) -> None:
    text = (LADDER / "README.md").read_text(encoding="utf-8")
    for step in ladder["steps"].STEPS:
        assert f"\n### {step.number}. " in text
        assert step.file is None or f"]({step.file})" in text
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (LADDER / link).exists(), link
    file = LADDER.parent / "results" / "h200-ladder.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    assert ladder["report"].markdown(results) in text, "run ladder.py --readme"


def test_readme_is_filled_from_results(ladder: dict[str, ModuleType], tmp_path: Path) -> None:
    report, steps = ladder["report"], ladder["steps"]
    readme = tmp_path / "README.md"
    before = (LADDER / "README.md").read_text(encoding="utf-8")
    readme.write_text(before, encoding="utf-8")
    report.fill_readme(readme, made_up(steps))
    text = readme.read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| 9 "))
    p = steps.step_of(9).predicted
    assert row.endswith(f"| {p[0]:.0f} | 900 | 90.0% | {p[1]:.0f} | 901 | 90.0% |")
    assert "| failed | — |" in next(line for line in text.splitlines() if line.startswith("| 3 "))
    assert "on one Chip X, 2020-02-02; cuBLAS in the same run: 809 at" in text
    # nothing but the table has changed, and filling again changes nothing
    assert text.partition("<!-- results")[0] == before.partition("<!-- results")[0]
    assert text.partition("<!-- end")[2] == before.partition("<!-- end")[2]
    report.fill_readme(readme, made_up(steps))
    assert readme.read_text(encoding="utf-8") == text
    readme.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="expected the marks"):
        report.fill_readme(readme, None)


def test_plot_of_incomplete_results(ladder: dict[str, ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ladder["report"].plot(made_up(ladder["steps"]), tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


def test_judge_of_a_product(ladder: dict[str, ModuleType]) -> None:
    wrong = ladder["device"].wrong
    torch.manual_seed(0)
    x, w = torch.randn(96, 200).bfloat16(), torch.randn(72, 200).bfloat16()
    right = (x.float() @ w.float().T).bfloat16()
    assert wrong(right, x, w) is None
    for m, n, value in ((0, 0, torch.nan), (95, 71, 0.0), (50, 3, float(right[50, 3]) * 1.02 + 0.1)):
        y = right.clone()
        y[m, n] = value
        assert f"y[{m}, {n}]" in (wrong(y, x, w) or "")
    # each element within what is allowed of it, but half of them off
    exact = x.double() @ w.double().T
    larger = torch.where(exact.frexp().mantissa.abs() > 0.75, 1.0012 * exact, exact).bfloat16()
    assert "rounding alone" in (wrong(larger, x, w) or "")
    # without the last 16 of K
    assert wrong((x[:, :184].float() @ w[:, :184].float().T).bfloat16(), x, w) is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so() -> None:
    done = run("--step", "1")
    assert done.returncode == 1
    assert done.stderr == "ladder: no CUDA GPU was found; --build works without one\n"


def test_all_steps_compile(ladder: dict[str, ModuleType], tmp_path: Path) -> None:
    building, steps = ladder["building"], ladder["steps"]
    if building.find_nvcc() is None:
        pytest.skip("no nvcc")
    done = run("--build", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    expected = [building.library(step, tmp_path) for step in steps.STEPS if step.file is not None]
    assert sorted(tmp_path.iterdir()) == expected
    times = [path.stat().st_mtime_ns for path in expected]
    assert building.build(steps.STEPS, tmp_path) == {}
    assert [path.stat().st_mtime_ns for path in expected] == times  # nothing was stale

    bad = tmp_path / "bad.cu"
    bad.write_text("no C++", encoding="utf-8")
    step = steps.Step(1, str(bad), "bad", "", (1.0, 1.0), 1)
    assert "error" in building.build([step], tmp_path)[1]
    assert not (tmp_path / "bad.so").exists()


def test_a_step_that_crashes_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    script = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import device, ladder
from steps import SHAPES, STEPS

def measure(step, path, *, seconds):
    if step.number == 2:
        os._exit(3)
    if step.number == 3:
        time.sleep(60)
    if step.number == 4:
        raise ValueError("wrong result")
    return [{"shape": str(shape), "us": 1.0, "cublas_us": 2.0, "tflops": 5.0, "cublas_tflops": 9.0, "share": 0.5}
            for shape in SHAPES]

device.find_problem, device.warm_up, device.measure = lambda: None, lambda: {"device": "fake"}, measure
ladder.build = lambda steps, folder: {5: "syntax"}
ladder.climb(list(STEPS[:6]), folder=Path("."), seconds=1, limit=2, into=Path(sys.argv[2]))
"""
    into = tmp_path / "ladder.json"
    command = [sys.executable, "-c", script, str(LADDER), str(into)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    results = json.loads(into.read_text(encoding="utf-8"))
    assert results["device"] == "fake"
    assert [row["step"] for row in results["rows"]] == [1, 1, 6, 6]
    assert [row["predicted_tflops"] for row in results["rows"][:2]] == [0.47, 0.47]
    failed = results["failed"]
    assert sorted(failed) == ["2", "3", "4", "5"]
    assert "ended with 3" in failed["2"]
    assert "nothing came in 2 s" in failed["3"]
    assert failed["4"] == "ValueError: wrong result"
    assert "does not compile: syntax" in failed["5"]


@pytest.fixture(scope="module")
def errors(ladder: dict[str, ModuleType]) -> dict[bool, dict[str, float]]:
    return {positive: ladder["float32_planes"].errors(positive=positive) for positive in (False, True)}


def test_float32_from_planes_needs_six_products_and_promotion(errors: dict[bool, dict[str, float]]) -> None:
    for found in errors.values():
        assert found["6 products, promoted"] < found["float32 (SGEMM)"] < found["6 products"]
        assert found["6 products, promoted"] < found["3 products, promoted"] < found["3 products"]
        assert found["3 products"] < found["1 product (bf16)"]
        assert found["6 products"] > 10 * found["float32 (SGEMM)"]
    assert errors[False]["float32 (SGEMM)"] < errors[False]["3 products, promoted"]


def test_readme_has_the_errors_that_the_script_finds(errors: dict[bool, dict[str, float]]) -> None:
    text = (LADDER / "README.md").read_text(encoding="utf-8")
    for name in errors[False]:
        cells = []
        for found in errors.values():
            cells += [f"{found[name]:.1e}", f"{found[name] / found['float32 (SGEMM)']:.2f}"]
        assert f"| {name} | {' | '.join(cells)} |" in text


def test_planes_and_the_tensor_core(ladder: dict[str, ModuleType]) -> None:
    module = ladder["float32_planes"]
    x = torch.randn(64, 32).double().numpy().astype("float32").astype("float64")
    parts = module.planes(x, 3)
    assert (sum(parts) == x).all()  # 24 bits in three times 8
    for part in parts:
        assert (torch.from_numpy(part).bfloat16().double().numpy() == part).all()
    # what fits is exact, and a naive chain agrees
    ints = torch.randint(-8, 9, (5, 48)).double().numpy()
    zero = torch.zeros(5, 5).double().numpy()
    assert (module.tensor_core(zero, ints, ints) == ints @ ints.T).all()
    assert (module.sgemm(ints, ints) == ints @ ints.T).all()
    # beside 1, sixteen products of 2^-25 are kept, of 2^-26 dropped, and a negative one is cut toward zero too
    one, sixteen = torch.ones(1, 1).double().numpy(), torch.ones(1, 16).double().numpy()
    assert module.tensor_core(one, sixteen, sixteen * 2.0**-25)[0, 0] == 1 + 2.0**-21
    assert module.tensor_core(one, sixteen, sixteen * 2.0**-26)[0, 0] == 1
    assert module.tensor_core(-one, sixteen, sixteen * -(2.0**-26))[0, 0] == -1
    with pytest.raises(ValueError, match="k=40: expected a positive multiple of 32"):
        module.errors(k=40)


def test_float32_script_prints_its_table() -> None:
    done = run("--k", "64", "--size", "4", "--positive", script="float32_planes.py")
    assert done.returncode == 0, done.stderr
    assert "K = 64, uniform(0, 1) data" in done.stdout
    assert re.search(r"6 products, promoted +[\d.]+e-\d\d +[\d.]+", done.stdout)
