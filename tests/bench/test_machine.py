from __future__ import annotations

import datetime
import subprocess
from typing import Any

import pytest
import torch

import zoo
from zoo import machine
from zoo.machine import cache_bytes, device_of, examine, float32_precision, free_bytes, peak_of

CPU = torch.device("cpu")


def test_facts_of_the_cpu() -> None:
    found = examine(CPU)
    assert (found.torch, found.zoo, found.driver) == (torch.__version__, zoo.__version__, None)
    assert found.device and found.threads == torch.get_num_threads()
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(found.date)
    assert age < datetime.timedelta(minutes=1)
    assert 2**17 < cache_bytes(CPU) < 2**34
    assert 2**24 < free_bytes(CPU) < 2**50


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of(None) == device_of("cpu") == CPU and device_of("meta") == torch.device("meta")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_of("cuda") == device_of(torch.device("cuda")) == torch.device("cuda:1")
    assert device_of("cuda:0") == torch.device("cuda:0")
    for wrong, said in (("cuda:2", "torch sees 2 GPUs"), ("gpu", "expected one such as cpu"), (1.5, "expected one")):
        with pytest.raises(ValueError, match=said):
            device_of(wrong)  # type: ignore[arg-type]


def test_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 0, stdout="580.159.04\n580.159.04\n")

    monkeypatch.setattr(subprocess, "run", answer)
    assert machine._driver() == "580.159.04"

    def absent(command: list[str], **_: Any) -> Any:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", absent)
    assert machine._driver() is None


def test_peaks() -> None:
    known = peak_of("NVIDIA H200", "bfloat16", "highest")
    assert known is not None and (known.flops, known.bandwidth) == (989e12, 4.8e12)
    rates = [peak_of("NVIDIA H200", "float32", precision) for precision in ("highest", "high", "medium")]
    assert [peak.flops for peak in rates if peak] == [67e12, 495e12, 989e12]
    assert peak_of("AMD EPYC", "float32", "highest") is None


def test_precision_comes_back() -> None:
    before = torch.get_float32_matmul_precision()
    other = "high" if before != "high" else "highest"

    def fail() -> None:
        with float32_precision(other):
            assert torch.get_float32_matmul_precision() == other
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_float32_matmul_precision() == before
