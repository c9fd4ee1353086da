"""Every example runs, in small, as a reader would start it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zoo

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_each_example_is_tested() -> None:
    here = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    scripts = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(scripts) >= 3
    for name in scripts:
        assert f'run("{name}"' in here or f'EXAMPLES / "{name}"' in here, f"{name} runs in no test"


def by_two_ranks(*script: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_ddp_scaling(tmp_path: Path) -> None:
    small = ("--models", "mlp", "--batch", "4", "--blocks", "3", "--steps", "1", "--slack", "1", "--device", "cpu")
    out = run("ddp_scaling.py", *small, "--json", str(tmp_path / "alone.json"))
    assert out.count("100.0%") == 2  # of itself
    script = (str(EXAMPLES / "ddp_scaling.py"), *small, "--json", str(tmp_path / "two.json"))
    by_two_ranks(*script)
    for name, ranks in (("alone", [1, 1]), ("two", [1, 1, 2, 2])):
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert [row["gpus"] for row in rows] == ranks
        assert [row["layers"] for row in rows] == ["stock", "custom"] * (len(ranks) // 2)
        for row in rows:
            low, high = row["quartiles"]
            assert 0 < low <= row["images_per_second"] <= high
            alone = next(r for r in rows if r["layers"] == row["layers"])["images_per_second"]
            assert row["efficiency"] == pytest.approx(row["images_per_second"] / (row["gpus"] * alone))


def test_mlp_unit(tmp_path: Path) -> None:
    file = tmp_path / "unit.json"
    small = ("--models", "mlp", "--batch", "4", "--blocks", "2", "--steps", "1", "--device", "cpu")
    out = run("mlp_unit.py", *small, "--json", str(file))
    assert "images/s, batch 4, bf16" in out
    (row,) = json.loads(file.read_text())["rows"]
    assert row["model"] == "mlp" and row["units"] == 1 and set(row["images_per_second"]) == {"stock", "linear", "mlp"}
    assert all(rate > 0 for rate in row["images_per_second"].values())
    for ratio in (row["over_linear"], row["over_stock"]):
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]


def test_distributed_parity(tmp_path: Path) -> None:
    small = ("--models", "mlp", "--batch", "4", "--device", "cpu")
    by_two_ranks(str(EXAMPLES / "distributed_parity.py"), *small, "--json", str(tmp_path / "two.json"))
    rows = json.loads((tmp_path / "two.json").read_text())["rows"]
    cases = [(dtype, strategy) for dtype in ("f32", "bf16") for strategy in ("ddp", "fsdp", "tp")]
    assert [(row["dtype"], row["strategy"]) for row in rows] == cases
    for row in rows:
        assert row["ok"] and row["ranks"] == 2 and row["tensors"] == 7 and 0 < row["of_limit"] <= 1


def test_mnist_mlp_on_digits() -> None:
    out = run("mnist_mlp.py", "--data", "digits", "--epochs", "6", "--device", "cpu")
    assert out.startswith("digits: 1,437 images to train, 360 to test, on cpu\n")
    losses = {
        kind: re.findall(r"mean loss ([\d.]+)", part)
        for kind, part in zip(("stock", "custom"), parts(out), strict=True)
    }
    assert len(losses["stock"]) == 6
    assert float(losses["stock"][-1]) < 0.5 < float(losses["stock"][0])
    assert [float(x) for x in losses["custom"]] == pytest.approx([float(x) for x in losses["stock"]], abs=2e-3)
    accuracies = re.findall(r"(stock|custom): test accuracy ([\d.]+)%, trained in [\d.]+ s", out)
    assert [kind for kind, _ in accuracies] == ["stock", "custom"]
    assert all(float(accuracy) > 85 for _, accuracy in accuracies)


def parts(out: str) -> list[str]:
    return re.split(r"\n(?:stock|custom) Linears\n", out)[1:]


def test_mnist_mlp_of_one_kind_takes_the_files_that_are_there(fashion_mnist_root: Path) -> None:
    out = run(
        *("mnist_mlp.py", "--data", "fashion_mnist", "--layers", "custom", "--epochs", "1", "--batch-size", "1000"),
        ZOO_DATA=str(fashion_mnist_root),
    )
    assert out.startswith("fashion_mnist: 60,000 images to train, 10,000 to test")
    assert "stock" not in out
    accuracy = re.search(r"custom: test accuracy ([\d.]+)%", out)
    assert accuracy is not None
    assert float(accuracy[1]) > 70


def test_mnist_mlp_falls_back_only_if_it_may(tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "mnist_mlp.py"), "--epochs", "1", "--layers", "stock"]
    environment = {**os.environ, "ZOO_DATA": str(tmp_path)}
    auto = subprocess.run(script, capture_output=True, text=True, env=environment, check=True)
    assert auto.stdout.startswith("digits:")
    named = subprocess.run([*script, "--data", "mnist"], capture_output=True, text=True, env=environment, check=False)
    assert named.returncode != 0
    assert "ZOO_DATA" in named.stderr


def test_finetune_resnet_resumes_to_the_same_end(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    small = ["--epochs", "2", "--images", "64"]
    out = run("finetune_resnet.py", str(whole), *small)
    assert "trained a base on the digits 0 to 4" in out
    assert "epoch 2 of 2" in out
    assert sorted(path.name for path in whole.iterdir()) == [
        "base.safetensors",
        "epoch-2.safetensors",
        "epoch-2.training.pt",
    ]
    command = [sys.executable, "-u", str(EXAMPLES / "finetune_resnet.py"), str(killed), *small]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 1 of 2"):
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "epoch-2.safetensors").exists()
    again = run("finetune_resnet.py", str(killed), *small)
    assert again.startswith("resumed after epoch 1\nepoch 2 of 2")
    assert again.splitlines()[1:2] == [line for line in out.splitlines() if line.startswith("epoch 2")]

    one, other = (load_file(folder / "epoch-2.safetensors") for folder in (whole, killed))
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key
    one, other = (torch.load(folder / "epoch-2.training.pt", weights_only=True) for folder in (whole, killed))
    assert one["schedule"] == other["schedule"]
    for index, state in one["optimizer"]["state"].items():
        assert torch.equal(state["momentum_buffer"], other["optimizer"]["state"][index]["momentum_buffer"])

    model = zoo.load(killed / "epoch-2.safetensors")
    assert isinstance(model.fc, zoo.layers.Linear)
    assert model.fc.out_features == 10


def test_an_epoch_counts_only_if_all_of_it_is_there(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from finetune_resnet import last_epoch
    finally:
        sys.path.remove(str(EXAMPLES))
    assert last_epoch(tmp_path) == 0
    for name in ("epoch-9.training.pt", "epoch-10.training.pt", "epoch-11.safetensors", "training.tmp"):
        (tmp_path / name).touch()
    assert last_epoch(tmp_path) == 10


def test_bring_your_own_linear_finds_the_wrong_one() -> None:
    out = run("bring_your_own_linear.py", "--model", "timm/test_vit")
    assert out.endswith("addmm: right\nsliced: right\nforgetful: WRONG\n")
    assert out.count("swapped 25 Linears, left 0 alone") == 3
    shares = [float(share) for share in re.findall(r"([\d.]+)% of the FLOPs ran through it", out)]
    assert len(shares) == 3
    assert min(shares) > 50
    assert out.count("outputs: right") == 3  # the wrong one too
    assert out.count("gradients: right") == 2
    assert "gradients: 25 WRONG" in out
    assert "first divergence: gradient head.bias" in out


VERDICTS = {
    "triton_linear-cpu": "triton_linear:triton_linear",
    "low_rank_linear-cpu": "low_rank_linear:LowRankLinear",
    "low_rank_linear-against-its-twin-cpu": "low_rank_linear:LowRankLinear",
    "int8_linear-cpu": "int8_linear:Int8Linear",
    "int8_linear-against-its-twin-cpu": "int8_linear:Int8Linear",
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_committed_verdict_is_of_the_code_that_is_here(name: str) -> None:
    data = json.loads((EXAMPLES / "results" / "verify" / f"{name}.json").read_text(encoding="utf-8"))
    script = EXAMPLES / data["source_file"]
    text = script.read_text(encoding="utf-8")
    assert data["target"] == VERDICTS[name] and data["complete"] and data["seed"] == 0
    assert data["source_sha256"] == hashlib.sha256(script.read_bytes()).hexdigest(), "made of another version"
    assert f"--json results/verify/{name}.json" in " ".join(text.split())
    assert data["target"] in data["command"] and ((data["against"] or "") in data["command"])
    (values,) = [v["status"] for v in data["verdicts"] if v["claim"] == "values"]
    assert values == ("fail" if name in ("low_rank_linear-cpu", "int8_linear-cpu") else "pass")


def verdicts(out: str) -> list[tuple[str, str]]:
    return re.findall(r"^ ([a-z][\w-]+) +(pass|fail|refused|untested) +[\d.]+ ", out, re.M)


def test_low_rank_linear() -> None:
    out = run("low_rank_linear.py", "--claim", "values", "--claim", "gradients", "--claim", "output")
    names = ("build", "values", "output", "gradients")
    beside_linear = ("pass", "fail", "pass", "fail")
    assert verdicts(out) == [*zip(names, beside_linear, strict=True), *((name, "pass") for name in names)]


def test_int8_linear() -> None:
    pytest.importorskip("torchao")
    out = run("int8_linear.py", "--claim", "values", "--claim", "gradients", "--claim", "no-grad")
    names = ("build", "values", "gradients", "no-grad")
    beside_linear = ("pass", "fail", "refused", "pass")  # of the weight, which is not trained
    assert verdicts(out) == [*zip(names, beside_linear, strict=True), *((name, "pass") for name in names)]


def test_triton_linear() -> None:
    pytest.importorskip("triton")
    out = run("triton_linear.py", "--claim", "edge-shapes", "--claim", "gradients", TRITON_INTERPRET="1")
    assert verdicts(out) == [("build", "pass"), ("edge-shapes", "pass"), ("gradients", "pass")]
    if not torch.cuda.is_available():
        assert run("triton_linear.py", TRITON_INTERPRET="0").startswith(
            "a Triton kernel runs on a GPU; TRITON_INTERPRET=1"
        )
