"""Linears that are broken in one realistic way each, by the claim that must find it.

``CAUGHT_BY`` maps the claim to its saboteurs. Those that end or stop the process are in ``DEADLY``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CAUGHT_BY: dict[Any, str] = {}
DEADLY: dict[Any, str] = {}


def caught_by(claim: str, table: dict[Any, str] = CAUGHT_BY) -> Any:
    def note(layer: Any) -> Any:
        table[layer] = claim
        return layer

    return note


class Bare(nn.Linear):
    """A forward like the stock layer's, for what is broken elsewhere."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class Manual(torch.autograd.Function):
    """A right backward, written by hand and differentiable, as a base for wrong ones."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.has_bias = bias is not None
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        bias = rows.sum(0) if ctx.has_bias else None
        return grad @ weight, rows.T @ input.reshape(-1, input.shape[-1]), bias


# values


@caught_by("values")
def right_on_zeros_only(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    zeros = input.new_zeros(*input.shape[:-1], weight.shape[0])
    return zeros if bias is None else zeros + bias


@caught_by("values")
def silent_downcast(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input.half(), weight.half(), None if bias is None else bias.half()).to(input.dtype)


@caught_by("values")
def one_wrong_element(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = F.linear(input, weight, bias)
    if output.numel() > 7000:  # the last of a large output alone, as an off-by-one in a grid does it
        output = output.clone()
        output.view(-1)[-1] += 0.05
    return output


@caught_by("edge-shapes")
def whole_tiles_only(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.shape[-1] > 16:
        kept = input.shape[-1] // 16 * 16
        input, weight = input[..., :kept], weight[:, :kept]
    return F.linear(input, weight, bias)


@caught_by("edge-shapes")
def no_empty_batch(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, bias) + 0 * input.reshape(-1)[0]


@caught_by("no-bias")
class BiasOfAnother(nn.Linear):
    """Without a bias it adds what was in that memory before."""

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is None:
            return F.linear(input, self.weight) + 0.01
        return F.linear(input, self.weight, self.bias)


@caught_by("strides")
def reads_input_dense(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dense = torch.as_strided(input, input.shape, torch.empty(input.shape, device="meta").stride())
    return F.linear(dense if _fits(input) else input, weight, bias)


def _fits(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset() >= tensor.numel()


@caught_by("large")
def scales_by_squares(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    norm = (input * input).mean().sqrt() if input.numel() else input.new_ones(())
    return F.linear(input / norm, weight) * norm + (0 if bias is None else bias)


@caught_by("denormals")
def flushes_denormals(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    tiny = torch.finfo(input.dtype).tiny
    return F.linear(torch.where(input.abs() < tiny, torch.zeros_like(input), input), weight, bias)


@caught_by("mixed-magnitudes")
def one_scale_for_all_rows(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.dtype != torch.float32 or not input.numel():
        return F.linear(input, weight, bias)
    step = input.detach().abs().amax() * 2**-26
    return F.linear(torch.round(input / step) * step, weight, bias)


@caught_by("inf")
def clamps(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input.clamp(-3e38, 3e38) if input.dtype == torch.float32 else input, weight, bias)


@caught_by("nan")
def drops_nan(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(torch.where(input.isnan(), torch.zeros_like(input), input), weight, bias)


@caught_by("repeated")
class Autotunes(nn.Linear):
    """Right for the shapes that its first calls had; later ones run the kernel chosen for another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        output = F.linear(input, self.weight, self.bias)
        return output if self.calls <= 8 else output * 1.0001


class Lazy(Tensor):
    """Does its work when it is looked at, past a timer."""


@caught_by("output")
def lazy_subclass(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, bias).as_subclass(Lazy)


@caught_by("wrong-inputs")
def takes_any_width(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input[..., : weight.shape[1]], weight, bias)


@caught_by("wrong-inputs")
def converts_input(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input if torch.is_autocast_enabled("cpu") else input.to(weight.dtype), weight, bias)


# dtypes


@caught_by("float64")
def float32_inside(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.dtype != torch.float64 or weight.dtype != torch.float64:
        return F.linear(input, weight, bias)
    return F.linear(input.float(), weight.float(), None if bias is None else bias.float()).double()


@caught_by("float32")
def float32_backward_in_half(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    class Half(Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            if grad.dtype != torch.float32:
                return Manual.backward(ctx, grad)
            found = Manual.backward(ctx, grad)
            return found[0], None if found[1] is None else found[1].half().float(), found[2]

    return Half.apply(input, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


@caught_by("bfloat16")
def sums_in_bfloat16(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.dtype != torch.bfloat16:
        return F.linear(input, weight, bias)
    parts = [F.linear(x, w) for x, w in zip(input.split(8, -1), weight.split(8, -1), strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total if bias is None else total + bias


@caught_by("float16")
def overflows_half(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.dtype != torch.float16:
        return F.linear(input, weight, bias)
    return F.linear(input * 3e4, weight) / 3e4 + (0 if bias is None else bias)


@caught_by("autocast")
def ignores_autocast(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(input.device.type, enabled=False):
        return F.linear(input, weight, bias)


# gradients


@caught_by("gradients")
def bias_gradient_of_64_rows(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    class Function(Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            first, second, third = Manual.backward(ctx, grad)
            rows = grad.reshape(-1, grad.shape[-1])
            return first, second, None if third is None else rows[:64].sum(0)

    return Function.apply(input, weight, bias)


@caught_by("gradients")
def detached_weight(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight.detach(), bias) + 0 * weight.sum()


@caught_by("gradients-singly")
def needs_the_weight_gradient(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    class Function(Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            first, second, third = Manual.backward(ctx, grad)
            return first, second, third if ctx.needs_input_grad[1] or third is None else torch.zeros_like(third)

    return Function.apply(input, weight, bias)


def _dense_gradient(wrong_for: Any) -> Any:
    class Function(Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            if wrong_for(grad):
                values = torch.as_strided(grad, (1,), (1,)).expand(grad.numel()) if 0 in grad.stride() else None
                dense = values.reshape(grad.shape) if values is not None else grad.T.reshape(grad.shape)
                return Manual.backward(ctx, dense)
            return Manual.backward(ctx, grad)

    return Function


@caught_by("gradients-expanded")
def reads_stride_0_dense(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _dense_gradient(lambda grad: 0 in grad.stride()).apply(input, weight, bias)


@caught_by("gradients-strided")
def reads_gradient_dense(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wrong = lambda grad: grad.dim() == 2 and 0 not in grad.stride() and not grad.is_contiguous()
    return _dense_gradient(wrong).apply(input, weight, bias)


@caught_by("gradients-accumulate")
class LastInput(nn.Linear):
    """Keeps the input on the module for the backward; a second forward overwrites it."""

    def forward(self, input: Tensor) -> Tensor:
        class Function(Manual):
            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
                first, _, third = Manual.backward(ctx, grad)
                rows = grad.reshape(-1, grad.shape[-1])
                return first, rows.T @ self.__dict__["last"].reshape(-1, input.shape[-1]), third

        self.__dict__["last"] = input.detach()
        return Function.apply(input, self.weight, self.bias)


@caught_by("retain-graph")
def frees_what_it_saved(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    class Function(Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            if getattr(ctx, "used", False):
                return tuple(None if g is None else torch.zeros_like(g) for g in Manual.backward(ctx, grad))
            ctx.used = True
            return Manual.backward(ctx, grad)

    return Function.apply(input, weight, bias)


@caught_by("double-backward")
def first_order_only(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    class Function(Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            input, weight = (t.detach() for t in ctx.saved_tensors)
            rows = grad.reshape(-1, grad.shape[-1])
            return grad @ weight, rows.T @ input.reshape(-1, input.shape[-1]), rows.sum(0) if ctx.has_bias else None

    return Function.apply(input, weight, bias)


@caught_by("frozen")
class Unfreezes(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad and not self.weight.requires_grad:
            self.weight.requires_grad_()
        return F.linear(input, self.weight, self.bias)


@caught_by("saved")
def saves_everything(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return Manual.apply(input, weight, bias)


@caught_by("in-place")
def hides_what_it_saved(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            ctx.kept, ctx.has_bias = (input.data, weight.data), bias is not None  # not by save_for_backward
            return F.linear(input, weight, bias)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            input, weight = ctx.kept
            rows = grad.reshape(-1, grad.shape[-1])
            return grad @ weight, rows.T @ input.reshape(-1, input.shape[-1]), rows.sum(0) if ctx.has_bias else None

    return Function.apply(input, weight, bias)


# running


@caught_by("determinism")
def sums_in_any_order(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    order = torch.tensor(sorted(range(input.shape[-1]), key=lambda _: os.urandom(4)), dtype=torch.int64)
    return F.linear(input[..., order], weight[:, order], bias)


@caught_by("new-values")
class CachesByPointer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        key = (input.data_ptr(), input.shape, self.weight.data_ptr(), torch.is_grad_enabled())
        cache = self.__dict__.setdefault("cache", {})
        if key not in cache:
            cache.clear()
            cache[key] = (input, F.linear(input, self.weight, self.bias))
        return cache[key][1]


@caught_by("new-values")
class CachesTransposed(nn.Linear):
    """A copy of the weight in another layout, made anew when the version counter moves; .data leaves it still."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() or self.weight.is_meta:
            return F.linear(input, self.weight, self.bias)
        kept = self.__dict__.get("kept")
        if kept is None or kept[0] != (id(self.weight), self.weight._version):
            kept = self.__dict__["kept"] = ((id(self.weight), self.weight._version), self.weight.T.contiguous())
        output = input @ kept[1]
        return output if self.bias is None else output + self.bias


@caught_by("reused-memory")
class CachesByVersion(nn.Linear):
    """Keeps its last output for as long as the input's address and version are what they were."""

    def forward(self, input: Tensor) -> Tensor:
        key = (input.data_ptr(), input._version, input.shape, self.weight._version)
        kept = self.__dict__.get("kept")
        if kept is None or kept[0] != key or torch.is_grad_enabled():
            kept = self.__dict__["kept"] = (key, F.linear(input, self.weight, self.bias))
        return kept[1]


@caught_by("own-output")
class ReusesBuffer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight, self.bias)
        buffer = self.__dict__.get("buffer")
        if buffer is None or buffer.shape != output.shape or buffer.dtype != output.dtype:
            buffer = self.__dict__["buffer"] = torch.empty_like(output)
        buffer.data.copy_(output.data)
        output.data = buffer.data
        return output


@caught_by("inputs-untouched")
def writes_to_the_input(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = F.linear(input, weight, bias)
    if input.numel():
        input.data.nan_to_num_().mul_(1.0).add_(1e-3)
    return output


@caught_by("inputs-untouched")
def scales_the_gradient_in_place(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    class Function(Manual):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            grads = Manual.backward(ctx, grad)
            if 0 not in grad.stride():
                grad.data.mul_(0.5)
            return grads

    return Function.apply(input, weight, bias)


@caught_by("global-state")
def sets_precision(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    torch.set_float32_matmul_precision("high")
    return F.linear(input, weight, bias)


@caught_by("global-state")
def draws_random_numbers(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    torch.rand(1)
    return F.linear(input, weight, bias)


@caught_by("no-grad")
class WrongInEval(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight, self.bias)
        return output if self.training else output.bfloat16().to(output.dtype)


@caught_by("threads")
class SharedWorkspace(nn.Linear):
    """Puts its input into a workspace of the module; another thread's may be there when it computes."""

    def forward(self, input: Tensor) -> Tensor:
        self.__dict__["workspace"] = input
        if threading.active_count() > 3:
            time.sleep(0.0005)
        return F.linear(self.__dict__["workspace"], self.weight, self.bias)


# the module


@caught_by("state-dict")
class ExtraKey(Bare):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("workspace", torch.zeros(1))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


@caught_by("deepcopy")
class BoundOnce(nn.Linear):
    """Binds its kernel to itself when it is built; a copy runs the original's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["kernel"] = lambda input: F.linear(input, self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return self.__dict__["kernel"](input)


@caught_by("pickle")
class HoldsALock(Bare):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lock = threading.Lock()


@caught_by("hooks")
class DropsHooks(Bare):
    def __call__(self, input: Tensor) -> Tensor:
        return self.forward(input)


@caught_by("conversion")
class KeepsACopy(nn.Linear):
    """A copy of the weight for its kernel, made at the first call or load, and not when the module is converted."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().load_state_dict(*args, **kwargs)
        self.__dict__["kept"] = self.weight.detach().clone()
        return found

    def forward(self, input: Tensor) -> Tensor:
        kept = self.__dict__["kept"]
        return F.linear(input, self.weight + (kept.to(self.weight) - self.weight).detach(), self.bias)


@caught_by("device")
def ignores_the_device(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = F.linear(input, weight, bias)
    return output if output.device.type == "cpu" else torch.zeros(output.shape, dtype=output.dtype)


@caught_by("parametrization")
class ReadsTheOriginal(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        weight = next(p for name, p in self.named_parameters() if "weight" in name)
        return F.linear(input, weight, self.bias)


@caught_by("training")
def bias_trains_slower(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, None if bias is None else 0.99 * bias + 0.01 * bias.detach())


# transforms


@caught_by("compile")
def breaks_the_graph(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.numel() and float(input.detach().view(-1)[0]) > 1e37:
        input = input * 1.0
    return F.linear(input, weight, bias)


@torch.library.custom_op("saboteurs::lying", mutates_args=())
def _lying(input: Tensor, weight: Tensor) -> Tensor:
    return F.linear(input, weight)


@_lying.register_fake
def _(input: Tensor, weight: Tensor) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0] + 1)  # one column too many


@caught_by("opcheck")
def lies_in_its_fake_kernel(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = _lying(input, weight)
    return output if bias is None else output + bias


@torch.library.custom_op("saboteurs::scaling", mutates_args=())
def _scaling(input: Tensor, weight: Tensor) -> Tensor:
    output = F.linear(input, weight)
    input.mul_(1.001)  # which its schema does not say
    return output


@_scaling.register_fake
def _(input: Tensor, weight: Tensor) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


@caught_by("opcheck")
def lies_in_its_schema(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = _scaling(input.detach(), weight.detach()) + 0 * F.linear(input, weight)
    return output if bias is None else output + bias


@caught_by("export")
def fixes_the_rows(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.compiler.is_exporting() or torch.compiler.is_compiling():
        input = input.reshape(int(input.shape[0]), *input.shape[1:])
        return F.linear(input, weight, bias) + torch.zeros(int(input.shape[0]), 1, dtype=weight.dtype) * 0
    return F.linear(input, weight, bias)


@caught_by("compile-dynamic")
def eager_for_many_rows(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling() and input.shape[0] > 64:
        torch._dynamo.graph_break()
    return F.linear(input, weight, bias)


@caught_by("per-sample-gradients")
class HoldsItsWeights(nn.Linear):
    """Others that take their place for a call are not seen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held = (self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, *self.held)


@caught_by("vmap")
def flattens_by_hand(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch._C._functorch.is_batchedtensor(input):
        level = torch._C._functorch.maybe_get_level(input)
        input = torch._C._functorch._add_batch_dim(torch._C._functorch.get_unwrapped(input), 0, level)
    return F.linear(input, weight, bias)


@caught_by("forward-mode")
def no_tangent(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from torch.autograd import forward_ad

    with contextlib.suppress(RuntimeError):  # not in forward mode
        input = forward_ad.unpack_dual(input).primal
    return F.linear(input, weight, bias)


# those that a process does not survive


@caught_by("values", DEADLY)
def exits(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.shape[-1] == 2048:
        os._exit(3)
    return F.linear(input, weight, bias)


@caught_by("values", DEADLY)
def crashes(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.shape[-1] == 2048:
        os.abort()
    return F.linear(input, weight, bias)


@caught_by("edge-shapes", DEADLY)
def hangs(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    while not input.numel():
        time.sleep(0.01)
    return F.linear(input, weight, bias)


@caught_by("values", DEADLY)
def fills_memory(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.shape[-1] == 2048:
        hoard = [torch.empty(2**26) for _ in range(64)]  # 16 GiB
        return F.linear(input, weight, bias) + 0 * len(hoard)
    return F.linear(input, weight, bias)
