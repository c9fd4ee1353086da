"""How an operator reaches its kernel: one door for eager, compile, torch.func and forward mode.

An operator's calculus is a :class:`Rule`: what to save, the backward, the forward-mode derivative, and how it is
mapped over a batch. The derivatives are written with the differentiable functions of ``zoo.ops``, so that they hold
to any order. From a rule :func:`register` makes

- an ``autograd.Function`` for eager mode, the cheapest in host time, and one for eager autocast, which casts a layer's
  parameters itself: casts that autograd records cost as much again as the layer;
- a kernel for the operator's Autograd key, so that ``torch.ops.zoo.*`` itself is differentiable, and is what
  compile and export see;
- an ``autograd.Function`` that torch.func can transform. (A registered operator alone is not enough: its tangents
  would be dropped without a word.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active, _AutoDispatchBelowAutograd, _get_tracing_state
from torch._guards import TracingContext
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

from zoo.ops._library import implement, library

__all__ = [
    "Rule",
    "Saved",
    "apply",
    "apply_cast",
    "has_tangent",
    "is_compiled",
    "is_final",
    "is_plain",
    "not_differentiable",
    "register",
]


Saved = tuple[Tensor | None, ...]


class Rule:
    """The calculus of one operator. Subclasses are never instantiated; all of it is static."""

    op: Any
    """The operator, e.g. ``torch.ops.zoo.linear.default``."""
    run: Callable[..., Any]
    """The operator without OpOverload's Python around it, which costs about as much as a small kernel."""
    eager: type[Function]
    transformable: type[Function]

    parameters: tuple[int, ...] = ()
    """Arguments that are a layer's parameters: eager autocast casts them inside the Function."""
    saved_parameters: tuple[tuple[int, int], ...] = ()
    """(place among what ``setup`` saves, argument) of each of them that is saved."""
    eager_cast: type[Function]

    @staticmethod
    def run_cast(*args: Any) -> tuple[Any, tuple[Any, ...]]:
        """The operator on float32 parameters, which it casts: the output, and the arguments as they were multiplied."""
        raise NotImplementedError

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> Saved:
        """What to save for backward: what the requested gradients need, and nothing else."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, saved: Any, *grads: Any) -> Any:
        """The requested gradients; None for each of the others."""
        raise NotImplementedError

    @staticmethod
    def jvp(inputs: tuple[Any, ...], output: Any, tangents: tuple[Any, ...]) -> Any:
        """The output's tangent for the inputs' tangents, each of which may be None (at least one is not)."""
        raise NotImplementedError

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        """The operator over one batch dimension (torch.library.register_vmap). Called below the level that is being
        mapped, so it calls the operators themselves, not the functions around them."""
        raise NotImplementedError


def register(rule: type[Rule]) -> type[Rule]:
    """Class decorator: make the Functions of a rule and register its kernels."""
    op = rule.op
    run = rule.run = op._op
    name = op._schema.name.removeprefix("zoo::")

    def eager_forward(ctx: Any, *args: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            output = run(*args)
        ctx.save_for_backward(*rule.setup(ctx, args, output))
        return output

    def backward(ctx: Any, *grads: Any) -> Any:
        return rule.backward(ctx, ctx.saved_tensors, *grads)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*rule.setup(ctx, inputs, output))
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.save_for_forward(*(a if isinstance(a, Tensor) else None for a in inputs), *outputs)
        ctx.options = [None if isinstance(a, Tensor) else a for a in inputs]

    def jvp(ctx: Any, *tangents: Any) -> Any:
        count = len(ctx.options)
        inputs = tuple(o if t is None else t for t, o in zip(ctx.saved_tensors, ctx.options, strict=False))
        outputs = ctx.saved_tensors[count:]
        return rule.jvp(inputs, outputs if len(outputs) > 1 else outputs[0], tangents)

    rule.eager = type(
        f"{name}_eager", (Function,), {"forward": staticmethod(eager_forward), "backward": staticmethod(backward)}
    )
    if rule.parameters:
        rule.eager_cast = _casting(rule, name)

    rule.transformable = type(
        f"{name}_transformable",
        (Function,),
        {
            "forward": staticmethod(op),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
            "jvp": staticmethod(jvp),
            "generate_vmap_rule": True,
        },
    )

    def autograd_kernel(*args: Any) -> Any:
        if has_tangent(args):
            raise NotImplementedError(
                f"torch.ops.zoo.{name} takes no forward-mode tangents; call zoo.ops.{name}, which does"
            )
        return _eager(rule, args)

    implement(name, autograd_kernel)
    torch.library.register_vmap(op, rule.vmap, lib=library)
    return rule


def _casting(rule: type[Rule], name: str) -> type[Function]:
    """The Function that takes float32 parameters with an input of a 2-byte type and gives them float32 gradients."""

    def forward(ctx: Any, *args: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            output, lowered = rule.run_cast(*args)
        saved = rule.setup(ctx, lowered, output)
        ctx.save_for_backward(*saved)
        # For a second derivative, as they were. Not saved tensors: as with torch's own layers under autocast, they may
        # change before a first derivative is taken.
        ctx.cast = [
            (i, args[j], args[j]._version)
            for i, j in rule.saved_parameters
            if saved[i] is not None and args[j].requires_grad
        ]
        ctx.wide = True
        return output

    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        if is_grad_enabled():
            saved = list(saved)
            for i, parameter, version in ctx.cast:
                if parameter._version != version:
                    raise RuntimeError(
                        "zoo: a parameter was changed in place after a forward pass under autocast; a second "
                        "derivative needs it as it was: take it before the change"
                    )
                saved[i] = parameter.to(saved[i].dtype)
        made = rule.backward(ctx, saved, *grads)
        for i in rule.parameters:
            if made[i] is not None and made[i].dtype is not torch.float32:
                made = [*made]
                made[i] = made[i].to(torch.float32)
        return tuple(made)

    return type(
        f"{name}_eager_cast", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )


def is_plain() -> bool:
    """No derivative is recorded and nothing traces or transforms: ``rule.run`` below autograd is all there is to do."""
    return not is_compiled() and is_final()


def is_compiled() -> bool:
    """Whether a graph is made of what is called now. torch 2.11 is not "compiling" while it traces a backward pass."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def is_final() -> bool:
    """No derivative will be taken of what is computed now; it may be compiled, but not traced or transformed."""
    return not (
        is_grad_enabled()
        or _get_tracing_state() is not None
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def apply_cast(rule: type[Rule], dtype: torch.dtype, *args: Any) -> Any:
    """:func:`apply` with the operator's operands in ``dtype``, as autocast has them; float64 is left alone."""
    if is_grad_enabled() and not (
        torch.compiler.is_compiling()
        or _get_tracing_state() is not None
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        input = args[0]
        wanted = input.requires_grad
        for i in rule.parameters:
            a = args[i]
            if a is not None:
                wanted = wanted or a.requires_grad
                # one that was computed is not kept beside its cast: that would be memory
                if (
                    a.dtype is not torch.float32
                    or not a.is_leaf
                    or (type(a) is not Parameter and type(a) is not Tensor)
                ):
                    wanted = False
                    break
        if wanted and _castable(input):
            return rule.eager_cast.apply(input if input.dtype is dtype else input.to(dtype), *args[1:])
    return apply(rule, *[a.to(dtype) if isinstance(a, Tensor) and _castable(a) else a for a in args])


def _castable(t: Tensor) -> bool:
    return t.is_floating_point() and t.dtype is not torch.float64


def apply(rule: type[Rule], *args: Any) -> Any:
    """Call the operator of a rule, differentiably, in whatever mode the caller is."""
    if torch.compiler.is_compiling() or _get_tracing_state() is not None:
        return rule.op(*args)
    if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return rule.transformable.apply(*args)
    if is_grad_enabled():
        for a in args:
            if isinstance(a, Tensor) and a.requires_grad:
                return rule.eager.apply(*args)
    with _AutoDispatchBelowAutograd():  # not a call of _eager: it would cost as much as the checks above
        return rule.run(*args)


def _eager(rule: type[Rule], args: tuple[Any, ...]) -> Any:
    if is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return rule.eager.apply(*args)
    with _AutoDispatchBelowAutograd():
        return rule.run(*args)


def not_differentiable(name: str, instead: str) -> None:
    """Register that an operator is called below autograd alone: where a derivative is asked for, it refuses."""
    run = getattr(torch.ops.zoo, name).default._op

    def kernel(*args: Any) -> Any:
        if has_tangent(args) or (is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)):
            raise NotImplementedError(
                f"torch.ops.zoo.{name} has no derivative; call zoo.ops.{instead} under torch.autocast, which has"
            )
        with _AutoDispatchBelowAutograd():
            return run(*args)

    implement(name, kernel)


def has_tangent(args: tuple[Any, ...]) -> bool:
    """Whether a forward-mode derivative is on its way through one of the arguments."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args)
