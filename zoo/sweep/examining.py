"""What a sweep does with one model, step by step; the first step that fails ends it."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zoo.coverage import coverage
from zoo.isolation import float32_convolutions, undisturbed
from zoo.parity import parity
from zoo.passes import named_tensors
from zoo.preparing import make
from zoo.readout import equalities, numbers
from zoo.registry import build
from zoo.state_dict import check_state_dict
from zoo.swap import Rule, apply_rules, patch, unpatch
from zoo.sweep.batch_norms import set_scales
from zoo.sweep.exactness import Snapshot, outputs_of
from zoo.sweep.inputs import input_shape, random_inputs, smallest_shape
from zoo.sweep.products import LinearProducts
from zoo.sweep.rows import Failure, ParitySummary, SweepRow, Task, failed, reference_name

__all__ = ["examine"]

BATCH = 2
META = torch.device("meta")
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
"""As CUDA, its libraries and the CPU's allocator say it."""


def examine(task: Task, *, note: Callable[[str], None] = lambda step: None) -> SweepRow:
    """Build the model, patch it, run it forward and backward, compare it with the source library's, and unpatch it.

    On the meta device: build, patch, forward, state dict and unpatch. ``note`` is told each step as it begins. Whatever
    a step raises is the row's failure.

    On data, convolutions run in float32 proper, not in cuDNN's TF32, which torch allows by default: its errors of 1e-3,
    in the stock model and the custom one alike, would hide those of a layer, and change gradients by far more. Batch
    norms give values of about one (:func:`set_scales`).
    """
    work = _Work(task, note)
    failure = None
    try:
        with float32_convolutions() if task.on == "data" else contextlib.nullcontext():
            work.all()
    except Exception as error:  # libraries fail in any way
        failure = Failure(work.step_now, _in_words(error), starved=_of_memory(error))
    if work.device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # an error of CUDA's may come again at each call
            work.found["peak_bytes"] = torch.cuda.max_memory_allocated(work.device)
    row = failed(task, failure)
    fields = {**{key: getattr(row, key) for key in row.__dataclass_fields__}, **work.found}
    return SweepRow(**{**fields, "untested": work.untested, "seconds": work.seconds})


class _Wrong(Exception):
    """A step found what should not be."""


class _Work:
    def __init__(self, task: Task, note: Callable[[str], None]) -> None:
        self.task, self.note = task, note
        self.found: dict[str, Any] = {}
        self.untested: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.step_now = ""
        self.device = META
        self.before: dict[str, Tensor] | None = None
        """Outputs of the stock model; None without values, or if they are not the same each time."""

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        self.step_now = name
        self.note(name)
        begun = time.perf_counter()
        try:
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            self.seconds[name] = time.perf_counter() - begun

    def all(self) -> None:
        with self.step("build"):
            model, shape = self.build()
        one = random_inputs(1, shape, self.device)
        inputs = one if self.device is META else random_inputs(BATCH, shape, self.device)
        with self.step("stock"):
            if self.device is not META:
                self.found["batch_norms"] = set_scales(model, inputs)
            runs = self.stock(model, one, inputs)
            snapshot = Snapshot(model)
            stock = None if self.device is META or reference_name(self.task.name) else copy.deepcopy(model)
        with self.step("patch"):
            swap = patch(model)  # without a probe, as zoo.create does it; what runs is seen next
            apply_rules(model, [Rule("mlp", "zoo", None)])
            self.found["swapped"] = len(swap.swapped)
            skipped: dict[str, list[str]] = {}
            for name, reason in swap.skipped.items():
                skipped.setdefault(reason, []).append(name)
            self.found["skipped"] = {reason: tuple(names) for reason, names in skipped.items()}
        if runs:
            with self.step("run"):
                self.run(model, one, inputs, set(swap.swapped))
        with self.step("state_dict"):
            reference = self.state_dict(model)
        if self.device is not META:
            if self.task.gradients:
                with self.step("backward"):
                    self.backward(model, inputs)
            with self.step("parity"):
                self.parity(model, reference or stock, inputs)
        with self.step("unpatch"):
            self.unpatch(model, snapshot, inputs)

    def build(self) -> tuple[nn.Module, tuple[int, ...]]:
        task = self.task
        model = make(task.name, task.options, device=META)
        parameters = sum(p.numel() for p in model.parameters())
        linears = sum(isinstance(module, nn.Linear) for module in model.modules())
        shape = input_shape(task.name, model)
        too_large = task.max_parameters is not None and parameters > task.max_parameters
        self.found |= {"on": task.on, "parameters": parameters, "linears": linears, "input": shape}
        if task.on == "data" and too_large:
            self.untested["data"] = f"over the limit of {task.max_parameters} parameters"
            self.found["on"] = "meta"
        elif task.on == "data":
            self.device = torch.device(task.device)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            model = self.leaner(make(task.name, task.options, device=self.device).eval())
            if task.small:
                self.found["input"] = shape = smallest_shape(model, shape)
        return model.eval(), shape

    def leaner(self, model: nn.Module) -> nn.Module:
        """The model, with gradient checkpointing if the task asks for it and the model can."""
        switch = getattr(model, "set_grad_checkpointing", None)
        if self.task.lean and callable(switch):
            with contextlib.suppress(AssertionError):  # so timm refuses it
                switch(True)
                self.found["lean"] = True
        return model

    def stock(self, model: nn.Module, one: Tensor, inputs: Tensor) -> bool:
        """Run the model as it was built. Returns whether it can be run at all."""
        try:
            with LinearProducts(model) as products:
                report = coverage(model, one)
        except Exception as error:
            if self.device is not META or _runs(model, one):
                raise
            self.untested["run"] = f"the stock model does not run on the meta device: {_in_words(error)}"
            return False
        reached = sum(module.flops for module in report.modules)
        self.found |= {"flops": report.flops, "reached_flops": reached, "linear_flops": products.products}
        if self.device is not META:
            self.before, again = outputs_of(model, inputs), outputs_of(model, inputs)
            if not _equal(self.before, again):
                self.untested["outputs after unpatch"] = "the stock model's own differ from run to run"
                self.before = None
        return True

    def run(self, model: nn.Module, one: Tensor, inputs: Tensor, swapped: set[str]) -> None:
        report = coverage(model, one)
        self.found["custom_flops"] = report.custom_flops
        self.found["idle"] = tuple(m.name for m in report.modules if m.name in swapped and m.status == "never called")
        reports = {"eval": report}
        if self.device is not META:
            with undisturbed(model):
                reports["training"] = coverage(model.train(), inputs)
        for mode, report in reports.items():
            if bad := [module for module in report.modules if module.fault]:
                why = bad[0].reason or ", ".join(bad[0].fallbacks)
                raise _Wrong(f"in {mode} mode {len(bad)} layers do not run as custom, first {bad[0].name}: {why}")

    def backward(self, model: nn.Module, inputs: Tensor) -> None:
        with undisturbed(model):
            torch.manual_seed(0)
            outputs = [tensor for _, tensor in named_tensors(model.train()(inputs), "output")]
            sum((o.float().square().mean() for o in outputs if o.requires_grad), torch.zeros(())).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        if not gradients:
            raise _Wrong("no parameter has a gradient")
        finite = numbers(gradient.isfinite().all() for gradient in gradients.values())
        if bad := [name for name, good in zip(gradients, finite, strict=True) if not good]:
            raise _Wrong(f"{len(bad)} gradients are not finite, first {bad[0]}")

    def state_dict(self, model: nn.Module) -> nn.Module | None:
        """Load the weights both ways. Returns the reference, which has the model's then."""
        name = reference_name(self.task.name)
        if name is None:
            self.untested["state_dict"] = "no model of the same name in torchvision"
            return None
        with torch.device(self.device):
            reference = self.leaner(build(name, self.task.options).eval())
        check_state_dict(model, reference).raise_for_failure()
        reference.load_state_dict(model.state_dict(), strict=True)
        model.load_state_dict(reference.state_dict(), strict=True)
        return reference

    def parity(self, model: nn.Module, reference: nn.Module | None, inputs: Tensor) -> None:
        assert reference is not None
        report = parity(model, reference, inputs, gradients=self.task.gradients)
        kinds = [entry.kind for entry in report.entries]
        self.found["parity"] = ParitySummary(
            ok=report.ok,
            outputs=kinds.count("output"),
            gradients=kinds.count("gradient"),
            blank=len(report.blank),
            worst=report.worst.name,
            error=report.worst.error,
            limit=report.worst.limit,
        )
        if report.weights_differ:
            raise _Wrong(f"weights are not equal after loading, first {report.weights_differ[0]}")
        if not report.ok:
            first = report.first_divergence
            where = f"; first at {first.kind} {first.name}" if first is not None else ""
            raise _Wrong(f"{report.worst.name}: {report.worst.reason}{where}")

    def unpatch(self, model: nn.Module, snapshot: Snapshot, inputs: Tensor) -> None:
        unpatch(model)
        wrong = snapshot.differences(model)
        if self.before is not None and not _equal(outputs_of(model, inputs), self.before):
            wrong.append("outputs differ")
        if wrong:
            raise _Wrong("; ".join(wrong))


def _runs(model: nn.Module, inputs: Tensor) -> bool:
    try:
        outputs_of(model, inputs)
    except Exception:  # libraries fail in any way
        return False
    return True


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(equalities((tensor, other[name]) for name, tensor in one.items()))


def _of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that memory ran out."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _in_words(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, _Wrong) else f"{type(error).__name__}: {lines[0]}"
