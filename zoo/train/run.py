"""One training run, from its first step or from its last checkpoint, to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from zoo.checkpoint import save_checkpoint
from zoo.data import count_right, top1
from zoo.lock import locked
from zoo.train import checkpoints, split_checkpoints, strategies
from zoo.train.building import (
    build_mixup,
    build_model,
    build_optimizer,
    build_scheduler,
    has_batch_norms,
    parameter_names,
    steps_per_epoch,
)
from zoo.train.config import TrainConfig, differences, read_config, write_config
from zoo.train.data import Batch, Part, Source, batches_to_test, open_data, training_batches
from zoo.train.log import Log, Silence
from zoo.train.randomness import rng_state, seed_all, seed_rank, set_rng_state
from zoo.train.ranks import Ranks, joined
from zoo.train.report import TrainReport
from zoo.train.tensorboard import Board
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
    with joined(config.device) as ranks:
        _check(config, ranks)
        source = open_data(config.data)
        where = Path(folder)
        with _begun(config, where, ranks, resume=resume):
            run = _Run(config, where, ranks, source, watch, say)
            ranks.lead(lambda: write_config(config, where / "config.toml"))
            resumed_from, damaged = checkpoints.newest(where / "checkpoints", run.restore)
            for line in damaged:
                say(line)
            try:
                return run.finish(resumed_from=resumed_from)
            finally:
                run.close()


def _check(config: TrainConfig, ranks: Ranks) -> None:
    """Refuse what cannot be done here, or by several ranks."""
    if config.tensorboard:
        Board.check()
    if not ranks.several:
        return
    parts = 1 if config.strategy == "tp" else ranks.size
    if config.batch_size % parts:
        raise ValueError(f"batch_size: got {config.batch_size} for {parts} ranks, expected a multiple of {parts}")
    if (config.mixup or config.cutmix) and config.batch_size % (2 * parts):
        raise ValueError(
            f"batch_size: got {config.batch_size} for {parts} ranks, expected a multiple of {2 * parts}, since mixup "
            "mixes pairs"
        )
    if config.sync_bn and ranks.device.type == "cpu":
        raise ValueError("sync_bn: torch's SyncBatchNorm runs on GPUs alone; on CPUs leave it out")
    if config.strategy == "tp" and config.autocast == "fp16":
        raise ValueError("autocast 'fp16': torch's GradScaler takes no model that tp splits; choose bf16, ddp or fsdp")


@contextlib.contextmanager
def _begun(config: TrainConfig, folder: Path, ranks: Ranks, *, resume: bool) -> Iterator[None]:
    """The folder of the run, ready and locked."""
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            held = locked(folder / "checkpoints", doing="training into this folder", remedy="name another folder")
            stack.enter_context(held)
            saved = folder / "config.toml"
            if saved.exists():
                if not resume:
                    raise ValueError(f"{folder}: there is a run already; resume it (--resume), or name another folder")
                other = differences(config, TrainConfig(**read_config(saved)))
                if other:
                    raise ValueError(
                        f"{folder}: the run to resume is another one; name another folder\n" + "\n".join(other)
                    )
            for own in (folder, folder / "checkpoints"):
                checkpoints.remove_unfinished(own)

        ranks.lead(begin)
        yield


class _Run:
    """A run in progress. ``step`` is the number of optimizer steps that are done.

    ``model`` has the weights; ``runner`` is what is called to train it: the model itself, or what joins it to those of
    the other ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        ranks: Ranks,
        source: Source,
        watch: Watch,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.folder, self.watch, self.say = config, folder, watch, say
        self.ranks, self.device, self.classes = ranks, ranks.device, source.classes
        self.split = ranks.several and config.strategy != "ddp"
        self.part: Part = (0, 1) if self.split and config.strategy == "tp" else (ranks.rank, ranks.size)
        seed_all(config.seed)
        self.model = build_model(config, source.classes, self.device)
        self.images, self.tests = source.train(self.model, config), source.test(self.model, config)
        self.steps_per_epoch = steps_per_epoch(config, self.images)
        self.steps = self.steps_per_epoch * config.epochs
        # before the model is spread: what it is then cannot be copied
        self.ema = None if config.ema is None else ModelEmaV3(self.model, decay=config.ema, foreach=not self.split)
        self.runner = self._spread()
        self.optimizer = build_optimizer(config, self.model)
        self.names = parameter_names(self.optimizer, self.model)
        if self.split:
            strategies.split_groups(self.optimizer)
        self.scheduler = build_scheduler(config, self.optimizer, self.steps_per_epoch)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.autocast == "fp16")
        self.mixup = build_mixup(config, self.model, source.classes)
        self.step = 0
        self.loss = torch.zeros((), device=self.device)  # summed since the last line of the log
        self.counted = 0
        self.epoch_sum, self.epoch_mean = 0.0, math.nan
        self.accuracy, self.best, self.best_step = math.nan, -1.0, 0
        self.corrupt = 0
        self.board: Board | None = None
        self.replaced: list[tuple[int, str]] = []  # by other images, since the last line of the log
        seed_all(config.seed)  # stock and custom begin alike, whatever their builders drew
        if self.part[0]:
            seed_rank(config.seed, self.part[0])

    def _spread(self) -> nn.Module:
        if self.config.compile:
            self.model.compile()
        if not self.ranks.several:
            return self.model
        if has_batch_norms(self.model) and self.part[1] > 1 and not self.config.sync_bn:
            self.say("each rank's batch norms see its own part of a batch; with sync_bn they see all of it, on GPUs")
        runner = strategies.spread(self.model, self.config.strategy, self.ranks)
        if self.ema is not None and self.split:
            strategies.spread(self.ema.module, self.config.strategy, self.ranks)
        return runner

    # What a checkpoint holds

    def state(self, *, tensors: bool = True) -> dict[str, Any]:
        """``tensors=False``: without those of the models and the optimizer, which several ranks save together."""
        large = {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        return {
            **(large if tensors else {}),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": rng_state(self.device),
            "losses": (self.ranks.mean(self.loss), self.counted, self.epoch_sum, self.epoch_mean),
            "accuracies": (self.accuracy, self.best, self.best_step),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_rest(state, state["rng"])

    def _load_rest(self, state: dict[str, Any], rng: dict[str, Any] | None) -> None:
        if self.scheduler is not None:
            own = self.scheduler.state_dict().items()
            # its lists have a value for each group of parameters, which tp has more of; they follow from the settings
            lists = {name: value for name, value in own if isinstance(value, list)}
            self.scheduler.load_state_dict({**state["scheduler"], **lists})
        self.scaler.load_state_dict(state["scaler"])
        self.loss, self.counted, self.epoch_sum, self.epoch_mean = state["losses"]
        self.loss = self.loss.to(self.device)
        self.accuracy, self.best, self.best_step = state["accuracies"]
        self.step = state["step"]
        if rng is None:
            seed_rank(self.config.seed, self.part[0], self.step)
        else:
            set_rng_state(rng, self.device)

    def restore(self, path: Path) -> int:
        """Go on from a checkpoint, whichever number of ranks wrote it. Returns its step."""
        if path.is_dir():
            tensors, settings = self._tensors().taken()
            state = split_checkpoints.read(path, tensors, self.ranks)
            self._tensors().put(tensors, {**settings, **state["optimizer"]})
            rng = state["rng"][self.part[0]] if self.part[0] < len(state["rng"]) else None
            self._load_rest(state, rng)
        elif self.ranks.several:
            state = checkpoints.read(path)
            self._tensors().put_whole(state, self.names)
            self._load_rest(state, state["rng"])
            if self.part[0]:
                seed_rank(self.config.seed, self.part[0], self.step)
        else:
            self.load(checkpoints.read(path))
        self.optimizer.zero_grad()
        return self.step

    def _tensors(self) -> split_checkpoints.RunTensors:
        models = {"model": self.model} if self.ema is None else {"model": self.model, "ema": self.ema.module}
        return split_checkpoints.RunTensors(models, self.optimizer)

    # The loop

    def finish(self, *, resumed_from: int | None) -> TrainReport:
        self.log = Log(self.folder / "log.jsonl", keep=self.step) if self.ranks.leads else Silence()
        if self.config.tensorboard and self.ranks.leads:
            self.board = Board(self.folder / "tensorboard", begin=self.step)
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
                self._tell_replaced()
                now = time.perf_counter()
                rate = (self.step - marked_step) * self._images_per_step / (now - marked)
                epoch = (self.step - 1) // self.steps_per_epoch + 1
                lr = self.optimizer.param_groups[0]["lr"]
                self._record("step", {"epoch": epoch, "loss": loss, "lr": lr, "images_per_second": round(rate, 1)})
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
        self._publish("final.safetensors", self.accuracy)
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

    def close(self) -> None:
        """Write what is not yet on the disk, however the run ended."""
        if self.board is not None:
            self.board.close()

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
        steps = {"start": self.step, "steps_per_epoch": self.steps_per_epoch}
        batches = iter(training_batches(self.images, self.config, **steps, part=self.part))
        while group := list(itertools.islice(batches, self.config.accumulate)):
            yield group

    def _update(self, batches: list[Batch]) -> None:
        """A step; the list is empty after it."""
        self.optimizer.zero_grad()
        passes = len(batches)
        while batches:
            self._backward(batches.pop(0), passes, last=len(batches) == 0)
        if self.config.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            strategies.clip(self.optimizer, self.config.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        self.counted += 1
        if self.scheduler is not None:
            self.scheduler.step_update(self.step)
        if self.ema is not None:
            self.ema.update(self.model, self.step)

    def _backward(self, batch: Batch, passes: int, *, last: bool) -> None:
        # No name for a batch outlives this: the optimizer and the next batch take its memory, which is in the caches.
        if batch.corrupt:
            self._replaced(batch.corrupt)
        with strategies.accumulating(self.runner, last) if passes > 1 else contextlib.nullcontext():
            loss = self._loss(batch)
            if passes > 1:
                loss = loss / passes
            self.scaler.scale(loss).backward()
        self.loss += loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        images, labels = batch.images, batch.labels
        if self.device.type != "cpu" or self.config.channels_last:
            images, labels = self._here(images), labels.to(self.device, non_blocking=True)
        smoothing = self.config.label_smoothing
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
            smoothing = 0.0  # it is in the labels
        with self._autocast():
            logits = self.runner(images)
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
        models = {"accuracy": self.model} if self.ema is None else {"accuracy": self.shown, "raw": self.model}
        for model in models.values():
            self.ranks.agree_on_buffers(model)
        found = self._accuracies(models)
        self.accuracy = found["accuracy"]
        self._record("epoch", {"epoch": self.step // self.steps_per_epoch, **found})
        if self.accuracy > self.best:
            self._check_weights()
            self.best, self.best_step = self.accuracy, self.step
            self._publish("best.safetensors", self.best)

    def _accuracies(self, models: dict[str, nn.Module]) -> dict[str, float]:
        parts = batches_to_test(self.tests, self.config, self.part)
        batches = ((self._here(images), labels) for images, labels in parts)
        with self._autocast():
            if self.part[1] == 1:
                return top1(models, batches, device=self.device)
            right, _ = count_right(models, batches, device=self.device)
        counts = self.ranks.gathered(right)
        return {name: sum(count[name] for count in counts) / len(self.tests) for name in models}

    def _publish(self, name: str, accuracy: float) -> None:
        """Save the model that is shown, for zoo.load. All ranks must ask."""
        metadata = {"step": self.step, "accuracy": accuracy, "data": self.config.data}
        weights = strategies.whole_weights(self.shown) if self.split else None

        def write() -> None:
            model = self.shown
            if weights is not None:
                plain = dataclasses.replace(self.config, weights=None, reset_head=False)
                model = build_model(plain, self.classes, torch.device("meta"))
                model.load_state_dict(weights, assign=True)
            save_checkpoint(model, self.folder / name, metadata=metadata)

        self.ranks.lead(write)

    # What must not be lost

    def _save(self) -> None:
        if not self.ranks.all(math.isfinite(float(self.loss))):
            self._mean_loss()
        self._check_weights()
        folder, keep = self.folder / "checkpoints", self.config.keep_last
        if not self.ranks.several:
            checkpoints.save(folder, self.step, self.state(), keep=keep)
            return
        tensors, settings = self._tensors().taken()
        rest = self.state(tensors=False)
        rest |= {"optimizer": settings, "rng": self.ranks.gathered(rest["rng"])}
        split_checkpoints.save(folder, self.step, tensors, rest, self.ranks, keep=keep)

    def _mean_loss(self) -> float:
        """The mean since it was last asked for. ValueError if it is not finite."""
        loss = float(self.ranks.mean(self.loss)) / max(self.counted, 1)
        if not math.isfinite(loss):
            raise ValueError(self._diverged(f"the loss is {loss}"))
        self.epoch_sum += loss * self.counted
        self.loss.zero_()
        self.counted = 0
        return loss

    def _check_weights(self) -> None:
        name = strategies.first_not_finite(self.model, self.ranks)
        if name is not None:
            raise ValueError(self._diverged(f"{name} is no longer finite"))

    def _diverged(self, what: str) -> str:
        kept = checkpoints.listed(self.folder / "checkpoints")
        last = f"the last checkpoint is {kept[0]}" if kept else "there is no checkpoint yet"
        return f"by step {self.step} {what}; {last}. Try a smaller lr, a warm-up or clip_grad, in a new folder"

    def _replaced(self, corrupt: list[str]) -> None:
        if self.config.on_corrupt == "error":
            raise ValueError(f"{corrupt[0]}; mend or remove it and resume, or train with on_corrupt='replace'")
        self.replaced += [(self.step + 1, text) for text in corrupt]

    def _tell_replaced(self) -> None:
        if self.config.on_corrupt == "error":
            return
        for step, text in sorted(line for lines in self.ranks.gathered(self.replaced) for line in lines):
            self.corrupt += 1
            self.say(f"{text}; the next one is in its place")
            self.log.write("corrupt", step, {"image": text})
        self.replaced.clear()

    # What is told

    def _record(self, event: str, fields: dict[str, Any]) -> None:
        self.log.write(event, self.step, fields)
        if self.board is not None:
            self.board.write(event, self.step, fields)

    def _log_start(self, resumed_from: int | None) -> None:
        facts = {
            "model": self.config.model,
            "layers": "custom" if self.config.custom_linear else "stock",
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "steps": self.steps,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "ranks": self.ranks.size,
            **({"strategy": self.config.strategy} if self.ranks.several else {}),
            "versions": {"zoo": __version__, "torch": str(torch.__version__), "timm": timm.__version__},
        }
        self.log.write("start" if resumed_from is None else "resume", self.step, facts)
