"""The parts of a run, made as its settings say: model, optimizer, schedule, mixup. All are torch's or timm's own."""

from __future__ import annotations

import torch
from timm.data.mixup import Mixup
from timm.optim import create_optimizer_v2, list_optimizers  # type: ignore[attr-defined]
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2
from torch import nn

from zoo.factory import create
from zoo.naming import unknown_name
from zoo.train.config import TrainConfig
from zoo.train.data import Images

__all__ = [
    "build_mixup",
    "build_model",
    "build_optimizer",
    "build_scheduler",
    "has_batch_norms",
    "parameter_names",
    "steps_per_epoch",
]


def build_model(config: TrainConfig, classes: int, device: torch.device) -> nn.Module:
    options = {"num_classes": classes, **config.options}
    if isinstance(options["num_classes"], int) and options["num_classes"] < classes:
        raise ValueError(f"num_classes: got {options['num_classes']}, and the data has {classes} classes")
    asked = {"weights": config.weights, "reset_head": config.reset_head, "custom_linear": config.custom_linear}
    try:
        model = create(config.model, **{**options, **asked}, device=device)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if config.grad_checkpointing:
        _checkpoint_gradients(model, config.model)
    if config.sync_bn and torch.distributed.is_initialized():
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def _checkpoint_gradients(model: nn.Module, name: str) -> None:
    switch = getattr(model, "set_grad_checkpointing", None)
    try:
        if switch is None:
            raise AssertionError
        switch(True)
    except AssertionError:  # how timm's models say that they cannot
        raise ValueError(
            f"grad_checkpointing: {name} has no gradient checkpointing of its own (set_grad_checkpointing), as most of "
            "timm's models have; leave it out"
        ) from None


def has_batch_norms(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The names of an optimizer's parameters, in the order in which its state counts them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def steps_per_epoch(config: TrainConfig, images: Images) -> int:
    steps = len(images) // (config.batch_size * config.accumulate)
    if not steps:
        raise ValueError(
            f"batch_size {config.batch_size} x accumulate {config.accumulate}: the data has only {len(images)} images "
            "to train with; choose a smaller batch"
        )
    return steps


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    known = [str(name) for name in list_optimizers()]
    if config.optimizer not in known:
        raise unknown_name("optimizer", config.optimizer, known)
    fields = {name: getattr(config, name) for name in ("lr", "weight_decay", "momentum")}
    return create_optimizer_v2(model, config.optimizer, **fields)


def build_mixup(config: TrainConfig, model: nn.Module, classes: int) -> Mixup | None:
    if not (config.mixup or config.cutmix):
        return None
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        label_smoothing=config.label_smoothing,
        num_classes=getattr(model, "num_classes", None) or config.options.get("num_classes", classes),
    )


def build_scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Scheduler | None:
    """timm's, by optimizer steps; None for the schedule 'none'."""
    scheduler: Scheduler | None = create_scheduler_v2(
        optimizer,
        config.schedule,
        num_epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        warmup_lr=0.0,
        min_lr=config.min_lr,
        decay_epochs=config.decay_epochs,
        decay_rate=config.decay_rate,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )[0]
    return scheduler
