from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zoo import doctor
from zoo.doctor import LIBRARIES, Build, Device, Facts, Library, Problem, Version, diagnose, examine, serving

GPU = Device("cuda:0", "NVIDIA H200", "9.0", "sm_90a", kernel="tiled", error=1e-7)
FACTS = Facts(
    versions=(Version("torch", "2.14.1"), Version("torchvision", "0.29.1")),
    libraries=tuple(Library(name, f"/zoo/{name}.so", True) for name in LIBRARIES),
    build=Build("2.14.1", "13.0", ("sm_90a", "compute_80"), "nvcc 13.0"),
    torch_cuda="13.0",
    nvcc="/usr/local/cuda/bin/nvcc",
    nvcc_cuda="13.0",
    devices=(Device("cpu", "2 threads", kernel="aten", error=1e-7),),
    driver_gpus=0,
    hidden_by=None,
)
NO_CUDA_LIBRARY = (
    FACTS.libraries[0],
    Library("_C_cuda", None, False, "zoo was built without CUDA"),
    FACTS.libraries[2],
)


def only_problem(facts: Facts) -> Problem:
    problems, _ = diagnose(facts)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        ((9, 0), ["sm_90a", "compute_80"], "sm_90a"),
        ((8, 0), ["sm_90a", "compute_80"], "compute_80"),
        ((10, 0), ["sm_90a", "compute_80"], "compute_80"),
        ((7, 5), ["sm_90a", "compute_80"], None),
        ((8, 6), ["sm_80", "compute_80"], "sm_80"),  # code of the same major comes before PTX
        ((8, 9), ["sm_80", "sm_86"], "sm_86"),  # the nearest
        ((8, 0), ["sm_86"], None),  # not the later one
        ((9, 0), ["sm_80"], None),  # not another major
        ((10, 0), ["compute_90a"], None),  # PTX with features of one chip is for that chip
        ((10, 3), ["sm_100f"], "sm_100f"),
        ((10, 3), ["sm_100a"], None),
        ((12, 0), ["compute_100f"], None),
        ((12, 1), ["sm_90", "sm_120"], "sm_120"),  # two digits of major
        ((9, 0), [], None),
    ],
)
def test_serving(capability: tuple[int, int], architectures: list[str], expected: str | None) -> None:
    assert serving(capability, architectures) == expected


def test_serving_refuses_other_names() -> None:
    with pytest.raises(ValueError, match=r"'9\.0'.*sm_90a"):
        serving((9, 0), ["9.0"])


def test_no_gpu_is_no_problem() -> None:
    problems, notes = diagnose(FACTS)
    assert problems == ()
    assert "no GPU" in notes[0]


def test_a_served_gpu_is_no_problem() -> None:
    assert diagnose(replace(FACTS, devices=(*FACTS.devices, GPU), driver_gpus=1)) == ((), ())


def test_gpu_without_the_cuda_library() -> None:
    broken = replace(GPU, failure="zoo was built without CUDA", served_by=None)
    facts = replace(FACTS, devices=(*FACTS.devices, broken), driver_gpus=1, libraries=NO_CUDA_LIBRARY)
    problem = only_problem(facts)
    assert "NVIDIA H200" in problem.what
    assert "built without CUDA" in problem.what
    assert problem.remedy.startswith("rebuild zoo: ZOO_CUDA=1")
    assert "install the CUDA 13 toolkit" in only_problem(replace(facts, nvcc=None, nvcc_cuda=None)).remedy
    other = only_problem(replace(facts, nvcc_cuda="12.4")).remedy
    assert "nvcc is CUDA 12.4 and torch was built with CUDA 13.0" in other


def test_gpu_that_no_architecture_serves() -> None:
    old = Device("cuda:0", "Tesla T4", "7.5", None, failure="no kernel image is available")
    problem = only_problem(replace(FACTS, devices=(*FACTS.devices, old), driver_gpus=1))
    assert "sm_90a, compute_80" in problem.what
    assert "Tesla T4" in problem.what
    assert "TORCH_CUDA_ARCH_LIST=7.5" in problem.remedy


def test_wrong_results_are_a_problem() -> None:
    wrong = replace(FACTS.devices[0], failure="output output: error 1.0e-01 is over the limit")
    assert "error 1.0e-01" in only_problem(replace(FACTS, devices=(wrong,))).what


def test_gpu_that_torch_cannot_use() -> None:
    facts = replace(FACTS, driver_gpus=1)
    assert "nvidia-smi" in only_problem(facts).remedy
    assert "CUDA build of torch" in only_problem(replace(facts, torch_cuda=None)).remedy
    problems, notes = diagnose(replace(facts, hidden_by=""))
    assert problems == ()
    assert "CUDA_VISIBLE_DEVICES" in notes[0]


def test_without_autograd_in_cpp_it_works_and_says_so() -> None:
    eager = Library("_C_eager", None, False, "it was built with torch 2.11.0, and this is 2.12.0")
    problems, notes = diagnose(replace(FACTS, libraries=(*FACTS.libraries[:2], eager)))
    assert problems == ()
    assert any("host time" in note and "built with torch 2.11.0" in note for note in notes)


def test_library_that_cannot_be_imported() -> None:
    broken = Version("torchvision", None, "RuntimeError: operator torchvision::nms does not exist")
    problem = only_problem(replace(FACTS, versions=(FACTS.versions[0], broken)))
    assert "nms" in problem.what
    assert "pip install -U torchvision" in problem.remedy


def test_missing_core_is_told_once() -> None:
    reason = "zoo's library is not built"
    libraries = tuple(Library(name, None, False, reason) for name in LIBRARIES)
    problem = only_problem(replace(FACTS, libraries=libraries, devices=()))
    assert problem.remedy == "python -m pip install --force-reinstall --no-deps ."


def test_examine_runs_a_linear_here() -> None:
    report = examine()
    assert report.ok, str(report)
    assert str(report).endswith("ok: zoo runs on " + ", ".join(d.device for d in report.facts.devices))
    data = json.loads(report.to_json())
    assert data["ok"] is True
    cpu = data["devices"][0]
    assert (cpu["device"], cpu["kernel"], cpu["failure"]) == ("cpu", "aten", None)
    assert 0 < cpu["error"] < 1e-6
    assert [library["name"] for library in data["libraries"]] == [*LIBRARIES]
    assert Path(data["libraries"][0]["path"]).suffix in (".so", ".pyd")  # and not the stub beside it
    assert data["versions"][0] == {"name": "torch", "version": torch.__version__, "error": None}


@pytest.mark.parametrize("what", ["output", "gradient"])
def test_examine_catches_a_wrong_linear(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def wrong(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        return y + 1e-3 if what == "output" else y + 1e-3 * (x.sum() - x.sum().detach())

    monkeypatch.setattr("zoo.layers.Linear.forward", wrong)
    report = examine()
    assert not report.ok
    assert what in report.problems[0].what
    assert "WRONG" in str(report)


def test_examine_survives_a_library_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.importlib.import_module

    def failing(name: str) -> object:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist\nand more lines")
        if name == "zoo.ops._library":
            raise ImportError("zoo's library is not built: run pip")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", failing)
    report = examine()
    assert [p.what for p in report.problems] == [
        "torchvision cannot be imported: RuntimeError: operator torchvision::nms does not exist",
        "zoo's library is not loaded: zoo's library is not built: run pip",
    ]
    assert report.facts.devices == ()


def test_build_record(tmp_path: Path) -> None:
    path = tmp_path / "_build_info.json"
    assert doctor._build_record(path) is None
    record = {"torch": "2.14.1", "cuda": "13.0", "architectures": ["sm_90a", "compute_80"], "compiler": "nvcc 13.0"}
    path.write_text(json.dumps(record))
    assert doctor._build_record(path) == FACTS.build
