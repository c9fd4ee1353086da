"""One training run, from its first step or from its last checkpoint, to its end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.optim import create_optimizer_v2, list_optimizers  # type: ignore[attr-defined]
from timm.scheduler.scheduler_factory import create_scheduler_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from zoo.checkpoint import save_checkpoint
from zoo.data import top1
from zoo.factory import create
from zoo.naming import unknown_name
from zoo.preparing import choose_device
from zoo.train import checkpoints
from zoo.train.config import TrainConfig, differences, read_config, write_config
from zoo.train.data import Batch, Images, Source, batches_to_test, open_data, training_batches
from zoo.train.log import Log
from zoo.train.randomness import rng_state, seed_all, set_rng_state
from zoo.train.report import TrainReport
from zoo.version import __version__

__all__ = ["FIRST_STEPS", "train"]

FIRST_STEPS = 20
"""Steps with a line each in the log: so long the losses of stock and custom layers are equal but for rounding."""

Watch = Callable[[int, int, str], None]


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    watch: Watch = lambda step, steps, text: None,
    say: Callable[[str], None] = lambda text: None,
) -> TrainReport:
    """Train a model, and leave in ``folder`` all that came of it.

    ``config.toml`` is the run, ``log.jsonl`` its losses and accuracies, ``checkpoints/`` what it resumes from,
    ``best.safetensors`` and ``final.safetensors`` the model (the averaged one with ``ema``; the raw one is then in the
    checkpoints) for zoo.load.

    Args:
        resume: go on from the newest checkpoint in ``folder``, or begin where there is none. On a CPU, with as many
            threads, the run ends with the bits that it would have had without the break.
        watch: called after each step with its number, the number of all, and what to show beside them.
        say: called with a line on what happened: an image replaced, a checkpoint damaged.

    Raises:
        ValueError: what does not go together; a run in ``folder`` without ``resume``, or of other settings; a loss or
            weights that are not finite; an image that cannot be read. The last checkpoint is then as it was.
        OSError: data that is not there, a disk that is full. The last checkpoint is then as it was.
    """
    place = choose_device(config.device)
    source = open_data(config.data)
    where = Path(folder)
    _begin(config, where, resume=resume)
    found, damaged = checkpoints.latest(where / "checkpoints")
    for line in damaged:
        say(line)
    run = _Run(config, where, place, source, watch, say)
    if found is not None:
        run.load(found)
    return run.finish(resumed_from=None if found is None else found["step"])


def _begin(config: TrainConfig, folder: Path, *, resume: bool) -> None:
    saved = folder / "config.toml"
    if saved.exists():
        if not resume:
            raise ValueError(f"{folder}: there is a run already; resume it (--resume), or name another folder")
        other = differences(config, TrainConfig(**read_config(saved)))
        if other:
            raise ValueError(f"{folder}: the run to resume is another one; name another folder\n" + "\n".join(other))
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    for own in (folder, folder / "checkpoints"):
        checkpoints.remove_unfinished(own)
    write_config(config, saved)


class _Run:
    """A run in progress. ``step`` is the number of optimizer steps that are done."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        device: torch.device,
        source: Source,
        watch: Watch,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.folder, self.device, self.watch, self.say = config, folder, device, watch, say
        seed_all(config.seed)
        self.model = _build(config, source.classes, device)
        self.images, self.tests = source.train(self.model, config), source.test(self.model, config)
        self.steps_per_epoch = _steps_per_epoch(config, self.images)
        self.steps = self.steps_per_epoch * config.epochs
        self.optimizer = _optimizer(config, self.model)
        self.scheduler, _ = create_scheduler_v2(
            self.optimizer,
            config.schedule,
            num_epochs=config.epochs,
            warmup_epochs=config.warmup_epochs,
            warmup_lr=0.0,
            min_lr=config.min_lr,
            decay_epochs=config.decay_epochs,
            decay_rate=config.decay_rate,
            step_on_epochs=False,
            updates_per_epoch=self.steps_per_epoch,
        )
        self.ema = None if config.ema is None else ModelEmaV3(self.model, decay=config.ema)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.autocast == "fp16")
        self.mixup = _mixup(config, self.model, source.classes)
        self.step = 0
        self.loss = torch.zeros((), device=device)  # summed since the last line of the log
        self.counted = 0
        self.epoch_sum, self.epoch_mean = 0.0, math.nan
        self.accuracy, self.best, self.best_step = math.nan, -1.0, 0
        self.corrupt = 0
        seed_all(config.seed)  # stock and custom begin alike, whatever their builders drew

    # What a checkpoint holds

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": rng_state(self.device),
            "losses": (self.loss, self.counted, self.epoch_sum, self.epoch_mean),
            "accuracies": (self.accuracy, self.best, self.best_step),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.loss, self.counted, self.epoch_sum, self.epoch_mean = state["losses"]
        self.loss = self.loss.to(self.device)
        self.accuracy, self.best, self.best_step = state["accuracies"]
        self.step = state["step"]
        set_rng_state(state["rng"], self.device)

    # The loop

    def finish(self, *, resumed_from: int | None) -> TrainReport:
        self.log = Log(self.folder / "log.jsonl", keep=self.step)
        self._log_start(resumed_from)
        self.model.train()
        first, seconds = self.step, 0.0
        started = marked = time.perf_counter()
        marked_step = self.step
        for batches in self._grouped():
            self._update(batches)
            ends = self.step % self.steps_per_epoch == 0
            text = ""
            if self.step <= FIRST_STEPS or self.step % self.config.log_every == 0 or ends:
                loss = self._mean_loss()
                now = time.perf_counter()
                rate = (self.step - marked_step) * self._images_per_step / (now - marked)
                epoch = (self.step - 1) // self.steps_per_epoch + 1
                lr = self.optimizer.param_groups[0]["lr"]
                self.log.write(
                    "step", self.step, {"epoch": epoch, "loss": loss, "lr": lr, "images_per_second": round(rate, 1)}
                )
                text = f"epoch {epoch}/{self.config.epochs}, loss {loss:.4f}, {rate:,.0f} images/s"
                marked, marked_step = now, self.step
            if ends:
                seconds += time.perf_counter() - started
                self._end_epoch()
            if ends or (self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0):
                self._save()
            if ends:
                started = marked = time.perf_counter()
            self.watch(self.step, self.steps, text)
        save_checkpoint(self.shown, self.folder / "final.safetensors", metadata=self._metadata(self.accuracy))
        return TrainReport(
            model=self.config.model,
            data=self.config.data,
            layers="custom" if self.config.custom_linear else "stock",
            device=str(self.device),
            steps=self.step,
            resumed_from=resumed_from,
            images=(self.step - first) * self._images_per_step,
            seconds=seconds,
            loss=self.epoch_mean,
            accuracy=self.accuracy,
            best_accuracy=self.best,
            best_step=self.best_step,
            corrupt=self.corrupt,
            folder=str(self.folder),
        )

    @property
    def shown(self) -> nn.Module:
        """What is evaluated and saved: the averaged weights where there are such."""
        return self.model if self.ema is None else self.ema.module

    @property
    def _images_per_step(self) -> int:
        return self.config.batch_size * self.config.accumulate

    def _grouped(self) -> Iterator[list[Batch]]:
        """The batches of each step to come. Nothing is read where none is left."""
        if self.step == self.steps:
            return
        group: list[Batch] = []
        for batch in training_batches(self.images, self.config, start=self.step, steps_per_epoch=self.steps_per_epoch):
            group.append(batch)
            if len(group) == self.config.accumulate:
                yield group
                group = []

    def _update(self, batches: list[Batch]) -> None:
        self.optimizer.zero_grad()
        for batch in batches:
            if batch.corrupt:
                self._replaced(batch.corrupt)
            loss = self._loss(batch)
            if len(batches) > 1:
                loss = loss / len(batches)
            self.scaler.scale(loss).backward()
            self.loss += loss.detach()
        if self.config.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        self.counted += 1
        if self.scheduler is not None:
            self.scheduler.step_update(self.step)
        if self.ema is not None:
            self.ema.update(self.model, self.step)

    def _loss(self, batch: Batch) -> Tensor:
        images, labels = self._here(batch.images), batch.labels.to(self.device, non_blocking=True)
        smoothing = self.config.label_smoothing
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
            smoothing = 0.0  # it is in the labels
        with self._autocast():
            logits = self.model(images)
            if not isinstance(logits, Tensor):
                raise ValueError(
                    f"{self.config.model}: gives {type(logits).__name__} in training, expected logits (N, classes); "
                    "torchvision's models with auxiliary classifiers take the option aux_logits=false"
                )
            return F.cross_entropy(logits, labels, label_smoothing=smoothing)

    def _here(self, images: Tensor) -> Tensor:
        form = torch.channels_last if self.config.channels_last else torch.contiguous_format
        return images.to(self.device, non_blocking=True, memory_format=form)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = dtypes.get(self.config.autocast)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _end_epoch(self) -> None:
        self.epoch_mean, self.epoch_sum = self.epoch_sum / self.steps_per_epoch, 0.0
        batches = ((self._here(images), labels) for images, labels in batches_to_test(self.tests, self.config))
        models = {"accuracy": self.model} if self.ema is None else {"accuracy": self.shown, "raw": self.model}
        with self._autocast():
            found = top1(models, batches, device=self.device)
        self.accuracy = found["accuracy"]
        self.log.write("epoch", self.step, {"epoch": self.step // self.steps_per_epoch, **found})
        if self.accuracy > self.best:
            self._check_weights()
            self.best, self.best_step = self.accuracy, self.step
            save_checkpoint(self.shown, self.folder / "best.safetensors", metadata=self._metadata(self.best))

    def _metadata(self, accuracy: float) -> dict[str, Any]:
        return {"step": self.step, "accuracy": accuracy, "data": self.config.data}

    # What must not be lost

    def _save(self) -> None:
        if not math.isfinite(float(self.loss)):
            self._mean_loss()
        self._check_weights()
        checkpoints.save(self.folder / "checkpoints", self.step, self.state(), keep=self.config.keep_last)

    def _mean_loss(self) -> float:
        """The mean since it was last asked for. ValueError if it is not finite."""
        loss = float(self.loss) / max(self.counted, 1)
        if not math.isfinite(loss):
            raise ValueError(self._diverged(f"the loss is {loss}"))
        self.epoch_sum += loss * self.counted
        self.loss.zero_()
        self.counted = 0
        return loss

    def _check_weights(self) -> None:
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise ValueError(self._diverged(f"{name} is no longer finite"))

    def _diverged(self, what: str) -> str:
        kept = checkpoints.listed(self.folder / "checkpoints")
        last = f"the last checkpoint is {kept[0]}" if kept else "there is no checkpoint yet"
        return f"by step {self.step} {what}; {last}. Try a smaller lr, a warm-up or clip_grad, in a new folder"

    def _replaced(self, corrupt: list[str]) -> None:
        if self.config.on_corrupt == "error":
            raise ValueError(f"{corrupt[0]}; mend or remove it and resume, or train with on_corrupt='replace'")
        for text in corrupt:
            self.corrupt += 1
            self.say(f"{text}; the next one is in its place")
            self.log.write("corrupt", self.step + 1, {"image": text})

    def _log_start(self, resumed_from: int | None) -> None:
        facts = {
            "model": self.config.model,
            "layers": "custom" if self.config.custom_linear else "stock",
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "steps": self.steps,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "versions": {"zoo": __version__, "torch": str(torch.__version__), "timm": timm.__version__},
        }
        self.log.write("start" if resumed_from is None else "resume", self.step, facts)


def _build(config: TrainConfig, classes: int, device: torch.device) -> nn.Module:
    options = {"num_classes": classes, **config.options}
    if isinstance(options["num_classes"], int) and options["num_classes"] < classes:
        raise ValueError(f"num_classes: got {options['num_classes']}, and the data has {classes} classes")
    asked = {"weights": config.weights, "reset_head": config.reset_head, "custom_linear": config.custom_linear}
    try:
        model = create(config.model, **{**options, **asked}, device=device)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def _steps_per_epoch(config: TrainConfig, images: Images) -> int:
    steps = len(images) // (config.batch_size * config.accumulate)
    if not steps:
        raise ValueError(
            f"batch_size {config.batch_size} x accumulate {config.accumulate}: the data has only {len(images)} images "
            "to train with; choose a smaller batch"
        )
    return steps


def _optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    known = [str(name) for name in list_optimizers()]
    if config.optimizer not in known:
        raise unknown_name("optimizer", config.optimizer, known)
    fields = {name: getattr(config, name) for name in ("lr", "weight_decay", "momentum")}
    return create_optimizer_v2(model, config.optimizer, **fields)


def _mixup(config: TrainConfig, model: nn.Module, classes: int) -> Mixup | None:
    if not (config.mixup or config.cutmix):
        return None
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        label_smoothing=config.label_smoothing,
        num_classes=getattr(model, "num_classes", None) or config.options.get("num_classes", classes),
    )
