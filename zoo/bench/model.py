"""``zoo bench model``: whole models with zoo's Linears beside the same models with torch's, in images a second."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bench.model_report import ModelReport, ModelRow
from zoo.bench.options import chosen
from zoo.bench.timing import WallClock, finish, race
from zoo.coverage import coverage
from zoo.factory import create
from zoo.machine import device_of, examine, float32_precision
from zoo.registry import resolve

__all__ = [
    "MODELS",
    "MODES",
    "OUTPUT_TOLERANCE",
    "PEERS",
    "PHASES",
    "ModelMeasurement",
    "batches_for",
    "bench_model",
    "difference",
    "forward_mode",
]

MODELS = (
    "timm/vit_base_patch16_224",
    "timm/mixer_b16_224",
    "timm/convnext_tiny",
    "timm/swin_tiny_patch4_window7_224",
    "resnet50",
)
MODES = ("fp32", "tf32", "bf16")
PHASES = ("train", "infer")
PEERS = ("eager", "compiled")

BLOCKS = 9
BLOCK_SECONDS = 0.2
SECONDS = 60.0
"""That the blocks of one measurement may take, before there are fewer of them."""
MOST_STEPS = 20
"""In a block."""
LEARNING_RATE = 1e-3
BATCHES = 2
FEW = 2
"""Images that the probes are made on."""
OUTPUT_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 1e-1}
"""How far the logits of the first step may lie apart, relative (Frobenius): the weights are equal then."""
LOSS_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2}
"""How far the losses after as many steps may lie apart, relative: a training magnifies rounding."""


@dataclass(frozen=True)
class ModelMeasurement:
    """One row to be."""

    model: str
    mode: str
    phase: str
    peer: str

    def __str__(self) -> str:
        return f"{self.model} {self.mode} {self.phase} {self.peer}"


def bench_model(
    models: Iterable[str] = MODELS,
    *,
    modes: Iterable[str] = ("fp32", "bf16"),
    phases: Iterable[str] = PHASES,
    peers: Iterable[str] = PEERS,
    batch: int = 64,
    image: int = 224,
    device: torch.device | str = "cpu",
    blocks: int = BLOCKS,
    block_seconds: float = BLOCK_SECONDS,
    seed: int = 0,
    command: str = "zoo.bench.bench_model",
    progress: Callable[[Sequence[ModelMeasurement]], Iterable[ModelMeasurement]] = iter,
    checkpoint: Callable[[ModelReport], None] | None = None,
) -> ModelReport:
    """Time models of ``zoo.create(name, custom_linear=True)`` beside the same without, from the same weights and data.

    With a compiled peer, what torch.compile keeps in this process is dropped before each measurement.

    Args:
        models: names, as in ``zoo.list_models()``, of image classifiers.
        modes: "fp32", "tf32", "bf16".
        phases: "train", "infer".
        peers: "eager"; "compiled", where both sides are compiled.
        batch: images at once.
        image: their height and width.
        device: where to run.
        blocks: timed blocks of each side, interleaved at random, at least 2.
        block_seconds: how long a block should last.
        seed: of the weights, the data and the order.
        command: what the report says was asked for.
        progress: wraps the sequence of measurements that is gone through.
        checkpoint: called after each measurement with what there is so far.

    Raises:
        ValueError: an unknown name, or a model that does not take such images.
    """
    place, names = device_of(device), tuple(dict.fromkeys(models))
    for name in names:
        resolve(name)
    for what, number in (("batch", batch), ("image", image)):
        if number < 1:
            raise ValueError(f"{what}={number}: expected at least 1")
    measurements = [
        ModelMeasurement(*words)
        for words in itertools.product(
            names, chosen("mode", modes, MODES), chosen("phase", phases, PHASES), chosen("peer", peers, PEERS)
        )
    ]
    convolutions = torch.backends.cudnn.allow_tf32
    report = ModelReport(examine(place), command, seed, convolutions, (), complete=False)
    for m in progress(measurements):
        row = _measure(m, batch, image, place, blocks=blocks, block_seconds=block_seconds, seed=seed)
        report = replace(report, rows=(*report.rows, row))
        if checkpoint is not None:
            checkpoint(report)
    return replace(report, complete=True)


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model under torch.compile."""
    return torch.compile(model, dynamic=False)


def _measure(
    m: ModelMeasurement, batch: int, image: int, device: torch.device, *, blocks: int, block_seconds: float, seed: int
) -> ModelRow:
    row = ModelRow(m.model, m.mode, m.phase, m.peer, batch, image)
    precision = "high" if m.mode == "tf32" else "highest"
    if m.peer == "compiled":  # what was compiled before counts towards the limit of recompilations
        torch._dynamo.reset()
    gc.collect()
    with float32_precision(precision), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        stock = create(m.model, device=device)
        data = batches_for(m.model, stock, batch, image, device)
        stock.train(m.phase == "train")
        custom = create(m.model, custom_linear=True, device=device)
        custom.load_state_dict(stock.state_dict())
        custom.train(stock.training)
        with forward_mode(m.mode, m.phase, device):
            share = coverage(custom, data[0][0][:FEW]).share
        try:
            sides = {name: _Side(model, m, data, device, seed) for name, model in (("zoo", custom), ("peer", stock))}
            logits = {name: side.step(0)[1] for name, side in sides.items()}  # compiles, and chooses algorithms
            for side in sides.values():
                for i in range(1, BATCHES):
                    side.step(i)
            peaks = {name: side.peak() for name, side in sides.items()}
            trial = WallClock({name: side.step for name, side in sides.items()}, sets=1, device=device)
            slowest = max(trial.block(name) for name in sides) / 1e6
            steps = max(1, min(MOST_STEPS, math.ceil(block_seconds / slowest)))
            clock = WallClock({name: side.step for name, side in sides.items()}, sets=steps, device=device)
            timing = race(clock, repeats=blocks, seconds=SECONDS, seed=seed)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return replace(row, custom_share=share, failure=f"{type(error).__name__}: {lines[0]}")
        losses = {name: float(clock.outputs(name)[-1][0]) for name in sides}
        found = timing.speedup("zoo", over="peer", seed=seed)
        apart = {
            "logits of the first step": (difference(logits["zoo"], logits["peer"]), OUTPUT_TOLERANCE[m.mode]),
            "losses of the last step": (difference(*map(torch.tensor, losses.values())), LOSS_TOLERANCE[m.mode]),
        }
        (output_difference, _), (loss_difference, _) = apart.values()
        # a NaN is over any limit
        wrong = [f"the {what} differ by {d:.1e}, over {limit}" for what, (d, limit) in apart.items() if not d <= limit]
        return replace(
            row,
            zoo_img_s=batch * 1e6 / timing.median("zoo"),
            peer_img_s=batch * 1e6 / timing.median("peer"),
            speedup=found.value,
            speedup_low=found.low,
            speedup_high=found.high,
            custom_share=share,
            zoo_peak_bytes=peaks["zoo"],
            peer_peak_bytes=peaks["peer"],
            zoo_loss=losses["zoo"],
            peer_loss=losses["peer"],
            loss_difference=loss_difference,
            output_difference=output_difference,
            steps=steps,
            blocks=timing.repeats,
            failure="; ".join(wrong),
        )


class _Side:
    """One of the two models at work."""

    def __init__(
        self,
        model: nn.Module,
        m: ModelMeasurement,
        data: Sequence[tuple[Tensor, Tensor]],
        device: torch.device,
        seed: int,
    ) -> None:
        self.m, self.data, self.device, self.seed = m, data, device, seed
        self.forward = compiled(model) if m.peer == "compiled" else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE) if m.phase == "train" else None

    def step(self, i: int) -> tuple[Tensor, Tensor]:
        """One step on the data's batch i, counted round. Returns loss and logits."""
        images, labels = self.data[i % len(self.data)]
        if i == 0:  # dropout draws the same on both sides
            torch.manual_seed(self.seed)
        with forward_mode(self.m.mode, self.m.phase, self.device):
            logits = self.forward(images)
            loss = F.cross_entropy(logits, labels)
        if self.optimizer is not None:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), logits.detach()

    def peak(self) -> int | None:
        """The most that one step allocates beside what lies there."""
        if self.device.type != "cuda":
            self.step(0)
            return None
        finish(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.step(0)
        finish(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


@contextlib.contextmanager
def forward_mode(mode: str, phase: str, device: torch.device) -> Iterator[None]:
    """Of a forward: gradients only where they will be asked for, and autocast."""
    with (
        torch.set_grad_enabled(phase == "train"),
        torch.autocast(device.type, dtype=torch.bfloat16, enabled=mode == "bf16"),
    ):
        yield


def batches_for(
    name: str, model: nn.Module, batch: int, image: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Batches of normal values in the shape of the model's images, and labels of its classes. Leaves it in eval mode.

    ValueError for a model that does not take such images.
    """
    if (pixels := getattr(model, "in_features", None)) is not None:
        shape: tuple[int, ...] = (batch, pixels)
    else:
        channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
        shape = (batch, channels, image, image)
    images = [torch.randn(shape, device=device) for _ in range(BATCHES)]
    try:
        with torch.no_grad():
            classes = model.eval()(images[0][:FEW]).shape[-1]
    except Exception as error:
        raise ValueError(
            f"{name} does not take images of shape {(len(images[0][:FEW]), *shape[1:])}: {error}"
        ) from error
    return [(x, torch.randint(classes, (batch,), device=device)) for x in images]


def difference(value: Tensor, reference: Tensor) -> float:
    """Relative (Frobenius); 0 where the two are equal, zero or not."""
    off, size = float((value.double() - reference.double()).norm()), float(reference.double().norm())
    if off == 0.0:
        return 0.0
    return off / size if size else math.inf
