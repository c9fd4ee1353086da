"""One pass of a model over given inputs, for comparisons: outputs and gradients by name, leaving no trace.

Inputs are handed over as private copies with the caller's strides; every pass starts from the same random state, and
what the model keeps of it, such as a result with its graph, is gone before the next.
cuDNN's recurrent layers cannot be differentiated in eval mode: where a model has such layers, a pass with gradients is
without cuDNN.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zoo.isolation import cudnn_set, nothing_kept
from zoo.meta_device import held_tensors

__all__ = [
    "DoesNotRun",
    "Pass",
    "Values",
    "after_each_call",
    "all_tensors",
    "jittered",
    "named_tensors",
    "private_copy",
    "snapshot",
    "twin_of",
    "with_values",
    "without_parallel",
]

_SEED = 20_240_601


@dataclass(frozen=True)
class Values:
    """What a pass computed, by name."""

    outputs: dict[str, Tensor]
    form: list[tuple[str, Any]]
    """Every container and every leaf of the output with its path: "Tensor", a constant, or the container's type."""
    gradients: dict[str, Tensor | None]
    """Of the parameters that require one, in the order of the reference's, then of the floating inputs."""


class DoesNotRun(ValueError):
    """A model does not run in the dtype of a pass."""


@dataclass(frozen=True)
class Pass:
    """One way to run one model."""

    what: str
    call: nn.Module
    dtype: torch.dtype | None = None
    """Inputs are cast to it, with autocast off; None: inputs as they are, under the caller's autocast."""
    jitter: tuple[torch.Generator, float] | None = None
    """Moves floating inputs at random, see :func:`jittered`."""
    widened: bool = False
    """Where the forward asks for float32, it gets float64."""

    @property
    def core(self) -> nn.Module:
        """The model inside of wrappers (torch.compile, DDP)."""
        model = self.call
        while True:
            inner = without_parallel(model)
            inner = getattr(inner, "_orig_mod", inner)
            if inner is model:
                return model
            model = inner

    def bare(self) -> Pass:
        """The same pass, of the model inside of wrappers."""
        return dataclasses.replace(self, call=self.core)

    def run(self, inputs: tuple[Any, ...], *, gradients_like: nn.Module | None = None) -> Values:
        """Run it, and backward from random cotangents if ``gradients_like`` gives an order of parameters.

        Raises:
            DoesNotRun: with ``dtype``, if the model does not run in it. Without, whatever the model raises.
        """
        gradients = gradients_like is not None
        leaves: dict[str, Tensor] = {}

        def prepared(path: Any, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = private_copy(value)
            if not (value.is_floating_point() or value.is_complex()):
                return value
            if self.dtype is not None:
                value = value.to(_cast(value.dtype, self.dtype))
            if self.jitter is not None:
                value = jittered(value, *self.jitter)
            if gradients:
                leaves["input" + pytree.keystr(path)] = value.requires_grad_()
            return value

        arguments = pytree.tree_map_with_path(prepared, inputs)
        if gradients_like is not None:
            leaves = _trainable(self.core, gradients_like) | leaves
        gpus = sorted({t.device.index for t in all_tensors(self.core, inputs) if t.device.type == "cuda"})
        with contextlib.ExitStack() as stack:
            stack.enter_context(nothing_kept(self.core))
            stack.enter_context(torch.set_grad_enabled(gradients))
            stack.enter_context(torch.random.fork_rng(gpus))
            stack.enter_context(_without_autocast_cache() if self.dtype is None else _without_autocast())
            if self.widened:
                stack.enter_context(_Widened())
            if gradients and any(isinstance(module, nn.RNNBase) for module in self.core.modules()):
                stack.enter_context(cudnn_set(enabled=False))
            output = self._called(arguments)
            nodes = list(_nodes(output))
            outputs = {path: value for path, value in nodes if isinstance(value, Tensor)}
            form = [(path, "Tensor" if isinstance(value, Tensor) else value) for path, value in nodes]
            grads = _gradients(outputs, leaves) if gradients else {}
        return Values({path: value.detach() for path, value in outputs.items()}, form, grads)

    def _called(self, arguments: tuple[Any, ...]) -> Any:
        try:
            return self.call(*arguments)
        except Exception as error:
            if self.dtype is None:
                raise
            raise DoesNotRun(
                f"{self.what} does not run: {error}; expected a model that computes in the dtype of its weights and "
                "inputs, since float64 is what errors are measured against"
            ) from error


# Around a pass


@contextlib.contextmanager
def after_each_call(
    model: nn.Module, names: Iterable[str], hook: Callable[[tuple[str, int], Any], Any]
) -> Iterator[None]:
    """Call ``hook((name, number of the call), output)`` after each call of those of the named modules that there are.

    What the hook returns, if not None, replaces the output.
    """
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        def forward_hook(module: nn.Module, args: Any, output: Any) -> Any:
            calls[name] += 1
            return hook((name, calls[name] - 1), output)

        return forward_hook

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(counting(name)) for name in names if name in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """A weight that was cast without a graph must not be found again by a pass that needs one, nor by the caller."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


class _Widened(TorchFunctionMode):
    """Takes every float32 that is asked for as float64, but where bytes are read as such."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func in (Tensor.view, torch.frombuffer):
            return func(*args, **(kwargs or {}))
        func = Tensor.double if func is Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


# Outputs and gradients


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an output (of any containers), each with ``name`` and its path."""
    return ((path, item) for path, item in _nodes(value, name) if isinstance(item, Tensor))


def with_values(output: Any, values: Any) -> Any:
    """``output`` with the values of ``values``, an output of the same form, and its own graph."""
    leaves, form = pytree.tree_flatten(output)
    others, other_form = pytree.tree_flatten(values)
    if form != other_form:
        return output
    pairs = zip(leaves, others, strict=True)
    return pytree.tree_unflatten([_SetTo.apply(a, b) if _settable(a, b) else a for a, b in pairs], form)


def snapshot(output: Any) -> Any:
    """``output`` with its tensors copied, so that what works in place later does not change them."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, output)


def _settable(leaf: Any, value: Any) -> bool:
    return isinstance(leaf, Tensor) and isinstance(value, Tensor) and leaf.requires_grad and leaf.shape == value.shape


class _SetTo(torch.autograd.Function):
    """The value of the second argument with the graph of the first."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, value: Tensor) -> Tensor:
        return value.to(output.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _nodes(value: Any, path: str = "output") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor) or value is None or isinstance(value, (bool, int, float, str)):
        yield path, torch.tensor(value) if isinstance(value, float) else value
        return
    yield path, type(value).__name__
    items: Iterable[tuple[str, Any]] = ()
    if dataclasses.is_dataclass(value):
        items = ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        items = ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip((f".{name}" for name in value._fields), value, strict=True)
    elif isinstance(value, (tuple, list)):
        items = ((f"[{i}]", item) for i, item in enumerate(value))
    for key, item in items:
        yield from _nodes(item, path + key)


def _trainable(model: nn.Module, like: nn.Module) -> dict[str, Tensor]:
    """Parameters that require a gradient: under the names that ``like`` has for its own, then what is left."""
    mine = {n: p for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    known = {n for n, p in like.named_parameters(remove_duplicate=False) if p.requires_grad}
    names = [n for n, _ in like.named_parameters() if n in mine and n in known]
    names += [n for n, _ in model.named_parameters() if n in mine and n not in known]
    return {name: mine[name] for name in names}


def _gradients(outputs: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(_SEED)
    roots, cotangents = [], []
    for output in outputs.values():
        # Multiples of 1/64 below 4 are exact in every floating dtype of 8 bits of precision or more.
        steps = torch.randn(output.shape, generator=generator).mul_(64).round_().clamp_(-255, 255)
        if output.requires_grad:
            roots.append(output)
            cotangents.append((steps / 64).to(output.device, output.dtype))
    if not roots or not leaves:
        return dict.fromkeys(leaves)
    grads = torch.autograd.grad(roots, list(leaves.values()), cotangents, allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


# Models and inputs


def without_parallel(model: nn.Module) -> nn.Module:
    """The module inside of DDP or DataParallel."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    return model


def all_tensors(model: nn.Module, inputs: Any = ()) -> list[Tensor]:
    """The model's parameters and buffers, and the tensors among the inputs."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return [*model.parameters(), *model.buffers(), *leaves]


def twin_of(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A deep copy, its floating tensors cast to ``dtype`` if given: parameters, buffers, and plain attributes."""
    # Tensors that are results (as of weight_norm) cannot be deep-copied; their values can.
    results = {id(value): value.detach().clone() for value in held_tensors(model) if not value.is_leaf}
    twin = copy.deepcopy(model, results)
    if dtype is not None:
        for tensor in held_tensors(twin):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.data = tensor.data.to(_cast(tensor.dtype, dtype))
    return twin


def jittered(tensor: Tensor, generator: torch.Generator, rounding: float) -> Tensor:
    """``tensor``, each value moved at random by up to half of ``rounding`` (or its own eps, if more), relative."""
    eps = max(rounding, torch.finfo(tensor.dtype).eps)
    noise = (
        torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=generator.device)
        .sub_(0.5)
        .mul_(eps)
        .add_(1)
    )
    return (tensor.detach() * noise.to(tensor.device)).to(tensor.dtype)


def private_copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, overlapping ones included."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def _cast(dtype: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    return wanted.to_complex() if dtype.is_complex else wanted
