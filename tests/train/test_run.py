"""One run: what it computes, beside the same loop written plainly, and how it ends where it cannot go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from zoo import checkpoint, data, factory
from zoo.lock import locked
from zoo.preparing import resized
from zoo.train import TrainConfig, run, train
from zoo.train.building import build_model
from zoo.train.checkpoints import latest, listed
from zoo.train.log import Log, read_log

ROOT = Path(__file__).parents[2]


def config_for(**fields: Any) -> TrainConfig:
    return TrainConfig(**{"model": "mlp", "data": "digits", "device": "cpu", "epochs": 2, "batch_size": 128, **fields})


def logged(folder: Path, event: str, field: str) -> list[Any]:
    return [line[field] for line in read_log(folder / "log.jsonl") if line["event"] == event]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(checkpoint.load(path).state_dict())


def test_it_is_the_loop_that_one_would_write(tmp_path: Path) -> None:
    config = config_for(optimizer="sgd", lr=0.1, schedule="none", label_smoothing=0.1, clip_grad=0.5)
    report = train(config, tmp_path / "run")

    torch.manual_seed(0)
    model = factory.create("mlp", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    images, labels = data.digits(train=True).tensors
    images, losses = resized(images, 28), []
    for epoch in range(2):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order[: 11 * 128].split(128):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    got = weights(tmp_path / "run" / "final.safetensors")
    assert all(torch.equal(got[name], tensor) for name, tensor in model.state_dict().items())
    assert logged(tmp_path / "run", "step", "loss")[:20] == losses[:20]
    assert report.loss == pytest.approx(sum(losses[11:]) / 11)
    test_images, answers = data.digits(train=False).tensors
    assert report.accuracy == data.accuracy(model, [(resized(test_images, 28), answers)])
    assert (report.steps, report.images, report.layers) == (22, 2 * 11 * 128, "stock")


def test_accumulated_passes_are_one_large_batch(tmp_path: Path) -> None:
    train(config_for(batch_size=128), tmp_path / "one")
    train(config_for(batch_size=32, accumulate=4), tmp_path / "four")
    one, four = (weights(tmp_path / name / "final.safetensors") for name in ("one", "four"))
    assert all(torch.allclose(one[name], four[name], atol=1e-4) for name in one)
    assert not all(torch.equal(one[name], four[name]) for name in one)
    losses = [logged(tmp_path / name, "step", "loss") for name in ("one", "four")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_average_is_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    update = run._Run._update

    def watched(self: run._Run, batches: Any) -> None:
        update(self, batches)
        seen.append({name: tensor.double() for name, tensor in self.model.state_dict().items()})

    monkeypatch.setattr(run._Run, "_update", watched)
    train(config_for(epochs=1, ema=0.75), tmp_path / "run")
    mean = seen[0]
    for state in seen[1:]:
        mean = {name: 0.75 * mean[name] + 0.25 * tensor for name, tensor in state.items()}
    got = weights(tmp_path / "run" / "final.safetensors")
    assert all(torch.allclose(got[name].double(), mean[name], atol=1e-6) for name in got)
    assert set(read_log(tmp_path / "run" / "log.jsonl")[-1]) >= {"accuracy", "raw"}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"schedule": "cosine"}, [0.25, 0.0]),
        ({"schedule": "cosine", "min_lr": 0.1}, [0.3, 0.1]),
        ({"schedule": "poly", "decay_rate": 1.0}, [0.25, 0.0]),
        ({"schedule": "step", "decay_epochs": 1}, [0.05, 0.005]),
        ({"schedule": "none"}, [0.5, 0.5]),
    ],
)
def test_schedules(tmp_path: Path, schedule: dict[str, Any], expected: list[float]) -> None:
    train(config_for(optimizer="sgd", lr=0.5, batch_size=512, **schedule), tmp_path / "run")
    assert logged(tmp_path / "run", "step", "lr")[1::2] == pytest.approx(expected, abs=1e-9)


def test_a_warm_up_begins_at_nothing(tmp_path: Path) -> None:
    train(config_for(optimizer="sgd", lr=0.5, warmup_epochs=1, batch_size=512), tmp_path / "run")
    assert logged(tmp_path / "run", "step", "lr")[:2] == pytest.approx([0.25, 0.25], abs=0.01)


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_autocast_runs_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autocast: str) -> None:
    dtypes, cross_entropy = set(), F.cross_entropy

    def watched(logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        dtypes.add(logits.dtype)
        return cross_entropy(logits, *args, **options)

    monkeypatch.setattr(F, "cross_entropy", watched)
    report = train(config_for(epochs=3, autocast=autocast, custom_linear=True), tmp_path / "run")
    assert dtypes == {torch.bfloat16 if autocast == "bf16" else torch.float16}
    assert report.accuracy > 0.8
    state = latest(tmp_path / "run" / "checkpoints")[0]
    assert state is not None
    assert bool(state["scaler"]) == (autocast == "fp16")


@pytest.mark.parametrize("model", ["resnet18", "torchvision/mnasnet0_5", "timm/test_vit"])
def test_models_of_every_library_resume_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    few = {train: TensorDataset(*data.digits(train=train)[:16]) for train in (True, False)}
    monkeypatch.setattr(data, "digits", lambda *, train: few[train])
    # what takes any size gets a small one
    small = {"channels_last": True, "size": 32} if model != "timm/test_vit" else {}
    config = config_for(model=model, batch_size=4, accumulate=2, epochs=1, checkpoint_every=1, **small)
    train(config, tmp_path / "whole")
    with pytest.raises(ValueError, match="stop"):
        train(config, tmp_path / "broken", watch=at_step(1))
    assert train(config, tmp_path / "broken", resume=True).resumed_from == 1
    files = [(tmp_path / name / "final.safetensors").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1]


def test_the_best_and_the_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.3, 0.9, 0.5, 0.9, 0.4])
    monkeypatch.setattr(run, "top1", lambda models, *_, **__: {name: next(accuracies) for name in models})
    report = train(config_for(epochs=5, batch_size=512, keep_last=3), tmp_path / "run")
    assert (report.best_accuracy, report.best_step, report.accuracy) == (0.9, 4, 0.4)
    assert checkpoint.read_metadata(tmp_path / "run" / "best.safetensors")["step"] == "4"
    assert [path.name for path in listed(tmp_path / "run" / "checkpoints")] == [
        f"step-{step:08d}.pt" for step in (10, 8, 6)
    ]


def test_a_resumed_run_knows_its_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.9, 0.5])
    monkeypatch.setattr(run, "top1", lambda models, *_, **__: {name: next(accuracies) for name in models})
    with pytest.raises(ValueError, match="stop"):
        train(config_for(batch_size=512), tmp_path / "run", watch=at_step(3))
    report = train(config_for(batch_size=512), tmp_path / "run", resume=True)
    assert (report.best_accuracy, report.best_step, report.accuracy) == (0.9, 2, 0.5)
    assert checkpoint.read_metadata(tmp_path / "run" / "best.safetensors")["step"] == "2"


# What must not cost the last checkpoint


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in listed(folder / "checkpoints")}


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, loss = tmp_path / "run", run._Run._loss
    kept: dict[str, bytes] = {}

    def poisoned(self: run._Run, batch: Any) -> torch.Tensor:
        if self.step == 31:
            kept.update(contents(folder))
        return loss(self, batch) * (torch.nan if self.step == 31 else 1)

    monkeypatch.setattr(run._Run, "_loss", poisoned)
    with pytest.raises(ValueError, match=r"by step 32 the loss is nan; the last checkpoint is .*step-00000028.pt"):
        train(config_for(epochs=4, checkpoint_every=4), folder)
    assert contents(folder) == kept
    state = latest(folder / "checkpoints")[0]
    assert state is not None
    assert all(bool(tensor.isfinite().all()) for tensor in state["model"].values())
    monkeypatch.setattr(run._Run, "_loss", loss)
    assert train(config_for(epochs=4, checkpoint_every=4), folder, resume=True).steps == 44


def test_weights_that_are_not_finite_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = run._Run._update

    def poisoned(self: run._Run, batches: Any) -> None:
        update(self, batches)
        if self.step == 8:  # the loss was finite, and the step after it was not
            self.model[0].weight.data[3, 5] = torch.inf

    monkeypatch.setattr(run._Run, "_update", poisoned)
    with pytest.raises(ValueError, match=r"by step 8 0.weight is no longer finite; .*step-00000004.pt"):
        train(config_for(checkpoint_every=4), tmp_path / "run")
    assert list(contents(tmp_path / "run")) == ["step-00000004.pt"]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """A process that may write no file larger than what the log needs: the system refuses the rest of a checkpoint."""
    folder = tmp_path / "run"
    train(config_for(epochs=1), folder)
    (folder / "config.toml").write_text((folder / "config.toml").read_text().replace("epochs = 1", "epochs = 2"))
    before = contents(folder) | {"best": (folder / "best.safetensors").read_bytes()}
    code = f"""
import resource
from zoo.train import TrainConfig, read_config, train
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    train(TrainConfig(**read_config({str(folder / "config.toml")!r})), {str(folder)!r}, resume=True)
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "not saved, the former file is as it was" in done.stdout, done.stderr
    assert contents(folder) | {"best": (folder / "best.safetensors").read_bytes()} == before
    assert list(folder.rglob(".*.tmp")) == []
    assert train(config_for(epochs=2), folder, resume=True).resumed_from == 11


def test_a_log_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="stop"):
        train(config_for(), folder, watch=at_step(12))
    before = contents(folder)

    class OnAFullDisk(Log):
        def __init__(self, path: Path, *, keep: int) -> None:
            super().__init__(path, keep=keep)
            self.path = Path("/dev/full")

    monkeypatch.setattr(run, "Log", OnAFullDisk)
    with pytest.raises(OSError, match=r"/dev/full: a line could not be written: .*No space left on device"):
        train(config_for(), folder, resume=True)
    assert contents(folder) == before
    monkeypatch.undo()
    assert train(config_for(), folder, resume=True).resumed_from == 11


def at_step(last: int) -> Any:
    """A watcher that ends the run there."""

    def watch(step: int, steps: int, text: str) -> None:
        if step == last:
            raise ValueError("stop")

    return watch


def test_images_that_cannot_be_read(tmp_path: Path) -> None:
    from PIL import Image

    root = tmp_path / "images"
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for index in range(4):
                Image.new("RGB", (40, 40), (index * 60, 0, 200)).save(root / part / name / f"{index}.png")
    damaged = root / "train" / "dog" / "2.png"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:60])
    small = {"model": "resnet18", "data": str(root), "batch_size": 4, "epochs": 1, "size": 32}
    with pytest.raises(ValueError, match=r"dog/2.png: this image cannot be read .*on_corrupt='replace'"):
        train(config_for(**small), tmp_path / "strict")
    said: list[str] = []
    report = train(config_for(**small, on_corrupt="replace"), tmp_path / "lenient", say=said.append)
    assert report.corrupt == 1
    assert said == [line["image"] + "; the next one is in its place" for line in _corrupt(tmp_path / "lenient")]
    assert str(damaged) in said[0]
    damaged.write_bytes(whole)
    assert train(config_for(**small), tmp_path / "strict", resume=True).steps == 2


def test_compiled_or_recomputed_it_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, compile=torch.nn.Module.compile: (compiled.append(self), compile(self, backend="aot_eager")),
    )
    kinds = {"plain": {}, "compiled": {"compile": True}, "recomputed": {"grad_checkpointing": True}}
    for name, fields in kinds.items():
        train(config_for(options={"hidden": [16]}, custom_linear=True, ema=0.9, **fields), tmp_path / name)
        assert len(compiled) == (name != "plain")
    losses = {name: logged(tmp_path / name, "step", "loss") for name in kinds}
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["recomputed"] == losses["plain"]
    want = weights(tmp_path / "plain" / "final.safetensors")
    for name in kinds:
        got = weights(tmp_path / name / "final.safetensors")
        assert list(got) == list(want)
        assert all(torch.allclose(got[key], want[key], atol=1e-5) for key in want)


def test_activations_are_really_recomputed(tmp_path: Path) -> None:
    """By a model of timm's; torchvision's have no such switch."""
    config = config_for(model="timm/test_vit", grad_checkpointing=True)
    assert build_model(config, 10, torch.device("meta")).grad_checkpointing
    config = config_for(model="torchvision/mnasnet0_5", grad_checkpointing=True)
    with pytest.raises(ValueError, match=r"grad_checkpointing: torchvision/mnasnet0_5 has no gradient checkpointing"):
        train(config, tmp_path / "run")


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"tensorboard: the package is not here \(.*pip install tensorboard"):
        train(config_for(tensorboard=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given to torch's writer: the numbers of the log, and after a break what comes again in its place."""
    written: list[Any] = []

    class Writer:
        def __init__(self, folder: str, *, purge_step: int) -> None:
            written.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append("closed")

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    config = config_for(batch_size=512, tensorboard=True)
    with pytest.raises(ValueError, match="stop"):
        train(config, tmp_path / "run", watch=at_step(3))
    train(config, tmp_path / "run", resume=True)
    assert [entry for entry in written if len(entry) == 2] == [("tensorboard", 1), ("tensorboard", 3)]
    losses = [(value, step) for name, value, step in (e for e in written if len(e) == 3) if name == "step/loss"]
    assert [step for _, step in losses] == [1, 2, 3, 3, 4]
    assert [losses[index][0] for index in (0, 1, 3, 4)] == logged(tmp_path / "run", "step", "loss")
    assert [e[2] for e in written if e[0] == "epoch/accuracy"] == [2, 4]
    assert written[-1] == "closed"


def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    train(config_for(batch_size=512, tensorboard=True), tmp_path / "run")
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


# One process a folder


def test_two_processes_cannot_train_into_one_folder(tmp_path: Path) -> None:
    refused: list[str] = []

    def second(step: int, steps: int, text: str) -> None:
        if step == 3:
            for resume in (True, False):
                with pytest.raises(ValueError, match="another process is training into this folder"):
                    train(config_for(), tmp_path / "run", resume=resume)
            code = f"""
from zoo.train import TrainConfig, train
train(TrainConfig(**{config_for().to_dict()!r}), {str(tmp_path / "run")!r}, resume=True)
"""
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
            refused.append(done.stderr)

    assert train(config_for(), tmp_path / "run", watch=second).steps == 22
    assert "another process is training into this folder; wait for its end" in refused[0]
    assert train(config_for(), tmp_path / "run", resume=True).resumed_from == 22  # it is let go of


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    """Killed, and though a process that it forked, as a worker, is still alive."""
    code = f"""
import os, signal, time
from pathlib import Path
from zoo.lock import locked
with locked(Path({str(tmp_path)!r}), doing="working", remedy="go away"):
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        assert holder.wait(60) == -signal.SIGKILL
        os.kill(child, 0)  # it lives
        words = {"doing": "working", "remedy": "go away"}
        refused = pytest.raises(ValueError, match="another process is working; wait for its end, or go away")
        with locked(tmp_path, **words), refused, locked(tmp_path, **words):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def _corrupt(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_log(folder / "log.jsonl") if line["event"] == "corrupt"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "mpl"}, "unknown model 'mpl'"),
        ({"optimizer": "adamv"}, "unknown optimizer 'adamv'"),
        ({"data": "digit"}, "data 'digit': there is no such folder"),
        ({"options": {"depth": 3}}, "does not take the option 'depth'"),
        ({"options": {"num_classes": 9}}, "num_classes: got 9, and the data has 10 classes"),
        ({"model": "torchvision/googlenet", "batch_size": 2}, "gives GoogLeNetOutputs in training, expected logits"),
        ({"batch_size": 2000}, "batch_size 2000 x accumulate 1: the data has only 1437 images"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"weights": "mlp.none"}, "mlp.none"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(config_for(**fields), tmp_path / "run")
